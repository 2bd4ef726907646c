"""The tail of a log that another process writes: every published frame once, and no other."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from streamhouse.core.errors import CorruptDataError, StorageFailedError
from streamhouse.storage_service.log.append_queue import RoutedBatch
from streamhouse.storage_service.log.filesystem import LocalFilesystem
from streamhouse.storage_service.log.log_tablet import LogTablet
from streamhouse.storage_service.log.log_tail import LogTail
from tests.support.log_world import SettableClock, open_log, store


def _log(tmp_path: Path, **options: int) -> LogTablet:
    return open_log(LocalFilesystem(), directory=tmp_path, **options)


def _tail(tmp_path: Path) -> LogTail:
    return LogTail(tmp_path, table_id=7, bucket=0)


def _read(tail: LogTail, start: int, end: int) -> list[tuple[int, bytes]]:
    return [(frame.base_offset, bytes(frame.payload)) for frame in tail.frames(start, end)]


@pytest.mark.parametrize("seed", range(20))
def test_it_reads_what_the_log_reads(tmp_path: Path, seed: int) -> None:
    random, log, tail, position = Random(seed), _log(tmp_path, segment_bytes_max=3_000), None, 0
    for _ in range(60):
        payloads = [random.randbytes(random.choice((1, 50, 900))) for _ in range(3)]
        store(log, *payloads, rows=random.randint(1, 5))
        if random.random() < 0.4:
            tail = tail or _tail(tmp_path)
            end = log.high_watermark
            batches = log.read(position, bytes_max=1 << 30)
            expected = [(batch.base_offset, bytes(batch.payload)) for batch in batches]
            assert _read(tail, position, end) == expected
            position = end
        if tail is not None and random.random() < 0.1:
            tail.close()
            tail = None
    log.close()


def test_a_frame_larger_than_any_piece_is_read(tmp_path: Path) -> None:
    log, tail = _log(tmp_path), _tail(tmp_path)
    store(log, b"small", b"x" * (9 << 20), b"last")

    assert [len(payload) for _, payload in _read(tail, 0, 3)] == [5, 9 << 20, 4]
    log.close()


def test_what_is_not_published_is_not_read(tmp_path: Path) -> None:
    log, tail = _log(tmp_path), _tail(tmp_path)
    store(log, b"one")
    assert _read(tail, 0, 1) == [(0, b"one")]
    log.append(RoutedBatch(0, 1, b"two", 1))
    log.flush()

    assert _read(tail, 1, 1) == []
    # As after a rollback: other bytes are written there.
    path = next(tmp_path.glob("*.log"))
    data = path.read_bytes()
    path.write_bytes(data[:-8] + bytes(8))
    path.write_bytes(data)
    log.publish()
    assert _read(tail, 1, 2) == [(1, b"two")]
    log.close()


def test_an_end_within_a_frame_is_refused(tmp_path: Path) -> None:
    log, tail = _log(tmp_path), _tail(tmp_path)
    store(log, b"three rows", rows=3)

    with pytest.raises(CorruptDataError, match="no whole frame of offset 0 below 2"):
        _read(tail, 0, 2)
    log.close()


def test_damage_is_noticed(tmp_path: Path) -> None:
    log, tail = _log(tmp_path), _tail(tmp_path)
    store(log, b"one", b"two")
    path = next(tmp_path.glob("*.log"))
    data = bytearray(path.read_bytes())
    data[-8] ^= 1
    path.write_bytes(data)

    with pytest.raises(CorruptDataError, match="no whole frame of offset 1"):
        _read(tail, 0, 2)
    log.close()


def test_rows_that_have_left_the_log_are_missed(tmp_path: Path) -> None:
    clock = SettableClock()
    log = open_log(LocalFilesystem(), directory=tmp_path, clock_us=clock, segment_bytes_max=200)
    for number in range(10):
        clock.now_us += 1_000
        store(log, b"%d" % number * 60)
    log.apply_retention(timestamp_us_before=clock.now_us - 3_000, offset_max=8)

    with pytest.raises(CorruptDataError, match="begins after offset 0"):
        _read(_tail(tmp_path), 0, 10)
    log.close()


def test_a_log_that_is_gone_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(StorageFailedError):
        _read(_tail(tmp_path / "gone"), 0, 1)
