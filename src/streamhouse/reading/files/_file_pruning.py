"""Which files of a manifest a read needs, decided a column at a time over the whole manifest.

Invariants:
- a file is left out only when its partition or its bounds prove that it has no requested row
- a missing fact of a manifest counts as possible

The bytes that a read decodes are estimated in the same way. Files of a batch layout have row groups
with narrow ranges of the sort columns, and a read skips the row groups ruled out by its predicate.
Manifests have no bounds of row groups: the estimate cuts the file's range into equal parts, and
tests the predicate on each part.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from streamhouse.core.model.offsets import OffsetRange
from streamhouse.core.model.partitioning import Clustering
from streamhouse.lake.files.bounds import (
    ColumnStatistics,
    plain_bound,
    statistics_key,
)
from streamhouse.lake.snapshots.live_files import ManifestFiles
from streamhouse.reading.where._pruning import may_match
from streamhouse.reading.where.predicate import Predicate

__all__ = [
    "LakeQuery",
    "SystemFields",
    "estimated_bytes",
    "read_share",
    "select_files",
]


PARTS_MAX: Final = 8
UNKNOWN_SHARE: Final = 0.5
"""What a predicate on a sorted column of text is taken to read: there is no middle of a range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LakeQuery:
    """Which lake rows a read wants.

    `ranges` bucket -> wanted offsets; a bucket without one is not wanted. None means all rows of
    the snapshot. Times in microseconds, `to` exclusive. `clustering` is the order of rows in the
    files of a batch layout, by which reads are estimated.
    """

    ranges: Mapping[int, OffsetRange] | None = None
    predicate: Predicate | None = None
    from_timestamp_us: int | None = None
    to_timestamp_us: int | None = None
    clustering: Clustering = field(default_factory=Clustering)


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemFields:
    """Field ids of the system columns in this lake table."""

    bucket: int
    offset: int
    timestamp: int


def select_files(
    files: ManifestFiles,
    query: LakeQuery,
    *,
    system: SystemFields,
    columns: Sequence[tuple[str, int, pa.DataType]],
    partition_matches: npt.NDArray[np.bool_] | None,
) -> npt.NDArray[np.int64]:
    """Return the indexes of the files with possible rows of the query, in manifest order.

    Args:
        columns: (name, lake field id, type) of the columns the predicate reads.
        partition_matches: of each partition False if it has no matching row; None: no pruning.
    """
    keep = np.ones(len(files), dtype=np.bool_)
    if query.ranges is not None:
        keep &= _in_ranges(files, query.ranges, system)
    if query.from_timestamp_us is not None:
        keep &= files.integer_bounds(system.timestamp).upper >= query.from_timestamp_us
    if query.to_timestamp_us is not None:
        keep &= files.integer_bounds(system.timestamp).lower < query.to_timestamp_us
    if partition_matches is not None:
        keep &= partition_matches[files.partition_codes]
    candidates = np.flatnonzero(keep)
    if query.predicate is None:
        return candidates
    bounded = _with_bounds(columns)
    chosen = [
        index
        for index in candidates.tolist()
        if may_match(query.predicate, _statistics(files, index, bounded))
    ]
    return np.array(chosen, dtype=np.int64)


def estimated_bytes(
    files: ManifestFiles,
    chosen: Iterable[int],
    query: LakeQuery,
    *,
    columns: Sequence[tuple[str, int, pa.DataType]],
) -> int:
    """Return about how many bytes of the files at the indexes `chosen` a read decodes."""
    if query.predicate is None or not query.clustering.columns:
        return sum(files.file_bytes[index] for index in chosen)
    bounded = _with_bounds(columns)
    total = 0.0
    for index in chosen:
        statistics = _statistics(files, index, bounded)
        row_groups = len(files.row_group_starts[index] or ())
        total += files.file_bytes[index] * read_share(
            query.predicate, statistics, query.clustering, row_groups=row_groups
        )
    return int(total)


