"""The log ranges of a round, cut into tasks. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from streamhouse.core.errors import CorruptDataError, OffsetOutOfRangeError
from streamhouse.core.model.offsets import (
    BucketPositions,
    OffsetRange,
    truncated_offsets,
)

__all__ = ["PlanLimits", "RoundPlan", "plan_copy", "plan_history", "plan_round"]

# Other tables may wait for a round, and the work of a failed round is repeated.
ROWS_PER_ROUND_MAX: Final = 10_000_000
ROWS_PER_SPLIT_MIN: Final = 500_000
# A task of a primary key table holds 9 bytes a change of its bucket's range, and sorts a part.
KEY_ROWS_PER_BUCKET_MAX: Final = 4_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanLimits:
    """Bounds of a round: at most `rows_max` rows, cut to keep `parallelism` tasks busy.

    A bucket of a primary key table moves at most `key_bucket_rows_max` changes. A bucket's range is
    not cut into splits below `split_rows_min` rows.
    """

    rows_max: int = ROWS_PER_ROUND_MAX
    key_bucket_rows_max: int = KEY_ROWS_PER_BUCKET_MAX
    parallelism: int = 1
    split_rows_min: int = ROWS_PER_SPLIT_MIN

    def __post_init__(self) -> None:
        values = (self.rows_max, self.key_bucket_rows_max, self.parallelism, self.split_rows_min)
        if min(values) < 1:
            raise ValueError(f"limits of a round must be positive: {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPlan:
    """`splits` cover exactly the rows from `base_offsets` to `target_offsets`, largest first.

    Both mappings have every bucket of the table. Rows below `truncated_offsets` were overwritten:
    the round skips these rows, and removes them from the lake. Expired rows are not moved.
    """

    splits: tuple[OffsetRange, ...]
    base_offsets: Mapping[int, int]
    target_offsets: Mapping[int, int]
    truncated_offsets: Mapping[int, int] = field(default_factory=dict)

    @property
    def row_count(self) -> int:
        """Rows the round moves."""
        return sum(split.row_count for split in self.splits)


def plan_round(
    *,
    table: str,
    covered: Mapping[int, int],
    positions: Mapping[int, BucketPositions],
    limits: PlanLimits,
    is_primary_key_table: bool = False,
) -> RoundPlan:
    """Plan a round from the offsets the lake covers to the high watermarks of `positions`.

    When more than `limits.rows_max` rows wait, every bucket gets an equal share, and the unused
    part of a share goes to the remaining buckets.

    Raises:
        OffsetOutOfRangeError: rows not yet in the lake are gone from the log.
        CorruptDataError: the lake covers rows the log never had.
    """
    base = {bucket: covered.get(bucket, 0) for bucket in sorted(positions)}
    for bucket, start in base.items():
        position = positions[bucket]
        if start > position.high_watermark:
            raise CorruptDataError(
                f"table '{table}', bucket {bucket}: the lake table covers offsets up to {start},"
                f" but the log ends at {position.high_watermark}; the lake table belongs to other"
                " data, or the service was restored from an older copy"
            )
        if max(start, position.first_offset) < position.log_start_offset:
            raise OffsetOutOfRangeError(
                f"table '{table}', bucket {bucket}: offsets {start} to"
                f" {position.log_start_offset - 1} are neither in the lake nor in the log"
            )
    truncated = truncated_offsets(positions)
    starts = {bucket: max(start, positions[bucket].first_offset) for bucket, start in base.items()}
    lags = {bucket: positions[bucket].high_watermark - start for bucket, start in starts.items()}
    if is_primary_key_table:
        lags = {bucket: min(lag, limits.key_bucket_rows_max) for bucket, lag in lags.items()}
    shares = _shares(lags, rows_max=limits.rows_max)
    target = {bucket: starts[bucket] + rows for bucket, rows in shares.items()}
    return replace(_planned(starts, target, limits), base_offsets=base, truncated_offsets=truncated)


def plan_copy(
    *, covered: Mapping[int, int], positions: Mapping[int, BucketPositions], limits: PlanLimits
) -> RoundPlan:
    """Plan the next rows for a batch layout from the lake: rows already gone from the log.

    The copy ends at the start of the log, whatever the lake has. Later rows, and changes to the
    copied rows, come from the log, which drops no row before the layout has it.
    """
    truncated = truncated_offsets(positions)
    base = {bucket: covered.get(bucket, 0) for bucket in sorted(positions)}
    starts = {bucket: max(start, positions[bucket].first_offset) for bucket, start in base.items()}
    lags = {b: max(0, positions[b].log_start_offset - start) for b, start in starts.items()}
    shares = _shares(lags, rows_max=limits.rows_max)
    target = {bucket: starts[bucket] + rows for bucket, rows in shares.items()}
    return replace(_planned(starts, target, limits), base_offsets=base, truncated_offsets=truncated)


def plan_history(rows: RoundPlan, *, covered: Mapping[int, int], limits: PlanLimits) -> RoundPlan:
    """Plan the changes of the round `rows` that the full history, at `covered`, lacks.

    The history may be ahead of the round: an earlier round died between its two commits.
    """
    target = {bucket: max(end, covered[bucket]) for bucket, end in rows.target_offsets.items()}
    return _planned(dict(covered), target, limits)


def _planned(base: Mapping[int, int], target: Mapping[int, int], limits: PlanLimits) -> RoundPlan:
    ranges = [
        OffsetRange(bucket=bucket, start=base[bucket], end=end)
        for bucket, end in target.items()
        if end > base[bucket]
    ]
    total = sum(whole.row_count for whole in ranges)
    split_rows = max(limits.split_rows_min, -(-total // limits.parallelism))
    splits = [piece for whole in ranges for piece in _cut(whole, split_rows)]
    return RoundPlan(
        splits=tuple(sorted(splits, key=lambda s: (-s.row_count, s.bucket, s.start))),
        base_offsets=base,
        target_offsets={bucket: target[bucket] for bucket in base},
    )


def _shares(lags: Mapping[int, int], *, rows_max: int) -> dict[int, int]:
    """Return how many rows each bucket gets: all of a small lag, an equal share of large ones."""
    shares: dict[int, int] = {}
    remaining_rows = rows_max
    by_lag = sorted(lags, key=lambda bucket: (lags[bucket], bucket))
    for position, bucket in enumerate(by_lag):
        # Rounded up, so that a budget below the number of buckets still moves rows.
        share = -(-remaining_rows // (len(by_lag) - position))
        shares[bucket] = min(lags[bucket], share, remaining_rows)
        remaining_rows -= shares[bucket]
    return shares


def _cut(whole: OffsetRange, rows: int) -> list[OffsetRange]:
    """Cut a range into pieces of nearly equal size, of about `rows` rows at most."""
    pieces = max(1, -(-whole.row_count // rows))
    bounds = [whole.start + whole.row_count * i // pieces for i in range(pieces + 1)]
    return [
        OffsetRange(bucket=whole.bucket, start=start, end=end)
        for start, end in itertools.pairwise(bounds)
    ]
