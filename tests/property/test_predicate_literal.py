"""Literals moved into the column's type match the rows that Spark's common type matches."""

from __future__ import annotations

import datetime
import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pyarrow as pa
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from streamhouse.core.errors import InvalidPredicateError
from streamhouse.core.model.schema import Schema
from streamhouse.core.model.values.calendar import date_text, timestamp_text
from streamhouse.reading.where.parser import parse_predicate
from streamhouse.reading.where.predicate import Operator
from tests.support.examples import examples
from tests.support.predicate_model import (
    OPERATORS,
    TYPES,
    compare,
    scaled,
    to_batch,
    truth_values,
    values,
)

SCHEMA = Schema.from_arrow(pa.schema(list(TYPES.items())))
DAY_US = 86_400_000_000
EPOCH = datetime.datetime(1970, 1, 1)
EXACT = ("tiny", "small", "number", "big", "price", "wide")

operators = st.sampled_from(OPERATORS)
moments = st.one_of(
    st.datetimes(datetime.datetime(1969, 12, 30), datetime.datetime(1970, 1, 2)), st.datetimes()
)


def _truths(where: str, column: str, cells: list[Any]) -> list[bool | None]:
    batch = to_batch([dict.fromkeys([*TYPES, "place"]) | {column: cell} for cell in cells])
    return truth_values(parse_predicate(where, SCHEMA, table="db.t"), batch)


def _expected(cells: list[Any], operator: Operator, literal: Any) -> list[bool | None]:
    return [None if cell is None else compare(cell, operator, literal) for cell in cells]


@st.composite
def cases(draw: st.DrawFn, *columns: str) -> tuple[str, list[Any]]:
    column = draw(st.sampled_from(columns))
    cell = st.one_of(st.none(), values(TYPES[column]), values(TYPES[column]))
    return column, draw(st.lists(cell, min_size=1, max_size=8))


def _near(cells: list[Any]) -> st.SearchStrategy[Any]:
    return st.sampled_from([cell for cell in cells if cell is not None] or [0])


@given(st.data(), cases(*EXACT), operators, st.integers(0, 12), st.integers(-15, 15))
@settings(max_examples=examples(120))
def test_exact_literals_are_compared_without_truncation(
    data: st.DataObject, case: tuple[str, list[Any]], operator: Operator, scale: int, step: int
) -> None:
    column, cells = case
    unscaled = int(Fraction(data.draw(_near(cells))) * 10**scale) + step
    literal = scaled(unscaled, scale)
    assume(len(literal.as_tuple().digits) <= 38)

    try:
        found = _truths(f"{column} {operator} {literal:f}", column, cells)
    except InvalidPredicateError as error:
        assert "more than 38 digits" in str(error)  # noqa: PT017
        return
    comparable = [None if cell is None else Fraction(cell) for cell in cells]
    assert found == _expected(comparable, operator, Fraction(literal))


@given(st.data(), cases(*EXACT, "ratio", "amount"), operators, st.integers(-2, 2))
@settings(max_examples=examples(120))
def test_double_literals_are_compared_as_doubles(
    data: st.DataObject, case: tuple[str, list[Any]], operator: Operator, steps: int
) -> None:
    column, cells = case
    literal = float(data.draw(_near(cells)))
    for _ in range(abs(steps)):
        literal = math.nextafter(literal, math.copysign(math.inf, steps))

    text = f"{literal!r}D" if math.isfinite(literal) else f"double('{literal!r}')"
    found = _truths(f"{column} {operator} {text}", column, cells)

    doubles = [None if cell is None else float(cell) for cell in cells]
    assert found == _expected(doubles, operator, literal)


@given(st.data(), cases("ratio", "amount"), operators, st.integers(0, 20))
@settings(max_examples=examples(80))
def test_decimal_literals_are_compared_with_floats_as_doubles(
    data: st.DataObject, case: tuple[str, list[Any]], operator: Operator, scale: int
) -> None:
    column, cells = case
    near = data.draw(_near(cells))
    assume(math.isfinite(near) and abs(near) < 1e15)
    literal = scaled(int(Fraction(near) * 10**scale), scale)

    found = _truths(f"{column} {operator} {literal:f}", column, cells)

    assert found == _expected(cells, operator, float(literal))


@given(cases("day", "at", "local"), operators, moments, st.sampled_from("TD"))
@settings(max_examples=examples(120))
def test_dates_and_timestamps_are_compared_as_moments_in_utc(
    case: tuple[str, list[Any]], operator: Operator, moment: datetime.datetime, kind: str
) -> None:
    column, cells = case
    unit = DAY_US if column == "day" else 1
    if kind == "D":
        moment = moment.replace(hour=0, minute=0, second=0, microsecond=0)
        literal = f"DATE '{moment.date()}'"
    else:
        literal = f"TIMESTAMP '{moment}'"

    found = _truths(f"{column} {operator} {literal}", column, cells)

    micros = (moment - EPOCH) // datetime.timedelta(microseconds=1)
    moments_of_cells = [None if cell is None else cell * unit for cell in cells]
    assert found == _expected(moments_of_cells, operator, micros)


@given(cases("day", "at", "local"), operators, st.data())
@settings(max_examples=examples(80))
def test_literals_may_name_any_year(
    case: tuple[str, list[Any]], operator: Operator, data: st.DataObject
) -> None:
    column, cells = case
    unit = DAY_US if column == "day" else 1
    near = data.draw(_near(cells))
    if column == "day":
        literal, micros = f"DATE '{date_text(near)}'", near * DAY_US
    else:
        literal, micros = f"TIMESTAMP '{timestamp_text(near)}'", near

    found = _truths(f"{column} {operator} {literal}", column, cells)

    assert found == _expected([c if c is None else c * unit for c in cells], operator, micros)


@given(cases("at", "local"), operators, st.dates(), st.booleans())
@settings(max_examples=examples(80))
def test_the_date_and_the_year_of_a_timestamp_are_ranges_of_it(
    case: tuple[str, list[Any]], operator: Operator, day: datetime.date, by_year: bool
) -> None:
    column, cells = case
    cells = [
        None if c is None else max(min(c, 200_000_000_000_000_000), -60_000 * 10**12) for c in cells
    ]
    moments = [None if c is None else EPOCH + datetime.timedelta(microseconds=c) for c in cells]
    function, literal = ("year", str(day.year)) if by_year else ("date", f"'{day}'")

    found = _truths(f"{function}({column}) {operator} {literal}", column, cells)

    parts = [None if m is None else m.year if by_year else m.date() for m in moments]
    assert found == _expected(parts, operator, day.year if by_year else day)


@given(cases(*EXACT), st.lists(st.decimals(-200, 200, places=1), min_size=1, max_size=5))
def test_a_list_is_any_of_its_members(case: tuple[str, list[Any]], members: list[Decimal]) -> None:
    column, cells = case

    found = _truths(f"{column} IN ({', '.join(map(str, members))})", column, cells)

    assert found == [None if cell is None else cell in members for cell in cells]
