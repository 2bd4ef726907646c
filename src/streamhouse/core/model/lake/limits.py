"""The limits of the lake for tables and values; a write beyond the limits is refused.

Tables: a new table, and each change of a table, is checked. An existing table always opens, and a
later change can mend the table.

Values: the lake stores every value of a column's type, including dates and timestamps of any
year. Refused are:
- a decimal with more digits than its type, which Arrow's validation allows in one case
- a value whose lake partition lies outside of the partition's Iceberg type: the lowest values
  under `truncate(w, c)`, which cuts below the least value of the type, and times under `hour(c)`
  whose hours need more than 32 bits. Engines wrap such a partition around and lose its rows in
  reads

A column with possible violations costs a minimum and a maximum; other columns cost nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from streamhouse.core.errors import InvalidSchemaError, SchemaMismatchError
from streamhouse.core.model.casts.nested import fields_of
from streamhouse.core.model.identity import Same
from streamhouse.core.model.lake.facts import LINEAGE_COLUMNS, VERSION_3
from streamhouse.core.model.partitioning import PartitionField
from streamhouse.core.model.properties import TableProperties
from streamhouse.core.model.schema import Schema
from streamhouse.core.model.table import TableDescriptor, TableInfo
from streamhouse.core.model.values.calendar import timestamp_text
from streamhouse.core.model.values.decimals import decimal_of
from streamhouse.core.types.registry import type_of

__all__ = [
    "NESTED_FIELD_ID_FIRST",
    "NO_LIMITS",
    "LakeLimits",
    "ValueLimit",
    "check_lake_schema",
    "decimal_limits",
    "time_units",
]

NESTED_FIELD_ID_FIRST: Final = 10_000
"""The first field id inside of nested columns; the ids of columns are lower."""

_PARAMETER_MAX: Final = (1 << 31) - 1
HOUR_US: Final = 3_600_000_000
_INT32: Final = np.iinfo(np.int32)
_UNITS: Final = {"year": "M8[Y]", "month": "M8[M]"}

Number = int | Decimal


# -- tables ------------------------------------------------------------------------------------


def check_lake_schema(descriptor: TableDescriptor) -> None:
    """Raise `InvalidSchemaError` for a table without a possible lake table."""
    table = str(descriptor.path)
    seen: dict[int, str] = {}
    for column in descriptor.schema.columns:
        number = column.id
        if number in seen:
            raise InvalidSchemaError(
                f"table '{table}': columns '{seen[number]}' and '{column.name}' have the same id"
                f" {number}; leave ids out, and the service gives them"
            )
        if not 1 <= number < NESTED_FIELD_ID_FIRST:
            raise InvalidSchemaError(
                f"table '{table}': column '{column.name}' has the id {number}; ids are from 1 to"
                f" {NESTED_FIELD_ID_FIRST - 1}, and the service gives them if they are left out"
            )
        seen[number] = column.name
    _check_names(descriptor)
    layout = descriptor.batch_layout()
    fields = (*descriptor.partitioned_by, *(() if layout is None else layout.partitioned_by))
    for field in fields:
        if field.parameter is not None and field.parameter > _PARAMETER_MAX:
            raise InvalidSchemaError(
                f"table '{table}': partition field '{field}' has a parameter above {_PARAMETER_MAX}"
            )


def _check_names(descriptor: TableDescriptor) -> None:
    """Check that no two fields have the same full name in Iceberg, with dots between the parts.

    Files of format version 3 have two columns of Iceberg's own.
    """
    properties = TableProperties.parse(descriptor.properties, table=str(descriptor.path))
    is_version_3 = properties.datalake_format_version >= VERSION_3
    seen: set[str] = set()
    for column in descriptor.schema.columns:
        if is_version_3 and column.name.lower() in LINEAGE_COLUMNS:
            raise InvalidSchemaError(
                f"table '{descriptor.path}': Iceberg's format version 3 has a column"
                f" '{column.name.lower()}' of its own; rename column '{column.name}'"
            )
        for name in _full_names(column.name, column.type):
            # Engines find columns without case.
            folded = name.lower()
            if folded in seen:
                raise InvalidSchemaError(
                    f"table '{descriptor.path}': two fields are called '{name}' in the lake, where"
                    " the names of nested fields are joined by dots; rename one"
                )
            seen.add(folded)


def _full_names(name: str, t: pa.DataType) -> Iterator[str]:
    yield name
    for field in fields_of(t):
        yield from _full_names(f"{name}.{field.name}", field.type)


# -- values ------------------------------------------------------------------------------------


def time_units(numbers: npt.NDArray[np.int64], t: pa.DataType, unit: str) -> npt.NDArray[np.int32]:
    """Return whole years, months, days or hours since 1970 of the numbers of dates or timestamps.

    An hour beyond 32 bits becomes the nearest hour within 32 bits.
    """
    if unit == "hour":
        return (numbers // HOUR_US).clip(_INT32.min, _INT32.max).astype(np.int32)
    day = type_of(t).day
    assert day is not None, t
    days = numbers // day
    if unit != "day":
        days = days.astype("M8[D]").astype(_UNITS[unit]).astype(np.int64)
    return days.astype(np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueLimit:
    """The least and greatest value of a type in a column, nested values included.

    `reason` ends the sentence of the error.
    """

    column: str
    type: pa.DataType
    lowest: Number
    highest: Number
    reason: str

    def keeps(self, array: pa.Array) -> bool:
        """Whether all values are within the limit."""
        bounds = (_bounds(leaf) for leaf in _leaves(array, self.type))
        return all(
            low is None or (self.lowest <= low and high <= self.highest) for low, high in bounds
        )


@dataclass(frozen=True, slots=True)
class LakeLimits:
    """The limits for the rows of a table."""

    limits: tuple[ValueLimit, ...]

    @staticmethod
    def of_table(info: TableInfo, schema_id: int) -> LakeLimits:
        """Return the limits of rows of one version of a table's schema, cached."""
        return _limits_of(Same(info), schema_id)

    @classmethod
    def of(cls, descriptor: TableDescriptor, schema: Schema | None = None) -> LakeLimits:
        """Return the limits of a table, for rows of an earlier `schema` if given."""
        layout = descriptor.batch_layout()
        fields = (*descriptor.partitioned_by, *(() if layout is None else layout.partitioned_by))
        written = descriptor.schema if schema is None else schema
        limits = [limit for c in written.columns for limit in decimal_limits(c.name, c.type)]
        if fields:
            names = {column.id: (column.name, column.type) for column in written.columns}
            current = {column.name: column for column in descriptor.schema.columns}
            for field in dict.fromkeys(fields):
                column = current[field.column]
                name, t = names.get(column.id, (None, None))
                # A narrower type of an earlier schema has no value below the limit.
                if name is not None and t == column.type:
                    limits += _of_partition(name, t, field)
        return cls(tuple(limits))

    def check(
        self,
        rows: pa.RecordBatch,
        *,
        table: str,
        row_numbers: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """Raise `SchemaMismatchError` with table, column and row of a value beyond the limits.

        Columns missing from `rows` are skipped. `row_numbers` are the caller's numbers of the rows;
        the default counts from 0.
        """
        for limit in self.limits:
            position = rows.schema.get_field_index(limit.column)
            if position < 0 or limit.keeps(rows.column(position)):
                continue
            row = _first(rows.column(position), limit.keeps)
            number = row if row_numbers is None else int(row_numbers[row])
            raise SchemaMismatchError(
                f"table '{table}': column '{limit.column}' of row {number} has a value"
                f" {limit.reason}"
            )


NO_LIMITS: Final = LakeLimits(())


@functools.lru_cache(maxsize=1_024)
def _limits_of(table: Same, schema_id: int) -> LakeLimits:
    info: TableInfo = table.value
    return LakeLimits.of(info.descriptor, info.schema_version(schema_id))


def decimal_limits(name: str, t: pa.DataType) -> Sequence[ValueLimit]:
    """Return the limits of the decimals in a column of this type; empty for most types."""
    return tuple(_of_decimals(name, t))


def _of_decimals(name: str, t: pa.DataType) -> Iterator[ValueLimit]:
    for leaf in dict.fromkeys(_leaf_types(t)):
        if pa.types.is_decimal(leaf):
            highest = decimal_of(10**leaf.precision - 1, leaf.scale)
            yield ValueLimit(
                column=name,
                type=leaf,
                lowest=highest.copy_negate(),
                highest=highest,
                reason=f"with more digits than decimal({leaf.precision},{leaf.scale}) has",
            )


def _of_partition(name: str, t: pa.DataType, field: PartitionField) -> Iterator[ValueLimit]:
    if field.transform == "hour":
        yield ValueLimit(
            column=name,
            type=t,
            lowest=_INT32.min * HOUR_US,
            highest=(_INT32.max + 1) * HOUR_US - 1,
            reason=f"that the lake's partition field {field} cannot hold: the field takes"
            f" {timestamp_text(_INT32.min * HOUR_US)} to"
            f" {timestamp_text((_INT32.max + 1) * HOUR_US - 1)}",
        )
    least = type_of(t).least
    # A tinyint or smallint is an int in the lake, so no value is too low.
    if field.transform == "truncate" and least is not None and t.bit_width >= _INT32.bits:
        width = field.parameter or 1
        if isinstance(least, Decimal):
            unscaled = 10**t.precision - 1
            lowest: Number = decimal_of(-(unscaled // width) * width, t.scale)
        else:
            lowest = -(-least // width) * width
        yield ValueLimit(
            column=name,
            type=t,
            lowest=lowest,
            highest=least.copy_negate() if isinstance(least, Decimal) else -least,
            reason=f"that the lake's partition field {field} cannot hold: the field takes no"
            f" value below {lowest}",
        )


def _leaf_types(t: pa.DataType) -> Iterator[pa.DataType]:
    fields = fields_of(t)
    if not fields:
        yield t
    for field in fields:
        yield from _leaf_types(field.type)


def _leaves(array: pa.Array, leaf_type: pa.DataType) -> Iterator[pa.Array]:
    """Yield the nested arrays with type `leaf_type` inside of an array."""
    t = array.type
    if not pa.types.is_nested(t):
        if t == leaf_type:
            yield array
        return
    if pa.types.is_map(t):
        # A slice of a map array still gives the keys and values of the whole.
        start, end = (array.offsets[i].as_py() for i in (0, len(array)))
        children = [array.keys.slice(start, end - start), array.items.slice(start, end - start)]
    else:
        children = [array.flatten()] if pa.types.is_list(t) else array.flatten()
    for child in children:
        yield from _leaves(child, leaf_type)


def _bounds(array: pa.Array) -> tuple[Any, Any]:
    """Return the least and the greatest value, None without any value."""
    bounds = pc.min_max(array.view(pa.int64()) if pa.types.is_timestamp(array.type) else array)
    return bounds["min"].as_py(), bounds["max"].as_py()


def _first(array: pa.Array, keeps: Callable[[pa.Array], bool]) -> int:
    """Return the position of the first value outside of the limit; there is one."""
    start, end = 0, len(array)
    while end - start > 1:
        middle = (start + end) // 2
        if keeps(array.slice(start, middle - start)):
            start = middle
        else:
            end = middle
    return start
