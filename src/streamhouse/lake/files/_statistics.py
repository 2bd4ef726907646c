"""Column statistics from the Parquet footer of a data file: raw bounds, never Python dates.

Invariants:
- every value of the types has bounds: also dates and timestamps outside the years 1 to 9999, for
  which Python has no objects
- a bound covers all row groups of the file: a row group without bounds leaves the file without
- a cut bound of text is valid UTF-8, and an upper bound is above every text with the cut beginning
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import pyarrow.parquet as pq
from pyiceberg.schema import Schema as IcebergSchema
from pyiceberg.table import TableProperties
from pyiceberg.types import IcebergType, ListType, MapType, StructType

from streamhouse.core.model.lake.facts import LINEAGE_COLUMNS
from streamhouse.core.types.logical_type import LogicalType
from streamhouse.core.types.numbers import Float
from streamhouse.core.types.registry import type_of_iceberg

__all__ = ["StatisticsPlan"]

_TRUNCATE: Final = re.compile(r"truncate\(([1-9][0-9]*)\)")


@dataclass(frozen=True, slots=True)
class _Mode:
    """A metrics mode of Iceberg; bounds of texts and bytes are cut to `length`, if not None.

    The library has the same modes in a module that imports pandas.
    """

    has_counts: bool
    has_bounds: bool
    length: int | None = None

    @classmethod
    def parse(cls, text: str, *, name: str) -> _Mode:
        """Read a table's property; raises `ValueError` for no mode."""
        mode = text.strip().lower()
        if match := _TRUNCATE.fullmatch(mode):
            return cls(True, True, int(match[1]))
        if mode not in _MODES:
            raise ValueError(f"{name} = '{text}' is none, counts, truncate(length) or full")
        return _MODES[mode]


