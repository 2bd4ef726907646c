"""Rows that are dicts as a record batch with the columns of a table.

Values are those that Python has for a column's type; one that is another, or that would be stored
as another, is refused by row and column: no text becomes a number, no fraction is cut off, no time
without a zone becomes a moment. Numbers of numpy count as Python's, and pandas' NA and NaT as None.

A column of plain values becomes an array in one step; only others are looked at one by one.
"""

from __future__ import annotations

import datetime
import functools
from collections.abc import Mapping, Sequence
from decimal import Decimal
from types import NoneType
from typing import Any, Final

import pyarrow as pa

from streamhouse.client.values._python_value import Misfit, python_value_of
from streamhouse.core.errors import SchemaMismatchError, UnknownColumnError
from streamhouse.core.model.identity import Same
from streamhouse.core.model.schema import (
    CHANGE_TYPE_COLUMN,
    Column,
    empty_batch,
    type_name,
)
from streamhouse.core.model.table import TableInfo
from streamhouse.core.model.values.decimals import is_near
from streamhouse.core.model.values.json_values import json_value

__all__ = ["keys_as_arrow", "rows_as_arrow", "rows_as_tried"]

_Row = Mapping[str, Any]
_CHANGE_TYPE: Final = Column(id=0, name=CHANGE_TYPE_COLUMN, type=pa.string())
_NO_ARRAY: Final = (pa.ArrowException, ValueError, TypeError, OverflowError)


def rows_as_arrow(table: TableInfo, rows: Sequence[_Row]) -> pa.RecordBatch:
    """Return rows for `table`.

    To a log table a column that a row does not name is null. Rows of a primary key table have the
    same columns, which may be some of the table's: a forgotten one would take the value away that
    is there. Only deletes, by their `__change_type`, may have no more than the key.

    Raises `SchemaMismatchError` or `UnknownColumnError` naming table, row and column.
    """
    columns = _columns(table, rows)
    arrays = [_array([row.get(c.name) for row in rows], c, table=table) for c in columns]
    if columns is table.schema.columns:
        return pa.RecordBatch.from_arrays(arrays, schema=table.schema.to_arrow())
    return pa.RecordBatch.from_arrays(arrays, names=[column.name for column in columns])


def keys_as_arrow(table: TableInfo, rows: Sequence[_Row]) -> pa.RecordBatch:
    """Return keys of a primary key table, or leading columns of them."""
    if not rows:
        name = str(table.path)
        return empty_batch(table.schema.select(table.descriptor.primary_key, table=name).to_arrow())
    return rows_as_arrow(table, rows)


def rows_as_tried(table: TableInfo, rows: Sequence[_Row]) -> pa.RecordBatch:
    """Return the same for who keeps rows that do not fit: a column with misfits comes as texts."""
    columns = _columns(table, rows)
    arrays = []
    for column in columns:
        values = [row.get(column.name) for row in rows]
        try:
            arrays.append(_array(values, column, table=table))
        except SchemaMismatchError:
            if pa.types.is_nested(column.type):
                raise
            arrays.append(pa.array([None if v is None else _text(v) for v in values], pa.string()))
    return pa.RecordBatch.from_arrays(arrays, names=[column.name for column in columns])


def _columns(table: TableInfo, rows: Sequence[_Row]) -> Sequence[Column]:
    """Return the columns that the rows have, or those of the table; raises for others."""
    known = _known(Same(table.schema))
    named: set[str] = set()
    for row in rows:
        named.update(row)
    has_changes = table.is_primary_key_table and CHANGE_TYPE_COLUMN in named
    if not named <= known:
        _check_names(table, rows, has_changes=has_changes)
    if not rows or not table.is_primary_key_table:
        return table.schema.columns
    chosen = [column for column in table.schema.columns if column.name in named]
    if has_changes:
        return [*chosen, _CHANGE_TYPE]
    for at, row in enumerate(rows):
        if len(row) != len(chosen):
            missing = next(column.name for column in chosen if column.name not in row)
            raise SchemaMismatchError(
                f"table '{table.path}': row {at} has no column '{missing}', which other rows have;"
                " give None to make it null, or write rows with other columns in another call"
            )
    return table.schema.columns if len(chosen) == len(known) else chosen


