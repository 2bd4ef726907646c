"""Small transactions of tables with two buckets, straight at the manager."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from streamhouse.storage_service.engine.keys.key_table import KeyTable
from streamhouse.storage_service.engine.manager import TabletManager
from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.engine.transactions.table_transactions import TableTransactions
from streamhouse.storage_service.kv.plan.write_plan import KeyWrite
from streamhouse.storage_service.log.append_queue import RoutedBatch
from streamhouse.storage_service.model.transaction import TransactionOperation
from tests.support.in_process_service import EVENTS, event_rows, routed, table_descriptor

__all__ = [
    "begin",
    "make_table",
    "stage_parts",
    "staged_batches",
    "until",
    "visible_ends",
    "write_alone",
]


async def make_table(manager: TabletManager, is_keyed: bool, path: str = "events") -> OpenTable:
    """Make a table of `EVENTS` with two buckets."""
    key = ("id",) if is_keyed else ()
    return await manager.create_table(table_descriptor(path, bucket_count=2, primary_key=key))


async def begin(
    transactions: TableTransactions, is_keyed: bool = False, version: int | None = None
) -> str:
    """Begin a transaction of a minute; return its id."""
    operation = TransactionOperation.UPSERT if is_keyed else TransactionOperation.APPEND
    app_id = None if version is None else "app"
    begun, _ = await transactions.begin(
        operation, columns=None, app_id=app_id, version=version, timeout_ms=60_000
    )
    return begun


def staged_batches(start: int, count: int) -> list[RoutedBatch]:
    """Return rows for both buckets."""
    return [
        RoutedBatch(
            bucket,
            count,
            memoryview(event_rows(first, first + count).serialize()).cast("B"),
        )
        for bucket, first in ((0, start), (1, start + count))
    ]


async def stage_parts(transactions: TableTransactions, begun: str, parts: int = 6) -> list[str]:
    """Stage parts of 40 rows; return their ids."""
    return [
        (await transactions.stage(begun, EVENTS, staged_batches(100 * n, 20), token=None))[0]
        for n in range(parts)
    ]


async def write_alone(manager: TabletManager, table: OpenTable, number: int) -> None:
    """Write one row outside any transaction."""
    row = event_rows(10_000 + number, 10_001 + number)
    if isinstance(table, KeyTable):
        await manager.write_keys(table, [KeyWrite(0, row)], columns=None, writer_id=0)
    else:
        await manager.append(table, [routed(0, row)])


def visible_ends(table: OpenTable) -> list[int]:
    """Return the high watermarks."""
    return [tablet.high_watermark for tablet in table.tablets]


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)
