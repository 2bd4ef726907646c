"""A table gets other properties: what of the former counts no more, and what follows at once."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.engine.tiering_desk.tiering_coordinator import TieringCoordinator
from streamhouse.storage_service.model.table import TableInfo

__all__ = ["changing_properties"]


@contextlib.asynccontextmanager
async def changing_properties(
    tiering: TieringCoordinator, table: OpenTable, changed: TableInfo
) -> AsyncIterator[None]:
    """Keep rounds from being claimed and reported while the table becomes `changed`.

    If that is another batch layout, what is in the former one counts no more: readers turn to the
    rows' own lake table, and a round that runs may go on, but its layout is not registered. A
    crash in between leaves the former layout, to be made anew.

    If other properties of the lake changed, a worker is to look now what is to be tidied: nobody
    may write to the table any more, and a round that runs looks with the former ones.
    """
    async with tiering.round_of(table).lock:
        lake = table.lake
        if table.info.descriptor.batch_layout() != changed.descriptor.batch_layout():
            lake = replace(
                lake,
                batch=None,
                batch_tiered_at_us=None,
                batch_since_epoch=lake.tiering_epoch,
            )
        if table.properties.of_lake() != changed.properties().of_lake():
            lake = replace(
                lake,
                # Of a lake table that nobody has made yet nothing is due.
                maintenance_due_us=None if lake.snapshot_id is None else 0,
                altered_in_epoch=lake.tiering_epoch,
            )
        if lake is not table.lake:
            await tiering.record(table, lake)
        yield
    await table.follow()
