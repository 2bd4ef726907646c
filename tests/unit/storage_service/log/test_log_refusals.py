"""What a log refuses or repeats: sequences, a full disk, failed syncs, damage, being closed."""

from __future__ import annotations

import errno

import pytest

from streamhouse.core.errors import (
    CorruptDataError,
    OutOfOrderSequenceError,
    StorageFailedError,
    UnknownOutcomeError,
)
from streamhouse.storage_service.log.append_queue import RoutedBatch
from streamhouse.storage_service.log.log_tablet import AppendResult
from tests.support.crash_filesystem import Crash, CrashFilesystem
from tests.support.log_world import (
    DIRECTORY,
    SettableClock,
    open_log,
    payloads_of,
    read_all,
    store,
)


def test_a_repeated_sequence_is_answered_with_its_first_offsets(disk: CrashFilesystem) -> None:
    clock = SettableClock(10)
    log = open_log(disk, clock_us=clock)
    first = store(log, b"a", rows=3, writer_id=9, sequence=1)[0]
    clock.now_us = 99

    again = store(log, b"a", rows=3, writer_id=9, sequence=1)[0]

    assert again == first._replace(is_duplicate=True)
    assert log.high_watermark == 3


def test_a_repetition_within_one_group_is_recognised(disk: CrashFilesystem) -> None:
    log = open_log(disk)

    first = log.append(RoutedBatch(0, 1, b"a", 1, writer_id=9, sequence=1))
    again = log.append(RoutedBatch(0, 1, b"a", 1, writer_id=9, sequence=1))

    assert again == first._replace(is_duplicate=True)
    assert again.end_offset > log.log_end_offset, "it depends on the flush to come"


def test_an_out_of_order_sequence_is_refused_and_changes_nothing(disk: CrashFilesystem) -> None:
    log = open_log(disk)
    store(log, b"a", writer_id=9, sequence=1)

    with pytest.raises(OutOfOrderSequenceError):
        log.append(RoutedBatch(0, 1, b"b", 1, writer_id=9, sequence=3))

    assert store(log, b"b", writer_id=9, sequence=2)[0].base_offset == 1


def test_take_back_forgets_batches_and_their_sequences(disk: CrashFilesystem) -> None:
    log = open_log(disk)
    log.append(RoutedBatch(0, 5, b"a", 1, writer_id=9, sequence=1))
    log.append(RoutedBatch(0, 5, b"b", 1, writer_id=9, sequence=2))

    log.take_back(keep=1)
    retried = store(log, b"c", rows=2, writer_id=9, sequence=2)[0]

    assert (retried.base_offset, retried.is_duplicate) == (5, False)
    assert payloads_of(read_all(log)) == [b"a", b"c"]


def test_disk_full_refuses_the_group_and_the_log_goes_on(disk: CrashFilesystem) -> None:
    log = open_log(disk)
    store(log, b"kept", writer_id=9, sequence=1)
    log.append(RoutedBatch(0, 7, b"refused", 1, writer_id=9, sequence=2))
    disk.errors = {disk.steps: errno.ENOSPC}

    with pytest.raises(StorageFailedError, match="nothing was stored"):
        log.flush()

    assert (log.high_watermark, log.log_end_offset, log.queued_count) == (1, 1, 0)
    assert store(log, b"again", writer_id=9, sequence=2)[0] == AppendResult(1, 2, 1_000_000, False)
    assert payloads_of(read_all(log)) == [b"kept", b"again"]


def test_a_failed_sync_makes_the_log_read_only_until_restart(disk: CrashFilesystem) -> None:
    log = open_log(disk)
    store(log, b"kept")
    log.append(RoutedBatch(0, 1, b"unknown", 1, writer_id=9, sequence=1))
    disk.errors = {disk.steps + 1: errno.EIO}

    with pytest.raises(UnknownOutcomeError, match="may or may not be stored"):
        log.flush()

    assert log.is_read_only
    assert payloads_of(read_all(log)) == [b"kept"]
    with pytest.raises(StorageFailedError, match="read-only"):
        log.append(RoutedBatch(0, 1, b"more", 1))
    log.close()
    disk.restart(Crash.POWER)
    log = open_log(disk)
    store(log, b"unknown", writer_id=9, sequence=1)
    assert payloads_of(read_all(log)) == [b"kept", b"unknown"]


