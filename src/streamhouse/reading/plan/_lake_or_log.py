"""Which rows of a table a read takes from the lake, and which from the log.

The decisions are pure; only `ranges_by_tier` asks the service, which turns times into offsets.

Invariants:
- an offset comes from exactly one tier: below its bucket's lake end from the lake, from it on from
  the log
- an offset that neither tier has is reported as lost, never skipped silently
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from streamhouse.client import StorageClient
from streamhouse.core.errors import (
    BucketNotFoundError,
    HistoryDivergedError,
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
    "check_asked",
    "cut_by_tier",
    "narrowed",
    "ranges_by_tier",
    "readable",
    "refuse_diverged",
    "refuse_loss",
    "resolve_starts",
    "wanted_ranges",
]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Readable:
    """What one bucket offers a read: lake rows [lake_start, lake_end), log rows [log_start, end).

    `lake_end` is 0 if the lake offers none. Rows below `lake_start` were overwritten. Those below
    `expired` have reached their time to live: they are left out, and are no loss.
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
    """Return the offsets that a batch read takes of the lake and of the log.

    Raises `OffsetOutOfRangeError` for requested rows that neither tier has any more.
    """
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


def readable(state: TableState, *, part: str = "") -> dict[int, Readable]:
    """Return what every bucket offers to a read of the table, or of one tier of it.

    Of a primary key table only `$lake` counts the rows in the lake: everything else that goes by
    offsets is its changelog, which the lake has if the table keeps its full history.

    Raises `HistoryDivergedError` for what is read of both tiers if they have other histories.
    """
    refuse_diverged(state, part=part)
    found = {}
    for bucket, at in state.positions.items():
        tiered = at.tiered_offset if state.lake.snapshot_id is not None else 0
        if part == LAKE:
            end = max(tiered, at.truncated_offset)
            found[bucket] = Readable(
                lake_end=_offered(tiered, at),
                log_start=end,
                end=end,
                lake_start=at.truncated_offset,
                expired=at.expired_offset,
            )
        else:
            found[bucket] = Readable(
                lake_end=_lake_end(state, bucket, part),
                log_start=at.log_start_offset,
                end=at.high_watermark,
                lake_start=at.truncated_offset,
                # The log by itself has what `table.log.ttl` leaves there.
                expired=0 if part == LOG else at.expired_offset,
            )
    return found


def refuse_diverged(state: TableState, *, part: str) -> None:
    """Raise `HistoryDivergedError` if lake and log have other histories, unless one is enough."""
    if state.lake.diverged and part not in (LAKE, LOG):
        path = state.table.path
        raise HistoryDivergedError(
            f"{state.lake.diverged}. '{path}$lake' and '{path}$log' can be read, each by itself"
        )


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
    """Return where the lake's rows end, 0 if all of them were overwritten."""
    return tiered if tiered > at.truncated_offset else 0


def check_asked(table: TableInfo, options: ReadOptions) -> None:
    """Raise `TableNotFoundError` if offsets of the options are of a table that was dropped."""
    for name, offsets in (
        ("startingOffsets", options.starting.offsets),
        ("endingOffsets", options.ending or {}),
    ):
        said = table_of_offsets(offsets.values(), what=f"option '{name}'")
        if said is not None:
            table.check_positions(offsets, table_id=said)


def resolve_starts(
    starting: StartingPosition, buckets: Mapping[int, Readable], *, table: str
) -> dict[int, int]:
    """Return the offset every bucket starts at; a time starts at the oldest row.

    Raises `OffsetOutOfRangeError` for an offset above the end, `BucketNotFoundError` for a bucket
    that does not exist. An offset below the oldest row is returned as it is: it is a loss.
    """
    _check_buckets(starting.offsets, buckets, table=table)
    starts = {}
    for bucket, has in sorted(buckets.items()):
        given = starting.offsets.get(bucket, EARLIEST)
        if given == LATEST or starting.kind == "latest":
            starts[bucket] = has.end
        elif given == EARLIEST:
            starts[bucket] = has.start
        elif given > has.end:
            raise _out_of_range("startingOffsets", bucket, given, has, table=table)
        else:
            starts[bucket] = given
    return starts


def wanted_ranges(
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
    """Cut each range at its bucket's lake end, and set aside what has left the log untiered."""
    lake: dict[int, OffsetRange] = {}
    log: dict[int, OffsetRange] = {}
    lost = []
    for bucket, wanted in sorted(ranges.items()):
        has = buckets[bucket]
        if wanted.start < (overwritten := min(has.lake_start, wanted.end)):
            lost.append(OffsetRange(bucket=bucket, start=wanted.start, end=overwritten))
            wanted = OffsetRange(bucket=bucket, start=overwritten, end=wanted.end)
        oldest = max(wanted.start, min(has.expired, wanted.end))
        wanted = OffsetRange(bucket=bucket, start=oldest, end=wanted.end)
        lake_end = min(max(has.lake_end, wanted.start), wanted.end)
        log_start = min(max(has.log_start, lake_end), wanted.end)
        if wanted.start < lake_end:
            lake[bucket] = OffsetRange(bucket=bucket, start=wanted.start, end=lake_end)
        if lake_end < log_start:
            lost.append(OffsetRange(bucket=bucket, start=lake_end, end=log_start))
        if log_start < wanted.end:
            log[bucket] = OffsetRange(bucket=bucket, start=log_start, end=wanted.end)
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
    found = {}
    for bucket, wanted in ranges.items():
        start, end = wanted.start, wanted.end
        if starts is not None:
            start = max(start, starts.get(bucket, start))
        if ends is not None:
            end = min(end, ends.get(bucket, end))
        if start < end:
            found[bucket] = OffsetRange(bucket=bucket, start=start, end=end)
    return found


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
