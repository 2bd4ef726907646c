"""The constraints of a table, parsed and judged: `CHECK` with the language of `where`.

A row breaks a constraint if the predicate is FALSE; NULL passes, as in SQL. Times without a zone
are in UTC, whoever writes. Judging is vectorised; the parser is loaded for a table with constraints
only.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from streamhouse.core.errors import (
    CheckFailedError,
    InvalidPredicateError,
    InvalidSchemaError,
    StreamhouseError,
)
from streamhouse.core.extras import require
from streamhouse.core.model.casts.written_rows import in_current_version
from streamhouse.core.model.changelog import OPERATION_UPSERT, operations_of
from streamhouse.core.model.identity import Same
from streamhouse.core.model.schema import CHANGE_TYPE_COLUMN
from streamhouse.core.model.table import TableInfo
from streamhouse.core.model.values.calendar import python_value
from streamhouse.core.model.values.checks import CheckText, check_property
from streamhouse.core.rows.checked_rows import CheckedRows, Misfit, broken_rows
from streamhouse.core.rows.shown_value import shown_value
from streamhouse.reading.where._evaluation import false_rows
from streamhouse.reading.where.predicate import Predicate

__all__ = [
    "NO_CHECKS",
    "BrokenCheck",
    "Check",
    "Checks",
    "check_columns_stay",
    "check_failed",
    "judged",
]

_PREDICATE_SHOWN_MAX: Final = 300
_VALUES_SHOWN_MAX: Final = 8


@dataclass(frozen=True, slots=True)
class Check:
    """One constraint: the text, and the predicate on the table's current columns."""

    text: CheckText
    predicate: Predicate

    def __str__(self) -> str:
        predicate = self.text.predicate
        if len(predicate) > _PREDICATE_SHOWN_MAX:
            predicate = f"{predicate[:_PREDICATE_SHOWN_MAX]}..."
        return f"constraint '{self.text.name}', CHECK ({predicate})"


