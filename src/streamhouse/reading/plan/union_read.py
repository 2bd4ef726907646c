"""Planning a batch read of both tiers on one cut of a table.

One `TableState` pins everything: the lake snapshot and, from the same instant, the positions of all
buckets. Planning never asks the service again, except to turn a time into log offsets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from streamhouse.client import StorageClient
from streamhouse.core.errors import InvalidRequestError, SnapshotNotFoundError
from streamhouse.core.model.offsets import OffsetRange
from streamhouse.core.model.table_state import TableState
from streamhouse.reading.options.connection import LAKE, LOG
from streamhouse.reading.options.options import ReadOptions
from streamhouse.reading.plan._key_table_read import plan_key_table_rows
from streamhouse.reading.plan._read_plan import LOG_ROW_BYTES, pack
from streamhouse.reading.plan._tier_ranges import (
    TierRanges,
    check_asked,
    cut_by_tier,
    narrowed,
    readable,
    refuse_loss,
    resolve_starts,
    wanted_ranges,
)
from streamhouse.reading.plan.iceberg_read import plan_source_read
from streamhouse.reading.plan.row_form import RowForm, batch_form, check_columns
from streamhouse.reading.plan.tier_plan import (
    ReadPlan,
    plan_lake,
    plan_ranges,
    read_context,
    split_sizes,
)
from streamhouse.reading.scan.scan import ScanColumn, ScanContext

__all__ = ["choose_layout", "plan_batch_read"]


def plan_batch_read(
    client: StorageClient,
    state: TableState,
    options: ReadOptions,
    output: Sequence[ScanColumn],
) -> ReadPlan:
    """Plan a batch read of a table, or of one tier of it, on exactly the cut of `state`."""
    name = options.connection.name
    if name.is_iceberg:
        return plan_source_read(client, state, options, output)
    form = batch_form(state.table, name)
    context = read_context(state, options, output)
    check_columns(context, form, name)
    if not (name.part and context.has_changelog):
        _refuse_time_before_table(state, options)
    if form is RowForm.ROWS:
        state = choose_layout(client, state, context, options)
    if options.as_of_snapshot is None and form is RowForm.ROWS and context.has_changelog:
        return plan_key_table_rows(client, state, context, options)
    context = replace(
        context,
        lake_is_changelog=context.has_changelog and form is RowForm.CHANGES,
        from_timestamp_us=options.from_timestamp_us,
        to_timestamp_us=options.to_timestamp_us,
    )
    if context.has_changelog and options.as_of_timestamp_us is not None:
        raise InvalidRequestError(
            f"option 'asOfTimestamp' cannot be used with '{name}', which has changes; use"
            " endingTimestamp"
        )
    if options.as_of_snapshot is None:
        return plan_ranges(client, state, context, _tier_ranges(client, state, options), options)
    if name.part not in ("", LAKE):
        raise InvalidRequestError(f"option 'asOfSnapshot' cannot be used with '{name}'")
    scan = plan_lake(
        client,
        state,
        context,
        None,
        snapshot_id=options.as_of_snapshot,
        allow_successor=False,
        is_union=False,
    )
    return ReadPlan(context=scan.context, splits=pack(scan.pieces, split_sizes(options)))


def _refuse_time_before_table(state: TableState, options: ReadOptions) -> None:
    """Raise if the table is wanted as of a time when there was none."""
    as_of_us, table = options.as_of_timestamp_us, state.table
    # Milliseconds may name the time of the first row. An adopted table has rows from before.
    if as_of_us is None or table.adopted_from or as_of_us >= table.created_at_us // 1_000 * 1_000:
        return
    times = [
        datetime.fromtimestamp(us / 1_000_000, UTC).isoformat()
        for us in (as_of_us, table.created_at_us)
    ]
    raise InvalidRequestError(
        f"option 'asOfTimestamp': there was no table '{table.path}' at {times[0]}; it was created"
        f" at {times[1]}"
    )


def _tier_ranges(client: StorageClient, state: TableState, options: ReadOptions) -> TierRanges:
    table, table_id = str(state.table.path), state.table.table_id
    buckets = readable(state, part=options.connection.name.part)
    check_asked(state.table, options)
    starts = resolve_starts(options.starting, buckets, table=table)
    ranges = wanted_ranges(starts, options.ending, buckets, table=table)
    tiers = cut_by_tier(ranges, buckets)
    refuse_loss(tiers.lost, buckets, table=table, fail_on_data_loss=options.fail_on_data_loss)
    from_us, to_us = options.from_timestamp_us, options.to_timestamp_us
    if from_us is not None and options.fail_on_data_loss:
        _refuse_lost_changes(client, state, options, from_us)
    if not tiers.log or (from_us is None and to_us is None):
        return tiers
    # The scan keeps the rows of the time. Here the log is only read where it has any.
    begins = {bucket: wanted.start for bucket, wanted in tiers.log.items()}

    def since(timestamp_us: int | None) -> Mapping[int, int] | None:
        if timestamp_us is None:
            return None
        return client.offsets_for_timestamp(
            table, timestamp_us, start=begins, skip_lost=True, table_id=table_id
        )

    return replace(tiers, log=narrowed(tiers.log, starts=since(from_us), ends=since(to_us)))


def _refuse_lost_changes(
    client: StorageClient, state: TableState, options: ReadOptions, from_us: int
) -> None:
    """Raise `OffsetOutOfRangeError` if changes of a time or later are in neither log nor lake.

    Changes that have left the log cannot be read again, but those that the full history keeps. Rows
    of a log table that have are no rows of the table any more.
    """
    if (
        state.table.is_primary_key_table
        and state.lake.changelog is None
        and options.connection.name.part != LOG
        and options.starting.kind in ("full", "timestamp")
    ):
        table = state.table
        client.offsets_for_timestamp(str(table.path), from_us, table_id=table.table_id)


def choose_layout(
    client: StorageClient, state: TableState, context: ScanContext, options: ReadOptions
) -> TableState:
    """Return `state` as that one of the table's two lake layouts has it which reads fewer bytes.

    Both have the same rows up to offsets of their own, and a union read finds the rest in the log:
    the answer is the same, only what is read for it differs. Bytes are estimated from the sizes of
    the files that pruning leaves and the rows of the tail.

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
