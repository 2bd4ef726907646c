"""Which files of a manifest a read needs, decided a column at a time over the whole manifest.

Invariants:
- a file is left out only when its partition or its bounds prove that no row of it is wanted
- what a manifest does not say counts as possible
No lake library here: manifests arrive as `ManifestFiles`, which the planner decodes and keeps.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from streamhouse.connector.lake.read_estimate import read_share
from streamhouse.connector.where.predicate import PlainValue, Predicate, statistics_key
from streamhouse.connector.where.pruning import ColumnStatistics, may_match
from streamhouse.storage_service.model.batch_layout import Clustering
from streamhouse.storage_service.model.offsets import OffsetRange

__all__ = [
    "IntegerBounds",
    "LakeQuery",
    "ManifestFiles",
    "SystemFields",
    "estimated_bytes",
    "select_files",
]

_LOWEST: Final = -(2**63)
_HIGHEST: Final = 2**63 - 1


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


@dataclass(frozen=True, slots=True)
class IntegerBounds:
    """Smallest and largest value of one integer column in every file of a manifest.

    Where a file has no bounds, they are those of all 64-bit integers and `is_known` is False.
    """

    lower: npt.NDArray[np.int64]
    upper: npt.NDArray[np.int64]
    is_known: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestFiles:
    """The live data files of one manifest, column by column; immutable, so it can be kept.

    `partitions` holds each distinct partition once and `partition_codes` points into it. Bounds
    are Iceberg's single-value serialisation by field id.
    """

    paths: Sequence[str]
    file_bytes: Sequence[int]
    row_counts: Sequence[int]
    row_group_starts: Sequence[Sequence[int] | None]
    sequences: Sequence[int]
    formats: Sequence[str]
    spec_id: int
    partitions: Sequence[tuple[Any, ...]]
    partition_codes: npt.NDArray[np.int64]
    lower_bounds: Sequence[Mapping[int, bytes]]
    upper_bounds: Sequence[Mapping[int, bytes]]
    null_counts: Sequence[Mapping[int, int]]
    _decoded: dict[int, IntegerBounds] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.paths)

    def integer_bounds(self, field_id: int) -> IntegerBounds:
        """Return the bounds of an integer, date or timestamp column, decoded once."""
        if field_id not in self._decoded:
            self._decoded[field_id] = IntegerBounds(
                _integers(self.lower_bounds, field_id, missing=_LOWEST),
                _integers(self.upper_bounds, field_id, missing=_HIGHEST),
                np.fromiter(
                    (
                        field_id in low and field_id in high
                        for low, high in zip(self.lower_bounds, self.upper_bounds, strict=True)
                    ),
                    dtype=np.bool_,
                    count=len(self),
                ),
            )
        return self._decoded[field_id]


def _integers(
    bounds: Sequence[Mapping[int, bytes]], field_id: int, *, missing: int
) -> npt.NDArray[np.int64]:
    return np.fromiter(
        (
            missing if raw is None else int.from_bytes(raw, "little", signed=True)
            for raw in (bound.get(field_id) for bound in bounds)
        ),
        dtype=np.int64,
        count=len(bounds),
    )


def select_files(
    files: ManifestFiles,
    query: LakeQuery,
    *,
    system: SystemFields,
    columns: Sequence[tuple[str, int, pa.DataType]],
    partition_may_match: Callable[[tuple[Any, ...]], bool] | None,
) -> npt.NDArray[np.int64]:
    """Return the indexes of the files that may hold wanted rows, in manifest order.

    Args:
        columns: (name, lake field id, type) of the columns the predicate reads.
        partition_may_match: False only for a partition without a matching row; None: no pruning.
    """
    keep = np.ones(len(files), dtype=np.bool_)
    if query.ranges is not None:
        keep &= _in_ranges(files, query.ranges, system)
    if query.from_timestamp_us is not None:
        keep &= files.integer_bounds(system.timestamp).upper >= query.from_timestamp_us
    if query.to_timestamp_us is not None:
        keep &= files.integer_bounds(system.timestamp).lower < query.to_timestamp_us
    if partition_may_match is not None:
        matches = np.fromiter(
            (partition_may_match(partition) for partition in files.partitions),
            dtype=np.bool_,
            count=len(files.partitions),
        )
        keep &= matches[files.partition_codes]
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
            minimum=_plain(lower.get(field_id), data_type),
            maximum=_plain(upper.get(field_id), data_type),
            null_count=nulls.get(field_id),
            row_count=files.row_counts[index],
        )
        for key, field_id, data_type in columns
    }


def _plain(raw: bytes | None, data_type: pa.DataType) -> PlainValue | None:
    """Decode Iceberg's single-value serialisation (spec, appendix D); None if it is no bound."""
    if raw is None:
        return None
    if pa.types.is_boolean(data_type):
        return raw != b"\x00"
    if pa.types.is_floating(data_type):
        value: float = struct.unpack("<d" if len(raw) == 8 else "<f", raw)[0]
        return None if value != value else value
    if pa.types.is_decimal(data_type):
        unscaled = int.from_bytes(raw, "big", signed=True)
        # From a tuple: arithmetic would round to the context's precision.
        digits = tuple(int(digit) for digit in str(abs(unscaled)))
        return Decimal((int(unscaled < 0), digits, -data_type.scale))
    if pa.types.is_string(data_type):
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return None
    if pa.types.is_binary(data_type):
        return raw
    return int.from_bytes(raw, "little", signed=True)