def _with_bounds(
    columns: Sequence[tuple[str, int, pa.DataType]],
) -> list[tuple[str, int, pa.DataType]]:
    """Return (statistics key, field id, type) of the columns with bounds in manifests."""
    return [
        (statistics_key((name,)), field_id, data_type)
        for name, field_id, data_type in columns
        if not pa.types.is_nested(data_type)
    ]


def _in_ranges(
    files: ManifestFiles, ranges: Mapping[int, OffsetRange], system: SystemFields
) -> npt.NDArray[np.bool_]:
    buckets = files.integer_bounds(system.bucket)
    offsets = files.integer_bounds(system.offset)
    keep = np.zeros(len(files), dtype=np.bool_)
    for bucket_range in ranges.values():
        if bucket_range.row_count:
            keep |= (
                (buckets.lower <= bucket_range.bucket)
                & (bucket_range.bucket <= buckets.upper)
                & (offsets.lower < bucket_range.end)
                & (bucket_range.start <= offsets.upper)
            )
    return keep


def _statistics(
    files: ManifestFiles, index: int, columns: Sequence[tuple[str, int, pa.DataType]]
) -> dict[str, ColumnStatistics]:
    lower, upper = files.lower_bounds[index], files.upper_bounds[index]
    nulls = files.null_counts[index]
    return {
        key: ColumnStatistics(
            minimum=plain_bound(lower.get(field_id), data_type),
            maximum=plain_bound(upper.get(field_id), data_type),
            null_count=nulls.get(field_id),
            row_count=files.row_counts[index],
        )
        for key, field_id, data_type in columns
    }


def read_share(
    predicate: Predicate,
    statistics: Mapping[str, ColumnStatistics],
    clustering: Clustering,
    *,
    row_groups: int,
) -> float:
    """Return which share of a file's row groups the predicate cannot rule out, from 0 to 1."""
    if row_groups < 2:
        return 1.0
    keys = [statistics_key((name,)) for name in clustering.columns]
    predicate_keys = {statistics_key((name,)) for name in predicate.columns}
    if not clustering.is_z_order:
        # The first column that varies in the file decides; those after it are mixed.
        varying = [key for key in keys if not _is_constant(statistics.get(key))]
        keys = varying[:1]
    share = 1.0
    for key in keys:
        if key in predicate_keys:
            parts = min(PARTS_MAX, max(2, round(row_groups ** (1 / len(keys)))))
            share *= _share(predicate, statistics, key, parts)
    return share


def _is_constant(column: ColumnStatistics | None) -> bool:
    return column is not None and column.minimum is not None and column.minimum == column.maximum


def _share(
    predicate: Predicate, statistics: Mapping[str, ColumnStatistics], key: str, parts: int
) -> float:
    column = statistics.get(key)
    if column is None:
        return 1.0
    matches = [may_match(predicate, {**statistics, key: part}) for part in _parts(column, parts)]
    return sum(matches) / len(matches) if matches else UNKNOWN_SHARE


def _parts(column: ColumnStatistics, count: int) -> Iterator[ColumnStatistics]:
    """Yield the column's statistics in equal parts of its range; no parts if the range has no
    middle.
    """
    low, high = column.minimum, column.maximum
    if isinstance(low, bool) or isinstance(high, bool):
        return
    if isinstance(low, int) and isinstance(high, int):
        for i in range(count):
            start, end = (low + (high - low) * at // count for at in (i, i + 1))
            yield replace(column, minimum=start, maximum=end)
    elif isinstance(low, float | Decimal) and isinstance(high, float | Decimal):
        bottom, width = float(low), float(high) - float(low)
        if not math.isfinite(width):
            return
        for i in range(count):
            start_f, end_f = (bottom + width * at / count for at in (i, i + 1))
            if isinstance(low, Decimal):
                yield replace(column, minimum=Decimal(start_f), maximum=Decimal(end_f))
            else:
                yield replace(column, minimum=start_f, maximum=end_f)
