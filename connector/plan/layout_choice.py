"""Which of a table's two layouts in the lake a batch read is answered from.

Both have the same rows up to offsets of their own, and a union read finds the rest in the log: the
answer is the same, only what is read for it differs. The one that reads fewer bytes is taken, by
an estimate from the sizes of the files that pruning leaves and the rows of the tail.
"""

from __future__ import annotations

from streamhouse.connector.options.options import ReadOptions
from streamhouse.connector.plan.read_plan import LOG_ROW_BYTES
from streamhouse.connector.plan.tier_plan import plan_lake
from streamhouse.connector.scan.scan import ScanContext
from streamhouse.storage_service.client import StorageClient
from streamhouse.storage_service.errors import SnapshotNotFoundError
from streamhouse.storage_service.model.offsets import OffsetRange
from streamhouse.storage_service.model.table_state import TableState

__all__ = ["choose_layout"]


def choose_layout(
    client: StorageClient, state: TableState, context: ScanContext, options: ReadOptions
) -> TableState:
    """Return `state` as the layout that reads the fewest bytes has it.

    The batch layout is looked at only for reads of all rows as they are now, with a predicate on
    columns that it is laid out by: for others it has nothing to gain.
    """
    layout = state.table.descriptor.batch_layout()
    in_batch = state.in_batch_layout()
    if (
        layout is None
        or in_batch is None
        or state.lake.snapshot_id is None
        or context.predicate is None
        or not layout.columns & set(context.predicate.columns)
        or not _reads_all_rows(options)
        or not _has_whole_tail(in_batch)
    ):
        return state
    try:
        in_batch_bytes = _read_bytes(client, in_batch, context)
    except SnapshotNotFoundError:
        # Somebody dropped or expired it: the rows are all in the other one.
        return state
    return in_batch if in_batch_bytes < _read_bytes(client, state, context) else state


def _reads_all_rows(options: ReadOptions) -> bool:
    return (
        not options.connection.name.part
        and options.as_of_snapshot is None
        and options.starting.kind == "full"
        and options.ending is None
        and options.from_timestamp_us is None
        and options.to_timestamp_us is None
    )


def _has_whole_tail(state: TableState) -> bool:
    """Whether the log has every row that the layout lacks; switched-off lakes lose some."""
    return all(
        at.log_start_offset <= max(at.tiered_offset, at.first_offset)
        for at in state.positions.values()
    )


def _read_bytes(client: StorageClient, state: TableState, context: ScanContext) -> int:
    positions = state.positions.items()
    tail_rows = sum(
        at.high_watermark - max(at.tiered_offset, at.first_offset) for _, at in positions
    )
    ranges = {
        bucket: OffsetRange(bucket=bucket, start=at.first_offset, end=at.tiered_offset)
        for bucket, at in positions
        if at.tiered_offset > at.first_offset
    }
    scan = plan_lake(client, state, context, ranges)
    return scan.read_bytes + tail_rows * LOG_ROW_BYTES