@functools.lru_cache(maxsize=256)
def _known(schema: Same) -> frozenset[str]:
    return frozenset(schema.value.names)


def _check_names(table: TableInfo, rows: Sequence[_Row], *, has_changes: bool) -> None:
    for at, row in enumerate(rows):
        for name, value in row.items():
            if has_changes and name == CHANGE_TYPE_COLUMN:
                continue
            if not isinstance(name, str):
                raise SchemaMismatchError(
                    f"table '{table.path}': row {at} names a column {name!r:.100}; names of columns"
                    " are texts"
                )
            try:
                table.schema.column(name, table=str(table.path))
            except UnknownColumnError as error:
                hint = ""
                if isinstance(value, Mapping):
                    hint = "; a dict is one row, so give many as a list"
                raise UnknownColumnError(f"{error.message}, but row {at} has it{hint}") from None


def _array(values: Sequence[Any], column: Column, *, table: TableInfo) -> pa.Array:
    t = column.type
    if _are_plain(values, t):
        try:
            return pa.array(values, t)
        except _NO_ARRAY:
            # Which of them is too large, or no text, is seen one by one.
            pass
    return _array_one_by_one(values, column, table=str(table.path))


def _are_plain(values: Sequence[Any], t: pa.DataType) -> bool:
    """Whether Arrow makes these values what they are, or refuses them."""
    plain = _PLAIN.get(t.id)
    if plain is None or not plain.issuperset(map(type, values)):
        return False
    if t.id == _DECIMAL:
        return all(is_near(value) for value in values if type(value) is Decimal)
    if t.id != _TIMESTAMP:
        return True
    is_moment = t.tz is not None
    return all(value is None or (value.tzinfo is not None) == is_moment for value in values)


_TIMESTAMP: Final = pa.timestamp("us").id
_DECIMAL: Final = pa.decimal128(1).id
_INTEGER: Final = frozenset((int, NoneType))
_PLAIN: Final[Mapping[int, frozenset[type]]] = {
    pa.bool_().id: frozenset((bool, NoneType)),
    pa.int8().id: _INTEGER,
    pa.int16().id: _INTEGER,
    pa.int32().id: _INTEGER,
    pa.int64().id: _INTEGER,
    pa.float64().id: frozenset((float, int, NoneType)),
    pa.string().id: frozenset((str, NoneType)),
    pa.binary().id: frozenset((bytes, NoneType)),
    pa.date32().id: frozenset((datetime.date, NoneType)),
    _TIMESTAMP: frozenset((datetime.datetime, NoneType)),
    _DECIMAL: frozenset((Decimal, int, NoneType)),
}


def _array_one_by_one(values: Sequence[Any], column: Column, *, table: str) -> pa.Array:
    t = column.type
    found = []
    for at, value in enumerate(values):
        try:
            found.append(python_value_of(value, t))
        except Misfit as misfit:
            raise _refused(at, column, str(misfit), table=table) from None
    try:
        return pa.array(found, t)
    except _NO_ARRAY as error:
        whole = error
    for at, value in enumerate(found):
        try:
            pa.array([value], t)
        except _NO_ARRAY:
            reason = f"{str(value)[:80]!r} does not fit {type_name(t)}"
            raise _refused(at, column, reason, table=table) from None
    raise SchemaMismatchError(f"table '{table}', column '{column.name}': {whole}") from whole


def _refused(at: int, column: Column, reason: str, *, table: str) -> SchemaMismatchError:
    return SchemaMismatchError(f"table '{table}', row {at}, column '{column.name}': {reason}")


def _text(value: Any) -> str:
    return value if isinstance(value, str) else str(json_value(value))
