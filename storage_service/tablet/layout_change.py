"""A table gets, changes or loses its batch layout: what may still be reported of the former."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

from streamhouse.storage_service.model.table import TableInfo
from streamhouse.storage_service.tablet.open_table import OpenTable
from streamhouse.storage_service.tablet.tiering_coordinator import TieringCoordinator

__all__ = ["changing_layout"]


@contextlib.asynccontextmanager
async def changing_layout(
    tiering: TieringCoordinator, table: OpenTable, changed: TableInfo
) -> AsyncIterator[None]:
    """Keep rounds from being claimed and reported while the table becomes `changed`.

    If that is another batch layout, what is in the former one counts no more: readers turn to the
    rows' own lake table, and a round that runs may go on, but its layout is not registered. A
    crash in between leaves the former layout, to be made anew. What is due is looked for anew.
    """
    async with tiering.round_of(table).lock:
        if table.info.descriptor.batch_layout() != changed.descriptor.batch_layout():
            lake = replace(
                table.lake,
                batch=None,
                batch_tiered_at_us=None,
                batch_since_epoch=table.lake.tiering_epoch,
            )
            await tiering.record(table, lake)
        if table.lake.maintenance_due_us and changed.properties() != table.properties:
            # When something is due depends on the properties: a worker is to look again.
            await tiering.record(table, replace(table.lake, maintenance_due_us=0))
        yield
