"""What an owner puts into its epoch: objects in order, several on their way, complete in order.

Plain values and steps; `writer.py` has the threads, the model check has every order of them.
Positions count the operations that were recorded since the start.

Invariants:
- places are given out in order, fewer than `IN_FLIGHT_MAX` ahead of what is complete
- a position is stored once the object with it and all objects before it are stored and ours
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

# Checkpoints ask soon after something was stored where it is.
_PLACES_KEPT: Final = 1 << 16


class Fenced(Exception):
    """Another process has sealed our epoch: nothing further is stored."""


@dataclass(frozen=True, slots=True)
class Sent:
    """An object on its way. Before `end_position` is what it and all before it have."""

    place: Place
    key: str
    buffers: Sequence[Buffer]
    end_position: int

    @property
    def size_bytes(self) -> int:
        """The bytes of the object."""
        return sum(map(len, self.buffers))

    def steps(self) -> Steps[None]:
        """Store it. Raises `Fenced`."""
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
        """The epoch that is written to."""
        return self._tenure

    @property
    def next_place(self) -> Place:
        """Where the next object goes."""
        return Place(self._tenure.epoch, self._next_seq)

    @property
    def sent_position(self) -> int:
        """All before it is stored or on its way."""
        return self._sent_position

    @property
    def stored_position(self) -> int:
        """All before it is stored."""
        return self._stored_position

    @property
    def in_flight(self) -> int:
        """How many objects are not complete."""
        return len(self._in_flight)

    @property
    def ended_for(self) -> str | None:
        """Why the epoch ended, once it has and all of it is stored."""
        return self._seal.reason if self._seal is not None and not self._in_flight else None

    @property
    def has_room(self) -> bool:
        """Whether another object may be sent now."""
        return self._seal is None and len(self._in_flight) < IN_FLIGHT_MAX - 1

    def send(self, operations: Sequence[Operation]) -> Sent:
        """Return the next object, of these operations, to be stored by `Sent.steps`."""
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
        """Return the epoch's seal, to be stored as any object."""
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
        """Take note that an object is stored, in whatever order."""
        self._complete[sent.place] = sent
        for place in list(self._in_flight):
            if place not in self._complete:
                break
            del self._in_flight[place]
            self._stored_position = self._complete.pop(place).end_position

    def next_epoch(self) -> Steps[Tenure]:
        """Open the epoch after ours, whose seal is complete. Raises `TakenByOtherError`."""
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
        """Raise `Fenced` if something is at our next place while nothing of ours is on its way."""
        key = self._tenure.names.object(self.next_place)
        if (yield from get_or_none(key)) is not None:
            raise Fenced(f"{key} was stored by another process")

    def place_of(self, position: int) -> tuple[Place, int]:
        """Return the object with the operation at a sent position, and its number in it.

        That of the object to come if it was not sent yet: the seal, where the epoch has one. Only
        of the last objects.
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
