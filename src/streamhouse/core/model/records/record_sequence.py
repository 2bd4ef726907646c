"""Sequences that count records, as Kafka's producers number their batches.

Such a producer says of each batch its epoch, the sequence of its first record and how many records
it has. Sequences of an epoch begin at 0, and after 2^31 - 1 comes 0 again. All three are one
unsigned 64-bit integer, so that a frame of the log has them where it has the sequence of any other
writer; those count batches and stay below 2^63.

    63 one | 48 epoch, 15 bits | 17 sequence of the first record, 31 bits | 0 records, 17 bits
"""

from __future__ import annotations

from enum import Enum
from typing import Final, NamedTuple

__all__ = [
    "EPOCH_MAX",
    "RECORDS_MAX",
    "RECORD_COUNTED",
    "SEQUENCE_COUNT",
    "Continuity",
    "RecordSequence",
]

RECORD_COUNTED: Final = 1 << 63
"""Sequences from here on count records."""
EPOCH_MAX: Final = (1 << 15) - 1
SEQUENCE_COUNT: Final = 1 << 31
"""How many sequences there are before they begin again."""
RECORDS_MAX: Final = (1 << 17) - 1
"""Records of one batch."""
_BASE_AT: Final = 17
_EPOCH_AT: Final = 48


class Continuity(Enum):
    """What the sequence of a batch that is new to a bucket must be.

    A batch that is divided over several buckets, or of which some or all rows change nothing, is in
    some of the buckets only. Its bucket cannot tell a batch that was skipped from one that is
    still to come: whoever appends sees to the order then.
    """

    EXACT = "exact"
    """The one that follows the bucket's last."""
    ORDERED = "ordered"
    """Any: the batch comes after all others of its producer, or repeats one that is remembered."""
    UNKNOWN = "unknown"
    """Any: it may also repeat one that is not remembered, since it left nothing in the bucket."""


class RecordSequence(NamedTuple):
    """Where a batch is among the records of its producer."""

    epoch: int
    base: int
    record_count: int

    @property
    def next_base(self) -> int:
        """The sequence of the record after the batch."""
        return (self.base + self.record_count) % SEQUENCE_COUNT

    def records_until(self, base: int) -> int:
        """Return how many records on from its first one the sequence is `base`."""
        return (base - self.base) % SEQUENCE_COUNT

    def is_before(self, other: RecordSequence) -> bool:
        """Whether the batch begins before another one of its epoch: sequences go round."""
        return 0 < self.records_until(other.base) < SEQUENCE_COUNT // 2

    def packed(self) -> int:
        """Return the sequence of its frames."""
        assert 0 <= self.epoch <= EPOCH_MAX
        assert 0 <= self.base < SEQUENCE_COUNT
        assert 0 < self.record_count <= RECORDS_MAX
        return RECORD_COUNTED | self.epoch << _EPOCH_AT | self.base << _BASE_AT | self.record_count

    @classmethod
    def unpacked(cls, sequence: int) -> RecordSequence:
        """Return what a frame's sequence says; it must be one that counts records."""
        assert sequence >= RECORD_COUNTED
        epoch = sequence >> _EPOCH_AT & EPOCH_MAX
        return cls(epoch, sequence >> _BASE_AT & SEQUENCE_COUNT - 1, sequence & RECORDS_MAX)
