"""Rows of a write divided into rows which fit a table and rows which do not.

Rows come as record batches, or as Python or JSON values. A column of plain values becomes an array
in one step; only a column with other values is read value by value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

import pyarrow as pa

from streamhouse.core.model.casts.conform import check_schema
from streamhouse.core.model.schema import CHANGE_TYPE_COLUMN
from streamhouse.core.model.table import TableInfo
from streamhouse.core.rows.row_splitter import BadRow, RowSplitter, castable
from streamhouse.core.rows.row_text import column_of

__all__ = ["Arranged", "Divided", "arranged", "divide", "divide_arranged", "divide_rows"]


@dataclass(frozen=True, slots=True)
class Divided:
    """Batches of fitting rows with the table's schema, and the bad rows.

    `bad` has pairs of the number of a batch's first row and the bad rows of the batch. `schema_id`
    is the schema version used for the division; None: the columns determine the version.
    """

    good: Sequence[pa.RecordBatch]
    bad: Sequence[tuple[int, Sequence[BadRow]]]
    schema_id: int | None = None

    @property
    def good_count(self) -> int:
        """The number of fitting rows."""
        return sum(batch.num_rows for batch in self.good)

    @property
    def bad_count(self) -> int:
        """The number of bad rows."""
        return sum(len(rows) for _, rows in self.bad)


def divide(
    table: TableInfo,
    schema: pa.Schema,
    batches: Iterable[pa.RecordBatch],
    *,
    is_delete: bool = False,
) -> Divided:
    """Divide batches of one schema; raises for columns which no row of the table can have.

    The columns must not be dictionaries or views.
    """
    has_changes = table.is_primary_key_table and CHANGE_TYPE_COLUMN in schema.names
    fields = [field for field in schema if not (has_changes and field.name == CHANGE_TYPE_COLUMN)]
    check_schema(castable(pa.schema(fields), table), table.schema, table=str(table.path))
    splitter = RowSplitter(table, is_delete=is_delete)
    good: list[pa.RecordBatch] = []
    bad: list[tuple[int, Sequence[BadRow]]] = []
    first = 0
    for batch in batches:
        fit, misfits = splitter.split(batch)
        if fit.num_rows:
            good.append(fit)
        if misfits:
            bad.append((first, misfits))
        first += batch.num_rows
    return Divided(good, bad)


@dataclass(frozen=True, slots=True)
class Arranged:
    """Rows as columns of the requested types, before the check against a table.

    `bad` maps the position of a row to a column and a reason: a value does not have the column's
    type, or the row has an unknown column.
    """

    rows: pa.RecordBatch
    bad: Mapping[int, tuple[str | None, str]]


def arranged(
    types: Mapping[str, pa.DataType],
    rows: Sequence[Mapping[str, Any]],
    *,
    owner: str = "the table",
    defaults: Mapping[str, str] | None = None,
) -> Arranged:
    """Return rows as columns `types`; a column missing from a row has its default, else null."""
    bad: dict[int, tuple[str | None, str]] = {}
    for at, row in enumerate(rows):
        if not row.keys() <= types.keys():
            name = next(name for name in row if name not in types)
            bad[at] = (None, f"{owner} has no column {name[:100]!a}")
    arrays: dict[str, pa.Array] = {}
    for name, t in types.items():
        default = None if defaults is None else defaults.get(name)
        arrays[name], wrong = _column([row.get(name, default) for row in rows], t)
        for at, reason in wrong.items():
            bad.setdefault(at, (name, reason))
    return Arranged(pa.RecordBatch.from_pydict(arrays), bad)


def divide_rows(
    table: TableInfo,
    rows: Sequence[Mapping[str, Any]],
    *,
    owner: str = "the table",
    original: Callable[[int], Mapping[str, Any]] | None = None,
) -> Divided:
    """Divide rows, as one batch.

    A column missing from a row is null. Rows of a table with a primary key may have the kind of
    change in `__change_type`. An error for an unknown column names the `owner` of the columns.
    `original` returns the original values of a bad row, by default from `rows`.
    """
    types = {column.name: column.type for column in table.schema.columns}
    if table.is_primary_key_table and any(CHANGE_TYPE_COLUMN in row for row in rows):
        types[CHANGE_TYPE_COLUMN] = pa.string()
    columns = arranged(types, rows, owner=owner, defaults={CHANGE_TYPE_COLUMN: "+U"})
    return divide_arranged(table, columns, original or rows.__getitem__)


def divide_arranged(
    table: TableInfo, columns: Arranged, original: Callable[[int], Mapping[str, Any]]
) -> Divided:
    """Divide arranged rows, as one batch; `original` returns the original values of a bad row."""
    batch, bad = columns.rows, dict(columns.bad)
    positions = [at for at in range(batch.num_rows) if at not in bad]
    if bad:
        batch = batch.take(pa.array(positions, pa.int64()))
    fit, misfits = RowSplitter(table).split(batch)
    bad |= {positions[misfit.position]: (misfit.column, misfit.reason) for misfit in misfits}
    misfitting = [
        BadRow(position=at, column=why[0], reason=why[1], values=dict(original(at)))
        for at, why in sorted(bad.items())
    ]
    return Divided([fit] if fit.num_rows else [], [(0, misfitting)] if bad else [])


def _column(values: Sequence[Any], t: pa.DataType) -> tuple[pa.Array, Mapping[int, str]]:
    """Return the result of `column_of`, in one step if all values are plainly of the type."""
    if set(map(type, values)) <= _plain_types(t):
        try:
            return pa.array(values, t), {}
        except (pa.ArrowException, ValueError, OverflowError):
            # Reading one by one finds the value that is too large or not a text.
            pass
    return column_of(values, t)


def _plain_types(t: pa.DataType) -> frozenset[type]:
    if pa.types.is_boolean(t):
        return frozenset((bool, NoneType))
    if pa.types.is_integer(t):
        return frozenset((int, NoneType))
    if pa.types.is_floating(t):
        return frozenset((int, float, NoneType))
    return frozenset((str, NoneType)) if pa.types.is_string(t) else frozenset((NoneType,))