def test_a_bucket_that_cannot_be_truncated_is_read_only(disk: CrashFilesystem) -> None:
    log = open_log(disk)
    log.append(RoutedBatch(0, 1, b"x", 1))
    disk.errors = {disk.steps: errno.ENOSPC, disk.steps + 1: errno.EIO}

    with pytest.raises(StorageFailedError):
        log.flush()

    assert log.is_read_only


def test_disk_full_while_rolling_refuses_appends_until_there_is_room(
    disk: CrashFilesystem,
) -> None:
    log = open_log(disk, segment_bytes_max=200)
    store(log, b"x" * 150)
    for step in range(14):
        if step in (8, 13):
            continue  # a directory that cannot be synced is another test
        disk.errors = {disk.steps + step: errno.ENOSPC}
        with pytest.raises(StorageFailedError, match="new segment"):
            log.append(RoutedBatch(0, 1, b"y" * 150, 1))
        assert not log.is_read_only
    disk.errors = {}

    store(log, b"y" * 150)

    assert (log.segment_count, len(read_all(log))) == (2, 2)


def test_a_new_segment_whose_name_may_be_lost_makes_the_log_read_only(
    disk: CrashFilesystem,
) -> None:
    log = open_log(disk, segment_bytes_max=200)
    store(log, b"x" * 150)
    disk.errors = {disk.steps + 13: errno.EIO}

    with pytest.raises(StorageFailedError, match="new segment"):
        log.append(RoutedBatch(0, 1, b"y" * 150, 1))

    assert log.is_read_only
    assert len(read_all(log)) == 1


def test_a_mark_that_cannot_be_written_does_not_fail_the_append(disk: CrashFilesystem) -> None:
    log = open_log(disk)
    log.append(RoutedBatch(0, 1, b"x", 1))
    disk.errors = {disk.steps + 2: errno.EIO}

    log.flush()
    store(log, b"y")

    assert disk.history[-1][0] == "sync", "the mark is not tried again"
    log.close()
    assert len(read_all(open_log(disk))) == 2


def test_a_damaged_batch_is_never_returned_and_good_ones_before_it_are(
    disk: CrashFilesystem,
) -> None:
    log = open_log(disk)
    store(log, b"a" * 100, b"b" * 100, b"c" * 100)
    disk.damage(DIRECTORY / f"{0:020d}.log", 64 + (64 + 104) + 64 + 50)

    assert payloads_of(log.read(0, bytes_max=1000)) == [b"a" * 100]
    with pytest.raises(CorruptDataError, match=r"0\.log at byte 232: frame checksum mismatch"):
        log.read(1, bytes_max=1000)
    assert payloads_of(log.read(2, bytes_max=1000)) == [b"c" * 100]


def test_a_closed_log_takes_nothing_more(disk: CrashFilesystem) -> None:
    log = open_log(disk)
    log.append(RoutedBatch(0, 1, b"never flushed", 1))

    log.close()
    log.close()

    with pytest.raises(StorageFailedError, match="closed"):
        log.append(RoutedBatch(0, 1, b"x", 1))
    with pytest.raises(StorageFailedError, match="closed; nothing was stored"):
        log.flush()
    assert open_log(disk).high_watermark == 0


def test_a_log_closed_between_write_and_sync_does_not_acknowledge(disk: CrashFilesystem) -> None:
    log = open_log(disk)
    log.append(RoutedBatch(0, 1, b"x", 1))
    log.write()

    log.close()

    with pytest.raises(UnknownOutcomeError, match="closed while"):
        log.sync()
