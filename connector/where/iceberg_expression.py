"""A predicate as a pyiceberg expression, for pruning manifests, partitions and files of the lake.

Invariant: the expression accepts every row the predicate keeps. It may accept more: what Iceberg
cannot say becomes AlwaysTrue, so the predicate itself is still applied to the rows read.

NOT is pushed down to the leaves first: a weaker expression under a NOT would be a stronger one.
Driver side only; the one predicate module that imports pyiceberg.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any, Final

import pyarrow as pa
from pyiceberg.expressions import (
    AlwaysFalse,
    AlwaysTrue,
    BooleanExpression,
    EqualTo,
    GreaterThan,
    GreaterThanOrEqual,
    IsNaN,
    IsNull,
    LessThan,
    LessThanOrEqual,
    NotEqualTo,
    NotIn,
    NotNaN,
    NotNull,
    NotStartsWith,
    Reference,
    StartsWith,
)
from pyiceberg.expressions import And as IcebergAnd
from pyiceberg.expressions import In as IcebergIn
from pyiceberg.expressions import Or as IcebergOr
from pyiceberg.expressions.literals import (
    BinaryLiteral,
    BooleanLiteral,
    DateLiteral,
    DecimalLiteral,
    DoubleLiteral,
    FloatLiteral,
    Literal,
    LongLiteral,
    StringLiteral,
    TimestampLiteral,
)

from streamhouse.connector.where import predicate as ast
from streamhouse.connector.where.predicate import Operator, PlainValue, Predicate, PredicateColumn
from streamhouse.storage_service.model.calendar import DAY_US, days_of

__all__ = ["to_iceberg_expression"]

# pyiceberg looks at no value of a longer list, so such a list gets its range beside it.
IN_VALUES_PRUNED_MAX: Final = 200

# Python's first day, and the one after its last.
_FIRST_DAY: Final = days_of(1, 1, 1)
_END_DAY: Final = days_of(10_000, 1, 1)

_PREDICATES: Final[dict[Operator, Callable[..., BooleanExpression]]] = {
    "=": EqualTo,
    "!=": NotEqualTo,
    "<": LessThan,
    "<=": LessThanOrEqual,
    ">": GreaterThan,
    ">=": GreaterThanOrEqual,
}


def to_iceberg_expression(predicate: Predicate) -> BooleanExpression:
    """Return an expression over the lake table's columns that accepts every matching row."""
    return _convert(predicate.root, negated=False)


def _convert(node: ast.Node, *, negated: bool) -> BooleanExpression:
    """Accept every row for which `node` is TRUE, or FALSE if `negated`."""
    match node:
        case ast.Constant(truth):
            return AlwaysTrue() if truth is (not negated) else AlwaysFalse()
        case ast.Not(child):
            return _convert(child, negated=not negated)
        case ast.And(children) | ast.Or(children):
            converted = [_convert(child, negated=negated) for child in children]
            return _all(converted) if isinstance(node, ast.And) != negated else _any(converted)
        case ast.CompareColumns(left, _, right):
            return _all([_not_null(left), _not_null(right)])
        case ast.IsNull(column):
            return _not_null(column) if negated else _null(column)
    if not _is_expressible(node.column):
        return AlwaysTrue()
    match node:
        case ast.Compare(column, operator, value):
            symbol = ast.NEGATED_OPERATOR[operator] if negated else operator
            return _compare(column, symbol, value)
        case ast.In():
            return _not_in(node) if negated else _in(node)
        case ast.Like():
            return _like(node, negated=negated)


def _all(expressions: Sequence[BooleanExpression]) -> BooleanExpression:
    return IcebergAnd(*expressions) if len(expressions) > 1 else expressions[0]


def _any(expressions: Sequence[BooleanExpression]) -> BooleanExpression:
    return IcebergOr(*expressions) if len(expressions) > 1 else expressions[0]


def _is_expressible(column: PredicateColumn) -> bool:
    # Iceberg's names of nested fields join the parts with dots, so a dot in a part is ambiguous.
    return not pa.types.is_nested(column.type) and not any("." in part for part in column.path)


def _of_column(
    kind: Callable[..., BooleanExpression], column: PredicateColumn
) -> BooleanExpression:
    return kind(Reference(".".join(column.path)))


def _with_value(
    kind: Callable[..., BooleanExpression], column: PredicateColumn, value: PlainValue
) -> BooleanExpression:
    return kind(Reference(".".join(column.path)), _literal(column, value))


def _with_values(
    kind: Callable[..., BooleanExpression], column: PredicateColumn, values: Sequence[PlainValue]
) -> BooleanExpression:
    return kind(Reference(".".join(column.path)), [_literal(column, value) for value in values])


