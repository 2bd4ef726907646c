"""The order of a producer's batches, for tables whose buckets cannot verify the order.

A Kafka producer numbers its records per partition. If a partition is a bucket, and each record a
row, the bucket's log knows the next number (`log/writer_state.py`), also after a crash. In other
tables a bucket gets some of the batches only: rows go to the buckets of their keys, change nothing,
or are rejected. For these tables `ProducerOrder` keeps the order in memory: the batches of a
producer and partition are stored in turn, and each must follow the predecessor.

After a start the order is empty. A producer's first batch then counts as the next batch, since
clients repeat unanswered batches in order. The buckets recognise repeated batches. Later batches
wait for the first batch, because its place is kept even if the batch is refused.

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
"""The maximal number of batches in flight, which a producer may repeat."""
_WRITERS_MAX: Final = 20_000
_WRITER_BYTES: Final = 8
_RESERVED_WRITERS: Final = (0, (1 << 64) - 1)


def writer_of(producer_id: int, partition: int) -> int:
    """Return the writer id for a producer and a partition, which has separate sequences.

    The id depends on the partition, because the rows of several partitions may meet in one bucket.
    """
    name = b"streamhouse kafka %d %d" % (producer_id, partition)
    while True:
        digest = blake2b(name, digest_size=_WRITER_BYTES).digest()
        writer_id = int.from_bytes(digest, "little")
        if writer_id not in _RESERVED_WRITERS:
            return writer_id
        name = digest


@dataclass(frozen=True, slots=True)
class Repeated(Generic[_A]):
    """A batch was stored before, with this answer."""

    answer: _A


@dataclass(slots=True)
class _Place(Generic[_A]):
    """A writer's next sequence, and the latest answered batches."""

    epoch: int
    next_base: int
    answered: list[tuple[RecordSequence, _A]] = field(default_factory=list)


class ProducerOrder(Generic[_A]):
    """The order of the producers of one table, since this process owns the table.

    Call `admit` for each batch, and `stored` after storing; only then admit the writer's next
    batch.
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
        """Return the check that buckets apply to the next batch, or the answer of a repeated batch.

        Raises OutOfOrderSequenceError for a gap, and FencedError for an older epoch.
        """
        place = self._places.pop(writer_id, None)
        if place is None:
            self._keep(writer_id, _Place(sequence.epoch, sequence.base))
            return Continuity.UNKNOWN
        self._keep(writer_id, place)
        if sequence.epoch < place.epoch:
            raise FencedError(
                f"the producer has epoch {place.epoch} by now, not {sequence.epoch}; another"
                " producer has taken its place"
            )
        expected = place.next_base if sequence.epoch == place.epoch else 0
        for answered_sequence, answer in place.answered:
            if answered_sequence == sequence:
                return Repeated(answer)
        if sequence.base != expected:
            raise OutOfOrderSequenceError(
                f"the producer sent {sequence.record_count} records from {sequence.base} on in"
                f" epoch {sequence.epoch}; expected {expected}, or a repetition of its"
                f" last {WINDOW} batches"
            )
        # Batches that were in flight at the start may have been stored before the start.
        is_later = len(place.answered) >= WINDOW
        return Continuity.ORDERED if is_later else Continuity.UNKNOWN

    def stored(self, writer_id: int, sequence: RecordSequence, answer: _A) -> None:
        """Record that an admitted batch is stored, now or earlier."""
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
