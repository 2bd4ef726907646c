"""What metrics report of the moment: how full each thing is that has a limit."""

from __future__ import annotations

from collections.abc import Iterable

from streamhouse.storage_service.engine.keys.key_table import KeyTable
from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.server.service import Service
from streamhouse.storage_service.server.status.event_loop import in_slices

__all__ = ["read_gauges"]


async def read_gauges(service: Service) -> dict[str, tuple[str, float]]:
    """Return name -> help, value. Event loop only."""
    manager = service.manager
    key_memory_bytes = await _key_memory_bytes(manager.open_tables())
    # From here on nothing is awaited: the others are of one moment.
    tables = manager.open_tables()
    key_tables = [table for table in tables if isinstance(table, KeyTable)]
    key_buckets = [keys for table in key_tables for keys in table.key_buckets]
    return {
        "connections": ("Open connections.", len(service.connections)),
        "idle_connections_closed": (
            "Connections closed while idle, to let others in.",
            service.connections.closed_idle_count,
        ),
        "open_requests": ("Requests in progress.", service.open_requests),
        "subscriptions": ("Open subscriptions.", service.subscription_count),
        "waiting_requests": ("Requests waiting for rows.", manager.waiter_limit.count),
        "catalog_requests": ("Requests to /iceberg in progress.", service.catalog_requests),
        "worker_calls": ("Calls on worker threads, waiting ones too.", service.worker_calls),
        "body_bytes": ("Bytes held by request bodies.", service.body_memory.bytes_held),
        "answer_bytes": (
            "Bytes held by answers that are being built or have not left.",
            service.answers.held,
        ),
        "answers_waiting": (
            "Requests waiting for memory for answers.",
            service.answers.waiting_count,
        ),
        "commit_queue_bytes": ("Appended bytes waiting for the disk.", manager.queued_bytes),
        "disk_bytes": ("What rows take of --disk-max.", service.manager.disk_budget.bytes_used),
        "key_writes_waiting": (
            "Writes to primary key tables waiting for their turn.",
            sum(table.key_writer.waiting_count for table in key_tables),
        ),
        "key_memory_bytes": (
            "Memory of rows by key: at hand, waiting for RocksDB, and in it.",
            key_memory_bytes,
        ),
        "key_rows": ("Rows of primary key tables.", sum(keys.row_count for keys in key_buckets)),
        "transactions_open": (
            "Transactions that are not finished.",
            manager.transactions.open_count,
        ),
        "transaction_staged_bytes": ("Bytes staged by them.", manager.transactions.staged_bytes),
        "databases": ("Databases.", len(manager.databases())),
        "tables": ("Tables.", len(list(tables))),
        "damaged_tables": ("Tables that are not served.", len(manager.damaged_tables())),
        "diverged_tables": (
            "Tables that are neither written nor tiered, because their lake has another history.",
            sum(bool(table.lake.diverged) for table in tables),
        ),
        "buckets": ("Buckets of all tables.", sum(len(table.tablets) for table in tables)),
        "read_only_buckets": (
            "Buckets that a failed disk has made read-only.",
            sum(tablet.is_read_only for table in tables for tablet in table.tablets),
        ),
        "unusable_key_buckets": (
            "Buckets whose rows by key are out of use, because they are damaged or behind.",
            sum(not keys.is_usable for keys in key_buckets),
        ),
        "grants_reload_failures": (
            "Changed grants files that were broken, the one before kept.",
            service.access.reload_failures,
        ),
    }


async def _key_memory_bytes(tables: Iterable[OpenTable]) -> int:
    """Return the memory of rows by key, which takes long to ask for. Event loop only."""
    total = 0
    async for table in in_slices(tables):
        if isinstance(table, KeyTable) and not table.is_dropped:
            # Those out of use may just be closed.
            usable = [keys.rows for keys in table.key_buckets if keys.is_usable]
            total += sum(_memory(rows.memory_bytes()) for rows in usable)
    return total


def _memory(by_place: dict[str, int]) -> int:
    return sum(size for place, size in by_place.items() if place != "files")
