"""What is to be written divided into rows that fit a table and rows that do not.

Rows come as record batches, or as Python's or JSON's values: a column of plain ones becomes an
array in one step, and only what is not plain is read value by value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

import pyarrow as pa

from streamhouse.core.model.casts.conform import check_schema
from streamhouse.core.model.rejected.row_splitter import BadRow, RowSplitter, castable
from streamhouse.core.model.rejected.row_text import column_of
from streamhouse.core.model.schema import CHANGE_TYPE_COLUMN
from streamhouse.core.model.table import TableInfo

__all__ = ["Arranged", "Divided", "arranged", "divide", "divide_arranged", "divide_rows"]


@dataclass(frozen=True, slots=True)
class Divided:
    """Batches of rows that fit, as the table has them, and those that do not.

    Of these, batch by batch: the number of the batch's first row, and its bad rows. `schema_id` is
    the version of the table's schema that rows were divided by; None: their columns say it.
    """

    good: Sequence[pa.RecordBatch]
    bad: Sequence[tuple[int, Sequence[BadRow]]]
    schema_id: int | None = None

    @property
    def good_count(self) -> int:
        """How many rows fit."""
        return sum(batch.num_rows for batch in self.good)

    @property
    def bad_count(self) -> int:
        """How many rows do not."""
        return sum(len(rows) for _, rows in self.bad)


def divide(
    table: TableInfo,
    schema: pa.Schema,
    batches: Iterable[pa.RecordBatch],
    *,
    is_delete: bool = False,
) -> Divided:
    """Divide batches that have one schema; raises for columns that no row of the table could have.

    Neither dictionaries nor views are among the columns.
    """
    has_changes = table.is_primary_key_table and CHANGE_TYPE_COLUMN in schema.names
    own = [field for field in schema if not (has_changes and field.name == CHANGE_TYPE_COLUMN)]
    check_schema(castable(pa.schema(own), table), table.schema, table=str(table.path))
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
    """Rows as columns of the wanted types, before it is seen whether they fit a table.

    `bad` has those with a value that is none of its column, or with a column that is not wanted,
    by their positions: the column, and the reason.
    """

    rows: pa.RecordBatch
    bad: Mapping[int, tuple[str | None, str]]


def arranged(
    types: Mapping[str, pa.DataType],
    rows: Sequence[Mapping[str, Any]],
    *,
    whose: str = "the table",
    defaults: Mapping[str, str] | None = None,
) -> Arranged:
    """Return rows as columns `types`; one that a row does not name is its default, else null."""
    bad: dict[int, tuple[str | None, str]] = {}
    for at, row in enumerate(rows):
        if not row.keys() <= types.keys():
            name = next(name for name in row if name not in types)
            bad[at] = (None, f"{whose} has no column {name[:100]!a}")
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
    whose: str = "the table",
    given: Callable[[int], Mapping[str, Any]] | None = None,
) -> Divided:
    """Divide rows, which are one batch then.

    A column that a row does not name is null in it. Rows of a table with a primary key may say with
    `__change_type` what they change. `whose` the columns are is said of one that is not there.
    `given` is asked what a bad row had; without it that is as in `rows`.
    """
    types = {column.name: column.type for column in table.schema.columns}
    if table.is_primary_key_table and any(CHANGE_TYPE_COLUMN in row for row in rows):
        types[CHANGE_TYPE_COLUMN] = pa.string()
    found = arranged(types, rows, whose=whose, defaults={CHANGE_TYPE_COLUMN: "+U"})
    return divide_arranged(table, found, given or rows.__getitem__)


def divide_arranged(
    table: TableInfo, found: Arranged, given: Callable[[int], Mapping[str, Any]]
) -> Divided:
    """Divide rows that are arranged already; `given` is asked what a bad one had.

    They are one batch.
    """
    batch, bad = found.rows, dict(found.bad)
    kept = [at for at in range(batch.num_rows) if at not in bad]
    if bad:
        batch = batch.take(pa.array(kept, pa.int64()))
    fit, misfits = RowSplitter(table).split(batch)
    bad |= {kept[misfit.position]: (misfit.column, misfit.reason) for misfit in misfits}
    misfitting = [
        BadRow(position=at, column=why[0], reason=why[1], values=dict(given(at)))
        for at, why in sorted(bad.items())
    ]
    return Divided([fit] if fit.num_rows else [], [(0, misfitting)] if bad else [])


def _column(values: Sequence[Any], t: pa.DataType) -> tuple[pa.Array, Mapping[int, str]]:
    """Return what `column_of` does, in one step if the values are plainly of the type."""
    if set(map(type, values)) <= _plain_types(t):
        try:
            return pa.array(values, t), {}
        except (pa.ArrowException, ValueError, OverflowError):
            # Which of them is too large, or no text, is seen one by one.
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
