"""Which rows of a log table or changelog a read takes from the lake, and which from the log.

`_key_table_read.py` decides for the rows of a primary key table.

The decisions are pure; only `ranges_by_tier` asks the service, which turns times into offsets.

Invariants:
- an offset comes from exactly one tier: the lake below its bucket's lake end, the log from the lake
  end on
- an offset missing from both tiers is reported as lost, never skipped silently
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from streamhouse.client import StorageClient
from streamhouse.core.errors import (
    BucketNotFoundError,
    InvalidRequestError,
    OffsetOutOfRangeError,
)
from streamhouse.core.model.offsets import (
    BucketPositions,
    OffsetRange,
    table_of_offsets,
)
from streamhouse.core.model.table import TableInfo
from streamhouse.core.model.table_state import TableState
from streamhouse.core.model.values.positions import EARLIEST, LATEST, StartingPosition
from streamhouse.reading.options.connection import LAKE, LOG
from streamhouse.reading.options.options import ReadOptions

__all__ = [
    "Readable",
    "TierRanges",
    "check_table_id",
    "cut_by_tier",
    "narrowed",
    "ranges_by_tier",
    "readable",
    "refuse_diverged",
    "refuse_loss",
    "refuse_lost_changes",
    "requested_ranges",
    "resolve_starts",
]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Readable:
    """The readable rows of one bucket: lake rows [lake_start, lake_end), log rows [log_start, end).

    `lake_end` is 0 without readable lake rows. Rows below `lake_start` were overwritten. Rows below
    `expired` have reached their time to live: reads leave them out, without a loss.
    """

    lake_end: int
    log_start: int
    end: int
    lake_start: int = 0
    expired: int = 0

    @property
    def start(self) -> int:
        """The oldest offset there is."""
        return max(self.lake_start if self.lake_end else self.log_start, self.expired)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierRanges:
    """Wanted offsets by tier and bucket, without empty ranges; `lost` are in neither tier."""

    lake: Mapping[int, OffsetRange] = field(default_factory=dict)
    log: Mapping[int, OffsetRange] = field(default_factory=dict)
    lost: Sequence[OffsetRange] = ()


def ranges_by_tier(client: StorageClient, state: TableState, options: ReadOptions) -> TierRanges:
    """Return the offsets of a batch read in the lake and in the log.

    Raises `OffsetOutOfRangeError` for requested rows that are gone from both tiers.
    """
    table, table_id = str(state.table.path), state.table.table_id
    buckets = readable(state, part=options.connection.name.part)
    check_table_id(state.table, options)
    starts = resolve_starts(options.starting, buckets, table=table)
    ranges = requested_ranges(starts, options.ending, buckets, table=table)
    tiers = cut_by_tier(ranges, buckets)
    refuse_loss(tiers.lost, buckets, table=table, fail_on_data_loss=options.fail_on_data_loss)
    from_us, to_us = options.from_timestamp_us, options.to_timestamp_us
    refuse_lost_changes(client, state, options)
    if not tiers.log or (from_us is None and to_us is None):
        return tiers
    # The scan keeps the rows of the time. Here the log is only read where it has any.
    begins = {bucket: offsets.start for bucket, offsets in tiers.log.items()}

    def since(timestamp_us: int | None) -> Mapping[int, int] | None:
        if timestamp_us is None:
            return None
        return client.offsets_for_timestamp(
            table, timestamp_us, start=begins, skip_lost=True, table_id=table_id
        )

    return replace(tiers, log=narrowed(tiers.log, starts=since(from_us), ends=since(to_us)))


def refuse_lost_changes(client: StorageClient, state: TableState, options: ReadOptions) -> None:
    """Raise `OffsetOutOfRangeError` if changes of a time or later are in neither log nor lake.

    Changes in Spark's form without a start begin at the first change of the table. Only a full
    history keeps changes by key that have left the log. An overwrite of a log table leaves neither
    the overwritten rows nor their deletes, and rows past their time to live leave nothing. In any
    other form, rows of a log table which are gone from both tiers are no rows of the table now.
    """
    is_spark_form = options.change_options is not None
    from_us = options.from_timestamp_us
    if (
        not options.fail_on_data_loss
        or options.starting.kind not in ("full", "timestamp")
        or options.connection.name.part == LOG
        or (from_us is None and not is_spark_form)
    ):
        return
    table, from_us = state.table, from_us or 0
    if is_spark_form and state.truncated_at_us and from_us <= state.truncated_at_us:
        raise OffsetOutOfRangeError(
            f"table '{table.path}' was overwritten at version {state.truncated_at_us}, and a table"
            " without a primary key keeps no changes from before, nor the deletes of its old rows;"
            " begin at a later version, or with startingOffsets=earliest for the rows since"
        )
    lake = state.lake
    if is_spark_form and any(lake.expired_offsets.values()) and from_us <= lake.expired_at_us:
        until = f" up to version {lake.expired_at_us}" if lake.expired_at_us else ""
        raise OffsetOutOfRangeError(
            f"table '{table.path}' has lost rows{until} by table.datalake.ttl, and their inserts"
            " with them; begin at a later version, or with startingOffsets=earliest for the"
            " changes that are left, or set a longer table.datalake.ttl in time"
        )
    is_kept_in_lake = state.lake.snapshot_id is not None
    if table.is_primary_key_table:
        is_kept_in_lake = state.lake.changelog is not None
    is_cut = any(at.log_start_offset for at in state.positions.values())
    if is_cut and not is_kept_in_lake and (table.is_primary_key_table or is_spark_form):
        client.offsets_for_timestamp(str(table.path), from_us, table_id=table.table_id)


def readable(state: TableState, *, part: str = "") -> dict[int, Readable]:
    """Return the readable rows of every bucket, of the table or of one tier of it.

    For a primary key table, only `$lake` counts the rows in the lake. Any other read by offsets is
    a read of the changelog, which the lake has if the table keeps its full history.

    Raises `HistoryDivergedError` for a read of both tiers if lake and log have other histories.
    """
    refuse_diverged(state, part=part)
    by_bucket = {}
    for bucket, at in state.positions.items():
        tiered = at.tiered_offset if state.lake.snapshot_id is not None else 0
        if part == LAKE:
            end = max(tiered, at.truncated_offset)
            by_bucket[bucket] = Readable(
                lake_end=_offered(tiered, at),
                log_start=end,
                end=end,
                lake_start=at.truncated_offset,
                expired=at.expired_offset,
            )
        else:
            by_bucket[bucket] = Readable(
                lake_end=_lake_end(state, bucket, part),
                log_start=at.log_start_offset,
                end=at.high_watermark,
                lake_start=at.truncated_offset,
                # The log by itself has what `table.log.ttl` leaves there.
                expired=0 if part == LOG else at.expired_offset,
            )
    return by_bucket


def refuse_diverged(state: TableState, *, part: str) -> None:
    """Raise `HistoryDivergedError` if lake and log have other histories, unless the read needs one
    tier.
    """
    if part not in (LAKE, LOG):
        state.lake.refuse_diverged(state.table.path)


def _lake_end(state: TableState, bucket: int, part: str) -> int:
    if part == LOG:
        return 0
    if state.table.is_primary_key_table:
        history = state.lake.changelog
        return 0 if history is None else history.tiered_offsets.get(bucket, 0)
    if state.lake.snapshot_id is None:
        return 0
    return _offered(state.positions[bucket].tiered_offset, state.positions[bucket])


def _offered(tiered: int, at: BucketPositions) -> int:
    """Return the end of the lake's rows, 0 if all of the rows were overwritten."""
    return tiered if tiered > at.truncated_offset else 0


