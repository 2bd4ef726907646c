"""A table that never had a row gets other columns, in place of those that it was made with.

It stays the same table: its id, its buckets and what consumers have said of it. One replacement of
its `table.json` does it, so a crash leaves the former columns or the new ones.

What keeps rows of the former columns out, who sent them for a table that had these:
- writes and commits under way are waited for, and if they brought a row nothing is replaced
- those that come meanwhile are told to come again, also who begins a transaction
- those that were decoded before and come after have a version of the schema that the table has not
  (`OpenTable.check_versions`)
- no tiering worker was ever given the table, and none is meanwhile: no lake table has the columns
Event loop only.
"""

from __future__ import annotations

import asyncio

from streamhouse.core.errors import StorageFailedError, UnavailableError
from streamhouse.core.model.lake.limits import check_lake_schema
from streamhouse.core.model.lake.partition_fields import check_column_names
from streamhouse.core.model.schema_change import replace_columns
from streamhouse.core.model.table import TableDescriptor, TableInfo
from streamhouse.storage_service.engine.manager import TabletManager
from streamhouse.storage_service.engine.open_table import LogTable, OpenTable

__all__ = ["is_untouched", "may_have_rows", "with_other_columns"]


def may_have_rows(manager: TabletManager, table: OpenTable) -> bool:
    """Whether a table has, or had, a row, or somebody is about to bring one."""
    return (
        # A row that nobody knows of may be behind the end of a log whose disk failed.
        not table.can_store
        or any(tablet.log_end_offset for tablet in table.tablets)
        or bool(manager.transactions.of(table).open_count)
        or table.lake.snapshot_id is not None
    )


def is_untouched(manager: TabletManager, table: OpenTable) -> bool:
    """Whether a table never had a row, and nobody is about to bring one or to look for some."""
    return (
        isinstance(table, LogTable)
        and not table.is_dropped
        and not may_have_rows(manager, table)
        and table.lake.tiering_epoch == 0
    )


async def with_other_columns(
    manager: TabletManager, table: OpenTable, before: TableInfo, wanted: TableDescriptor
) -> bool:
    """Give a table the columns and properties of `wanted`, durably; it has its path and buckets.

    Returns False, and changes nothing, if the table is not `before` any more or was touched. Once
    begun it goes on, whatever becomes of the caller. Raises as `TabletManager.alter_schema`.
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
