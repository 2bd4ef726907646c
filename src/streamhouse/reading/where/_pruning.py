"""Whether any row of a file or row group can match, from its column statistics.

Invariant: `may_match` is False only if `filter_batch` would keep no row. What is not known
(a missing column, a missing bound, a possible NaN) counts as possible.

Statistics are kept by `PredicateColumn.key`: the column's name, or `a.b` for a field of a struct.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import pyarrow as pa

from streamhouse.core.model.values.calendar import DAY_US
from streamhouse.lake.files.bounds import ColumnStatistics, PlainValue
from streamhouse.reading.where.predicate import (
    NEGATED_OPERATOR,
    And,
    Compare,
    CompareColumns,
    Constant,
    In,
    IsNull,
    Like,
    Node,
    Not,
    Operator,
    Or,
    Predicate,
    comparison_type,
)

__all__ = ["may_match"]

UNKNOWN: Final = ColumnStatistics()


class _Possible(NamedTuple):
    """Which truth values some row may have."""

    true: bool
    false: bool
    null: bool


def may_match(predicate: Predicate, statistics: Mapping[str, ColumnStatistics]) -> bool:
    """Return False if the statistics prove that no row matches `predicate`."""
    return _possible(predicate.root, statistics).true


def _possible(node: Node, statistics: Mapping[str, ColumnStatistics]) -> _Possible:
    match node:
        case Constant(truth):
            return _Possible(truth is True, truth is False, truth is None)
        case Not(child):
            inner = _possible(child, statistics)
            return _Possible(inner.false, inner.true, inner.null)
        case And(children):
            outcomes = [_possible(child, statistics) for child in children]
            return _Possible(
                all(p.true for p in outcomes),
                any(p.false for p in outcomes),
                any(p.null for p in outcomes),
            )
        case Or(children):
            outcomes = [_possible(child, statistics) for child in children]
            return _Possible(
                any(p.true for p in outcomes),
                all(p.false for p in outcomes),
                any(p.null for p in outcomes),
            )
        case CompareColumns():
            return _possible_columns(node, statistics)
    column_statistics = statistics.get(node.column.key, UNKNOWN)
    may_be_null, may_be_valid = _nulls(column_statistics)
    match node:
        case IsNull():
            return _Possible(may_be_null, may_be_valid, False)
        case Compare(column, operator, value):
            is_float = pa.types.is_floating(column.type)
            true = _may(column_statistics, operator, value, is_float=is_float)
            false = _may(column_statistics, NEGATED_OPERATOR[operator], value, is_float=is_float)
        case In(column, values):
            is_float = pa.types.is_floating(column.type)
            true = any(_may(column_statistics, "=", value, is_float=is_float) for value in values)
            false = len(values) != 1 or _may(column_statistics, "!=", values[0], is_float=is_float)
        case Like():
            true = _may_start_with(column_statistics, node.prefix)
            false = node.parts != (None,)
    return _Possible(true and may_be_valid, false and may_be_valid, may_be_null)


def _nulls(statistics: ColumnStatistics) -> tuple[bool, bool]:
    """Return whether a row may be NULL, and whether a row may be something else."""
    if statistics.null_count is None:
        return True, True
    return (
        statistics.null_count > 0,
        statistics.row_count is None or statistics.null_count < statistics.row_count,
    )


def _may(statistics: ColumnStatistics, operator: Operator, value: Any, *, is_float: bool) -> bool:
    """Return whether some non-NULL value may compare TRUE with `value`."""
    low: Any = statistics.minimum
    high: Any = statistics.maximum
    if is_float and math.isnan(value):
        return operator != ">"
    match operator:
        case "=":
            return (low is None or low <= value) and (high is None or high >= value)
        case "!=":
            return is_float or low is None or high is None or not low == value == high
        case "<":
            return low is None or bool(low < value)
        case "<=":
            return low is None or bool(low <= value)
        case ">":
            return is_float or high is None or bool(high > value)
        case ">=":
            return is_float or high is None or bool(high >= value)


def _may_start_with(statistics: ColumnStatistics, prefix: str) -> bool:
    low, high = statistics.minimum, statistics.maximum
    if isinstance(high, str) and high < prefix:
        return False
    # Every string with the prefix is below any `low` whose own beginning is above the prefix.
    return not (isinstance(low, str) and low[: len(prefix)] > prefix)


def _possible_columns(
    node: CompareColumns, statistics: Mapping[str, ColumnStatistics]
) -> _Possible:
    common = comparison_type(node.left.type, node.right.type)
    sides = [statistics.get(column.key, UNKNOWN) for column in (node.left, node.right)]
    nulls = [_nulls(side) for side in sides]
    bounds = [
        [_to_common(value, column.type, common) for value in (side.minimum, side.maximum)]
        for side, column in zip(sides, (node.left, node.right), strict=True)
    ]
    is_float = pa.types.is_floating(common)

    def may(operator: Operator) -> bool:
        (left_low, left_high), (right_low, right_high) = bounds
        may_be_less = left_low is None or right_high is None or left_low < right_high
        may_be_greater = left_high is None or right_low is None or left_high > right_low
        touches = (left_low is None or right_high is None or left_low <= right_high) and (
            left_high is None or right_low is None or left_high >= right_low
        )
        may_be_equal = is_float or touches
        possible = {
            "<": is_float or may_be_less,
            ">": is_float or may_be_greater,
            "=": may_be_equal,
        }
        if operator == "!=":
            return possible["<"] or possible[">"]
        return any(possible[symbol] for symbol in operator)

    may_be_valid = all(valid for _, valid in nulls)
    if node.needs_zone:
        return _Possible(may_be_valid, may_be_valid, any(null for null, _ in nulls))
    return _Possible(
        may(node.operator) and may_be_valid,
        may(NEGATED_OPERATOR[node.operator]) and may_be_valid,
        any(null for null, _ in nulls),
    )


def _to_common(value: PlainValue | None, t: pa.DataType, common: pa.DataType) -> Any:
    """Cast a bound as the evaluation casts the column; each cast keeps the order of values."""
    if value is None:
        return None
    if pa.types.is_floating(common):
        return float(value)
    return int(value) * DAY_US if pa.types.is_date32(t) and common != t else value
