"""Which directory is the journal's own: what it has beyond the journal stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamhouse.core.errors import InvalidRequestError
from streamhouse.storage_service.ownership.journal.restore._start import JournalStart
from streamhouse.storage_service.ownership.journal.restore.journal_file import (
    refuse_without_journal,
)
from streamhouse.storage_service.ownership.journal.store._file_store import FileObjectStore
from tests.support.restore_world import Owner, files, take_epoch

_LOG = "tables/1/bucket-0/00000000000000000000.log"
_LATER_LOG = "tables/1/bucket-0/00000000000000000067.log"


@pytest.mark.slow
def test_a_directory_stays_its_own_however_often_its_process_ends_before_it_serves(
    tmp_path: Path,
) -> None:
    """The catalog is away for a while, and somebody starts the service again and again."""
    store = FileObjectStore(tmp_path / "store")
    owner = Owner(tmp_path / "a", store)
    owner.filesystem.make_directory((tmp_path / "a" / _LOG).parent)
    owner.replace(_LOG, b"header")
    owner.wait_stored()
    owner.die()
    acknowledged = b"header, and what the disk acknowledged"
    (tmp_path / "a" / _LOG).write_bytes(acknowledged)

    for number in range(70):
        start = JournalStart(tmp_path / "a", store)
        nonce = number.to_bytes(16)
        start.prepare(nonce)
        tenure = take_epoch(store, nonce)
        start.begin(epoch=tenure.epoch, service_id=tenure.facts.service_id)
    Owner(tmp_path / "a", store, seed=1).die()

    assert files(tmp_path / "a")[_LOG] == acknowledged


def test_an_older_copy_of_the_directory_is_not_believed_where_it_was_half_written(
    tmp_path: Path,
) -> None:
    """A snapshot of the disk has bytes that were not synced yet; its process went on since."""
    store = FileObjectStore(tmp_path / "store")
    owner = Owner(tmp_path / "a", store)
    owner.filesystem.make_directory((tmp_path / "a" / _LOG).parent)
    owner.replace(_LOG, b"header")
    for _ in range(3):
        owner.append(_LOG, b"synced now")
    owner.wait_stored()
    owner.die()
    expected = files(tmp_path / "a")
    (tmp_path / "a" / _LOG).write_bytes(b"headersynced now" + bytes(10))

    Owner(tmp_path / "a", store, seed=1).die()

    assert files(tmp_path / "a") == expected


def test_a_directory_that_may_lack_rows_is_not_served_without_its_journal(tmp_path: Path) -> None:
    """Removing `journal.json` from it would make a part of the rows the truth."""
    store = FileObjectStore(tmp_path / "store")
    Owner(tmp_path / "a", store).die()
    with pytest.raises(InvalidRequestError, match="To go on without it"):
        refuse_without_journal(tmp_path / "a")
    nonce = bytes(16)
    start = JournalStart(tmp_path / "a", store)
    start.prepare(nonce)
    tenure = take_epoch(store, nonce)
    start.begin(epoch=tenure.epoch, service_id=tenure.facts.service_id)

    with pytest.raises(InvalidRequestError, match="is not what its journal says yet"):
        refuse_without_journal(tmp_path / "a")


def test_the_mark_of_an_older_copy_does_not_stay_where_retention_has_removed_segments(
    tmp_path: Path,
) -> None:
    """Nothing was appended since the copy was made: no log is short, but the mark is old."""
    bucket = "tables/1/bucket-0"
    first, second = (f"{bucket}/{offset:020d}.log" for offset in (0, 67))
    mark = f"{bucket}/durable.mark"
    store = FileObjectStore(tmp_path / "store")
    owner = Owner(tmp_path / "a", store)
    owner.filesystem.make_directory((tmp_path / "a" / first).parent)
    for path in (first, second, mark):
        owner.replace(path, b"as it was")
    older = files(tmp_path / "a")
    owner.replace(mark, b"begins at 67")
    owner.remove(first)
    owner.wait_stored()
    owner.die()
    expected = files(tmp_path / "a")
    for path, data in older.items():
        (tmp_path / "a" / path).write_bytes(data)

    Owner(tmp_path / "a", store, seed=1).die()

    assert files(tmp_path / "a") == expected


def test_an_older_copy_is_not_believed_where_a_state_file_says_that_it_is_one(
    tmp_path: Path,
) -> None:
    """No log has grown since the copy was made, and the disk that had it has flipped a bit."""
    state = "tables/1/lake.json"
    store = FileObjectStore(tmp_path / "store")
    owner = Owner(tmp_path / "a", store)
    owner.filesystem.make_directory((tmp_path / "a" / _LOG).parent)
    for path in (_LOG, _LATER_LOG, state):
        owner.replace(path, b"as it was")
    owner.replace(state, b"as it became")
    owner.wait_stored()
    owner.die()
    expected = files(tmp_path / "a")
    (tmp_path / "a" / state).write_bytes(b"as it was")
    (tmp_path / "a" / _LOG).write_bytes(b"as it wbs")

    Owner(tmp_path / "a", store, seed=1).die()

    assert files(tmp_path / "a") == expected


def test_the_end_of_a_log_stays_where_the_disk_damaged_what_is_before_it(tmp_path: Path) -> None:
    """What the journal has is fetched again; what only the disk has was acknowledged by it."""
    store = FileObjectStore(tmp_path / "store")
    owner = Owner(tmp_path / "a", store)
    owner.filesystem.make_directory((tmp_path / "a" / _LOG).parent)
    owner.replace(_LOG, b"header")
    for data in (b", first", b", second"):
        owner.append(_LOG, data)
    owner.wait_stored()
    owner.die()
    (tmp_path / "a" / _LOG).write_bytes(b"header, fjrst, second, on the disk")

    Owner(tmp_path / "a", store, seed=1).die()

    assert files(tmp_path / "a")[_LOG] == b"header, first, second, on the disk"
