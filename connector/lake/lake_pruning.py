"""Which files of a manifest a read needs, decided a column at a time over the whole manifest.

Invariants:
- a file is left out only when its partition or its bounds prove that no row of it is wanted
- what a manifest does not say counts as possible
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from streamhouse.connector.lake.read_estimate import read_share
from streamhouse.connector.where.predicate import Predicate
from streamhouse.connector.where.pruning import may_match
from streamhouse.storage_service.lake.files.bounds import (
    ColumnStatistics,
    plain_bound,
    statistics_key,
)
from streamhouse.storage_service.lake.snapshots.live_files import ManifestFiles
from streamhouse.storage_service.model.offsets import OffsetRange
from streamhouse.storage_service.model.partitioning import Clustering

__all__ = [
    "LakeQuery",
    "SystemFields",
    "estimated_bytes",
    "select_files",
]


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
    """Return the indexes of the files that may hold wanted rows, in manifest order.

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
    known = _with_bounds(columns)
    chosen = [
        index
        for index in candidates.tolist()
        if may_match(query.predicate, _statistics(files, index, known))
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
    known = _with_bounds(columns)
    total = 0.0
    for index in chosen:
        statistics = _statistics(files, index, known)
        row_groups = len(files.row_group_starts[index] or ())
        total += files.file_bytes[index] * read_share(
            query.predicate, statistics, query.clustering, row_groups=row_groups
        )
    return int(total)


def _with_bounds(
    columns: Sequence[tuple[str, int, pa.DataType]],
) -> list[tuple[str, int, pa.DataType]]:
    """Return (statistics key, field id, type) of the columns that manifests have bounds of."""
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
    for wanted in ranges.values():
        if wanted.row_count:
            keep |= (
                (buckets.lower <= wanted.bucket)
                & (wanted.bucket <= buckets.upper)
                & (offsets.lower < wanted.end)
                & (wanted.start <= offsets.upper)
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