def check_table_id(table: TableInfo, options: ReadOptions) -> None:
    """Raise `TableNotFoundError` if offsets of the options belong to a dropped table."""
    for name, offsets in (
        ("startingOffsets", options.starting.offsets),
        ("endingOffsets", options.ending or {}),
    ):
        offsets_table_id = table_of_offsets(offsets.values(), what=f"option '{name}'")
        if offsets_table_id is not None:
            table.check_positions(offsets, table_id=offsets_table_id)


def resolve_starts(
    starting: StartingPosition, buckets: Mapping[int, Readable], *, table: str
) -> dict[int, int]:
    """Return the start offset of every bucket; a read since a time starts at the oldest row.

    Raises `OffsetOutOfRangeError` for an offset above the end, `BucketNotFoundError` for an unknown
    bucket. An offset below the oldest row is returned unchanged: it is a loss.
    """
    _check_buckets(starting.offsets, buckets, table=table)
    starts = {}
    for bucket, has in sorted(buckets.items()):
        offset = starting.offsets.get(bucket, EARLIEST)
        if offset == LATEST or starting.kind == "latest":
            starts[bucket] = has.end
        elif offset == EARLIEST:
            starts[bucket] = has.start
        elif offset > has.end:
            raise _out_of_range("startingOffsets", bucket, offset, has, table=table)
        else:
            starts[bucket] = offset
    return starts


