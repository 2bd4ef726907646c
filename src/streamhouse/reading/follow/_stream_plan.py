"""Planning one micro-batch: the rows between two positions, from whichever tier has them now.

Invariant: a range has the same rows at any time. Tiering, compaction of the lake and retention of
the log change where rows are read, never which rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from streamhouse.client import StorageClient
from streamhouse.core.errors import SnapshotNotFoundError
from streamhouse.core.model.offsets import OffsetRange
from streamhouse.core.model.table_state import TableState
from streamhouse.reading.follow.stream_position import Bootstrap
from streamhouse.reading.options.options import ReadOptions
from streamhouse.reading.plan._lake_cut import cut_lake
from streamhouse.reading.plan._lake_or_log import Readable, cut_by_tier, readable, refuse_loss
from streamhouse.reading.plan._read_cut import ReadPlan, TableCut, cut_table
from streamhouse.reading.plan.row_form import stream_request
from streamhouse.reading.scan.scan import ScanColumn

__all__ = ["plan_bootstrap_range", "plan_stream_range"]

LOG_ROWS_PREFERRED_MAX: Final = 20_000
"""Tiered rows of a micro-batch that are still in the log are read there, up to this many: for
fewer, opening the lake costs more than it saves."""


def plan_stream_range(
    client: StorageClient,
    state: TableState,
    options: ReadOptions,
    output: Sequence[ScanColumn],
    *,
    start: Mapping[int, int],
    end: Mapping[int, int],
) -> ReadPlan:
    """Plan the rows from `start` to `end`; both have every bucket.

    Raises `OffsetOutOfRangeError` with bucket and range when retention took rows missing from the
    lake; without `failOnDataLoss` the rows are skipped with a warning.
    """
    ranges = _ranges(start, end)
    buckets = readable(state, part=options.connection.name.part)
    tiers = cut_by_tier(ranges, _log_first(ranges, buckets))
    refuse_loss(
        tiers.lost,
        buckets,
        table=str(state.table.path),
        fail_on_data_loss=options.fail_on_data_loss,
    )
    rows = stream_request(state.table, options, output)
    has_changelog = state.table.is_primary_key_table
    cut = cut_table(client, state, tiers, is_changelog=has_changelog, is_union=True)
    return cut.plan(rows, options)


def plan_bootstrap_range(
    client: StorageClient,
    state: TableState,
    options: ReadOptions,
    output: Sequence[ScanColumn],
    bootstrap: Bootstrap,
    *,
    start: Mapping[int, int],
    end: Mapping[int, int],
) -> ReadPlan:
    """Plan the rows of the bootstrap's snapshot from `start` to `end`.

    The log is never read, even if it holds the range: the log has other versions than the snapshot,
    and a replay must find the same rows. Raises `SnapshotNotFoundError` when the snapshot was
    expired.
    """
    rows = stream_request(state.table, options, output)
    try:
        lake = cut_lake(
            client,
            state,
            _ranges(start, end),
            snapshot_id=bootstrap.snapshot_id,
            allow_successor=False,
        )
        return TableCut(table=state.table, lake=lake).plan(rows, options)
    except SnapshotNotFoundError as error:
        raise SnapshotNotFoundError(
            f"table '{state.table.path}': lake snapshot {bootstrap.snapshot_id}, whose rows the"
            " stream was about to read, was expired; it is kept only while the stream runs and a"
            " while after. Start with a new checkpoint"
        ) from error


def _ranges(start: Mapping[int, int], end: Mapping[int, int]) -> dict[int, OffsetRange]:
    return {
        bucket: OffsetRange(bucket=bucket, start=start.get(bucket, 0), end=offset)
        for bucket, offset in sorted(end.items())
        if start.get(bucket, 0) < offset
    }


def _log_first(
    ranges: Mapping[int, OffsetRange], buckets: Mapping[int, Readable]
) -> dict[int, Readable]:
    """Return `buckets` without the lake where the log still holds a small range whole.

    A stream that lags behind also gets expired rows from the log.
    """
    in_both = {
        bucket: min(buckets[bucket].lake_end, offsets.end) - offsets.start
        for bucket, offsets in ranges.items()
        if buckets[bucket].log_start <= offsets.start < buckets[bucket].lake_end
    }
    if sum(in_both.values()) > LOG_ROWS_PREFERRED_MAX:
        return dict(buckets)
    return {
        bucket: replace(has, lake_end=0, expired=0) if bucket in in_both else has
        for bucket, has in buckets.items()
    }
