"""A predicate as an expression of the lake, for pruning manifests and partitions.

Invariant: the expression accepts every row the predicate keeps. The expression may accept more
rows, so the predicate is still applied to the rows read.

NOT is pushed down to the leaves first: a weaker expression under a NOT would be a stronger
expression. Driver side only.
"""

from __future__ import annotations

import math

from streamhouse.lake.files.bounds import PlainValue
from streamhouse.lake.snapshots.expressions import (
    Expression,
    FilterColumn,
    all_of,
    any_of,
    any_row,
    no_row,
)
from streamhouse.reading.where import predicate as ast
from streamhouse.reading.where.predicate import Operator, Predicate, PredicateColumn

__all__ = ["to_iceberg_expression"]


def to_iceberg_expression(predicate: Predicate) -> Expression:
    """Return an expression over the lake table's columns that accepts every matching row."""
    return _convert(predicate.root, negated=False)


def _convert(node: ast.Node, *, negated: bool) -> Expression:
    """Accept every row for which `node` is TRUE, or FALSE if `negated`."""
    match node:
        case ast.Constant(truth):
            return any_row() if truth is (not negated) else no_row()
        case ast.Not(child):
            return _convert(child, negated=not negated)
        case ast.And(children) | ast.Or(children):
            converted = [_convert(child, negated=negated) for child in children]
            return all_of(converted) if isinstance(node, ast.And) != negated else any_of(converted)
        case ast.CompareColumns(left=left, right=right):
            return all_of([_column(left).is_not_null(), _column(right).is_not_null()])
        case ast.IsNull(column):
            return _column(column).is_not_null() if negated else _column(column).is_null()
    lake_column = _column(node.column)
    if not lake_column.is_expressible:
        return any_row()
    match node:
        case ast.Compare(_, operator, value):
            symbol = ast.NEGATED_OPERATOR[operator] if negated else operator
            return _compare(lake_column, symbol, value)
        case ast.In(_, values):
            return _not_in(lake_column, values) if negated else _in(lake_column, values)
        case ast.Like():
            return _like(lake_column, node, negated=negated)


def _column(column: PredicateColumn) -> FilterColumn:
    return FilterColumn(column.path, column.type)


def _compare(column: FilterColumn, operator: Operator, value: PlainValue) -> Expression:
    if _is_nan(value):
        match operator:
            case "=" | ">=":
                return column.is_nan()
            case "!=" | "<":
                return column.is_not_nan()
            case "<=":
                return column.is_not_null()
            case ">":
                return no_row()
    compared = column.compare(operator, value)
    # To Spark NaN is above every number; Iceberg's bounds leave NaN out.
    if isinstance(value, float) and operator in (">", ">="):
        return any_of([compared, column.is_nan()])
    return compared


def _in(column: FilterColumn, values: tuple[PlainValue, ...]) -> Expression:
    numbers = [value for value in values if not _is_nan(value)]
    expressions = [column.is_in(numbers)] if numbers else []
    if len(numbers) < len(values):
        expressions.append(column.is_nan())
    return any_of(expressions) if expressions else no_row()


def _not_in(column: FilterColumn, values: tuple[PlainValue, ...]) -> Expression:
    numbers = [value for value in values if not _is_nan(value)]
    return column.is_not_in(numbers) if numbers else column.is_not_null()


def _like(column: FilterColumn, node: ast.Like, *, negated: bool) -> Expression:
    if not node.prefix:
        return column.is_not_null()
    if not negated:
        return column.starts_with(node.prefix)
    if node.parts == (node.prefix, None):
        return column.does_not_start_with(node.prefix)
    return column.is_not_null()


def _is_nan(value: PlainValue) -> bool:
    return isinstance(value, float) and math.isnan(value)
