"""Appending, publishing and reading one bucket's log."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamhouse.core.errors import (
    OffsetOutOfRangeError,
    RequestTooLargeError,
)
from streamhouse.storage_service.log.append_queue import RoutedBatch
from streamhouse.storage_service.log.filesystem import LocalFilesystem
from streamhouse.storage_service.log.log_tablet import AppendResult, LogOptions
from tests.support.crash_filesystem import CrashFilesystem
from tests.support.log_world import (
    DIRECTORY,
    SettableClock,
    open_log,
    payloads_of,
    read_all,
    store,
)


def test_a_new_log_is_empty(disk: CrashFilesystem) -> None:
    log = open_log(disk)

    assert (log.log_start_offset, log.high_watermark, log.log_end_offset) == (0, 0, 0)
    assert log.read(0, bytes_max=100) == []
    assert not log.is_read_only


def test_offsets_are_dense_and_rows_come_back_as_sent(disk: CrashFilesystem) -> None:
    clock = SettableClock(5)
    log = open_log(disk, clock_us=clock)

    first = log.append(RoutedBatch(0, 3, b"first", 1))
    second = log.append(RoutedBatch(0, 2, memoryview(b"second"), 9))
    log.flush()
    log.publish()

    assert first == AppendResult(0, 3, 5, False)
    assert second == AppendResult(3, 5, 5, False)
    stored = log.read(0, bytes_max=1000)
    assert [tuple(batch[:4]) for batch in stored] == [(0, 3, 5, 1), (3, 2, 5, 9)]
    assert payloads_of(stored) == [b"first", b"second"]


def test_a_payload_of_wider_items_is_stored_by_its_bytes(disk: CrashFilesystem) -> None:
    log = open_log(disk)

    store(log, memoryview(bytes(range(16))).cast("Q"))  # type: ignore[arg-type]

    assert payloads_of(read_all(log)) == [bytes(range(16))]


def test_rows_are_invisible_before_publish_and_not_durable_before_flush(
    disk: CrashFilesystem,
) -> None:
    log = open_log(disk)

    log.append(RoutedBatch(0, 4, b"rows", 1))
    assert (log.high_watermark, log.log_end_offset) == (0, 0)
    log.flush()
    assert (log.high_watermark, log.log_end_offset) == (0, 4)
    assert log.read(0, bytes_max=100) == []
    log.publish()

    assert log.high_watermark == 4
    assert payloads_of(log.read(0, bytes_max=100)) == [b"rows"]


def test_publish_up_to_an_end_shows_no_more(disk: CrashFilesystem) -> None:
    log = open_log(disk)
    log.append(RoutedBatch(0, 1, b"a", 1))
    log.flush()
    log.append(RoutedBatch(0, 1, b"b", 1))
    log.flush()

    log.publish(1)
    assert payloads_of(log.read(0, bytes_max=100)) == [b"a"]
    log.publish(2)
    log.publish(1)

    assert log.high_watermark == 2


def test_flush_without_appends_touches_nothing(disk: CrashFilesystem) -> None:
    log = open_log(disk)
    steps = disk.steps

    log.flush()

    assert disk.steps == steps


def test_a_group_is_one_write_and_one_sync(disk: CrashFilesystem) -> None:
    log = open_log(disk)
    before = len(disk.history)

    store(log, b"a", b"b", b"c")

    segment = f"{0:020d}.log"
    assert disk.history[before:] == [
        ("write", segment),
        ("sync", segment),
        ("write", "durable.mark"),
    ]


@pytest.mark.parametrize("offset", [0, 1, 4, 5, 9])
def test_read_begins_with_the_batch_that_holds_the_offset(
    disk: CrashFilesystem, offset: int
) -> None:
    log = open_log(disk)
    store(log, b"zero", b"one", rows=5)

    batches = log.read(offset, bytes_max=100)

    assert batches[0].base_offset == offset // 5 * 5
    assert batches[-1].end_offset == 10


def test_read_returns_up_to_bytes_max_but_at_least_one_batch(disk: CrashFilesystem) -> None:
    log = open_log(disk)
    store(log, b"a" * 100, b"b" * 100, b"c" * 100)

    assert [len(log.read(0, bytes_max=n)) for n in (0, 1, 199, 200, 299, 300)] == [1, 1, 1, 2, 2, 3]
    assert log.read(1, bytes_max=1)[0].base_offset == 1


class MappingsCounted(CrashFilesystem):
    """A disk that counts how often a file was mapped."""

    count = 0

    def map(self, path: Path, size_bytes: int) -> memoryview:
        self.count += 1
        return super().map(path, size_bytes)


def test_who_follows_a_log_is_given_its_last_batches_from_memory() -> None:
    disk = MappingsCounted(0)
    log = open_log(disk)
    store(log, b"a")
    log.read(0, bytes_max=100)
    disk.count = 0

    for number in range(1, 5):
        store(log, b"b%d" % number, b"c%d" % number)
        end = log.high_watermark
        assert payloads_of(log.read(end - 2, bytes_max=100)) == [b"b%d" % number, b"c%d" % number]
        assert payloads_of(log.read(end - 1, bytes_max=100)) == [b"c%d" % number]

    assert disk.count == 0
    store(log, b"x" * 100_000)
    assert payloads_of(log.read(end, bytes_max=100)) == [b"x" * 100_000]
    assert payloads_of(log.read(end - 1, bytes_max=1 << 20)) == [b"c4", b"x" * 100_000]
    assert disk.count == 2


def test_read_stops_before_end_offset_with_whole_batches(disk: CrashFilesystem) -> None:
    log = open_log(disk)
    store(log, b"a", b"b", b"c", rows=10)

    ends = {end: len(log.read(5, bytes_max=99, end_offset=end)) for end in (0, 5, 6, 10, 11, 99)}

    assert ends == {0: 0, 5: 0, 6: 1, 10: 1, 11: 2, 99: 3}


def test_read_outside_the_range_names_the_range(disk: CrashFilesystem) -> None:
    log = open_log(disk)
    store(log, b"a", rows=10)

    for offset in (-1, 11):
        with pytest.raises(OffsetOutOfRangeError, match=rf"offset {offset} .* \[0, 10\]"):
            log.read(offset, bytes_max=1)
    assert log.read(10, bytes_max=1) == []


def test_reads_cross_segments_within_the_limit(disk: CrashFilesystem) -> None:
    log = open_log(disk, segment_bytes_max=400)
    payloads = [bytes([n]) * 100 for n in range(20)]
    for payload in payloads:
        store(log, payload)

    assert log.segment_count > 5
    for offset in range(20):
        assert payloads_of(log.read(offset, bytes_max=700)) == payloads[offset : offset + 7]
    assert payloads_of(read_all(log)) == payloads


def test_a_group_larger_than_a_segment_goes_into_one(disk: CrashFilesystem) -> None:
    log = open_log(disk, segment_bytes_max=400)
    store(log, b"small")

    store(log, *[b"x" * 300] * 5)

    assert log.segment_count == 2
    assert len(read_all(log)) == 6


def test_size_bytes_counts_all_segments(disk: CrashFilesystem) -> None:
    log = open_log(disk, segment_bytes_max=400)
    for _ in range(9):
        store(log, b"x" * 100)

    names = [name for name in disk.list_names(DIRECTORY) if name.endswith(".log")]

    assert log.size_bytes == sum(disk.size_bytes(DIRECTORY / name) for name in names)


def test_a_roll_is_durable_step_by_step(disk: CrashFilesystem) -> None:
    """All contents, the names of index and writer state, and only then the next segment."""
    log = open_log(disk, segment_bytes_max=200)
    store(log, b"x" * 150)
    before = len(disk.history)

    log.append(RoutedBatch(0, 1, b"y" * 150, 1))

    assert disk.history[before:] == [
        ("create", f"{0:020d}.index.tmp"),
        ("write", f"{0:020d}.index.tmp"),
        ("sync", f"{0:020d}.index.tmp"),
        ("create", f"{1:020d}.writers.tmp"),
        ("write", f"{1:020d}.writers.tmp"),
        ("sync", f"{1:020d}.writers.tmp"),
        ("create", f"{1:020d}.log.tmp"),
        ("write", f"{1:020d}.log.tmp"),
        ("sync", f"{1:020d}.log.tmp"),
        ("rename", f"{0:020d}.index"),
        ("rename", f"{1:020d}.writers"),
        ("sync_directory", DIRECTORY.name),
        ("rename", f"{1:020d}.log"),
        ("sync_directory", DIRECTORY.name),
    ]


def test_timestamps_never_decrease(disk: CrashFilesystem) -> None:
    clock = SettableClock(100)
    log = open_log(disk, clock_us=clock, segment_bytes_max=300)
    times = []
    for now in (100, 90, 250, 10, 10, 300):
        clock.now_us = now
        times += [result.timestamp_us for result in store(log, b"x" * 100)]
    log.close()

    assert times == [100, 100, 250, 250, 250, 300]
    clock.now_us = 5
    assert store(open_log(disk, clock_us=clock), b"y")[0].timestamp_us == 300


def test_a_log_emptied_by_retention_still_knows_the_time(disk: CrashFilesystem) -> None:
    clock = SettableClock(500)
    log = open_log(disk, clock_us=clock)
    store(log, b"x")
    log.apply_retention(timestamp_us_before=501, offset_max=1)
    log.close()

    clock.now_us = 3

    assert store(open_log(disk, clock_us=clock), b"y")[0] == AppendResult(1, 2, 500, False)


@pytest.mark.parametrize("segment_bytes_max", [300, 1 << 20])
@pytest.mark.parametrize("index_interval_bytes", [1, 500])
def test_offset_for_timestamp(
    disk: CrashFilesystem, segment_bytes_max: int, index_interval_bytes: int
) -> None:
    clock = SettableClock(0)
    log = open_log(
        disk,
        clock_us=clock,
        segment_bytes_max=segment_bytes_max,
        index_interval_bytes=index_interval_bytes,
    )
    for now in (10, 10, 20, 30, 30, 30, 50):
        clock.now_us = now
        store(log, b"x" * 80, rows=2)

    wanted = {0: 0, 10: 0, 11: 4, 20: 4, 21: 6, 30: 6, 31: 12, 50: 12, 51: 14}

    assert {t: log.offset_for_timestamp(t) for t in wanted} == wanted


def test_offset_for_timestamp_ignores_unpublished_rows(disk: CrashFilesystem) -> None:
    clock = SettableClock(10)
    log = open_log(disk, clock_us=clock)
    store(log, b"a")
    clock.now_us = 20
    log.append(RoutedBatch(0, 1, b"b", 1))
    log.flush()

    assert log.offset_for_timestamp(15) == log.high_watermark == 1


@pytest.mark.parametrize("payload", [b"", b"x" * 101])
def test_a_batch_over_the_limit_is_refused(disk: CrashFilesystem, payload: bytes) -> None:
    log = open_log(disk, frame_bytes_max=100)

    with pytest.raises(RequestTooLargeError, match=f"a batch of {len(payload)} bytes"):
        log.append(RoutedBatch(0, 1, payload, 1))

    assert log.queued_count == 0


@pytest.mark.parametrize(
    "options",
    [
        {"frame_bytes_max": 0},
        {"frame_bytes_max": (1 << 30) + 1},
        {"segment_bytes_max": 0},
        {"index_interval_bytes": -1},
        {"writer_window": 0},
        {"writers_max": 0},
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        LogOptions(**options)


def test_on_the_local_disk_too(tmp_path: Path) -> None:
    directory = tmp_path / "t" / "b"
    log = open_log(LocalFilesystem(), directory=directory, segment_bytes_max=2000)
    payloads = [bytes([n]) * (37 * n + 1) for n in range(50)]
    for start in range(0, 50, 5):
        store(log, *payloads[start : start + 5])
    kept = log.read(0, bytes_max=1 << 20)
    log.close()

    log = open_log(LocalFilesystem(), directory=directory, segment_bytes_max=2000)

    assert payloads_of(read_all(log, bytes_max=999)) == payloads == payloads_of(kept)
    log.close()


def test_batches_of_one_time_keep_it_over_new_segments_and_restarts(disk: CrashFilesystem) -> None:
    clock = SettableClock(1_000)
    log = open_log(disk, clock_us=clock, segment_bytes_max=200)
    store(log, b"before")
    decided_us, clock.now_us = 2_000, 9_000
    stamps = [store(log, b"x" * 120, timestamp_us=decided_us)[0].timestamp_us for _ in range(3)]
    assert log.segment_count > 2
    log.apply_retention(timestamp_us_before=8_000, offset_max=0)
    log.close()

    log = open_log(disk, clock_us=clock, segment_bytes_max=200)
    stamps += [r.timestamp_us for r in store(log, b"redone", timestamp_us=decided_us)]
    stamps += [r.timestamp_us for r in store(log, b"after")]

    assert stamps == [2_000, 2_000, 2_000, 2_000, 9_000]


def test_how_much_a_read_takes_at_least_is_known_before_it() -> None:
    log = open_log(CrashFilesystem(0), segment_bytes_max=200_000, index_interval_bytes=4_096)
    sizes = [100] * 60 + [50_000, 100, 150_000] + [100] * 60
    for size in sizes:
        store(log, b"x" * size, rows=10)

    extents = [log.extent(number * 10 + 3) for number in range(len(sizes))]

    assert all(size < found.byte_count for size, found in zip(sizes, extents, strict=True))
    # Small batches right before a large one may be taken for a part of it.
    assert all(found.byte_count < 10_000 for found in extents[:20] + extents[-40:])
    assert all(10 <= found.row_count <= 1_000 for found in extents)
