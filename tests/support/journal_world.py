"""Owners of one journal, and what a reader of it finds."""

from __future__ import annotations

from streamhouse.storage_service.ownership.journal._asked_store import PatientStore
from streamhouse.storage_service.ownership.journal.epochs import Tenure, newest_epoch, take
from streamhouse.storage_service.ownership.journal.names import Place, ShardNames
from streamhouse.storage_service.ownership.journal.operations import Append, Operation
from streamhouse.storage_service.ownership.journal.reader import JournalReader
from streamhouse.storage_service.ownership.journal.steps import Step, do, run
from streamhouse.storage_service.ownership.journal.store.object_store import ObjectStore

__all__ = ["NAMES", "numbered", "numbers_in", "taken"]

NAMES = ShardNames("0")
_LOG = "tables/1/bucket-0/00000000000000000000.log"


def numbered(number: int, *, size_bytes: int = 0) -> Operation:
    """An operation that is told from others by its number."""
    return Append(_LOG, number, bytes(size_bytes))


def taken(store: ObjectStore, *, lease_ms: int = 1_000) -> Tenure:
    """Take over from whoever is the newest owner; the store may fail for a time."""

    patient = PatientStore(store, pause=lambda _: True, failed=lambda _: None)

    def patiently(step: Step) -> object:
        return do(patient, step)

    newest = run(newest_epoch(NAMES), patiently)
    return run(take(NAMES, after=newest, endpoint="http://a", lease_ms=lease_ms), patiently)


def numbers_in(store: ObjectStore, *, ahead: int = 0) -> list[int]:
    """The numbers of all operations that a reader finds from the beginning."""
    reader = JournalReader(store, NAMES, start=Place(1, 0), ahead=ahead)
    found: list[int] = []
    while (one := reader.next()) is not None:
        for operation in one.operations:
            assert isinstance(operation, Append)
            found.append(operation.position)
    reader.close()
    return found
