"""Trimming: deleting objects needed by neither of two checkpoints.

Promises:
- an epoch's open object and seal stay for ever, and all of the newest epoch stays: a stalled
  process must never see a free place that was taken
- two checkpoints stay, with all their packs
- a pack is deleted only if older than both checkpoints: a pack being uploaded stays
- a missing object never causes a deletion
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple, Self

from streamhouse.core.errors import CorruptDataError
from streamhouse.storage_service.ownership.journal.checkpoints.manifest import Manifest
from streamhouse.storage_service.ownership.journal.epochs import read_open
from streamhouse.storage_service.ownership.journal.names import SEQ_MAX, Place, ShardNames
from streamhouse.storage_service.ownership.journal.steps import run_on
from streamhouse.storage_service.ownership.journal.store.object_store import (
    LIST_COUNT_MAX,
    ObjectEntry,
    ObjectStore,
)

__all__ = ["TrimPoint", "Trimmer", "list_all"]

_logger = logging.getLogger(__name__)

_BATCH: Final = 500


def list_all(store: ObjectStore, folder: str, *, last_key: str = "") -> Iterator[ObjectEntry]:
    """Yield every object below `folder` that the store lists, in order."""
    while True:
        page = store.list_objects(folder, start_after=last_key)
        yield from page
        if len(page) < LIST_COUNT_MAX:
            return
        last_key = page[-1].key


class TrimPoint(NamedTuple):
    """The facts of a checkpoint needed for trimming."""

    place: Place
    packs: frozenset[str]
    next_pack: str

    @classmethod
    def of(cls, manifest: Manifest) -> Self:
        """Return the facts of a stored manifest."""
        return cls(manifest.place, frozenset(manifest.packs), manifest.next_pack)


@dataclass(slots=True)
class Trimmer:
    """Trims for one owner, after each of its checkpoints. One thread at a time."""

    store: ObjectStore
    names: ShardNames
    _trimmed_epoch: int = 0

    def trim(self, older: TrimPoint, newer: TrimPoint, *, epoch: int) -> int:
        """Delete objects needed by neither checkpoint; return their number.

        `epoch` is the newest, open and owned by this process. Raises store errors.
        """
        assert older.place < newer.place
        deleted = self._delete(self._old_checkpoints(older))
        deleted += self._delete(self._old_objects(min(older.place, Place(epoch, 0))))
        deleted += self._delete(self._old_packs(older, newer))
        deleted += self._delete(self._old_leases(older.place.epoch))
        self._trimmed_epoch = older.place.epoch - 1
        if deleted:
            _logger.info("event=journal_trimmed before=%s objects=%d", older.place, deleted)
        return deleted

    def _delete(self, keys: Iterable[str]) -> int:
        batch: list[str] = []
        deleted = 0
        for key in keys:
            batch.append(key)
            if len(batch) == _BATCH:
                self.store.delete(batch)
                deleted, batch = deleted + len(batch), []
        if batch:
            self.store.delete(batch)
        return deleted + len(batch)

    def _old_objects(self, end: Place) -> Iterator[str]:
        seals: dict[int, int | None] = {}
        last_key = self.names.object(Place(self._trimmed_epoch, SEQ_MAX))
        for entry in list_all(self.store, self.names.journal, last_key=last_key):
            place = self.names.place_of_object(entry.key)
            if place is None or place.seq == 0:
                continue
            if place >= end:
                return
            if place.epoch not in seals:
                seals[place.epoch] = self._seal_of(place.epoch)
            seal = seals[place.epoch]
            # Objects behind a seal were never acknowledged: they are seals or nothing.
            if seal is not None and place.seq < seal:
                yield entry.key

    def _seal_of(self, epoch: int) -> int | None:
        """Return the end of an epoch from the next open object; None if unreadable."""
        try:
            return run_on(self.store, read_open(self.names, epoch + 1)).previous_seal_seq
        except CorruptDataError as error:
            _logger.warning("event=epoch_not_trimmed epoch=%d why=%r", epoch, error.message)
            return None

    def _old_packs(self, older: TrimPoint, newer: TrimPoint) -> Iterator[str]:
        first_kept_pack = min(older.next_pack, newer.next_pack)
        for entry in list_all(self.store, self.names.packs):
            name = self.names.name_of_pack(entry.key)
            if name is None:
                continue
            if name >= first_kept_pack:
                return
            if name not in older.packs and name not in newer.packs:
                yield entry.key

    def _old_checkpoints(self, older: TrimPoint) -> Iterator[str]:
        for entry in list_all(self.store, self.names.checkpoints):
            place = self.names.place_of_checkpoint(entry.key)
            if place is not None and place < older.place:
                yield entry.key

    def _old_leases(self, epoch: int) -> Iterator[str]:
        for entry in list_all(self.store, self.names.leases):
            lease = self.names.epoch_of_lease(entry.key)
            if lease is not None and lease < epoch:
                yield entry.key
