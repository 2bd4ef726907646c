"""Idempotent writers: an id, and the next sequence of every bucket written to."""

from __future__ import annotations

import secrets
import threading

__all__ = ["AppendWriter", "WriterPool"]


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

    def renew(self) -> None:
        """Become another writer: what was sent as this one no longer has to do with it."""
        self.writer_id = secrets.randbits(63) | 1
        self._next_sequence.clear()


class WriterPool:
    """Writers of one client that no call is using, by table. Thread-safe.

    A call takes a writer for itself and gives it back only when every answer came: after a failure
    its sequences are not known, and it is left to be forgotten.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: dict[int, list[AppendWriter]] = {}

    def take(self, table_id: int) -> AppendWriter:
        """Return a writer that nobody else has."""
        with self._lock:
            idle = self._idle.get(table_id)
            return idle.pop() if idle else AppendWriter()

    def give_back(self, table_id: int, writer: AppendWriter) -> None:
        """Keep a writer for later calls."""
        with self._lock:
            self._idle.setdefault(table_id, []).append(writer)
