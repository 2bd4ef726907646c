"""A log that another process writes: every published batch, no other, and the right errors."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from random import Random

import pytest

from streamhouse.core.errors import (
    CorruptDataError,
    OffsetOutOfRangeError,
    StorageFailedError,
)
from streamhouse.storage_service.log.append_queue import RoutedBatch
from streamhouse.storage_service.log.filesystem import LocalFilesystem
from streamhouse.storage_service.log.followed_log import FollowedLog
from streamhouse.storage_service.log.log_tablet import LogTablet, StoredBatch
from streamhouse.storage_service.log.readable_log import ReadableLog
from streamhouse.storage_service.log.segments.segment_format import index_path, segment_path
from tests.support.log_world import SettableClock, open_log, store


def _log(tmp_path: Path, **options: int) -> LogTablet:
    return open_log(LocalFilesystem(), directory=tmp_path, **options)


def _follower(tmp_path: Path, log: LogTablet | None = None) -> FollowedLog:
    return FollowedLog(
        tmp_path,
        table_id=7,
        bucket=0,
        filesystem=LocalFilesystem(),
        start_offset=0 if log is None else log.log_start_offset,
        high_watermark=0 if log is None else log.high_watermark,
    )


def _publish(follower: FollowedLog, log: LogTablet) -> None:
    follower.publish(log.log_start_offset, log.high_watermark)


def _read(log: ReadableLog, start: int) -> list[tuple[int, bytes]]:
    batches = log.read(start, bytes_max=1 << 30)
    return [(batch.base_offset, bytes(batch.payload)) for batch in batches]


def test_a_frame_larger_than_any_piece_is_read(tmp_path: Path) -> None:
    log = _log(tmp_path)
    store(log, b"small", b"x" * (9 << 20), b"last")

    follower = _follower(tmp_path, log)

    assert [len(payload) for _, payload in _read(follower, 0)] == [5, 9 << 20, 4]
    log.close()


def test_what_is_not_published_is_not_read(tmp_path: Path) -> None:
    log = _log(tmp_path)
    store(log, b"one")
    follower = _follower(tmp_path, log)
    assert _read(follower, 0) == [(0, b"one")]
    log.append(RoutedBatch(0, 1, b"two", 1))
    log.flush()

    assert _read(follower, 1) == []
    with pytest.raises(OffsetOutOfRangeError):
        _read(follower, 2)
    # As after a rollback: other bytes are written there.
    path = segment_path(tmp_path, 0)
    data = path.read_bytes()
    path.write_bytes(data[:-8] + bytes(8))
    path.write_bytes(data)
    log.publish()
    _publish(follower, log)
    assert _read(follower, 1) == [(1, b"two")]
    log.close()


def test_an_end_within_a_frame_is_refused(tmp_path: Path) -> None:
    log, follower = _log(tmp_path), _follower(tmp_path)
    store(log, b"three rows", rows=3)

    follower.publish(0, 2)

    with pytest.raises(CorruptDataError, match="no frame ends at offset 2"):
        _read(follower, 0)
    log.close()


@pytest.mark.parametrize("is_followed_before", [True, False])
def test_damage_is_noticed_where_a_read_begins(tmp_path: Path, is_followed_before: bool) -> None:
    log, follower = _log(tmp_path), _follower(tmp_path)
    store(log, b"one" * 3_000, b"two" * 3_000)
    _publish(follower, log)
    if is_followed_before:
        follower.follow()
    with segment_path(tmp_path, 0).open("r+b") as file:
        file.seek(-4_000, 2)
        file.write(b"?")

    assert _read(follower, 0) == [(0, b"one" * 3_000)]
    with pytest.raises(CorruptDataError, match="frame checksum mismatch"):
        _read(follower, 1)
    log.close()


def test_a_damaged_header_hides_nothing_before_it(tmp_path: Path) -> None:
    log, follower = _log(tmp_path), _follower(tmp_path)
    store(log, b"one", b"two", b"three")
    with segment_path(tmp_path, 0).open("r+b") as file:
        file.seek(64 + 72)
        file.write(b"????")
    _publish(follower, log)

    assert _read(follower, 0) == [(0, b"one")]
    assert follower.fingerprint(1) == log.fingerprint(1)
    for offset in (1, 2):
        with pytest.raises(CorruptDataError, match="no frame of offset 1 starts here"):
            _read(follower, offset)
    with pytest.raises(CorruptDataError):
        follower.offset_for_timestamp(1 << 62)
    assert follower.fingerprint(3) is None
    log.close()


def test_a_file_that_is_too_short_is_damage(tmp_path: Path) -> None:
    log, follower = _log(tmp_path), _follower(tmp_path)
    store(log, b"one")
    follower.publish(0, 2)

    assert _read(follower, 0) == [(0, b"one")]
    with pytest.raises(CorruptDataError, match="but rows below 2 are published"):
        _read(follower, 1)
    log.close()


@pytest.mark.parametrize("is_read_before", [False, True])
@pytest.mark.parametrize("size", [64, 100, 4_200])
def test_a_segment_that_was_cut_is_damage_from_the_cut_on(
    tmp_path: Path, size: int, *, is_read_before: bool
) -> None:
    """Also for the log of the owner, which has an index of what is missing."""
    log = _log(tmp_path)
    store(log, *[bytes([65 + number]) * 4_000 for number in range(4)])
    early = _follower(tmp_path, log)
    if is_read_before:
        assert _read(early, 0) == _read(log, 0)
    os.truncate(segment_path(tmp_path, 0), size)
    whole = size // 4_064

    for each in (log, early, _follower(tmp_path, log)):
        for offset in range(whole, 4):
            with pytest.raises(CorruptDataError):
                _read(each, offset)
        if whole:
            assert len(_read(each, 0)) == whole
    log.close()


def test_rows_that_have_left_the_log_are_missed(tmp_path: Path) -> None:
    clock = SettableClock()
    log = open_log(LocalFilesystem(), directory=tmp_path, clock_us=clock, segment_bytes_max=200)
    for number in range(10):
        clock.now_us += 1_000
        store(log, b"%d" % number * 60)
    stale = _follower(tmp_path, log)
    log.apply_retention(timestamp_us_before=clock.now_us - 3_000, offset_max=8)

    follower = _follower(tmp_path, log)

    start = log.log_start_offset
    assert 0 < start == follower.log_start_offset == follower.first_stored_offset
    with pytest.raises(OffsetOutOfRangeError):
        _read(follower, start - 1)
    assert _read(follower, start) == _read(log, start)
    # A follower that has not heard of it yet.
    with pytest.raises(StorageFailedError):
        _read(stale, 0)
    _publish(stale, log)
    with pytest.raises(OffsetOutOfRangeError):
        _read(stale, 0)
    assert _read(stale, start) == _read(log, start)
    log.close()


def test_a_follower_that_slept_while_all_its_files_were_removed_goes_on(tmp_path: Path) -> None:
    clock = SettableClock()
    log = open_log(LocalFilesystem(), directory=tmp_path, clock_us=clock, segment_bytes_max=200)
    follower = _follower(tmp_path, log)
    for number in range(10):
        clock.now_us += 1_000
        store(log, b"%d" % number * 60)
    log.apply_retention(timestamp_us_before=clock.now_us, offset_max=10)
    _publish(follower, log)

    assert follower.follow()
    assert _read(follower, log.log_start_offset) == _read(log, log.log_start_offset)
    log.close()


def test_removed_files_are_let_go_without_a_read(tmp_path: Path) -> None:
    clock, filesystem = SettableClock(), LocalFilesystem()
    log = open_log(LocalFilesystem(), directory=tmp_path, clock_us=clock, segment_bytes_max=200)
    for number in range(10):
        clock.now_us += 1_000
        store(log, b"%d" % number * 60)
    follower = FollowedLog(
        tmp_path,
        table_id=7,
        bucket=0,
        filesystem=filesystem,
        start_offset=0,
        high_watermark=log.high_watermark,
    )
    assert len(_read(follower, 0)) == 10
    log.apply_retention(timestamp_us_before=clock.now_us - 3_000, offset_max=8)
    assert "(deleted)" in Path("/proc/self/maps").read_text("utf-8")

    _publish(follower, log)

    gone = [
        line for line in Path("/proc/self/maps").read_text("utf-8").split("\n") if "del" in line
    ]
    assert not [line for line in gone if str(tmp_path) in line]
    log.close()


def test_a_follower_looks_at_some_frames_at_a_time(tmp_path: Path) -> None:
    log, follower = _log(tmp_path), _follower(tmp_path)
    store(log, *[b"%d" % number for number in range(10)])
    _publish(follower, log)

    assert [follower.follow(frames_max=4) for _ in range(3)] == [False, False, True]
    assert _read(follower, 0) == _read(log, 0)
    log.close()


def test_sealed_segments_are_not_walked(tmp_path: Path) -> None:
    log, follower = _log(tmp_path, segment_bytes_max=200), _follower(tmp_path)
    store(log, b"first", b"second")
    for number in range(3):
        store(log, b"%d" % number * 150)
    # The chain of headers is broken, so a walk would end here.
    with segment_path(tmp_path, 0).open("r+b") as file:
        file.seek(64 + 72)
        file.write(b"????")

    _publish(follower, log)

    assert follower.follow(frames_max=4)
    assert _read(follower, 2) == _read(log, 2)
    log.close()


def test_whole_files_grow_past_damage_once_its_segment_is_sealed(tmp_path: Path) -> None:
    """Until then the damage may as well be a frame that is not whole."""
    log, follower = _log(tmp_path, segment_bytes_max=200), _follower(tmp_path)
    store(log, b"first", b"second")
    with segment_path(tmp_path, 0).open("r+b") as file:
        file.seek(64 + 72)
        file.write(b"????")
    assert follower.grow() == 1

    for number in range(3):
        store(log, b"%d" % number * 150)
    follower.high_watermark = follower.grow()

    assert follower.high_watermark == log.high_watermark
    assert _read(follower, 2) == _read(log, 2)
    with pytest.raises(CorruptDataError):
        _read(follower, 1)
    log.close()


def test_an_index_that_is_cut_after_its_use_costs_no_row(tmp_path: Path) -> None:
    log = _log(tmp_path, segment_bytes_max=200)
    for number in range(6):
        store(log, b"%d" % number * 90)
    follower = _follower(tmp_path, log)
    assert _read(follower, 0) == _read(log, 0)
    for size in (100, 0):
        os.truncate(index_path(tmp_path, 0), size)
        assert _read(follower, 0) == _read(log, 0)
        assert len(_read(log, 0)) == 6
    log.close()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_damaged_index_costs_no_row(tmp_path: Path, when: str) -> None:
    log = _log(tmp_path, segment_bytes_max=200)
    early = _follower(tmp_path)
    for number in range(6):
        store(log, b"%d" % number * 90)
    if when == "after":
        _publish(early, log)
        assert early.follow()
    index_path(tmp_path, 0).write_bytes(b"no index")

    late = _follower(tmp_path, log)
    _publish(early, log)

    for follower in (early, late):
        assert _read(follower, 0) == _read(log, 0)
    log.close()


def test_a_log_that_is_gone_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(StorageFailedError):
        _follower(tmp_path / "gone")


def test_another_tables_segment_is_refused(tmp_path: Path) -> None:
    log = _log(tmp_path)
    log.close()

    with pytest.raises(CorruptDataError, match="belongs to bucket 0 of table 7"):
        FollowedLog(
            tmp_path,
            table_id=8,
            bucket=0,
            filesystem=LocalFilesystem(),
            start_offset=0,
            high_watermark=0,
        )


class _Reader(threading.Thread):
    """Reads a follower from the start on, until the end that is published when `is_over` is set."""

    def __init__(
        self, follower: FollowedLog, published: threading.Condition, is_over: threading.Event
    ) -> None:
        super().__init__()
        self._follower = follower
        self._published = published
        self._is_over = is_over
        self.position = 0
        self.problem: object = None

    def run(self) -> None:
        while not self.problem:
            with self._published:
                self._published.wait_for(
                    lambda: self.position < self._follower.high_watermark or self._is_over.is_set()
                )
            if self.position == self._follower.high_watermark:
                return
            try:
                batches = self._follower.read(self.position, bytes_max=2_000)
            except OffsetOutOfRangeError:
                self.position = max(self.position, self._follower.log_start_offset)
            except StorageFailedError:
                # Retention has removed the file, and says so next.
                continue
            except Exception as error:  # noqa: BLE001 - told to the main thread
                self.problem = error
            else:
                self._check(batches)

    def _check(self, batches: list[StoredBatch]) -> None:
        for batch in batches:
            if bytes(batch.payload) != b"%d," % batch.base_offset * batch.row_count:
                self.problem = batch
            self.position = batch.end_offset


@pytest.mark.parametrize("seed", range(3))
def test_readers_and_the_writer_run_beside_each_other(tmp_path: Path, seed: int) -> None:
    """Two threads read one follower while the log grows, rolls and loses its oldest segments."""
    random, clock = Random(seed), SettableClock()
    log = open_log(LocalFilesystem(), directory=tmp_path, clock_us=clock, segment_bytes_max=3_000)
    follower, is_over = _follower(tmp_path, log), threading.Event()
    published = threading.Condition()
    readers = [_Reader(follower, published, is_over) for _ in range(2)]
    for reader in readers:
        reader.start()
    for _ in range(200):
        clock.now_us += 1_000
        for _ in range(random.randint(1, 3)):
            rows, offset = random.randint(1, 60), log.log_end_offset
            log.append(RoutedBatch(0, rows, b"%d," % offset * rows, 1))
            log.flush()
        if random.random() < 0.8:
            log.publish()
        if random.random() < 0.1:
            log.apply_retention(
                timestamp_us_before=clock.now_us - 20_000, offset_max=log.high_watermark
            )
        with published:
            _publish(follower, log)
            published.notify_all()
    log.publish()
    with published:
        _publish(follower, log)
        is_over.set()
        published.notify_all()
    for reader in readers:
        reader.join()
        assert reader.problem is None
    log.close()
