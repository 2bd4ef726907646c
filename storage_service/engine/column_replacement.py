"""Replaces the columns of a table that never had a row.

The table keeps its id, its buckets and the reports of consumers. A single replacement of
`table.json` changes the columns, so a crash leaves either the former columns or the new columns.

Four rules keep out rows with the former columns:
- the replacement waits for writes and commits under way, and is given up if a row arrived
- writes and new transactions during the replacement get a retriable error
- rows decoded before and written afterwards name a schema version unknown to the table
  (`OpenTable.check_versions`)
- no tiering worker ever got the table, and none gets the table meanwhile: no lake table has the
  former columns

Event loop only.
"""

from __future__ import annotations

import asyncio

from streamhouse.core.errors import StorageFailedError, UnavailableError
from streamhouse.core.model.lake.limits import check_lake_schema
from streamhouse.core.model.lake.partition_fields import check_column_names
from streamhouse.core.model.schema_change import replace_columns
from streamhouse.core.model.table import TableDescriptor, TableInfo
from streamhouse.reading.where.checks import Checks
from streamhouse.storage_service.engine.manager import TabletManager
from streamhouse.storage_service.engine.open_table import LogTable, OpenTable

__all__ = ["is_untouched", "may_have_rows", "with_other_columns"]


def may_have_rows(manager: TabletManager, table: OpenTable) -> bool:
    """Whether a table has or had a row, or a caller is about to write a row."""
    return (
        # A row that nobody knows of may be behind the end of a log whose disk failed.
        not table.can_store
        or any(tablet.log_end_offset for tablet in table.tablets)
        or bool(manager.transactions.of(table).open_count)
        or table.lake.snapshot_id is not None
    )


def is_untouched(manager: TabletManager, table: OpenTable) -> bool:
    """Whether a table never had a row, and no caller is about to write or read rows."""
    return (
        isinstance(table, LogTable)
        and not table.is_dropped
        and not may_have_rows(manager, table)
        and table.lake.tiering_epoch == 0
    )


async def with_other_columns(
    manager: TabletManager, table: OpenTable, before: TableInfo, wanted: TableDescriptor
) -> bool:
    """Give a table the columns and properties of `wanted`, durably; path and buckets stay.

    Returns False, without a change, if the table differs from `before` or was touched. The
    replacement goes on without its caller. Raises as `TabletManager.alter_schema`.
    """
    replacing = asyncio.create_task(_replaced(manager, table, before, wanted))
    return await asyncio.shield(replacing)


async def _replaced(
    manager: TabletManager, table: OpenTable, before: TableInfo, wanted: TableDescriptor
) -> bool:
    async with manager.runtime.changing_files:
        manager.check_open(table)
        if table.info is not before:
            return False
        changed = replace_columns(before, wanted)
        check_lake_schema(changed.descriptor)
        check_column_names(before, changed)
        Checks.of_table(changed)
        # In this order: so does who freezes a table.
        async with manager.tiering.changing(table, changed), table.gate.alone():
            manager.check_open(table)
            if not is_untouched(manager, table):
                return False
            table.gate.stop(
                UnavailableError(
                    f"table '{table.path}' gets the columns of its first schema; try again"
                )
            )
            try:
                await _keep(manager, table, changed)
            finally:
                table.gate.resume()
            return True


async def _keep(manager: TabletManager, table: OpenTable, changed: TableInfo) -> None:
    try:
        table.info = await manager.runtime.run(manager.registry.replace_table, changed)
    except StorageFailedError:
        # Nothing was changed.
        raise
    except BaseException as error:
        # Rows of either kind may be unreadable after the next start.
        table.gate.refuse(
            StorageFailedError(
                f"whether table '{table.path}' has the columns of its first schema is known after a"
                f" restart of the service, and until then it takes no writes: {error}"
            )
        )
        raise
