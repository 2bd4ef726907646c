"""The memory limits of one bucket, and the budget shared by all buckets of a service.

A bucket may use memory unused by other buckets, and always an equal share of all: busy buckets use
idle buckets' memory, and no bucket is pushed out altogether. Buckets report their use; memory above
the share is released at the next write, or on request.
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
        """The reported use of all shares."""
        return self._total

    def join(self) -> MemoryShare:
        """Return a new share without use."""
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
    """One bucket's use of a budget."""

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget: Final = budget

    def report(self, used_bytes: int) -> int:
        """Report the current use; return the allowed use."""
        self._budget._report(self, used_bytes)
        return self._budget._allowed(self)

    def leave(self) -> None:
        """End the share's use; harmless when repeated."""
        self._budget._leave(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvOptions:
    """The limits of one bucket.

    `cache_bytes` bounds the rows kept in memory and their index; a bucket within the limit is never
    read from RocksDB. Further rows are evicted `segment_bytes` at a time (None: 1/32 of
    `cache_bytes`). `backlog_rows` and `backlog_bytes` are the size of one handover to RocksDB; at
    four times this size, because RocksDB is behind or its disk is full, writes are refused.
    `memory` bounds the cached rows of all buckets with the same budget, including the backlogs for
    RocksDB.
    """

    cache_bytes: int = 256 << 20
    segment_bytes: int | None = None
    backlog_rows: int = 500_000
    backlog_bytes: int = 64 << 20
    store: StoreOptions = field(default_factory=StoreOptions)
    memory: MemoryBudget | None = None

    @classmethod
    def shared(cls, *, cache_bytes: int, memory_bytes: int) -> KvOptions:
        """Return options for all buckets of a service, sharing `memory_bytes`."""
        # A quarter for runs on their way to disk, the remainder for rows and index.
        buffers = shared_write_buffers(memory_bytes // 4)
        return cls(
            cache_bytes=cache_bytes,
            store=StoreOptions(write_buffers=buffers),
            memory=MemoryBudget(memory_bytes - memory_bytes // 4),
        )
