"""Known bounds of a column's values in some rows: from manifests and Parquet footers.

Invariant: no value is below a minimum or above a maximum; unreadable or doubtful bounds count as
unknown. Executors have this module, which imports pyarrow only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from streamhouse.core.errors import CorruptDataError
from streamhouse.core.model.nested_fields import statistics_key
from streamhouse.core.types.logical_type import PlainValue
from streamhouse.core.types.registry import type_of

if TYPE_CHECKING:
    import pyarrow.parquet as pq

__all__ = [
    "ColumnStatistics",
    "PlainValue",
    "integer_bound",
    "integer_range",
    "plain_bound",
    "row_group_statistics",
    "statistics_key",
]

_UNITS_A_SECOND: Final = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}
_INTEGER_BYTES: Final = (4, 8)
_LAYOUTS: Final = {pa.large_string(): pa.string(), pa.large_binary(): pa.binary()}


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnStatistics:
    """The known facts about a column's values in some rows; None is "not known".

    no non-NULL value is below `minimum` or above `maximum`, both plain values; neither need occur.
    In a float or double column the bounds apply to numbers only: NaN may always occur.
    """

    minimum: PlainValue | None = None
    maximum: PlainValue | None = None
    null_count: int | None = None
    row_count: int | None = None


# -- of manifests: Iceberg's single-value serialisation (spec, appendix D) -------------------------


def integer_bound(raw: bytes | None) -> int | None:
    """Return the bound of an integer, date or timestamp column; None is not known."""
    if raw is None:
        return None
    if len(raw) not in _INTEGER_BYTES:
        raise CorruptDataError(f"a manifest's bound of integers has {len(raw)} bytes")
    return int.from_bytes(raw, "little", signed=True)


def plain_bound(raw: bytes | None, data_type: pa.DataType) -> PlainValue | None:
    """Return the bound of a column of this type, None if it is no bound."""
    if raw is None:
        return None
    return type_of(data_type).of_bound(raw)


# -- of Parquet footers ----------------------------------------------------------------------------


def integer_range(group: pq.RowGroupMetaData, name: str) -> tuple[int, int] | None:
    """Return the least and greatest value of a top-level column of integers, if known."""
    for number in range(group.num_columns):
        column = group.column(number)
        if column.path_in_schema == name:
            statistics = column.statistics
            if statistics is not None and statistics.has_min_max:
                return int(statistics.min), int(statistics.max)
    return None


def row_group_statistics(
    metadata: pq.FileMetaData, row_group: int, *, columns: Iterable[str] | None = None
) -> dict[str, ColumnStatistics]:
    """Return the statistics of one row group of a Parquet file, of `columns` (top level) or of all.

    Unreadable or doubtful bounds are left unknown. The keys are the file's own names; a caller
    renames the keys after a rename of table columns.
    """
    top_names = None if columns is None else set(columns)
    group = metadata.row_group(row_group)
    statistics_by_key = {}
    leaves = _leaves(metadata.schema.to_arrow_schema())
    for index, (path, data_type) in enumerate(leaves):
        if data_type is None or (top_names is not None and path[0] not in top_names):
            continue
        statistics = group.column(index).statistics
        if statistics is None:
            continue
        minimum = maximum = None
        if statistics.has_min_max:
            minimum = _parquet_bound(statistics.min_raw, data_type, is_upper=False)
            maximum = _parquet_bound(statistics.max_raw, data_type, is_upper=True)
        statistics_by_key[statistics_key(path)] = ColumnStatistics(
            minimum=minimum,
            maximum=maximum,
            null_count=statistics.null_count if statistics.has_null_count else None,
            row_count=group.num_rows,
        )
    return statistics_by_key


def _leaves(schema: pa.Schema) -> Iterator[tuple[tuple[str, ...], pa.DataType | None]]:
    """Yield path and type of every Parquet leaf in file order; type None inside lists and maps."""

    def walk(
        path: tuple[str, ...], data_type: pa.DataType, *, is_repeated: bool
    ) -> Iterator[tuple[tuple[str, ...], pa.DataType | None]]:
        if pa.types.is_struct(data_type):
            for field in data_type:
                yield from walk((*path, field.name), field.type, is_repeated=is_repeated)
        elif pa.types.is_map(data_type):
            yield from walk((*path, "key"), data_type.key_type, is_repeated=True)
            yield from walk((*path, "value"), data_type.item_type, is_repeated=True)
        elif pa.types.is_nested(data_type):
            yield from walk((*path, "element"), data_type.value_type, is_repeated=True)
        else:
            yield path, None if is_repeated else data_type

    for field in schema:
        yield from walk((field.name,), field.type, is_repeated=False)


def _parquet_bound(raw: Any, t: pa.DataType, *, is_upper: bool) -> PlainValue | None:
    """Return a raw Parquet bound as a plain value, widened where units differ, or None."""
    t = _LAYOUTS.get(t, t)
    if not pa.types.is_timestamp(t):
        return type_of(t).of_footer(raw)
    # Files of other engines have timestamps of every unit; a column's own unit is microseconds.
    if not isinstance(raw, int):
        return None
    units: int = _UNITS_A_SECOND[t.unit]
    micros = raw * 1_000_000
    return -(-micros // units) if is_upper else micros // units
