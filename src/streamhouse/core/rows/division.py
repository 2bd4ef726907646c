"""Rows of a write divided into rows which fit a table and rows which do not.

Rows come as record batches, or as Python or JSON values. A column of plain values becomes an array
in one step; only a column with other values is read value by value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import NoneType
from typing import Any

import pyarrow as pa

from streamhouse.core.model.casts.conform import check_schema
from streamhouse.core.model.schema import CHANGE_TYPE_COLUMN, empty_batch
from streamhouse.core.model.table import TableInfo
from streamhouse.core.rows._row_text import column_of
from streamhouse.core.rows.checked_rows import (
    CheckedRows,
    Misfit,
    Misfits,
    Original,
    ReadRows,
    joined,
)
from streamhouse.core.rows.row_splitter import RowSplitter, castable
from streamhouse.core.types.registry import type_of

__all__ = ["divide", "divide_rows", "read_rows"]


def divide(
    table: TableInfo,
    schema: pa.Schema,
    batches: Iterable[pa.RecordBatch],
    *,
    is_delete: bool = False,
) -> CheckedRows:
    """Divide batches of one schema; raises for columns which no row of the table can have.

    The columns must not be dictionaries or views.
    """
    has_changes = table.is_primary_key_table and CHANGE_TYPE_COLUMN in schema.names
    fields = [field for field in schema if not (has_changes and field.name == CHANGE_TYPE_COLUMN)]
    check_schema(castable(pa.schema(fields), table), table.schema, table=str(table.path))
    splitter = RowSplitter(table, is_delete=is_delete)
    parts = [splitter.split(batch) for batch in batches]
    return joined(parts or [CheckedRows(empty_batch(table.schema.to_arrow()), {})])


def read_rows(
    types: Mapping[str, pa.DataType],
    rows: Sequence[Mapping[str, Any]],
    *,
    owner: str = "the table",
    defaults: Mapping[str, str] | None = None,
) -> ReadRows:
    """Return rows as columns `types`; a column missing from a row has its default, else null.

    A row is a misfit if a value does not have the column's type, or a column is unknown. An error
    for an unknown column names the `owner` of the columns.
    """
    misfits: Misfits = {}
    for at, row in enumerate(rows):
        if not row.keys() <= types.keys():
            name = next(name for name in row if name not in types)
            misfits[at] = Misfit(None, f"{owner} has no column {name[:100]!a}")
    arrays: dict[str, pa.Array] = {}
    for name, t in types.items():
        default = None if defaults is None else defaults.get(name)
        arrays[name], wrong = _column([row.get(name, default) for row in rows], t)
        for at, reason in wrong.items():
            misfits.setdefault(at, Misfit(name, reason))
    return ReadRows(pa.RecordBatch.from_pydict(arrays), misfits, rows.__getitem__)


def divide_rows(
    table: TableInfo,
    rows: Sequence[Mapping[str, Any]],
    *,
    owner: str = "the table",
    original: Original | None = None,
) -> CheckedRows:
    """Divide rows, as one batch.

    A column missing from a row is null. Rows of a table with a primary key may have the kind of
    change in `__change_type`. An error for an unknown column names the `owner` of the columns.
    `original` returns the original values of a misfit, by default from `rows`.
    """
    types = {column.name: column.type for column in table.schema.columns}
    if table.is_primary_key_table and any(CHANGE_TYPE_COLUMN in row for row in rows):
        types[CHANGE_TYPE_COLUMN] = pa.string()
    read = read_rows(types, rows, owner=owner, defaults={CHANGE_TYPE_COLUMN: "+U"})
    return RowSplitter(table).check(ReadRows(read.rows, read.misfits, original or read.original))


def _column(values: Sequence[Any], t: pa.DataType) -> tuple[pa.Array, Mapping[int, str]]:
    """Return the result of `column_of`, in one step if all values are plainly of the type."""
    if set(map(type, values)) <= type_of(t).json_types | {NoneType}:
        try:
            return pa.array(values, t), {}
        except (pa.ArrowException, ValueError, OverflowError):
            # Reading one by one finds the value that is too large or not a text.
            pass
    return column_of(values, t)
