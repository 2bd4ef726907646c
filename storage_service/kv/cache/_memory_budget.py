"""What one bucket may use, and the memory that all buckets of a service share for rows at hand.

A bucket may take what the others leave, and always an equal share of all: busy buckets use what
idle ones do not need, and none is pushed out altogether. Buckets report what they use; they give
back what is over their share when they are written to, or when they are asked to.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Final

from streamhouse.storage_service.kv.rocksdb_store import StoreOptions, shared_write_buffers

__all__ = ["KvOptions", "MemoryBudget", "MemoryShare"]


class MemoryBudget:
    """`bytes_max` for all shares together; any thread."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max: Final = bytes_max
        self._lock: Final = threading.Lock()
        self._used: dict[MemoryShare, int] = {}
        self._total = 0

    @property
    def used_bytes(self) -> int:
        """What all shares have reported."""
        return self._total

    def join(self) -> MemoryShare:
        """Return a new share, which uses nothing yet."""
        share = MemoryShare(self)
        self._report(share, 0)
        return share

    def _report(self, share: MemoryShare, used_bytes: int) -> None:
        with self._lock:
            self._total += used_bytes - self._used.get(share, 0)
            self._used[share] = used_bytes

    def _leave(self, share: MemoryShare) -> None:
        with self._lock:
            self._total -= self._used.pop(share, 0)

    def _allowed(self, share: MemoryShare) -> int:
        with self._lock:
            other_shares = self._total - self._used.get(share, 0)
            return max(self._bytes_max // max(len(self._used), 1), self._bytes_max - other_shares)


class MemoryShare:
    """What one bucket uses of a budget."""

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget: Final = budget

    def report(self, used_bytes: int) -> int:
        """Say what is used now; return what may be."""
        self._budget._report(self, used_bytes)
        return self._budget._allowed(self)

    def leave(self) -> None:
        """Use nothing any more; harmless when repeated."""
        self._budget._leave(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvOptions:
    """What one bucket may use.

    `cache_bytes` bounds the rows kept in memory and their index; a bucket that fits is never read
    from RocksDB. Rows that do not fit are evicted `segment_bytes` at a time (None: 1/32 of it).
    `backlog_rows` and `backlog_bytes` say how much is handed to RocksDB at once; with four times as
    much waiting, because RocksDB is behind or its disk is full, writes are refused. `memory` bounds
    the rows at hand of all buckets that have it, and what waits for RocksDB with them.
    """

    cache_bytes: int = 256 << 20
    segment_bytes: int | None = None
    backlog_rows: int = 200_000
    backlog_bytes: int = 32 << 20
    store: StoreOptions = field(default_factory=StoreOptions)
    memory: MemoryBudget | None = None

    @classmethod
    def shared(cls, *, cache_bytes: int, memory_bytes: int) -> KvOptions:
        """Return options for all buckets of a service, which share `memory_bytes`."""
        # Runs on their way to disk, for a moment: a quarter, beside what rows and index take.
        buffers = shared_write_buffers(memory_bytes // 4)
        return cls(
            cache_bytes=cache_bytes,
            store=StoreOptions(write_buffers=buffers),
            memory=MemoryBudget(memory_bytes - memory_bytes // 4),
        )
