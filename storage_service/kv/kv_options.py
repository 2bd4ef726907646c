"""What one bucket of a primary key table may use."""

from __future__ import annotations

from dataclasses import dataclass, field

from streamhouse.storage_service.kv.cache.memory_budget import MemoryBudget
from streamhouse.storage_service.kv.rocksdb_store import StoreOptions, shared_write_buffers

__all__ = ["KvOptions"]


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
