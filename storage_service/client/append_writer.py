"""One idempotent writer: its id, and the next sequence of every bucket it writes to."""

from __future__ import annotations

import secrets

__all__ = ["AppendWriter"]


class AppendWriter:
    """Numbers the batches of one writer so that the service stores each of them once.

    Not thread-safe: sequences must reach the service in order, so each thread needs its own.
    """

    def __init__(self, writer_id: int | None = None) -> None:
        # 0 means "no writer" in the log; 63 random bits do not collide in practice.
        self.writer_id = writer_id or secrets.randbits(63) | 1
        self._next_sequence: dict[int, int] = {}

    def next_sequence(self, bucket: int) -> int:
        """Return the sequence of the next batch for `bucket`; the first is 1."""
        return self._next_sequence.get(bucket, 1)

    def advance(self, bucket: int) -> None:
        """Count one acknowledged batch of `bucket`."""
        self._next_sequence[bucket] = self.next_sequence(bucket) + 1
