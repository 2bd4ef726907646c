"""Planning a batch read of a table on one cut.

One `TableState` pins everything: the lake snapshot and, from the same instant, the positions of all
buckets. `_lake_or_log.py` decides which rows come from the lake and which from the log,
`_key_table_read.py` for the rows of a primary key table; `_read_cut.py` makes the plan. Planning
asks the service only to turn a time into offsets, and about unregistered commits to the lake.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final

from streamhouse.client import StorageClient
from streamhouse.core.errors import InvalidRequestError, SnapshotNotFoundError
from streamhouse.core.model.offsets import OffsetRange
from streamhouse.core.model.table_state import TableState
from streamhouse.reading.options.connection import LAKE
from streamhouse.reading.options.options import ReadOptions
from streamhouse.reading.plan._key_table_read import plan_key_table_rows
from streamhouse.reading.plan._lake_cut import cut_lake
from streamhouse.reading.plan._lake_or_log import ranges_by_tier
from streamhouse.reading.plan._read_cut import ReadPlan, TableCut, cut_table
from streamhouse.reading.plan._splits import FILE_OPEN_BYTES, LOG_ROW_BYTES
from streamhouse.reading.plan.iceberg_read import plan_source_read
from streamhouse.reading.plan.row_form import RowForm, batch_request
from streamhouse.reading.plan.row_request import RowRequest
from streamhouse.reading.scan.scan import ScanColumn

__all__ = ["choose_layout", "plan_batch_read"]

_CLOCKS_APART_US: Final = 300_000_000
"""The service's clock, which rows have their times from, may be ahead by five minutes."""


def plan_batch_read(
    client: StorageClient,
    state: TableState,
    options: ReadOptions,
    output: Sequence[ScanColumn],
) -> ReadPlan:
    """Plan a batch read of a table, or of one tier, on exactly the cut of `state`."""
    name = options.connection.name
    if name.is_iceberg:
        return plan_source_read(client, state, options, output)
    form, rows = batch_request(state.table, options, output)
    has_changelog = state.table.is_primary_key_table
    if not (name.part and has_changelog):
        _check_as_of(state, options)
    if form is RowForm.ROWS:
        state = choose_layout(client, state, rows, options)
    if options.as_of_snapshot is None and form is RowForm.ROWS and has_changelog:
        return plan_key_table_rows(client, state, rows, options)
    if has_changelog and options.as_of_timestamp_us is not None:
        raise InvalidRequestError(
            f"option 'asOfTimestamp' cannot be used with '{name}', which has changes; use"
            " endingTimestamp"
        )
    if options.as_of_snapshot is not None:
        if name.part not in ("", LAKE):
            raise InvalidRequestError(f"option 'asOfSnapshot' cannot be used with '{name}'")
        lake = cut_lake(
            client,
            state,
            None,
            snapshot_id=options.as_of_snapshot,
            allow_successor=False,
            is_union=False,
        )
        cut = TableCut(table=state.table, lake=lake)
    else:
        cut = cut_table(
            client,
            state,
            ranges_by_tier(client, state, options),
            is_changelog=has_changelog and form is RowForm.CHANGES,
            is_union=name.part != LAKE,
        )
    rows = replace(
        rows,
        from_timestamp_us=options.from_timestamp_us,
        to_timestamp_us=options.to_timestamp_us,
    )
    return cut.plan(rows, options)


def _check_as_of(state: TableState, options: ReadOptions) -> None:
    """Raise if the read is as of a time before the table's creation, or of a time to come.

    Rows of a time to come are not written yet: the same read would return other rows later.
    """
    as_of_us, table = options.as_of_timestamp_us, state.table
    if as_of_us is None:
        return
    now_us = time.time_ns() // 1_000
    if as_of_us > now_us + _CLOCKS_APART_US:
        raise InvalidRequestError(
            f"option 'asOfTimestamp': the time {_iso(as_of_us)} has not come, it is"
            f" {_iso(now_us)} now; leave the option out for the newest rows"
        )
    # Milliseconds may name the time of the first row. An adopted table has rows from before.
    if not table.adopted_from and as_of_us < table.created_at_us // 1_000 * 1_000:
        raise InvalidRequestError(
            f"option 'asOfTimestamp': there was no table '{table.path}' at {_iso(as_of_us)}; it was"
            f" created at {_iso(table.created_at_us)}"
        )


def _iso(time_us: int) -> str:
    return datetime.fromtimestamp(time_us / 1_000_000, UTC).isoformat()


def choose_layout(
    client: StorageClient, state: TableState, rows: RowRequest, options: ReadOptions
) -> TableState:
    """Return `state` in the lake layout of the table that needs fewer bytes.

    Both layouts have the same rows up to their covered offsets, and a union read takes all later
    rows from the log: the answer is the same, only the read bytes differ. Bytes are estimated from
    the sizes of the files after pruning and the rows of the tail.

    The batch layout is considered only for reads of all current rows with a predicate on columns of
    the layout: other reads gain nothing.
    """
    layout = state.table.descriptor.batch_layout()
    in_batch = state.in_batch_layout()
    if (
        layout is None
        or in_batch is None
        or state.lake.snapshot_id is None
        or rows.predicate is None
        or not layout.columns & set(rows.predicate.columns)
        or not _reads_all_rows(options)
        or not _has_whole_tail(in_batch)
    ):
        return state
    try:
        in_batch_bytes = _read_bytes(client, in_batch, rows)
    except SnapshotNotFoundError:
        # Somebody dropped or expired it: the rows are all in the other one.
        return state
    return in_batch if in_batch_bytes < _read_bytes(client, state, rows) else state


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
    """Whether the log has every row missing from the layout; a switched-off lake loses rows."""
    return all(
        at.log_start_offset <= max(at.tiered_offset, at.first_offset)
        for at in state.positions.values()
    )


def _read_bytes(client: StorageClient, state: TableState, rows: RowRequest) -> int:
    positions = state.positions.items()
    tail_rows = sum(
        at.high_watermark - max(at.tiered_offset, at.first_offset) for _, at in positions
    )
    ranges = {
        bucket: OffsetRange(bucket=bucket, start=at.first_offset, end=at.tiered_offset)
        for bucket, at in positions
        if at.tiered_offset > at.first_offset
    }
    cut = TableCut(table=state.table, lake=cut_lake(client, state, ranges)).pieces(rows)
    file_bytes = 0 if cut.files is None else cut.files.read_bytes
    return file_bytes + len(cut.pieces) * FILE_OPEN_BYTES + tail_rows * LOG_ROW_BYTES
