"""Reading a journal in order, epoch by epoch, each to its seal.

Promises:
- objects come as acknowledged: none left out, none from behind a seal
- each object belongs to the owner of its epoch and follows the previous object by its checksum; an
  epoch follows the seal of the previous epoch. Anything else is a `CorruptDataError`
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from typing import Final

from streamhouse.core.errors import CorruptDataError
from streamhouse.core.threads import Pool
from streamhouse.storage_service.ownership.journal.epochs import open_facts
from streamhouse.storage_service.ownership.journal.names import Place, ShardNames
from streamhouse.storage_service.ownership.journal.object_format import (
    OBJECT_BYTES_MAX,
    JournalObject,
    ObjectKind,
    decode_object,
)
from streamhouse.storage_service.ownership.journal.store.object_store import (
    ObjectNotFoundError,
    ObjectStore,
)

__all__ = ["JournalReader", "TrimmedError"]

_AHEAD_MAX: Final = 8


class TrimmedError(Exception):
    """The next object has been deleted: begin again from a newer checkpoint."""


class JournalReader:
    """Reads from a place on; follows the journal as it grows. Not safe from several threads.

    `start` is an epoch's open object, or a place behind an object of the epoch. `ahead` is the
    number of objects fetched in advance: to restore, not to follow. `journal` is the expected
    identity, if known.
    """

    def __init__(
        self,
        store: ObjectStore,
        names: ShardNames,
        *,
        start: Place,
        journal: bytes | None = None,
        ahead: int = 0,
    ) -> None:
        self._store = store
        self._names = names
        self._place = start
        self._journal = journal
        self._checksum: int | None = None
        self._nonce: bytes | None = None
        self._seal: JournalObject | None = None
        self._ahead = min(ahead, _AHEAD_MAX)
        self._pool = Pool("journal-read", self._ahead) if self._ahead else None
        self._fetched: dict[Place, Future[memoryview | None]] = {}

    @property
    def place(self) -> Place:
        """The place of the next object."""
        return self._place

    def next(self) -> JournalObject | None:
        """Return the next object of any kind, or None if missing so far.

        Raises `TrimmedError`, `CorruptDataError`, and store errors.
        """
        data = self._fetch(self._place)
        if data is None and self._pool is not None:
            # The request was sent a while ago.
            self._fetched.clear()
            data = self._get(self._place)
        if data is None:
            # An epoch with a successor was sealed, so all its objects existed.
            if self._get(Place(self._place.epoch + 1, 0)) is None:
                return None
            if (data := self._get(self._place)) is None:
                raise TrimmedError(
                    f"{self._names.object(self._place)} is not in the store any more"
                )
        return self._checked(data)

    def read_to(self, epoch: int) -> Iterator[JournalObject]:
        """Yield all objects before the open object of `epoch`."""
        while self._place < Place(epoch, 0):
            journal_object = self.next()
            if journal_object is None:
                raise TrimmedError(f"{self._names.object(self._place)} is not in the store")
            yield journal_object

    def close(self) -> None:
        """End its threads."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _checked(self, data: memoryview) -> JournalObject:
        key = self._names.object(self._place)
        journal_object = decode_object(data, key=key, place=self._place, journal=self._journal)
        is_open = journal_object.kind is ObjectKind.OPEN
        if is_open != (self._place.seq == 0):
            raise CorruptDataError(f"object {key} of the journal is not of the kind for its place")
        # A seal put ahead of a quick owner has no checksum of the object before.
        is_barrier = (
            journal_object.kind is ObjectKind.SEAL and journal_object.previous_checksum == 0
        )
        if not is_barrier and self._checksum not in (None, journal_object.previous_checksum):
            raise CorruptDataError(f"object {key} of the journal does not follow the object before")
        if is_open:
            facts = open_facts(journal_object, key=key)
            if self._seal is not None and facts.previous_seal_seq != self._seal.place.seq:
                raise CorruptDataError(f"object {key} of the journal follows another seal")
            self._nonce = journal_object.nonce
        elif self._nonce is None:
            self._nonce = self._owner(journal_object)
        if journal_object.kind is ObjectKind.OPERATIONS and journal_object.nonce != self._nonce:
            raise CorruptDataError(f"object {key} of the journal is not of its epoch's owner")
        self._journal, self._checksum = journal_object.journal, journal_object.checksum
        self._seal = journal_object if journal_object.kind is ObjectKind.SEAL else None
        self._place = (
            Place(journal_object.place.epoch + 1, 0)
            if self._seal
            else journal_object.place.following
        )
        return journal_object

    def _owner(self, journal_object: JournalObject) -> bytes:
        """Return the nonce of an epoch's owner; the open object is never deleted."""
        place = Place(journal_object.place.epoch, 0)
        key = self._names.object(place)
        if (data := self._get(place)) is None:
            raise CorruptDataError(f"object {key} of the journal, which opens its epoch, is gone")
        opened = decode_object(data, key=key, place=place, journal=journal_object.journal)
        open_facts(opened, key=key)
        return opened.nonce

    def _fetch(self, place: Place) -> memoryview | None:
        if self._pool is None:
            return self._get(place)
        for seq in range(place.seq, place.seq + self._ahead):
            ahead = Place(place.epoch, seq)
            if ahead not in self._fetched:
                self._fetched[ahead] = self._pool.submit(self._get, ahead)
        for fetched in [fetched for fetched in self._fetched if fetched < place]:
            self._fetched.pop(fetched).cancel()
        return self._fetched.pop(place).result()

    def _get(self, place: Place) -> memoryview | None:
        try:
            return self._store.get(self._names.object(place), bytes_max=OBJECT_BYTES_MAX)
        except ObjectNotFoundError:
            return None