def requested_ranges(
    starts: Mapping[int, int],
    ending: Mapping[int, int] | None,
    buckets: Mapping[int, Readable],
    *,
    table: str,
) -> dict[int, OffsetRange]:
    """Return the wanted offsets of every bucket: from `starts` to `ending`, else to the end."""
    ending = ending or {}
    _check_buckets(ending, buckets, table=table)
    ranges = {}
    for bucket, has in sorted(buckets.items()):
        end = ending.get(bucket, LATEST)
        if end == LATEST:
            end = has.end
        elif end > has.end:
            raise _out_of_range("endingOffsets", bucket, end, has, table=table)
        start = starts[bucket]
        if bucket in ending and start > end:
            raise InvalidRequestError(
                f"table '{table}', bucket {bucket}: the read ends at offset {end}, before it starts"
                f" at {start}"
            )
        ranges[bucket] = OffsetRange(bucket=bucket, start=min(start, end), end=end)
    return ranges


def cut_by_tier(ranges: Mapping[int, OffsetRange], buckets: Mapping[int, Readable]) -> TierRanges:
    """Cut each range at its bucket's lake end, and set aside rows that left the log untiered."""
    lake: dict[int, OffsetRange] = {}
    log: dict[int, OffsetRange] = {}
    lost = []
    for bucket, offsets in sorted(ranges.items()):
        has = buckets[bucket]
        if offsets.start < (overwritten := min(has.lake_start, offsets.end)):
            lost.append(OffsetRange(bucket=bucket, start=offsets.start, end=overwritten))
            offsets = OffsetRange(bucket=bucket, start=overwritten, end=offsets.end)
        oldest = max(offsets.start, min(has.expired, offsets.end))
        offsets = OffsetRange(bucket=bucket, start=oldest, end=offsets.end)
        lake_end = min(max(has.lake_end, offsets.start), offsets.end)
        log_start = min(max(has.log_start, lake_end), offsets.end)
        if offsets.start < lake_end:
            lake[bucket] = OffsetRange(bucket=bucket, start=offsets.start, end=lake_end)
        if lake_end < log_start:
            lost.append(OffsetRange(bucket=bucket, start=lake_end, end=log_start))
        if log_start < offsets.end:
            log[bucket] = OffsetRange(bucket=bucket, start=log_start, end=offsets.end)
    return TierRanges(lake=lake, log=log, lost=lost)


def refuse_loss(
    lost: Sequence[OffsetRange],
    buckets: Mapping[int, Readable],
    *,
    table: str,
    fail_on_data_loss: bool,
) -> None:
    """Raise `OffsetOutOfRangeError` naming the first lost range, or warn of each."""
    for gone in lost:
        has = buckets[gone.bucket]
        how = "are gone from the log and are not in the lake"
        if gone.end <= has.lake_start:
            how = "are no rows of the table any more, because it was overwritten"
        in_lake = f"[{has.lake_start}, {has.lake_end}) and " if has.lake_end else ""
        text = (
            f"table '{table}', bucket {gone.bucket}: rows [{gone.start}, {gone.end}) {how};"
            f" readable are {in_lake}[{has.log_start}, {has.end})"
        )
        if fail_on_data_loss:
            raise OffsetOutOfRangeError(f"{text}; set failOnDataLoss=false to skip them")
        _log.warning("%s; skipping them", text)


def narrowed(
    ranges: Mapping[int, OffsetRange],
    *,
    starts: Mapping[int, int] | None,
    ends: Mapping[int, int] | None,
) -> dict[int, OffsetRange]:
    """Return the parts of log ranges between `starts` and `ends`, without empty ones.

    The service's offsets for a time are exact for the log: within a bucket time never goes back.
    """
    log_ranges = {}
    for bucket, offsets in ranges.items():
        start, end = offsets.start, offsets.end
        if starts is not None:
            start = max(start, starts.get(bucket, start))
        if ends is not None:
            end = min(end, ends.get(bucket, end))
        if start < end:
            log_ranges[bucket] = OffsetRange(bucket=bucket, start=start, end=end)
    return log_ranges


def _check_buckets(
    offsets: Mapping[int, int], buckets: Mapping[int, Readable], *, table: str
) -> None:
    unknown = sorted(set(offsets) - set(buckets))
    if unknown:
        raise BucketNotFoundError(
            f"table '{table}' has no bucket {unknown[0]}; its buckets are 0 to {len(buckets) - 1}"
        )


def _out_of_range(
    option: str, bucket: int, offset: int, has: Readable, *, table: str
) -> OffsetOutOfRangeError:
    return OffsetOutOfRangeError(
        f"table '{table}', bucket {bucket}: option '{option}' asks for offset {offset}, but the"
        f" valid range is [{has.start}, {has.end}]"
    )
