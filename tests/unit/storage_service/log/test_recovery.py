"""What opening a log keeps, cuts off, and refuses to open."""

from __future__ import annotations

import pytest

from streamhouse.core.errors import CorruptDataError, StorageFailedError
from streamhouse.storage_service.log.append_queue import RoutedBatch
from streamhouse.storage_service.log.segments.segment_format import LogIdentity
from streamhouse.storage_service.log.segments.segment_roll import begin_log
from tests.support.crash_filesystem import CrashFilesystem
from tests.support.log_world import (
    DIRECTORY,
    SettableClock,
    open_log,
    payloads_of,
    read_all,
    store,
)

_PAYLOADS = [bytes([65 + n]) * (100 + n) for n in range(4)]
_MARK = DIRECTORY / "durable.mark"


def _segment(base_offset: int = 0) -> str:
    return f"{base_offset:020d}.log"


def _four_groups(disk: CrashFilesystem, **options: int) -> list[int]:
    """Store four one-batch groups of 10 rows; return where in its file each frame starts."""
    log = open_log(disk, **options)
    starts = []
    for payload in _PAYLOADS:
        starts.append(log.size_bytes)
        store(log, payload, rows=10)
    log.close()
    return starts


def _one_group(disk: CrashFilesystem) -> list[int]:
    """Store four batches as one group, as they look when its acknowledgement is not proven."""
    log = open_log(disk)
    store(log, *_PAYLOADS, rows=10)
    log.close()
    disk.remove(_MARK)
    starts = [64]
    for payload in _PAYLOADS[:-1]:
        starts.append(starts[-1] + 64 + (len(payload) + 7) // 8 * 8)
    return starts


def _without_mark(disk: CrashFilesystem) -> None:
    disk.remove(_MARK)


def test_a_log_may_begin_at_any_offset(disk: CrashFilesystem) -> None:
    begin_log(DIRECTORY, first_offset=40, identity=LogIdentity(7, 0), filesystem=disk, now_us=1_000)

    log = open_log(disk, end_offset_min=40)
    assert (log.log_start_offset, log.high_watermark, log.log_end_offset) == (40, 40, 40)
    assert [result.base_offset for result in store(log, b"x", b"y", rows=3)] == [40, 43]
    log.close()
    assert payloads_of(read_all(open_log(disk, end_offset_min=46))) == [b"x", b"y"]
    with pytest.raises(CorruptDataError, match="rows below 47 were durable"):
        open_log(disk, end_offset_min=47)


def test_a_clean_log_opens_as_it_was(disk: CrashFilesystem) -> None:
    _four_groups(disk, segment_bytes_max=300)

    log = open_log(disk, segment_bytes_max=300)

    assert (log.log_start_offset, log.high_watermark, log.segment_count) == (0, 40, 4)
    assert payloads_of(read_all(log)) == _PAYLOADS


def test_every_torn_length_of_an_unacknowledged_group_keeps_whole_batches(
    disk: CrashFilesystem,
) -> None:
    starts = _one_group(disk)
    path = DIRECTORY / _segment()
    whole = disk.read(path, bytes_max=1 << 20)

    for size in range(64, len(whole) + 1):
        torn = CrashFilesystem(0)
        torn.make_directory(DIRECTORY)
        torn.create(path).write([whole[:size]], position=0)

        log = open_log(torn)

        survivors = sum(size >= end for end in [*starts[1:], len(whole)])
        assert payloads_of(read_all(log)) == _PAYLOADS[:survivors]
        assert store(log, b"next")[0].base_offset == survivors * 10
        log.close()
        assert len(read_all(open_log(torn))) == survivors + 1


def test_a_torn_batch_before_whole_ones_of_its_own_group_is_a_torn_tail(
    disk: CrashFilesystem,
) -> None:
    """Pages of one write reach the disk in any order: later frames prove nothing here."""
    starts = _one_group(disk)
    disk.damage(DIRECTORY / _segment(), starts[1] + 70)

    log = open_log(disk)

    assert payloads_of(read_all(log)) == _PAYLOADS[:1]


@pytest.mark.parametrize("frame", range(3))
@pytest.mark.parametrize("delta", [0, 5, 8, 16, 24, 28, 32, 40, 56, 64, 100])
def test_damage_before_a_later_group_is_never_cut_off(
    disk: CrashFilesystem, frame: int, delta: int
) -> None:
    starts = _four_groups(disk)
    _without_mark(disk)
    disk.damage(DIRECTORY / _segment(), starts[frame] + delta)
    before = disk.read(DIRECTORY / _segment(), bytes_max=1 << 20)

    with pytest.raises(CorruptDataError, match=rf"{_segment()} at byte {starts[frame]}: "):
        open_log(disk)

    assert disk.read(DIRECTORY / _segment(), bytes_max=1 << 20) == before


def test_a_damaged_last_batch_is_refused_when_the_mark_proves_it(disk: CrashFilesystem) -> None:
    starts = _four_groups(disk)
    disk.damage(DIRECTORY / _segment(), starts[3] + 90)

    with pytest.raises(CorruptDataError, match="at offset 30, but rows below 40 were durable"):
        open_log(disk)


def test_removing_the_mark_accepts_the_loss_of_the_last_group(disk: CrashFilesystem) -> None:
    starts = _four_groups(disk)
    disk.damage(DIRECTORY / _segment(), starts[3] + 90)

    _without_mark(disk)

    assert payloads_of(read_all(open_log(disk))) == _PAYLOADS[:3]


@pytest.mark.parametrize("size", [70, 300, 64])
def test_a_file_cut_short_is_refused(disk: CrashFilesystem, size: int) -> None:
    _four_groups(disk)
    disk.cut(DIRECTORY / _segment(), size)

    with pytest.raises(CorruptDataError, match="but rows below 40 were durable"):
        open_log(disk)


def test_an_end_the_caller_knows_is_as_good_as_the_mark(disk: CrashFilesystem) -> None:
    starts = _four_groups(disk)
    _without_mark(disk)
    disk.cut(DIRECTORY / _segment(), starts[3])

    with pytest.raises(CorruptDataError, match="but rows below 35 were durable"):
        open_log(disk, end_offset_min=35)
    assert open_log(disk, end_offset_min=30).high_watermark == 30


@pytest.mark.parametrize("position", [0, 9, 25, 61])
def test_a_damaged_mark_is_ignored(disk: CrashFilesystem, position: int) -> None:
    _four_groups(disk)
    disk.damage(_MARK, position)

    log = open_log(disk)

    assert log.high_watermark == 40
    log.close()
    disk.cut(DIRECTORY / _segment(), 200)
    with pytest.raises(CorruptDataError):
        open_log(disk)


def test_segments_that_are_gone_are_missed(disk: CrashFilesystem) -> None:
    _four_groups(disk)
    disk.remove(DIRECTORY / _segment())

    with pytest.raises(CorruptDataError, match="has no segment files"):
        open_log(disk)
    with pytest.raises(CorruptDataError, match="reached offset 7"):
        open_log(CrashFilesystem(0), end_offset_min=7)


def test_a_sealed_segment_that_is_gone_is_missed(disk: CrashFilesystem) -> None:
    _four_groups(disk, segment_bytes_max=300)
    disk.remove(DIRECTORY / _segment(10))

    with pytest.raises(CorruptDataError, match="the next segment starts at 20"):
        open_log(disk, segment_bytes_max=300)


@pytest.mark.parametrize("base", [0, 30])
def test_a_damaged_file_header_is_refused(disk: CrashFilesystem, base: int) -> None:
    _four_groups(disk, segment_bytes_max=300)
    disk.damage(DIRECTORY / _segment(base), 33)

    with pytest.raises(CorruptDataError, match=rf"{_segment(base)} at byte 0: .*checksum"):
        open_log(disk, segment_bytes_max=300)


@pytest.mark.parametrize(("table_id", "bucket"), [(8, 0), (7, 1)])
def test_files_of_another_bucket_are_refused(
    disk: CrashFilesystem, table_id: int, bucket: int
) -> None:
    _four_groups(disk)

    with pytest.raises(CorruptDataError, match="belongs to bucket 0 of table 7"):
        open_log(disk, table_id=table_id, bucket=bucket)


def test_a_segment_under_another_name_is_refused(disk: CrashFilesystem) -> None:
    _four_groups(disk)
    disk.rename(DIRECTORY / _segment(), DIRECTORY / _segment(5))

    with pytest.raises(CorruptDataError, match="the header says base offset 0"):
        open_log(disk)


@pytest.mark.parametrize("fault", ["absent", "header", "entries", "short", "foreign"])
def test_a_lost_or_damaged_index_is_made_again(disk: CrashFilesystem, fault: str) -> None:
    _four_groups(disk, segment_bytes_max=300)
    path = DIRECTORY / f"{10:020d}.index"
    whole = disk.read(path, bytes_max=1 << 20)
    if fault == "absent":
        disk.remove(path)
    elif fault == "header":
        disk.damage(path, 42)
    elif fault == "entries":
        disk.damage(path, 70)
    elif fault == "short":
        disk.cut(path, 80)
    else:
        disk.rename(DIRECTORY / f"{0:020d}.index", path)

    log = open_log(disk, segment_bytes_max=300)
    assert payloads_of(read_all(log)) == _PAYLOADS
    assert payloads_of(log.read(15, bytes_max=1)) == _PAYLOADS[1:2]
    log.close()

    if fault not in ("entries", "short"):
        # Entries are verified at the first use, and then walked around until the header says no.
        assert disk.read(path, bytes_max=1 << 20) == whole


def test_damage_in_a_sealed_segment_is_found_when_its_index_is_rebuilt(
    disk: CrashFilesystem,
) -> None:
    _four_groups(disk, segment_bytes_max=300)
    disk.damage(DIRECTORY / _segment(10), 150)
    disk.remove(DIRECTORY / f"{10:020d}.index")

    with pytest.raises(CorruptDataError, match=rf"{_segment(10)} at byte 64: frame checksum"):
        open_log(disk, segment_bytes_max=300)


def test_damage_in_a_sealed_segment_is_found_when_it_is_read(disk: CrashFilesystem) -> None:
    _four_groups(disk, segment_bytes_max=300)
    disk.damage(DIRECTORY / _segment(10), 150)

    log = open_log(disk, segment_bytes_max=300)

    assert payloads_of(log.read(0, bytes_max=1000)) == _PAYLOADS[:1]
    with pytest.raises(CorruptDataError, match=rf"{_segment(10)} at byte 64"):
        log.read(10, bytes_max=1000)
    assert payloads_of(log.read(20, bytes_max=1000)) == _PAYLOADS[2:]


@pytest.mark.parametrize("lost", ["newest", "both", "damaged"])
def test_writers_are_remembered_without_their_newest_snapshot(
    disk: CrashFilesystem, lost: str
) -> None:
    log = open_log(disk, segment_bytes_max=300)
    for sequence, payload in enumerate(_PAYLOADS, 1):
        store(log, payload, rows=10, writer_id=9, sequence=sequence)
    log.close()
    newest, older = (DIRECTORY / f"{offset:020d}.writers" for offset in (30, 20))
    if lost == "damaged":
        disk.damage(newest, 100)
    else:
        disk.remove(newest)
    if lost == "both":
        disk.remove(older)

    log = open_log(disk, segment_bytes_max=300)

    for sequence in range(1, 5):
        again = log.append(RoutedBatch(0, 10, b"x", 1, writer_id=9, sequence=sequence))
        assert (again.base_offset, again.is_duplicate) == (sequence * 10 - 10, True)


def test_only_the_two_newest_snapshots_are_kept(disk: CrashFilesystem) -> None:
    _four_groups(disk, segment_bytes_max=300)

    names = [name for name in disk.list_names(DIRECTORY) if name.endswith(".writers")]

    assert names == [f"{20:020d}.writers", f"{30:020d}.writers"]


def test_writers_are_forgotten_after_their_expiry(disk: CrashFilesystem) -> None:
    clock = SettableClock(0)
    log = open_log(disk, clock_us=clock, segment_bytes_max=300, writer_expiry_us=1000)
    store(log, b"x" * 200, writer_id=1, sequence=1)
    clock.now_us = 900
    store(log, b"x" * 200, writer_id=2, sequence=1)
    clock.now_us = 1500
    store(log, b"x" * 200, writer_id=3, sequence=1)

    log.close()
    log = open_log(disk, clock_us=clock, segment_bytes_max=300, writer_expiry_us=1000)

    assert store(log, b"x", writer_id=2, sequence=1)[0].is_duplicate
    assert not store(log, b"x", writer_id=1, sequence=1)[0].is_duplicate


def test_what_interrupted_work_left_behind_is_removed(disk: CrashFilesystem) -> None:
    _four_groups(disk)
    for name in (
        f"{40:020d}.log.tmp",
        "durable.mark.tmp",
        f"{0:020d}.index",
        f"{17:020d}.index",
        f"{17:020d}.writers",
    ):
        disk.create(DIRECTORY / name).write([b"left behind"], position=0)
    disk.create(DIRECTORY / "notes.txt").close()

    log = open_log(disk)

    assert payloads_of(read_all(log)) == _PAYLOADS
    assert disk.list_names(DIRECTORY) == [_segment(), "durable.mark", "notes.txt"]


def test_opening_twice_changes_nothing_more(disk: CrashFilesystem) -> None:
    _four_groups(disk, segment_bytes_max=300)
    open_log(disk, segment_bytes_max=300).close()
    before = {name: disk.read(DIRECTORY / name, bytes_max=9999) for name in _names(disk)}

    open_log(disk, segment_bytes_max=300).close()

    assert {name: disk.read(DIRECTORY / name, bytes_max=9999) for name in _names(disk)} == before


def _names(disk: CrashFilesystem) -> list[str]:
    return disk.list_names(DIRECTORY)


def test_a_disk_that_fails_while_opening_is_named(disk: CrashFilesystem) -> None:
    _four_groups(disk)
    disk.errors = {disk.steps: 5}

    with pytest.raises(StorageFailedError, match="cannot open the log of bucket 0 of table 7"):
        open_log(disk)
