"""Sequences that count records, as used by Kafka's producers.

A Kafka producer sends with each batch its epoch, the sequence of the first record and the number of
records. Sequences of an epoch begin at 0, and wrap to 0 after 2^31 - 1. The three numbers are
packed into one unsigned 64-bit integer, which fits the sequence field of a log frame. Sequences of
all other writers count batches and stay below 2^63.

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
"""The lowest sequence that counts records."""
EPOCH_MAX: Final = (1 << 15) - 1
SEQUENCE_COUNT: Final = 1 << 31
"""The number of sequences before the wrap to 0."""
RECORDS_MAX: Final = (1 << 17) - 1
"""The most records of one batch."""
_BASE_AT: Final = 17
_EPOCH_AT: Final = 48


class Continuity(Enum):
    """The sequence required for a batch that is new to a bucket.

    Some buckets never see a batch: the batch is divided over other buckets, or its rows change
    nothing. The bucket cannot tell a skipped batch from a late batch, so the appending code keeps
    the order.
    """

    EXACT = "exact"
    """The sequence after the bucket's last."""
    ORDERED = "ordered"
    """Any: the batch follows all batches of its producer, or repeats a remembered batch."""
    UNKNOWN = "unknown"
    """Any: the batch may also repeat a forgotten batch, which left nothing in the bucket."""


class RecordSequence(NamedTuple):
    """The position of a batch among the records of its producer."""

    epoch: int
    base: int
    record_count: int

    @property
    def next_base(self) -> int:
        """The sequence of the record after the batch."""
        return (self.base + self.record_count) % SEQUENCE_COUNT

    def records_until(self, base: int) -> int:
        """Return the number of records from the batch's first record to the sequence `base`."""
        return (base - self.base) % SEQUENCE_COUNT

    def is_before(self, later: RecordSequence) -> bool:
        """Whether the batch begins before `later`, of the same epoch, across the wrap."""
        return 0 < self.records_until(later.base) < SEQUENCE_COUNT // 2

    def packed(self) -> int:
        """Return the sequence for the frames of the batch."""
        assert 0 <= self.epoch <= EPOCH_MAX
        assert 0 <= self.base < SEQUENCE_COUNT
        assert 0 < self.record_count <= RECORDS_MAX
        return RECORD_COUNTED | self.epoch << _EPOCH_AT | self.base << _BASE_AT | self.record_count

    @classmethod
    def unpacked(cls, sequence: int) -> RecordSequence:
        """Unpack a frame's sequence, which must count records."""
        assert sequence >= RECORD_COUNTED
        epoch = sequence >> _EPOCH_AT & EPOCH_MAX
        return cls(epoch, sequence >> _BASE_AT & SEQUENCE_COUNT - 1, sequence & RECORDS_MAX)