def _not_null(column: PredicateColumn) -> BooleanExpression:
    return _of_column(NotNull, column) if _is_expressible(column) else AlwaysTrue()


def _null(column: PredicateColumn) -> BooleanExpression:
    # A required field of an optional struct is NULL with the struct, which pyiceberg overlooks.
    is_top_level = len(column.path) == 1
    return _of_column(IsNull, column) if is_top_level and _is_expressible(column) else AlwaysTrue()


def _compare(column: PredicateColumn, operator: Operator, value: PlainValue) -> BooleanExpression:
    if isinstance(value, float) and math.isnan(value):
        match operator:
            case "=" | ">=":
                return _of_column(IsNaN, column)
            case "!=" | "<":
                return _of_column(NotNaN, column)
            case "<=":
                return _of_column(NotNull, column)
            case ">":
                return AlwaysFalse()
    if pa.types.is_date32(column.type) or pa.types.is_timestamp(column.type):
        return _compare_time(column, operator, value)
    compared = _with_value(_PREDICATES[operator], column, value)
    # To Spark NaN is above every number; Iceberg's bounds leave NaN out.
    if isinstance(value, float) and operator in (">", ">="):
        return IcebergOr(compared, _of_column(IsNaN, column))
    return compared


def _compare_time(column: PredicateColumn, operator: Operator, value: Any) -> BooleanExpression:
    """Compare with a date or timestamp, if pyiceberg's transforms know its year."""
    number: int = value
    # Its projections would do the same, and find the next value beyond the years that they know.
    if operator == ">":
        operator, number = ">=", number + 1
    elif operator == "<":
        operator, number = "<=", number - 1
    if not _have_known_years(column, [number]):
        return _of_column(NotNull, column)
    return _with_value(_PREDICATES[operator], column, number)


def _have_known_years(column: PredicateColumn, values: Sequence[Any]) -> bool:
    """Whether Python has all these dates or timestamps; values of other types are always known."""
    if pa.types.is_date32(column.type):
        unit = 1
    elif pa.types.is_timestamp(column.type):
        unit = DAY_US
    else:
        return True
    return all(_FIRST_DAY * unit <= value < _END_DAY * unit for value in values)


def _in(node: ast.In) -> BooleanExpression:
    column = node.column
    if not _have_known_years(column, node.values):
        return _of_column(NotNull, column)
    values = [v for v in node.values if not (isinstance(v, float) and math.isnan(v))]
    expressions: list[BooleanExpression] = []
    if len(values) == 1:
        expressions.append(_compare(column, "=", values[0]))
    elif values:
        expressions.append(_with_values(IcebergIn, column, values))
    if len(values) > IN_VALUES_PRUNED_MAX:
        least, greatest = _range(values)
        low = _with_value(GreaterThanOrEqual, column, least)
        high = _with_value(LessThanOrEqual, column, greatest)
        expressions = [IcebergAnd(expressions[0], low, high)]
    if len(values) < len(node.values):
        expressions.append(_of_column(IsNaN, column))
    return _any(expressions) if expressions else AlwaysFalse()


def _range(values: Sequence[Any]) -> tuple[PlainValue, PlainValue]:
    return min(values), max(values)


def _not_in(node: ast.In) -> BooleanExpression:
    column = node.column
    if not _have_known_years(column, node.values):
        return _of_column(NotNull, column)
    values = [v for v in node.values if not (isinstance(v, float) and math.isnan(v))]
    if len(values) == 1:
        return _compare(column, "!=", values[0])
    if not values:
        return _not_null(column)
    return _with_values(NotIn, column, values)


def _like(node: ast.Like, *, negated: bool) -> BooleanExpression:
    column = node.column
    if not node.prefix:
        return _of_column(NotNull, column)
    if not negated:
        return _with_value(StartsWith, column, node.prefix)
    if node.parts == (node.prefix, None):
        return _with_value(NotStartsWith, column, node.prefix)
    return _of_column(NotNull, column)


def _literal(column: PredicateColumn, value: Any) -> Literal[Any]:
    """Return the literal class of the lake column's type: pyiceberg then converts nothing.

    Its conversions between classes guess (a number for a timestamp, a string for a date) or lose
    (infinity is "above" every float).
    """
    t = column.type
    if pa.types.is_boolean(t):
        return BooleanLiteral(bool(value))
    if pa.types.is_date32(t):
        return DateLiteral(value)
    if pa.types.is_timestamp(t):
        return TimestampLiteral(value)
    if pa.types.is_float32(t):
        return FloatLiteral(value)
    if pa.types.is_float64(t):
        return DoubleLiteral(value)
    if isinstance(value, Decimal):
        return DecimalLiteral(value)
    if isinstance(value, str):
        return StringLiteral(value)
    if isinstance(value, bytes):
        return BinaryLiteral(value)
    return LongLiteral(value)
