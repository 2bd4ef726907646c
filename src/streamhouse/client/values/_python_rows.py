"""Rows in the form of dicts, converted to a record batch with the columns of a table.

Values have the Python types of the columns. A value of another type, or a value that would change
when stored, is refused with row and column: no text becomes a number, no fraction is cut off, no
time without a zone becomes a moment. Numbers of numpy count as Python's, pandas' NA and NaT as
None.

A column of plain values becomes an array in one step; only other columns are converted value by
value.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Final

import pyarrow as pa

from streamhouse.core.errors import SchemaMismatchError, UnknownColumnError
from streamhouse.core.model.casts.column_defaults import default_value
from streamhouse.core.model.identity import Same
from streamhouse.core.model.schema import (
    CHANGE_TYPE_COLUMN,
    Column,
    empty_batch,
    type_name,
)
from streamhouse.core.model.table import TableInfo
from streamhouse.core.model.values.json_values import json_value
from streamhouse.core.types.python_values import UnfitError, python_value_of
from streamhouse.core.types.registry import type_of

__all__ = ["keys_as_arrow", "rows_as_arrow", "rows_as_tried"]

_Row = Mapping[str, Any]
_CHANGE_TYPE: Final = Column(id=0, name=CHANGE_TYPE_COLUMN, type=pa.string())
_NO_ARRAY: Final = (pa.ArrowException, ValueError, TypeError, OverflowError)


def rows_as_arrow(table: TableInfo, rows: Sequence[_Row]) -> pa.RecordBatch:
    """Return rows for `table`.

    In a log table a column missing from a row has its default, else null. Rows of a primary key
    table all have the same columns, which may be a part of the table's: a forgotten column would
    lose its present value. Only deletes, marked by `__change_type`, may have just the key.

    Raises `SchemaMismatchError` or `UnknownColumnError` naming table, row and column.
    """
    columns = _columns(table, rows)
    arrays = [_array(_values(rows, column), column, table=table) for column in columns]
    if columns is table.schema.columns:
        return pa.RecordBatch.from_arrays(arrays, schema=table.schema.to_arrow())
    return pa.RecordBatch.from_arrays(arrays, names=[column.name for column in columns])


def keys_as_arrow(table: TableInfo, rows: Sequence[_Row]) -> pa.RecordBatch:
    """Return keys of a primary key table, or leading columns of the keys."""
    if not rows:
        name = str(table.path)
        return empty_batch(table.schema.select(table.descriptor.primary_key, table=name).to_arrow())
    return rows_as_arrow(table, rows)


def rows_as_tried(table: TableInfo, rows: Sequence[_Row]) -> pa.RecordBatch:
    """Return rows for a caller that keeps misfits: a column with misfits is a column of texts."""
    columns = _columns(table, rows)
    arrays = []
    for column in columns:
        values = _values(rows, column)
        try:
            arrays.append(_array(values, column, table=table))
        except SchemaMismatchError:
            if pa.types.is_nested(column.type):
                raise
            arrays.append(pa.array([None if v is None else _text(v) for v in values], pa.string()))
    return pa.RecordBatch.from_arrays(arrays, names=[column.name for column in columns])


def _values(rows: Sequence[_Row], column: Column) -> list[Any]:
    default = default_value(column)
    return [row.get(column.name, default) for row in rows]


def _columns(table: TableInfo, rows: Sequence[_Row]) -> Sequence[Column]:
    """Return the table's columns that the rows have; raises for unknown columns."""
    table_names = _column_names(Same(table.schema))
    named: set[str] = set()
    for row in rows:
        named.update(row)
    has_changes = table.is_primary_key_table and CHANGE_TYPE_COLUMN in named
    if not named <= table_names:
        _check_names(table, rows, has_changes=has_changes)
    if not rows or not table.is_primary_key_table:
        return table.schema.columns
    columns = [column for column in table.schema.columns if column.name in named]
    if has_changes:
        return [*columns, _CHANGE_TYPE]
    for row_number, row in enumerate(rows):
        if len(row) != len(columns):
            missing = next(column.name for column in columns if column.name not in row)
            raise SchemaMismatchError(
                f"table '{table.path}': row {row_number} has no column '{missing}', which other"
                " rows have; give None to make it null, or write rows with other columns in another"
                " call"
            )
    return table.schema.columns if len(columns) == len(table_names) else columns


@functools.lru_cache(maxsize=256)
def _column_names(schema: Same) -> frozenset[str]:
    return frozenset(schema.value.names)


def _check_names(table: TableInfo, rows: Sequence[_Row], *, has_changes: bool) -> None:
    for row_number, row in enumerate(rows):
        for name, value in row.items():
            if has_changes and name == CHANGE_TYPE_COLUMN:
                continue
            if not isinstance(name, str):
                raise SchemaMismatchError(
                    f"table '{table.path}': row {row_number} names a column {name!r:.100}; names of"
                    " columns are texts"
                )
            try:
                table.schema.column(name, table=str(table.path))
            except UnknownColumnError as error:
                hint = ""
                if isinstance(value, Mapping):
                    hint = "; a dict is one row, so give many as a list"
                raise UnknownColumnError(
                    f"{error.message}, but row {row_number} has it{hint}"
                ) from None


def _array(values: Sequence[Any], column: Column, *, table: TableInfo) -> pa.Array:
    t = column.type
    if type_of(t).are_plain(values):
        try:
            return pa.array(values, t)
        except _NO_ARRAY:
            # The next function names the value that is too large, or no text.
            pass
    return _array_one_by_one(values, column, table=str(table.path))


def _array_one_by_one(values: Sequence[Any], column: Column, *, table: str) -> pa.Array:
    t = column.type
    logical = type_of(t)
    values_for_arrow = []
    for row_number, value in enumerate(values):
        try:
            values_for_arrow.append(python_value_of(value, logical))
        except UnfitError as misfit:
            raise _refused(row_number, column, str(misfit), table=table) from None
    try:
        return pa.array(values_for_arrow, t)
    except _NO_ARRAY as error:
        array_error = error
    for row_number, value in enumerate(values_for_arrow):
        try:
            pa.array([value], t)
        except _NO_ARRAY:
            reason = f"{str(value)[:80]!r} does not fit {type_name(t)}"
            raise _refused(row_number, column, reason, table=table) from None
    raise SchemaMismatchError(
        f"table '{table}', column '{column.name}': {array_error}"
    ) from array_error


def _refused(row_number: int, column: Column, reason: str, *, table: str) -> SchemaMismatchError:
    return SchemaMismatchError(
        f"table '{table}', row {row_number}, column '{column.name}': {reason}"
    )


def _text(value: Any) -> str:
    return value if isinstance(value, str) else str(json_value(value))
