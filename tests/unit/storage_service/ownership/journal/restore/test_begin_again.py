"""A process that makes its directory what the journal says more than once, as a standby does."""

from __future__ import annotations

from pathlib import Path

from streamhouse.storage_service.ownership.journal.restore._start import JournalStart
from streamhouse.storage_service.ownership.journal.restore.journal_file import JournalFile, Phase
from streamhouse.storage_service.ownership.journal.store._file_store import FileObjectStore
from tests.support.restore_world import Owner, files

_LOG = "tables/1/bucket-0/00000000000000000000.log"
_MARK = "tables/1/bucket-0/durable.mark"


def test_a_directory_that_went_back_is_not_believed_when_it_begins_again(tmp_path: Path) -> None:
    """Its own process came last, so it was trusted: but it has followed older objects since."""
    store, directory = FileObjectStore(tmp_path / "store"), tmp_path / "data"
    owner = Owner(directory, store)
    owner.filesystem.make_directory(directory / "tables/1/bucket-0")
    owner.replace(_MARK, b"old mark")
    owner.replace(_LOG, b"rows")
    owner.replace(_MARK, b"new mark")
    epoch, service_id = owner.tenure.epoch, owner.tenure.facts.service_id
    owner.stop()
    right = files(directory)
    start = JournalStart(directory, store)
    start.prepare(b"n" * 16)
    start.begin(epoch=epoch + 1, service_id=service_id)
    # As far as a standby had followed the epoch again.
    (directory / _MARK).write_bytes(b"old mark")
    (directory / _LOG).write_bytes(b"sowr")

    start.prepare(b"n" * 16)
    known = JournalFile.load(directory)
    start.begin(epoch=epoch + 1, service_id=service_id)

    assert known is not None
    assert known.phase == Phase.RESTORING, "a crash now would leave a directory that is believed"
    assert files(directory) == right
