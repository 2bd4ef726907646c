"""Planning reads of a primary key table's rows: a lake snapshot and the changelog after it.

The rows are the snapshot's versions and the changelog tail's versions, without all versions
retracted by the tail. The retracted set comes from the whole tail, whatever the filters of the
read; predicates prune lake files only.

The driver reads the tail's `__retracts` column, once a bucket, and gives every piece the offsets
within the piece's bounds: eight bytes a changed row in the driver, one or two on the way. If tasks
read the column, every task would read the whole tail of its bucket.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from streamhouse.client import StorageClient
from streamhouse.core.errors import (
    InvalidRequestError,
    OffsetOutOfRangeError,
    SnapshotNotFoundError,
)
from streamhouse.core.model.changelog import DELETE
from streamhouse.core.model.offsets import OffsetRange
from streamhouse.core.model.schema import RETRACTS_COLUMN
from streamhouse.core.model.table import TableInfo
from streamhouse.core.model.table_state import TableState
from streamhouse.core.model.values.sorted_values import distinct
from streamhouse.core.threads import Pool
from streamhouse.reading.options.connection import LAKE
from streamhouse.reading.options.options import ReadOptions
from streamhouse.reading.plan._lake_cut import cut_lake, open_lake
from streamhouse.reading.plan._lake_or_log import refuse_diverged
from streamhouse.reading.plan._read_cut import ReadPlan, TableCut
from streamhouse.reading.plan.row_form import row_request
from streamhouse.reading.plan.row_request import RowRequest
from streamhouse.reading.scan._retraction import UPSERTS
from streamhouse.reading.scan.scan import ScanColumn

__all__ = ["plan_key_table_changes", "plan_key_table_rows", "retracted_by"]

_THREADS_MAX: Final = 8
_Offsets = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ends:
    """Where the lake and the log of a read end: a snapshot covers `lake`, changes reach `log`."""

    snapshot_id: int | None
    lake: Mapping[int, int]
    log: Mapping[int, int]


def plan_key_table_rows(
    client: StorageClient, state: TableState, rows: RowRequest, options: ReadOptions
) -> ReadPlan:
    """Plan the table's rows, or the rows of `$lake`, at the state's cut or at `asOfTimestamp`.

    Raises `OffsetOutOfRangeError` when the log has lost changes missing from all lake snapshots:
    the read would show rows that were changed or deleted since.
    """
    _check_bounds(options)
    refuse_diverged(state, part=options.connection.name.part)
    ends = _ends(client, state, options)
    tails = _tails(state, ends)
    retracted = retracted_by(client, state.table, tails.values())
    lake_ranges = {
        bucket: OffsetRange(bucket=bucket, start=0, end=end)
        for bucket, end in sorted(ends.lake.items())
        if end
    }
    lake = None
    if lake_ranges:
        lake = cut_lake(
            client,
            state,
            lake_ranges,
            snapshot_id=ends.snapshot_id,
            allow_successor=ends.snapshot_id == state.lake.snapshot_id,
            is_union=options.connection.name.part != LAKE,
        )
    cut = TableCut(table=state.table, lake=lake, log=tails, retracted=retracted)
    # A lost change cannot be skipped: without it an old version would live again.
    rows = replace(rows, change_types=UPSERTS, fail_on_data_loss=True)
    return cut.plan(rows, options)


def plan_key_table_changes(
    client: StorageClient,
    state: TableState,
    options: ReadOptions,
    output: Sequence[ScanColumn],
    since: Mapping[int, int],
) -> ReadPlan:
    """Plan the changes of the keys that were changed from the offsets `since` up to the cut.

    Rows are the later versions alive at the state's cut, and every delete in between. A key with
    both is alive. Only the log is read.

    Raises `OffsetOutOfRangeError` when the log does not have all of these changes any more.
    """
    rows = row_request(state.table, options, output)
    refuse_diverged(state, part=options.connection.name.part)
    tops = {bucket: at.high_watermark for bucket, at in state.positions.items()}
    tails = _tails(state, _Ends(snapshot_id=None, lake=since, log=tops))
    retracted = retracted_by(client, state.table, tails.values())
    cut = TableCut(table=state.table, log=tails, retracted=retracted)
    rows = replace(rows, change_types=(*UPSERTS, DELETE), fail_on_data_loss=True)
    return cut.plan(rows, options)


def retracted_by(
    client: StorageClient, table: TableInfo, tails: Iterable[OffsetRange]
) -> dict[int, _Offsets]:
    """Return by bucket which offsets the changes in `tails` retract, ascending, each once.

    Buckets without any are left out.
    """

    def read(tail: OffsetRange) -> tuple[int, _Offsets]:
        parts = [np.empty(0, dtype=np.int64)]
        try:
            for batch in client.read_range(
                str(table.path),
                tail.bucket,
                tail.start,
                tail.end,
                columns=[RETRACTS_COLUMN],
                schema_id=table.schema_id,
                table_id=table.table_id,
            ):
                column = batch.data.column(RETRACTS_COLUMN)
                if column.null_count < len(column):
                    values = pc.drop_null(column).cast(pa.int64())
                    parts.append(values.to_numpy(zero_copy_only=False))
        except OffsetOutOfRangeError as error:
            raise OffsetOutOfRangeError(
                f"table '{table.path}', bucket {tail.bucket}: changes [{tail.start}, {tail.end})"
                " left the log after the table was loaded; load it again to find them in the lake"
            ) from error
        return tail.bucket, distinct(np.concatenate(parts))

    ranges = list(tails)
    if not ranges:
        return {}
    threads = min(_THREADS_MAX, os.cpu_count() or 1, len(ranges))
    with Pool("streamhouse-tail", threads) as pool:
        return {bucket: offsets for bucket, offsets in pool.map(read, ranges) if len(offsets)}


def _check_bounds(options: ReadOptions) -> None:
    """Raise for bounds of changes in a read of rows."""
    bounds = {
        "startingOffsets": options.starting.kind != "full",
        "endingOffsets": options.ending is not None,
        "startingTimestamp": options.from_timestamp_us is not None,
        "endingTimestamp": options.to_timestamp_us is not None
        and options.as_of_timestamp_us is None,
    }
    name = options.connection.name
    for option, is_given in bounds.items():
        if is_given:
            raise InvalidRequestError(
                f"option '{option}' has no meaning for the rows of '{name}', a table with a"
                f" primary key: use asOfTimestamp for its rows at a time, where with __offset or"
                f" __timestamp for rows by when they were written, or '{name.path}$changelog' for"
                " changes"
            )
    if name.part == LAKE and options.as_of_timestamp_us is not None:
        raise InvalidRequestError(
            f"option 'asOfTimestamp' cannot be used with '{name}'; use asOfSnapshot, or load"
            f" '{name.path}'"
        )


def _tails(state: TableState, ends: _Ends) -> dict[int, OffsetRange]:
    """Return the changes after the lake, for the buckets with any."""
    tails = {}
    for bucket, end in sorted(ends.log.items()):
        start = ends.lake.get(bucket, 0)
        log_start = state.positions[bucket].log_start_offset
        if start >= end:
            continue
        if start < log_start:
            raise OffsetOutOfRangeError(
                f"table '{state.table.path}', bucket {bucket}: changes [{start}, {log_start}) have"
                " left the log (table.log.ttl) and are in no lake snapshot, so the table's rows"
                " cannot be read as a whole; look keys up instead, or keep a lake"
                " (table.datalake.enabled)"
            )
        tails[bucket] = OffsetRange(bucket=bucket, start=start, end=end)
    return tails


def _ends(client: StorageClient, state: TableState, options: ReadOptions) -> _Ends:
    tiered = {b: at.tiered_offset for b, at in state.positions.items()}
    if state.lake.snapshot_id is None:
        tiered = dict.fromkeys(tiered, 0)
    if options.connection.name.part == LAKE:
        return _Ends(snapshot_id=state.lake.snapshot_id, lake=tiered, log=tiered)
    if options.to_timestamp_us is None:
        tops = {b: at.high_watermark for b, at in state.positions.items()}
        return _Ends(snapshot_id=state.lake.snapshot_id, lake=tiered, log=tops)
    ends = _ends_at(client, state, options.to_timestamp_us)
    snapshot_id, covered = _snapshot_before(client, state, ends)
    return _Ends(snapshot_id=snapshot_id, lake=covered, log=ends)


def _ends_at(client: StorageClient, state: TableState, timestamp_us: int) -> dict[int, int]:
    """Return by bucket the first change made at or after a time; all changes below are older.

    Raises `OffsetOutOfRangeError` when changes since the time may be lost.
    """
    table = str(state.table.path)
    try:
        offsets = client.offsets_for_timestamp(table, timestamp_us, table_id=state.table.table_id)
    except OffsetOutOfRangeError as error:
        raise OffsetOutOfRangeError(
            f"the rows of '{table}' at that time are not known any more: {error.message}; or use"
            f" asOfSnapshot with one of '{table}$snapshots'"
        ) from error
    return {
        bucket: min(offsets.get(bucket, at.high_watermark), at.high_watermark)
        for bucket, at in state.positions.items()
    }


def _snapshot_before(
    client: StorageClient, state: TableState, ends: Mapping[int, int]
) -> tuple[int | None, dict[int, int]]:
    """Return the newest snapshot without rows after `ends`, and the offsets it covers."""
    if state.lake.snapshot_id is not None:
        lake = open_lake(client.lake_catalog(), state.table, state.lake)
        for snapshot_id in reversed(lake.snapshot_ids()):
            try:
                covered = lake.tiered_offsets(snapshot_id)
            except SnapshotNotFoundError:
                continue
            if all(covered.get(bucket, 0) <= end for bucket, end in ends.items()):
                return snapshot_id, {b: covered.get(b, 0) for b in ends}
    # Before the first round everything is in the log; `_tails` refuses if it is not any more.
    return None, dict.fromkeys(ends, 0)
