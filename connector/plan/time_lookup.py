"""The first offset written at or after a time, in whichever tier it is."""

from __future__ import annotations

from dataclasses import replace

import pyarrow.compute as pc

from streamhouse.connector.plan.scan_schema import SYSTEM_COLUMNS, scan_context
from streamhouse.connector.plan.tier_plan import plan_lake
from streamhouse.connector.scan.scan import Split
from streamhouse.connector.scan.split_reader import read_split
from streamhouse.storage_service.client import StorageClient
from streamhouse.storage_service.model.offsets import OffsetRange
from streamhouse.storage_service.model.table_state import TableState

__all__ = ["offsets_at"]


def offsets_at(client: StorageClient, state: TableState, timestamp_us: int) -> dict[int, int]:
    """Return per bucket the offset of the first row written at or after `timestamp_us`.

    The log answers for what it holds. Where its oldest row is late enough, an older one in the lake
    may be too, and is looked for there: of a primary key table in its full history, which it has.
    """
    offsets = client.offsets_for_timestamp(str(state.table.path), timestamp_us)
    older = {
        bucket: OffsetRange(
            bucket=bucket,
            start=at.first_offset,
            end=min(at.log_start_offset, at.tiered_offset),
        )
        for bucket, at in state.positions.items()
        if offsets[bucket] <= at.log_start_offset
        and at.first_offset < min(at.log_start_offset, at.tiered_offset)
    }
    if not older or state.lake.snapshot_id is None:
        return offsets
    _, offset_column, _ = SYSTEM_COLUMNS
    base = replace(
        scan_context(state, output=(offset_column,), where=None, endpoint="", token=None),
        from_timestamp_us=timestamp_us,
        lake_is_changelog=state.table.is_primary_key_table,
    )
    for bucket, wanted in older.items():
        scan = plan_lake(client, state, base, {bucket: wanted})
        for piece in scan.pieces:
            found = [
                pc.min(batch.column(0)).as_py()
                for batch in read_split(Split((piece,)), scan.context)
            ]
            if found:
                offsets[bucket] = min(offsets[bucket], *found)
    return offsets
