"""Comparisons of a column with SQL literals, moved into the column's own type without losing rows.

Spark compares in a common type: `int_column = 3.5` as decimals, `bigint_column < 1e0` as doubles,
`date_column > TIMESTAMP '..'` as timestamps. Each of these casts of the column is monotone, so the
matching values are a range of the column's own values; the ends of the range are computed here,
once. The result compares the column with plain values of its own type and matches exactly the same
rows.

A time without a zone is in the caller's zone, the zone of the Spark session. The cast to a wall
clock time is not monotone: where clocks are put back or forward, a comparison becomes ranges of
moments (`Zone.moments_reaching`). Parsing SQL is left to parser.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Final, TypeAlias

import numpy as np
import pyarrow as pa

from streamhouse.core.errors import InvalidPredicateError
from streamhouse.core.model.schema import type_name
from streamhouse.core.model.values.calendar import DAY_US, days_of
from streamhouse.core.model.values.decimals import decimal_of
from streamhouse.core.model.values.zone import UTC, Zone
from streamhouse.core.types.logical_type import PlainValue
from streamhouse.core.types.registry import type_of
from streamhouse.reading.where._text import parse_date, parse_double, parse_timestamp, refuse
from streamhouse.reading.where.predicate import (
    COMPARISONS,
    And,
    Compare,
    Constant,
    In,
    Node,
    Not,
    Operator,
    Or,
    PredicateColumn,
    decimal_shape,
)

__all__ = [
    "DateOf",
    "Literal",
    "Subject",
    "YearOf",
    "compare",
    "fold",
    "in_list",
    "to_float32",
]

DECIMAL_DIGITS_MAX: Final = 38
_INTEGER_TEXT: Final = re.compile(r"[+-]?\d{1,38}", re.ASCII)
_TRUE_TEXTS: Final = frozenset({"t", "true", "y", "yes", "1"})
_FALSE_TEXTS: Final = frozenset({"f", "false", "n", "no", "0"})


@dataclass(frozen=True, slots=True)
class Literal:
    """A literal of the SQL text.

    A date is days since 1970, a timestamp microseconds since 1970 in UTC, a timestamp_ntz
    microseconds of a wall clock.
    """

    # null, boolean, exact, double, string, binary, date, timestamp or timestamp_ntz
    kind: str
    value: bool | Decimal | float | str | bytes | int | None
    text: str


@dataclass(frozen=True, slots=True)
class DateOf:
    """`date(column)` of a timestamp column."""

    column: PredicateColumn


@dataclass(frozen=True, slots=True)
class YearOf:
    """`year(column)` of a date or timestamp column."""

    column: PredicateColumn


Subject: TypeAlias = PredicateColumn | DateOf | YearOf


@dataclass(frozen=True, slots=True, kw_only=True)
class _Domain:
    """The values of a discrete type, as numbers; neighbours differ by 1."""

    lowest: int
    highest: int
    scale: int = 0


def compare(subject: Subject, op: Operator, literal: Literal, *, zone: Zone = UTC) -> Node:
    """Return the node that matches exactly the rows for which Spark finds `subject op literal`."""
    if literal.kind == "null":
        return Constant(None)
    if isinstance(subject, PredicateColumn):
        column, data_type = subject, subject.type
    else:
        column = subject.column
        data_type = pa.date32() if isinstance(subject, DateOf) else pa.int32()
    if pa.types.is_floating(data_type):
        return _compare_float(column, op, _as_double(data_type, literal))
    if pa.types.is_nested(data_type):
        raise refuse(f"column '{column}' of type {type_name(data_type)} cannot be compared")
    if type_of(data_type).least is None:
        return Compare(column, op, _as_unordered(data_type, literal))
    if pa.types.is_timestamp(data_type) and data_type.tz is None and literal.kind == "timestamp":
        # Spark casts the column to a timestamp, so its wall clock times are read in the zone.
        moment = literal.value
        assert isinstance(moment, int)
        return _node_of_ranges(column, op, *map(zone.walls_reaching, (moment, moment + 1)))
    first_equal, first_above = _cut(data_type, literal, zone)
    if isinstance(subject, DateOf):
        first_equal, first_above = first_equal * DAY_US, first_above * DAY_US
    elif isinstance(subject, YearOf):
        day = type_of(column.type).day or DAY_US
        first_equal, first_above = (days_of(y, 1, 1) * day for y in (first_equal, first_above))
    if not isinstance(subject, PredicateColumn) and _has_zone(column.type):
        return _node_of_ranges(column, op, *map(zone.moments_reaching, (first_equal, first_above)))
    return _node_of_cut(column, op, first_equal, first_above)


def in_list(subject: Subject, literals: Sequence[Literal], *, zone: Zone = UTC) -> Node:
    """Return the node for `subject IN (literals)`."""
    kinds = {literal.kind for literal in literals} - {"null"}
    data_type = subject.type if isinstance(subject, PredicateColumn) else None
    if len(kinds) > 1 and "string" in kinds:
        raise refuse("an IN list that mixes strings with other literals is not supported")
    if "double" in kinds and data_type is not None and not pa.types.is_floating(data_type):
        # Spark compares the whole list in one type, which is double as soon as one member is.
        literals = [_to_double(literal) for literal in literals]
    column = subject if isinstance(subject, PredicateColumn) else subject.column
    values: list[PlainValue] = []
    comparisons: list[Node] = []
    for literal in literals:
        node = compare(subject, "=", literal, zone=zone)
        if isinstance(node, Compare):
            values.append(node.value)
        elif not isinstance(node, In) and node not in comparisons[-1:]:
            comparisons.append(node)
    nodes: list[Node] = (
        [In(column, tuple(dict.fromkeys(values)))] if values or not comparisons else []
    )
    nodes += comparisons
    return nodes[0] if len(nodes) == 1 else Or(tuple(nodes))


def fold(left: Literal, op: Operator, right: Literal) -> Constant:
    """Return the value of a comparison of two literals of one kind."""
    if "null" in (left.kind, right.kind):
        return Constant(None)
    if left.kind != right.kind or left.kind == "double":
        raise refuse(f"comparing {left.text} with {right.text} is not supported")
    return Constant(COMPARISONS[op](left.value, right.value))


def to_float32(value: float) -> float:
    """Return the nearest float32, infinite when too large."""
    with np.errstate(over="ignore"):
        return float(np.float32(value))


def _has_zone(t: pa.DataType) -> bool:
    return pa.types.is_timestamp(t) and t.tz is not None


def _domain(t: pa.DataType) -> _Domain:
    if pa.types.is_decimal(t):
        highest = 10**t.precision - 1
        return _Domain(lowest=-highest, highest=highest, scale=t.scale)
    half: int = 1 << (t.bit_width - 1)
    return _Domain(lowest=-half, highest=half - 1)


def _mismatch(t: pa.DataType, literal: Literal) -> InvalidPredicateError:
    return refuse(f"a column of type {t} cannot be compared with {literal.text}")


def _to_double(literal: Literal) -> Literal:
    if literal.kind != "exact":
        return literal
    assert isinstance(literal.value, Decimal)
    return Literal("double", float(literal.value), literal.text)


def _as_double(t: pa.DataType, literal: Literal) -> float:
    if literal.kind in ("exact", "double"):
        assert isinstance(literal.value, Decimal | float)
        return float(literal.value)
    if isinstance(literal.value, str):
        return parse_double(literal.value)
    raise _mismatch(t, literal)


def _as_unordered(t: pa.DataType, literal: Literal) -> PlainValue:
    """The value for a boolean, string or binary column."""
    value = literal.value
    if pa.types.is_boolean(t):
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.strip().lower() in _TRUE_TEXTS | _FALSE_TEXTS:
            return value.strip().lower() in _TRUE_TEXTS
    elif isinstance(value, str):
        return value if pa.types.is_string(t) else value.encode()
    elif isinstance(value, bytes) and pa.types.is_binary(t):
        return value
    raise _mismatch(t, literal)


def _compare_float(column: PredicateColumn, op: Operator, value: float) -> Node:
    value += 0.0  # turns -0.0 into 0.0, its equal
    if pa.types.is_float64(column.type) or math.isnan(value) or to_float32(value) == value:
        return Compare(column, op, value)
    if op in ("=", "!="):
        return _constant_if_valid(column, value=op == "!=")
    if op in ("<", "<="):
        return Compare(column, "<=", -_float32_at_least(-value) + 0.0)
    return Compare(column, ">=", _float32_at_least(value) + 0.0)


def _float32_at_least(value: float) -> float:
    near = to_float32(value)
    return near if near >= value else float(np.nextafter(np.float32(near), np.float32(np.inf)))


def _cut(t: pa.DataType, literal: Literal, zone: Zone) -> tuple[int, int]:
    """Return the first numbers of the type's domain that are >= and > the literal.

    The numbers may lie outside the domain, by any distance for an exact literal.
    """
    if pa.types.is_date32(t) or pa.types.is_timestamp(t):
        return _time_cut(t, literal, zone)
    value = literal.value
    if isinstance(value, str):
        if pa.types.is_decimal(t):
            return _double_cut(_domain(t), parse_double(value))
        if not _INTEGER_TEXT.fullmatch(value.strip()):
            raise refuse(f"'{value}' is not an integer, as the column is")
        return _exact_cut(int(value))
    if literal.kind == "double" and isinstance(value, float):
        return _double_cut(_domain(t), value)
    if literal.kind == "exact" and isinstance(value, Decimal):
        _check_digits(t, value, literal.text)
        return _exact_cut(Fraction(value) * 10 ** decimal_shape(t)[1])
    raise _mismatch(t, literal)


def _time_cut(t: pa.DataType, literal: Literal, zone: Zone) -> tuple[int, int]:
    value = literal.value
    if pa.types.is_date32(t):
        if literal.kind == "timestamp" and isinstance(value, int):
            return zone.day_reaching(value), zone.day_reaching(value + 1)
        if literal.kind == "timestamp_ntz" and isinstance(value, int):
            return _exact_cut(Fraction(value, DAY_US))
        return _exact_cut(_days(t, literal))
    if literal.kind == "timestamp" and isinstance(value, int):
        return _exact_cut(value)
    if literal.kind == "timestamp_ntz" and isinstance(value, int):
        return _exact_cut(zone.moment_of(value) if _has_zone(t) else value)
    if isinstance(value, str):
        return _exact_cut(parse_timestamp(value, zone=zone if _has_zone(t) else None))
    days = _days(t, literal)
    return _exact_cut(zone.midnight(days) if _has_zone(t) else days * DAY_US)


def _days(t: pa.DataType, literal: Literal) -> int:
    if isinstance(literal.value, str):
        return parse_date(literal.value)
    if literal.kind == "date" and isinstance(literal.value, int):
        return literal.value
    raise _mismatch(t, literal)


def _check_digits(t: pa.DataType, value: Decimal, text: str) -> None:
    exponent = value.as_tuple().exponent
    assert isinstance(exponent, int)
    integer_digits, fraction_digits = decimal_shape(t)
    integer_digits = max(integer_digits, len(value.as_tuple().digits) + exponent)
    if integer_digits + max(fraction_digits, -exponent) > DECIMAL_DIGITS_MAX:
        raise refuse(
            f"comparing {t} with {text} needs more than {DECIMAL_DIGITS_MAX} digits,"
            " so Spark would round"
        )


def _exact_cut(number: Fraction | int) -> tuple[int, int]:
    return math.ceil(number), math.floor(number) + 1


def _double_cut(domain: _Domain, value: float) -> tuple[int, int]:
    """Search the domain by halves: doubles and values have the same order."""

    def first(is_reached: Callable[[float], bool]) -> int:
        low, high = domain.lowest, domain.highest + 1
        while low < high:
            middle = (low + high) // 2
            if is_reached(
                float(decimal_of(middle, domain.scale)) if domain.scale else float(middle)
            ):
                high = middle
            else:
                low = middle + 1
        return low

    return first(lambda double: double >= value), first(lambda double: double > value)


def _node_of_cut(column: PredicateColumn, op: Operator, first_equal: int, first_above: int) -> Node:
    domain = _domain(column.type)
    if op in ("<", ">="):
        return _bound(column, op, first_equal)
    if op in ("<=", ">"):
        return _bound(column, op, first_above)
    width = first_above - first_equal
    is_inside = domain.lowest <= first_equal <= domain.highest
    if width == 0 or (width == 1 and not is_inside):
        return _constant_if_valid(column, value=op == "!=")
    if width == 1:
        return Compare(column, op, _plain(column, first_equal))
    both = And((_bound(column, ">=", first_equal), _bound(column, "<", first_above)))
    return both if op == "=" else Not(both)


def _node_of_ranges(
    column: PredicateColumn,
    op: Operator,
    equal: list[tuple[int, int | None]],
    above: list[tuple[int, int | None]],
) -> Node:
    """Return the node for `op`: `equal` are values >= the literal, `above` values > the literal."""
    if len(equal) == len(above) == 1:
        return _node_of_cut(column, op, equal[0][0], above[0][0])

    def within(ranges: list[tuple[int, int | None]]) -> Node:
        nodes: list[Node] = []
        for start, end in ranges:
            first = _bound(column, ">=", start)
            nodes.append(first if end is None else And((first, _bound(column, "<", end))))
        return nodes[0] if len(nodes) == 1 else Or(tuple(nodes))

    match op:
        case ">=":
            return within(equal)
        case "<":
            return Not(within(equal))
        case ">":
            return within(above)
        case "<=":
            return Not(within(above))
    node = And((within(equal), Not(within(above))))
    return node if op == "=" else Not(node)


def _bound(column: PredicateColumn, symbol: Operator, first: int) -> Node:
    """Compare with the number `first`; `<=` and `>` name the number before it instead."""
    domain = _domain(column.type)
    if not domain.lowest < first <= domain.highest:
        is_below = first > domain.highest
        return _constant_if_valid(column, value=is_below == (symbol in ("<", "<=")))
    return Compare(column, symbol, _plain(column, first - 1 if symbol in ("<=", ">") else first))


def _plain(column: PredicateColumn, number: int) -> PlainValue:
    is_decimal = pa.types.is_decimal(column.type)
    return decimal_of(number, _domain(column.type).scale) if is_decimal else number


def _constant_if_valid(column: PredicateColumn, *, value: bool) -> Node:
    """TRUE or FALSE, but NULL where the column is NULL."""
    return Not(In(column, ())) if value else In(column, ())
