"""An owner's objects in its epoch: in order, several in flight, complete in order.

Plain values and steps; `_writer.py` has the threads, the model check runs every order of the steps.
Positions count the operations recorded since the start.

Invariants:
- places are assigned in order, fewer than `IN_FLIGHT_MAX` ahead of the complete objects
- a position is stored once its object and all objects before are stored and belong to this owner
- nothing is put behind a seal; the next epoch opens once the seal is complete
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from streamhouse.storage_service.log.filesystem import Buffer
from streamhouse.storage_service.ownership.journal.epochs import (
    IN_FLIGHT_MAX,
    Seal,
    SealReason,
    Tenure,
    is_same_as,
    new_seal,
    open_epoch,
)
from streamhouse.storage_service.ownership.journal.names import Place
from streamhouse.storage_service.ownership.journal.object_format import (
    checksum_of,
    encode_operations,
)
from streamhouse.storage_service.ownership.journal.operations import Operation
from streamhouse.storage_service.ownership.journal.steps import Create, Steps, get_or_none, stored

__all__ = ["Fenced", "Pipeline", "Sent"]

# Checkpoints ask for the place of an operation soon after the operation was stored.
_PLACES_KEPT: Final = 1 << 16


class Fenced(Exception):
    """Another process has sealed this owner's epoch: nothing further is stored."""


@dataclass(frozen=True, slots=True)
class Sent:
    """An object in flight; `end_position` is the position after its operations."""

    place: Place
    key: str
    buffers: Sequence[Buffer]
    end_position: int

    @property
    def size_bytes(self) -> int:
        """The bytes of the object."""
        return sum(map(len, self.buffers))

    def steps(self) -> Steps[None]:
        """Store the object. Raises `Fenced`."""
        foreign_object = yield from stored(
            Create(self.key, self.buffers), is_same_as(list(self.buffers))
        )
        if foreign_object is not None:
            raise Fenced(f"{self.key} was stored by another process")


class Pipeline:
    """The objects of one owner. Not safe to call from several threads at once."""

    def __init__(self, tenure: Tenure) -> None:
        self._tenure = tenure
        self._next_seq = 1
        self._checksum = tenure.checksum
        self._sent_position = 0
        self._stored_position = 0
        self._seal: Seal | None = None
        self._in_flight: dict[Place, Sent] = {}
        self._complete: dict[Place, Sent] = {}
        self._ends: deque[tuple[int, Place, int]] = deque(maxlen=_PLACES_KEPT)

    @property
    def tenure(self) -> Tenure:
        """The current epoch."""
        return self._tenure

    @property
    def next_place(self) -> Place:
        """The place of the next object."""
        return Place(self._tenure.epoch, self._next_seq)

    @property
    def sent_position(self) -> int:
        """All operations before are stored or in flight."""
        return self._sent_position

    @property
    def stored_position(self) -> int:
        """All operations before are stored."""
        return self._stored_position

    @property
    def in_flight(self) -> int:
        """The number of incomplete objects."""
        return len(self._in_flight)

    @property
    def ended_for(self) -> str | None:
        """The reason of the epoch's end, once all of the epoch is stored."""
        return self._seal.reason if self._seal is not None and not self._in_flight else None

    @property
    def has_room(self) -> bool:
        """Whether another object may be sent now."""
        return self._seal is None and len(self._in_flight) < IN_FLIGHT_MAX - 1

    def send(self, operations: Sequence[Operation]) -> Sent:
        """Return the next object with these operations, for `Sent.steps`."""
        assert self.has_room
        place = self.next_place
        buffers = encode_operations(
            operations,
            place=place,
            journal=self._tenure.journal,
            nonce=self._tenure.nonce,
            previous_checksum=self._checksum,
        )
        start = self._sent_position
        self._sent_position += len(operations)
        self._ends.append((self._sent_position, place, start))
        return self._put(place, buffers)

    def seal(self, reason: str) -> Sent:
        """Return the epoch's seal, to be stored like any object."""
        assert self._seal is None
        place = self.next_place
        self._seal, buffers = new_seal(
            place,
            reason,
            facts=self._tenure.facts,
            journal=self._tenure.journal,
            nonce=self._tenure.nonce,
            previous_checksum=self._checksum,
        )
        return self._put(place, buffers)

    def stored(self, sent: Sent) -> None:
        """Note a stored object, in any order."""
        self._complete[sent.place] = sent
        for place in list(self._in_flight):
            if place not in self._complete:
                break
            del self._in_flight[place]
            self._stored_position = self._complete.pop(place).end_position

    def next_epoch(self) -> Steps[Tenure]:
        """Open the epoch after the sealed, complete epoch. Raises `TakenByOtherError`."""
        assert self._seal is not None
        assert not self._in_flight
        facts = {
            "endpoint": self._tenure.facts.endpoint,
            "lease_ms": self._tenure.facts.lease_ms,
        }
        names, nonce = self._tenure.names, self._tenure.nonce
        return (yield from open_epoch(names, self._seal, nonce=nonce, facts=facts))

    def rolled(self, tenure: Tenure) -> None:
        """Go on in the next epoch."""
        assert self._seal is not None
        assert self._seal.reason == SealReason.ROLLED
        assert not self._in_flight
        self._tenure, self._seal = tenure, None
        self._next_seq, self._checksum = 1, tenure.checksum

    def look(self) -> Steps[None]:
        """Raise `Fenced` for an object at the next place while nothing is in flight."""
        key = self._tenure.names.object(self.next_place)
        if (yield from get_or_none(key)) is not None:
            raise Fenced(f"{key} was stored by another process")

    def place_of(self, position: int) -> tuple[Place, int]:
        """Return the object of the operation at a sent position, and the operation's number.

        For an operation not sent yet: the next object, or the epoch's seal. Only recent objects are
        remembered.
        """
        for end, place, start in reversed(self._ends):
            if position >= end:
                break
            if position >= start:
                return place, position - start
        else:
            if position < self._sent_position:
                raise ValueError(f"position {position} is too long ago")
        # No object of this epoch comes after its seal.
        coming = self.next_place if self._seal is None else self._seal.place
        return coming, position - self._sent_position

    def _put(self, place: Place, buffers: list[Buffer]) -> Sent:
        sent = Sent(place, self._tenure.names.object(place), buffers, self._sent_position)
        self._in_flight[place] = sent
        self._checksum = checksum_of(buffers)
        self._next_seq += 1
        return sent
