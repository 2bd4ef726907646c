"""Planning one micro-batch: the rows between two positions, from whichever tier has them now.

Invariant: the rows are the same whenever the range is planned. Moving to the lake, compaction
there and retention of the log change where they are read, never which they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from streamhouse.connector.options import ReadOptions
from streamhouse.connector.scan import ScanColumn
from streamhouse.connector.tier_ranges import Readable, cut_by_tier, readable, refuse_loss
from streamhouse.connector.union_read import ReadPlan, plan_ranges, read_context
from streamhouse.storage_service.client import StorageClient
from streamhouse.storage_service.model.offsets import OffsetRange
from streamhouse.storage_service.model.table_state import TableState

__all__ = ["plan_stream_range"]

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

    Raises `OffsetOutOfRangeError` naming bucket and range when retention took rows that no lake
    has; without `failOnDataLoss` they are skipped with a warning.
    """
    ranges = {
        bucket: OffsetRange(bucket=bucket, start=start.get(bucket, 0), end=offset)
        for bucket, offset in sorted(end.items())
        if start.get(bucket, 0) < offset
    }
    buckets = readable(state, part=options.connection.name.part)
    tiers = cut_by_tier(ranges, _log_first(ranges, buckets))
    refuse_loss(
        tiers.lost,
        buckets,
        table=str(state.table.path),
        fail_on_data_loss=options.fail_on_data_loss,
    )
    return plan_ranges(client, state, read_context(state, options, output), tiers, options)


def _log_first(
    ranges: Mapping[int, OffsetRange], buckets: Mapping[int, Readable]
) -> dict[int, Readable]:
    """Return `buckets` with the lake left out where the log still holds a small range whole."""
    in_both = {
        bucket: min(buckets[bucket].lake_end, wanted.end) - wanted.start
        for bucket, wanted in ranges.items()
        if buckets[bucket].log_start <= wanted.start < buckets[bucket].lake_end
    }
    if sum(in_both.values()) > LOG_ROWS_PREFERRED_MAX:
        return dict(buckets)
    return {
        bucket: replace(has, lake_end=0) if bucket in in_both else has
        for bucket, has in buckets.items()
    }
