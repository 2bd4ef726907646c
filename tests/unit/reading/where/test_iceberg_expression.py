"""The lake expression says as much as Iceberg can; soundness is tests/property's job."""

from __future__ import annotations

import pyarrow as pa
import pytest
from pyiceberg.expressions import (
    AlwaysFalse,
    AlwaysTrue,
    And,
    BooleanExpression,
    EqualTo,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNaN,
    IsNull,
    LessThan,
    LessThanOrEqual,
    NotEqualTo,
    NotIn,
    NotNull,
    NotStartsWith,
    Or,
    StartsWith,
)
from pyiceberg.expressions.literals import DateLiteral, FloatLiteral, TimestampLiteral

from streamhouse.core.model.schema import Schema
from streamhouse.reading.where._iceberg_expression import to_iceberg_expression
from streamhouse.reading.where.parser import parse_predicate

SCHEMA = Schema.from_arrow(
    pa.schema(
        [
            ("id", pa.int64()),
            ("ratio", pa.float32()),
            ("name", pa.string()),
            ("day", pa.date32()),
            ("at", pa.timestamp("us", tz="UTC")),
            ("tags", pa.list_(pa.string())),
            ("a.b", pa.int32()),
            ("place", pa.struct([("zone", pa.int32())])),
        ]
    )
)


def _expression(where: str) -> BooleanExpression:
    return to_iceberg_expression(parse_predicate(where, SCHEMA, table="db.t"))


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("id = 1", EqualTo("id", 1)),
        ("id <= 1.5", LessThanOrEqual("id", 1)),
        ("id = 1.5", AlwaysFalse()),
        ("NOT id = 1.5", NotNull("id")),
        ("NOT (id < 1 OR name = 'a')", And(GreaterThanOrEqual("id", 1), NotEqualTo("name", "a"))),
        ("NOT (id < 1 AND name = 'a')", Or(GreaterThanOrEqual("id", 1), NotEqualTo("name", "a"))),
        ("id IN (1, 2)", In("id", {1, 2})),
        ("id NOT IN (1, 2)", NotIn("id", {1, 2})),
        ("id NOT IN (1, NULL)", AlwaysFalse()),
        ("id IS NULL", IsNull("id")),
        ("name LIKE 'a%b'", StartsWith("name", "a")),
        ("name NOT LIKE 'a%'", NotStartsWith("name", "a")),
        ("name NOT LIKE 'a%b'", NotNull("name")),
        ("name LIKE '%b'", NotNull("name")),
        ("day = '1970-01-03'", EqualTo("day", DateLiteral(2))),
        (
            "date(at) = '1970-01-02'",
            And(
                GreaterThanOrEqual("at", TimestampLiteral(86_400_000_000)),
                LessThanOrEqual("at", TimestampLiteral(172_799_999_999)),
            ),
        ),
        ("day > '9999-12-30'", GreaterThanOrEqual("day", DateLiteral(2_932_896))),
        ("day > '9999-12-31'", NotNull("day")),
        ("day >= '+10000-01-01'", NotNull("day")),
        ("day = '0000-12-31'", NotNull("day")),
        ("day IN ('-0001-01-01', '1970-01-01')", NotNull("day")),
        ("day NOT IN ('-0001-01-01', '1970-01-01')", NotNull("day")),
        ("at < '0001-01-01'", NotNull("at")),
        ("ratio > 1.5", Or(GreaterThan("ratio", FloatLiteral(1.5)), IsNaN("ratio"))),
        ("ratio < 1.5", LessThan("ratio", FloatLiteral(1.5))),
        ("isnan(ratio)", And(NotNull("ratio"), IsNaN("ratio"))),
        ("id = __offset", And(NotNull("id"), NotNull("__offset"))),
        ("place.zone = 1", EqualTo("place.zone", 1)),
        ("place.zone IS NULL", AlwaysTrue()),
        ("tags IS NULL", AlwaysTrue()),
        ("`a.b` = 1", AlwaysTrue()),
        ("NULL", AlwaysFalse()),
    ],
)
def test_a_predicate_becomes_this_expression(where: str, expected: BooleanExpression) -> None:
    assert _expression(where) == expected


def test_a_list_too_long_for_pyiceberg_is_bounded_by_its_range() -> None:
    numbers = ", ".join(map(str, range(500)))

    expression = _expression(f"id IN ({numbers})")

    assert isinstance(expression, And)
    text = repr(expression)
    assert repr(GreaterThanOrEqual("id", 0)) in text
    assert repr(LessThanOrEqual("id", 499)) in text
