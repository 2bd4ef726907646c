"""The order of a producer's batches, where the buckets that they go to cannot tell it.

A Kafka producer numbers its records per partition. Where a partition is a bucket, and each record a
row of it, the bucket's log knows what comes next (`log/writer_state.py`), also after a crash. Where
a partition's rows go to the buckets of their keys, may change nothing, or may be rejected, a bucket
has some of the batches only. Then `ProducerOrder` knows the order, in memory: the batches of one
producer and partition are stored one after the other, and each must follow the one before.

After a start nothing is known. The first batch of a producer is taken for the next one then, since
clients repeat what was not answered in order. What it repeats, the buckets recognise: each says for
itself what it has. That the place of this batch is kept even if it is refused is what makes later
ones wait for it.

Pure: no clock, no I/O. Not thread-safe.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final, Generic, TypeVar

from streamhouse.core.errors import FencedError, OutOfOrderSequenceError
from streamhouse.core.model.records.record_sequence import Continuity, RecordSequence

__all__ = ["ProducerOrder", "Repeated", "writer_of"]

_A = TypeVar("_A")
WINDOW: Final = 5
"""How many batches a producer may have in flight, and so may repeat."""
_WRITERS_MAX: Final = 20_000
_WRITER_BYTES: Final = 8
_RESERVED_WRITERS: Final = (0, (1 << 64) - 1)


def writer_of(producer_id: int, partition: int) -> int:
    """Return the writer that a producer is for one partition of a table: sequences are of both.

    The buckets of rows are others than the partition, so several partitions may meet in one bucket.
    """
    named = b"streamhouse kafka %d %d" % (producer_id, partition)
    while True:
        digest = blake2b(named, digest_size=_WRITER_BYTES).digest()
        writer_id = int.from_bytes(digest, "little")
        if writer_id not in _RESERVED_WRITERS:
            return writer_id
        named = digest


@dataclass(frozen=True, slots=True)
class Repeated(Generic[_A]):
    """A batch was stored before, and this was the answer."""

    answer: _A


@dataclass(slots=True)
class _Place(Generic[_A]):
    """Where a writer stands: its next batch, and the latest that were answered."""

    epoch: int
    next_base: int
    answered: list[tuple[RecordSequence, _A]] = field(default_factory=list)


class ProducerOrder(Generic[_A]):
    """The places of the producers of one table, since this process has it.

    For each batch: `admit`, and when it is stored `stored`; only then the writer's next one.
    """

    def __init__(self, *, writers_max: int = _WRITERS_MAX) -> None:
        self._writers_max = writers_max
        # In order of last activity.
        self._places: dict[int, _Place[_A]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, writer_id: int) -> bool:
        return writer_id in self._places

    def admit(self, writer_id: int, sequence: RecordSequence) -> Continuity | Repeated[_A]:
        """Return what the buckets are to ask of a batch that is the next one, or its answer.

        Raises OutOfOrderSequenceError for one that does not follow, FencedError for an older epoch.
        """
        place = self._places.pop(writer_id, None)
        if place is None:
            self._keep(writer_id, _Place(sequence.epoch, sequence.base))
            return Continuity.UNKNOWN
        self._keep(writer_id, place)
        if sequence.epoch < place.epoch:
            raise FencedError(
                f"the producer has epoch {place.epoch} by now, not {sequence.epoch}; another one"
                " goes on in its place"
            )
        expected = place.next_base if sequence.epoch == place.epoch else 0
        for known, answer in place.answered:
            if known == sequence:
                return Repeated(answer)
        if sequence.base != expected:
            raise OutOfOrderSequenceError(
                f"the producer sent {sequence.record_count} records from {sequence.base} on in"
                f" epoch {sequence.epoch}; expected {expected}, or a repetition of its"
                f" last {WINDOW} batches"
            )
        # All that was in flight at the start may have been stored before it.
        is_later = len(place.answered) >= WINDOW
        return Continuity.ORDERED if is_later else Continuity.UNKNOWN

    def stored(self, writer_id: int, sequence: RecordSequence, answer: _A) -> None:
        """Remember that an admitted batch is stored, or was stored before."""
        place = self._places.get(writer_id)
        if place is None:
            place = _Place(sequence.epoch, sequence.base)
        place.epoch, place.next_base = sequence.epoch, sequence.next_base
        place.answered = [*place.answered[1 - WINDOW :], (sequence, answer)]
        self._keep(writer_id, place)

    def refused(self, writer_id: int, error: Exception) -> None:
        """Forget a place that only a batch of an older epoch has claimed."""
        place = self._places.get(writer_id)
        if place is not None and not place.answered and isinstance(error, FencedError):
            del self._places[writer_id]

    def _keep(self, writer_id: int, place: _Place[_A]) -> None:
        self._places.pop(writer_id, None)
        self._places[writer_id] = place
        if len(self._places) > self._writers_max:
            del self._places[next(iter(self._places))]
