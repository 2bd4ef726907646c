"""The truth of a predicate for a batch of a single row, without Arrow's calls for whole columns.

A call of `pyarrow.compute` costs some microseconds, however few the rows. Only values whose Python
comparison is Spark's are compared here: integers, booleans, texts and doubles of whole columns. All
other predicates are left to `_evaluation.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import pyarrow as pa

from streamhouse.reading.where.predicate import (
    COMPARISONS,
    And,
    Compare,
    Constant,
    In,
    IsNull,
    Node,
    Not,
    Operator,
    Or,
    PredicateColumn,
)

__all__ = ["NotByRowError", "truth_of_row"]

_PLAIN: Final = frozenset({bool, int, str})


class NotByRowError(Exception):
    """The predicate has a comparison that is not made here."""


def truth_of_row(node: Node, row: pa.RecordBatch) -> bool | None:
    """Return TRUE, FALSE or NULL for a batch of one row; raise `NotByRowError`."""
    match node:
        case Compare(column, sign, value):
            own = _value(column, row)
            if own is None:
                return None
            if type(own) is float:
                return _compare_doubles(own, sign, value, column)
            _check_plain(own, (value,))
            return COMPARISONS[sign](own, value)
        case In(column, values):
            own = _value(column, row)
            if own is None:
                return None
            _check_plain(own, values)
            return own in values
        case IsNull(column):
            return _value(column, row) is None
        case Constant(value):
            return value
        case Not(child):
            truth = truth_of_row(child, row)
            return None if truth is None else not truth
        case And(children):
            return _all(children, row, decisive=False)
        case Or(children):
            return _all(children, row, decisive=True)
    raise NotByRowError


def _all(children: Iterable[Node], row: pa.RecordBatch, *, decisive: bool) -> bool | None:
    """Combine the truths of children; the `decisive` truth of a child decides."""
    result: bool | None = not decisive
    for child in children:
        truth = truth_of_row(child, row)
        if truth is decisive:
            return decisive
        if truth is None:
            result = None
    return result


def _value(column: PredicateColumn, row: pa.RecordBatch) -> Any:
    index = row.schema.get_field_index(column.path[0])
    if index < 0 or len(column.path) > 1:
        raise NotByRowError
    try:
        return row.column(index)[0].as_py()
    except UnicodeDecodeError:
        raise NotByRowError from None


def _check_plain(own: Any, values: Iterable[Any]) -> None:
    kind = type(own)
    if kind not in _PLAIN or any(type(value) is not kind for value in values):
        raise NotByRowError


def _compare_doubles(own: float, sign: Operator, value: Any, column: PredicateColumn) -> bool:
    # A float's literal is rounded to the column's type, and a NaN literal has rules of its own.
    if type(value) is not float or value != value or not pa.types.is_float64(column.type):
        raise NotByRowError
    # Spark has NaN above every number.
    return COMPARISONS[sign](own, value) or (own != own and sign in (">", ">="))