_MODES: Final = {
    "none": _Mode(False, False),
    "counts": _Mode(True, False),
    "full": _Mode(True, True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Leaf:
    """A Parquet column, and the encoding of its bounds as Iceberg's bytes (spec, appendix D)."""

    path: str
    field_id: int
    mode: _Mode
    data_type: LogicalType | None

    @property
    def has_bounds(self) -> bool:
        return self.mode.has_bounds and self.data_type is not None


class StatisticsPlan:
    """Which statistics the columns of a lake table get; the table's properties say it."""

    def __init__(self, schema: IcebergSchema, properties: Mapping[str, str]) -> None:
        name = TableProperties.DEFAULT_WRITE_METRICS_MODE
        text = properties.get(name, TableProperties.DEFAULT_WRITE_METRICS_MODE_DEFAULT)
        default = _Mode.parse(text, name=name)
        self._leaves = [
            _Leaf(
                path=path,
                field_id=field_id,
                mode=_mode(schema.find_column_name(field_id) or "", properties, default),
                data_type=type_of_iceberg(str(kind)),
            )
            for path, field_id, kind in _leaves(schema.as_struct(), "")
        ]

    def of_file(self, footer: pq.FileMetaData) -> dict[str, Any]:
        """Return the statistics of a file of the plan's schema, as `DataFile` names them."""
        groups = [footer.row_group(number) for number in range(footer.num_row_groups)]
        sizes: dict[int, int] = {}
        counts: dict[int, int] = {}
        nulls: dict[int, int] = {}
        lower: dict[int, bytes] = {}
        upper: dict[int, bytes] = {}
        for position, leaf in self._positions(groups):
            columns = [group.column(position) for group in groups]
            sizes[leaf.field_id] = sum(column.total_compressed_size for column in columns)
            if not leaf.mode.has_counts:
                continue
            counts[leaf.field_id] = sum(column.num_values for column in columns)
            column_statistics = [c.statistics if c.is_stats_set else None for c in columns]
            counted = [s for s in column_statistics if s is not None and s.has_null_count]
            if len(counted) < len(columns):
                continue
            nulls[leaf.field_id] = sum(statistics.null_count for statistics in counted)
            if leaf.has_bounds:
                _set_bounds(leaf, columns, counted, lower, upper)
        return {
            "record_count": footer.num_rows,
            "column_sizes": sizes,
            "value_counts": counts,
            "null_value_counts": nulls,
            "nan_value_counts": {},
            "lower_bounds": lower,
            "upper_bounds": upper,
            "split_offsets": sorted(_start(group.column(0)) for group in groups),
        }

    def _positions(self, groups: list[pq.RowGroupMetaData]) -> Iterator[tuple[int, _Leaf]]:
        """Yield the place of each column in the file; a column of another engine may be missing.

        The order of the columns matters as well: `l.list.element` may be a list or inside a list.
        """
        first = groups[0] if groups else None
        paths = [first.column(i).path_in_schema for i in range(first.num_columns)] if first else []
        position = 0
        for leaf in self._leaves:
            if position < len(paths) and paths[position] == leaf.path:
                yield position, leaf
                position += 1
        # The columns of lineage come last, and no reader needs their bounds.
        if position < len(paths) and paths[position:] != list(LINEAGE_COLUMNS):
            raise ValueError(
                f"no field of the lake's schema is the file's column {paths[position]}"
            )


def _mode(column: str, properties: Mapping[str, str], default: _Mode) -> _Mode:
    name = f"{TableProperties.METRICS_MODE_COLUMN_CONF_PREFIX}.{column}"
    of_column = properties.get(name)
    mode = _Mode.parse(of_column, name=name) if of_column else default
    # As in all engines: bounds of nested columns serve no reader.
    return replace(mode, has_bounds=False) if "." in column else mode


def _start(column: pq.ColumnChunkMetaData) -> int:
    start: int = column.data_page_offset
    return min(start, column.dictionary_page_offset) if column.has_dictionary_page else start


def _set_bounds(
    leaf: _Leaf,
    columns: list[pq.ColumnChunkMetaData],
    statistics: list[pq.Statistics],
    lower: dict[int, bytes],
    upper: dict[int, bytes],
) -> None:
    """Set the bounds of a column, if every row group with values of the column has bounds."""
    data_type, length = leaf.data_type, leaf.mode.length
    bounded = [s for s in statistics if s.has_min_max]
    for column, of_group in zip(columns, statistics, strict=True):
        # Parquet leaves out bounds of long text; of floats it leaves out NaN, as Iceberg does.
        is_empty = of_group.null_count == column.num_values
        if not (of_group.has_min_max or is_empty or isinstance(data_type, Float)):
            return
    if not bounded or data_type is None:
        return
    is_decimal_bytes = bounded[0].physical_type == "FIXED_LEN_BYTE_ARRAY"
    plain = _signed if is_decimal_bytes else _same
    low = data_type.lower_bound(min(plain(s.min_raw) for s in bounded), length)
    high = data_type.upper_bound(max(plain(s.max_raw) for s in bounded), length)
    if low is not None:
        lower[leaf.field_id] = low
    if high is not None:
        upper[leaf.field_id] = high


def _same(raw: Any) -> Any:
    return raw


def _signed(raw: bytes) -> int:
    return int.from_bytes(raw, "big", signed=True)


def _leaves(parent: IcebergType, path: str) -> Iterator[tuple[str, int, IcebergType]]:
    """Yield path in Parquet, field id and type of the columns, in the order of the file."""
    match parent:
        case StructType():
            below = [(f.name, f.field_id, f.field_type) for f in parent.fields]
        case ListType():
            below = [("list.element", parent.element_id, parent.element_type)]
        case MapType():
            below = [
                ("key_value.key", parent.key_id, parent.key_type),
                ("key_value.value", parent.value_id, parent.value_type),
            ]
    for name, field_id, kind in below:
        full = f"{path}{name}"
        if kind.is_primitive:
            yield full, field_id, kind
        else:
            yield from _leaves(kind, f"{full}.")
