"""Deleting old segments, never more than allowed, beside readers and across crashes."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from typing import Any

import pytest

from streamhouse.core.errors import (
    CorruptDataError,
    OffsetOutOfRangeError,
    StorageFailedError,
)
from streamhouse.storage_service.log.append_queue import RoutedBatch
from streamhouse.storage_service.log.filesystem import LocalFilesystem
from streamhouse.storage_service.log.log_tablet import LogTablet
from tests.support.crash_filesystem import CrashFilesystem
from tests.support.log_world import (
    DIRECTORY,
    SettableClock,
    open_log,
    payloads_of,
    read_all,
    store,
)


def _five_segments(disk: CrashFilesystem) -> LogTablet:
    """Five segments of 10 rows, stamped 0, 100, ... 400; the last one is active."""
    clock = SettableClock(0)
    log = open_log(disk, clock_us=clock, segment_bytes_max=300)
    for n in range(5):
        clock.now_us = n * 100
        store(log, bytes([65 + n]) * 200, rows=10)
    assert log.segment_count == 5
    return log


@pytest.mark.parametrize(
    ("timestamp_us_before", "offset_max", "deleted"),
    [(0, 50, 0), (1, 50, 1), (100, 50, 1), (101, 50, 2), (301, 50, 4), (301, 29, 2), (301, 0, 0)],
)
def test_only_old_segments_below_the_offset_go(
    disk: CrashFilesystem, timestamp_us_before: int, offset_max: int, deleted: int
) -> None:
    log = _five_segments(disk)

    count = log.apply_retention(timestamp_us_before=timestamp_us_before, offset_max=offset_max)

    assert count == deleted
    assert log.log_start_offset == deleted * 10
    assert log.high_watermark == 50
    assert payloads_of(read_all(log)) == [bytes([65 + n]) * 200 for n in range(deleted, 5)]
    assert sum(name.endswith(".log") for name in disk.list_names(DIRECTORY)) == 5 - deleted


def test_reading_a_deleted_offset_names_the_new_range(disk: CrashFilesystem) -> None:
    log = _five_segments(disk)
    log.apply_retention(timestamp_us_before=101, offset_max=50)

    with pytest.raises(OffsetOutOfRangeError, match=r"\[20, 50\]"):
        log.read(19, bytes_max=1)
    assert log.offset_for_timestamp(0) == 20


def test_an_aged_active_segment_is_sealed_and_deleted_too(disk: CrashFilesystem) -> None:
    log = _five_segments(disk)

    assert log.apply_retention(timestamp_us_before=401, offset_max=50) == 5

    assert (log.log_start_offset, log.high_watermark, log.segment_count) == (50, 50, 1)
    assert log.read(50, bytes_max=1) == []
    assert store(log, b"next")[0].base_offset == 50


def test_a_quiet_log_expires_within_twice_the_age(disk: CrashFilesystem) -> None:
    """Its active segment never fills: it is sealed when its first batch is old."""
    clock = SettableClock(0)
    log = open_log(disk, clock_us=clock)
    for now in range(0, 1000, 10):
        clock.now_us = now
        store(log, b"x")
        log.apply_retention(timestamp_us_before=now - 100, offset_max=1 << 60)

        assert log.high_watermark - log.log_start_offset <= 2 * (100 // 10) + 2


def test_an_empty_log_is_left_alone(disk: CrashFilesystem) -> None:
    log = open_log(disk)
    steps = disk.steps

    assert log.apply_retention(timestamp_us_before=1 << 60, offset_max=1 << 60) == 0
    assert disk.steps == steps


def test_unpublished_rows_are_kept(disk: CrashFilesystem) -> None:
    clock = SettableClock(0)
    log = open_log(disk, clock_us=clock)
    log.append(RoutedBatch(0, 1, b"x", 1))
    log.flush()

    assert log.apply_retention(timestamp_us_before=99, offset_max=99) == 0
    log.publish()

    assert payloads_of(read_all(log)) == [b"x"]
    assert log.apply_retention(timestamp_us_before=99, offset_max=99) == 1


def test_queued_batches_survive_a_retention_run(disk: CrashFilesystem) -> None:
    log = _five_segments(disk)
    log.append(RoutedBatch(0, 1, b"queued", 1))

    log.apply_retention(timestamp_us_before=1 << 60, offset_max=50)
    log.flush()
    log.publish()

    assert payloads_of(read_all(log))[-1] == b"queued"


def test_a_reader_keeps_what_it_read(disk: CrashFilesystem) -> None:
    log = _five_segments(disk)
    batches = log.read(0, bytes_max=1)

    log.apply_retention(timestamp_us_before=401, offset_max=50)

    assert payloads_of(batches) == [b"A" * 200]


def test_an_error_stops_the_run_and_the_next_one_goes_on(disk: CrashFilesystem) -> None:
    log = _five_segments(disk)
    # The mark is written and synced first.
    disk.errors = {disk.steps + 8: errno.EIO}

    with pytest.raises(StorageFailedError, match="cannot remove a segment"):
        log.apply_retention(timestamp_us_before=301, offset_max=50)
    disk.errors = {}

    assert sum(name.endswith(".log") for name in disk.list_names(DIRECTORY)) == 4
    assert log.apply_retention(timestamp_us_before=301, offset_max=50) == 3
    log.close()
    assert open_log(disk, segment_bytes_max=300).log_start_offset == 40


@pytest.mark.parametrize("step", range(5))
def test_nothing_is_deleted_before_it_is_known_durably(disk: CrashFilesystem, step: int) -> None:
    log = _five_segments(disk)
    disk.errors = {disk.steps + step: errno.EIO}

    with pytest.raises(StorageFailedError, match="cannot remove a segment"):
        log.apply_retention(timestamp_us_before=301, offset_max=50)

    assert sum(name.endswith(".log") for name in disk.list_names(DIRECTORY)) == 5
    log.close()
    assert open_log(disk, segment_bytes_max=300, must_exist=True).log_start_offset == 0


@pytest.mark.parametrize(("tiered", "forgotten"), [(50, 0), (40, 0), (39, 40), (0, 40)])
def test_the_mark_says_what_the_lake_need_not_have(
    disk: CrashFilesystem, tiered: int, forgotten: int
) -> None:
    log = _five_segments(disk)
    log.apply_retention(timestamp_us_before=301, offset_max=50, tiered_offset=tiered)
    log.close()

    again = open_log(disk, segment_bytes_max=300, must_exist=True)
    assert (again.first_stored_offset, again.forgotten_offset) == (40, forgotten)


@pytest.mark.parametrize(
    ("lost", "sentence"),
    [
        ((40,), r"the log ends at|has no segment files|were durable|begins at"),
        (("durable.mark",), r"durable\.mark is missing or damaged: .* loss\.accepted"),
        ((".writers",), r"\.writers is missing or damaged: which appends of idempotent writers"),
        ((".log", ".writers", "durable.mark", ".index"), r"all segment files are missing"),
    ],
)
def test_what_a_log_had_must_be_there(
    disk: CrashFilesystem, lost: tuple[Any, ...], sentence: str
) -> None:
    log = _five_segments(disk)
    log.apply_retention(timestamp_us_before=301, offset_max=50)
    log.close()
    names = [f"{name:020d}.log" if isinstance(name, int) else name for name in lost]
    for name in disk.list_names(DIRECTORY):
        if name.endswith(tuple(names)):
            disk.remove(DIRECTORY / name)
    left = disk.list_names(DIRECTORY)

    for _ in range(2):
        with pytest.raises(CorruptDataError, match=sentence):
            open_log(disk, segment_bytes_max=300, must_exist=True)
        assert disk.list_names(DIRECTORY) == left
    disk.create(DIRECTORY / "loss.accepted").close()
    open_log(disk, segment_bytes_max=300, must_exist=True).close()
    assert "loss.accepted" not in disk.list_names(DIRECTORY)
    open_log(disk, segment_bytes_max=300, must_exist=True).close()


def test_the_oldest_segments_are_missing_unless_retention_deleted_them(
    disk: CrashFilesystem,
) -> None:
    log = _five_segments(disk)
    log.apply_retention(timestamp_us_before=101, offset_max=50)
    start = log.log_start_offset
    log.close()
    assert 0 < start < 40
    disk.remove(DIRECTORY / f"{start:020d}.log")

    with pytest.raises(CorruptDataError, match=rf"has deleted rows below {start} only"):
        open_log(disk, segment_bytes_max=300, must_exist=True)


def test_a_closed_log_is_refused(disk: CrashFilesystem) -> None:
    log = _five_segments(disk)
    log.close()

    with pytest.raises(StorageFailedError, match="closed"):
        log.apply_retention(timestamp_us_before=301, offset_max=50)


@pytest.mark.slow
def test_readers_beside_appends_and_retention_see_whole_true_rows(tmp_path: Path) -> None:
    """Threads read while segments roll and go: right rows, or 'out of range', nothing else."""
    log = open_log(
        LocalFilesystem(mapped_files_max=4),
        directory=tmp_path / "b",
        segment_bytes_max=4000,
        index_interval_bytes=300,
    )
    done = threading.Event()
    problems: list[str] = []
    reads = [0, 0]

    def read(reader: int) -> None:
        offset = 0
        while not done.is_set():
            try:
                batches = log.read(offset, bytes_max=3000)
            except OffsetOutOfRangeError:
                offset = log.log_start_offset
                continue
            for batch in batches:
                if bytes(batch.payload) != _payload(batch.base_offset):
                    problems.append(f"wrong bytes at offset {batch.base_offset}")
            reads[reader] += len(batches)
            offset = batches[-1].end_offset if batches else log.log_start_offset

    threads = [threading.Thread(target=read, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for n in range(150):
        store(log, *(_payload(offset) for offset in range(n * 4, n * 4 + 4)))
        if n % 20 == 19:
            log.apply_retention(timestamp_us_before=1 << 60, offset_max=n * 4 - 40)
    done.set()
    for thread in threads:
        thread.join()
    log.close()

    assert not problems
    assert min(reads) > 0


def _payload(offset: int) -> bytes:
    return b"%d;" % offset * (offset % 40 + 1)