class BrokenCheck(NamedTuple):
    """A constraint, and which of the judged rows break it: at least one."""

    check: Check
    rows: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Checks:
    """All constraints of a table, for rows of the current schema. Plain values, for any thread."""

    table: str
    checks: tuple[Check, ...]

    def __bool__(self) -> bool:
        return bool(self.checks)

    @staticmethod
    def of_table(info: TableInfo) -> Checks:
        """Return the constraints of a table, cached.

        Raises `StreamhouseError` for a predicate that does not fit the table, with its property.
        """
        return _checks_of(Same(info)) if info.descriptor.checks else NO_CHECKS

    @property
    def texts(self) -> frozenset[CheckText]:
        """The constraints as written."""
        return frozenset(check.text for check in self.checks)

    def only(self, texts: frozenset[CheckText]) -> Checks:
        """Return the constraints with these texts."""
        return Checks(self.table, tuple(c for c in self.checks if c.text in texts))

    def broken(
        self, rows: pa.RecordBatch, *, deletes: npt.NDArray[np.bool_] | None = None
    ) -> Iterator[BrokenCheck]:
        """Yield the constraints that rows break; deletes break none."""
        for check in self.checks:
            mask = false_rows(check.predicate, rows)
            if mask is not None and deletes is not None:
                mask = mask & ~deletes
            if mask is not None and mask.any():
                yield BrokenCheck(check, mask)

    def refuse(
        self,
        rows: pa.RecordBatch,
        *,
        deletes: npt.NDArray[np.bool_] | None = None,
        row_numbers: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """Raise `CheckFailedError` for the first constraint that a row breaks.

        `row_numbers` are the caller's numbers of the rows; the default counts from 0.
        """
        for check, mask in self.broken(rows, deletes=deletes):
            at = int(np.argmax(mask))
            number = at if row_numbers is None else int(row_numbers[at])
            count = int(mask.sum())
            more = f"; {count} rows break it" if count > 1 else ""
            error = CheckFailedError(
                f"table '{self.table}': row {number} breaks {check}:"
                f" {shown_values(check, rows, at)}{more}; nothing was written"
            )
            error.broken = (self.table, check.text.name, count)
            raise error


NO_CHECKS: Final = Checks("", ())


def shown_values(check: Check, rows: pa.RecordBatch, at: int) -> str:
    """Return the values of a constraint's columns in one row, for a message."""
    names = check.predicate.columns[:_VALUES_SHOWN_MAX]
    return ", ".join(f"{name} = {shown_value(rows.column(name)[at])}" for name in names)


def judged(
    info: TableInfo,
    checked: CheckedRows,
    *,
    schema_id: int,
    is_delete: bool = False,
    checks: Checks | None = None,
) -> CheckedRows:
    """Return checked rows with the rows that break a constraint among the misfits.

    The rows are of version `schema_id`, maybe with a column of change types. Deletes and rows
    before an update stay, and so do rows to be merged by aggregates, which the service judges as
    they are after the merge.
    `checks` are the table's, where the parser is not installed.
    """
    checks = Checks.of_table(info) if checks is None else checks
    if is_delete or not checks or not checked.rows.num_rows:
        return checked
    if info.descriptor.merge_rules().aggregates:
        return checked
    rows, others = checked.rows, _without_effect(checked, table=str(info.path))
    if CHANGE_TYPE_COLUMN in rows.schema.names:
        rows = rows.drop_columns([CHANGE_TYPE_COLUMN])
    if schema_id != info.schema_id:
        rows = in_current_version(info, rows, schema_id=schema_id, deletes=others)
    misfits: dict[int, Misfit] = {}
    for check, mask in checks.broken(rows, deletes=others):
        columns = check.predicate.columns
        column = columns[0] if len(columns) == 1 else None
        for row in np.flatnonzero(mask).tolist():
            if row not in misfits:
                reason = f"breaks {check}: {shown_values(check, rows, row)}"
                misfits[row] = Misfit(column, reason, check.text.name)
    return _without(checked, misfits) if misfits else checked


def check_failed(table: str, checked: CheckedRows) -> CheckFailedError | None:
    """Return the error for checked rows whose first misfit breaks a constraint, else None."""
    position, misfit = checked.first_misfit()
    if misfit.constraint is None:
        return None
    count = broken_rows(checked.misfits.values())[misfit.constraint]
    more = f"; {count} rows break it" if count > 1 else ""
    error = CheckFailedError(
        f"table '{table}': row {position} {misfit.reason}{more}; nothing was written"
    )
    error.broken = (table, misfit.constraint, count)
    return error


def _without_effect(checked: CheckedRows, *, table: str) -> npt.NDArray[np.bool_] | None:
    """Return which rows write no values: deletes, and the rows before an update."""
    rows, operations = checked.rows, checked.operations
    if operations is None and CHANGE_TYPE_COLUMN in rows.schema.names:
        operations = operations_of(rows.column(CHANGE_TYPE_COLUMN), table=table)
    return None if operations is None else operations != OPERATION_UPSERT


def _without(checked: CheckedRows, broken: dict[int, Misfit]) -> CheckedRows:
    """Return the rows without the numbers in `broken`, which become misfits."""
    rows, positions = checked.rows, checked.positions
    if positions is None:
        every = np.arange(checked.row_count)
        positions = np.delete(every, list(checked.misfits)) if checked.misfits else every
    keeps = np.ones(rows.num_rows, dtype=np.bool_)
    keeps[list(broken)] = False
    row_at = {int(positions[row]): row for row in broken}
    misfits = checked.misfits | {at: broken[row] for at, row in row_at.items()}

    def original(position: int) -> dict[str, object]:
        row = row_at.get(position)
        if row is None:
            return dict(checked.original_of(position))
        return {name: python_value(rows.column(name)[row]) for name in rows.schema.names}

    return dataclasses.replace(
        checked,
        rows=rows.filter(pa.array(keeps)),
        misfits=dict(sorted(misfits.items())),
        operations=None if checked.operations is None else checked.operations[keeps],
        positions=None if checked.positions is None else positions[keeps],
        original=original,
    )


def check_columns_stay(before: TableInfo, after: TableInfo) -> None:
    """Raise `InvalidSchemaError` if a constraint's column is dropped, renamed or out of type."""
    columns = {column.name: column.id for column in after.schema.columns}
    ids = {column.name: column.id for column in before.schema.columns}
    for check in Checks.of_table(before).checks:
        advice = (
            f"; drop the constraint first (remove property {check_property(check.text.name)}), and"
            " add it again afterwards"
        )
        for name in check.predicate.columns:
            if columns.get(name) != ids[name]:
                raise InvalidSchemaError(
                    f"table '{before.path}': column '{name}' cannot be renamed or dropped: it is"
                    f" used by {check}{advice}"
                )
        try:
            Checks.of_table(after)
        except StreamhouseError as error:
            raise InvalidSchemaError(f"{error.message}{advice}") from error


@functools.lru_cache(maxsize=1_024)
def _checks_of(table: Same) -> Checks:
    info: TableInfo = table.value
    return Checks(
        str(info.path), tuple(_parsed(text, info) for text in sorted(info.descriptor.checks))
    )


def _parsed(text: CheckText, info: TableInfo) -> Check:
    # Loading the parser takes longer than most starts of a table.
    require("lake", "constraints")
    from streamhouse.reading.where.parser import parse_predicate  # noqa: PLC0415 - sqlglot is an extra

    where = f"table '{info.path}': constraint '{text.name}', CHECK ({text.predicate[:200]})"
    try:
        predicate = parse_predicate(text.predicate, info.schema, table=str(info.path))
    except StreamhouseError as error:
        raise type(error)(f"{where}: {error.message.removeprefix('where: ')}") from error
    unknown = [name for name in predicate.columns if name not in info.schema.names]
    if unknown or not predicate.columns:
        why = (
            f"{unknown[0]} is no column of a row that is written" if unknown else "names no column"
        )
        raise InvalidPredicateError(f"{where}: {why}")
    return Check(text, predicate)
