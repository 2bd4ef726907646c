"""What `where` accepts, what it refuses, and in which words."""

from __future__ import annotations

import pyarrow as pa
import pytest

from streamhouse.core.errors import InvalidPredicateError, UnknownColumnError
from streamhouse.core.model.schema import Schema
from streamhouse.reading.where.parser import parse_predicate
from streamhouse.reading.where.predicate import (
    And,
    Compare,
    CompareColumns,
    Constant,
    In,
    IsNull,
    Like,
    Node,
    Not,
    Or,
    PredicateColumn,
)

TYPES: dict[str, pa.DataType] = {
    "id": pa.int32(),
    "price": pa.decimal128(9, 2),
    "ratio": pa.float32(),
    "amount": pa.float64(),
    "name": pa.string(),
    "flag": pa.bool_(),
    "day": pa.date32(),
    "at": pa.timestamp("us", tz="UTC"),
    "local": pa.timestamp("us"),
    "raw": pa.binary(),
    "tags": pa.list_(pa.string()),
    "end": pa.int32(),
    "a.b": pa.int32(),
    "place": pa.struct([("zone", pa.int32()), ("x", pa.int32())]),
}
SCHEMA = Schema.from_arrow(pa.schema(list(TYPES.items())))
ID, NAME, FLAG = (PredicateColumn((name,), TYPES[name]) for name in ("id", "name", "flag"))
AT = PredicateColumn(("at",), TYPES["at"])


def _root(text: str) -> Node:
    return parse_predicate(text, SCHEMA, table="db.t").root


def _message(text: str) -> str:
    with pytest.raises(InvalidPredicateError) as caught:
        _root(text)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "root"),
    [
        ("ID = 3", Compare(ID, "=", 3)),
        ("3 < id", Compare(ID, ">", 3)),
        ("id <= 3.5", Compare(ID, "<=", 3)),
        ("id > 3.5", Compare(ID, ">", 3)),
        ("id >= 3.5", Compare(ID, ">=", 4)),
        ("id = 3.5", In(ID, ())),
        ("id != 3.5", Not(In(ID, ()))),
        ("id < 3000000000", Not(In(ID, ()))),
        ("id = NULL", Constant(None)),
        ("id <=> NULL", IsNull(ID)),
        ("id <=> 1", And((Not(IsNull(ID)), Compare(ID, "=", 1)))),
        ("id IN (1, 2, 1)", In(ID, (1, 2))),
        ("id NOT IN (1, NULL)", Not(Or((In(ID, (1,)), Constant(None))))),
        ("id BETWEEN 1 AND 2", And((Compare(ID, ">=", 1), Compare(ID, "<=", 2)))),
        ("flag", Compare(FLAG, "=", True)),
        ("NOT flag", Not(Compare(FLAG, "=", True))),
        ("flag IS NOT UNKNOWN", Not(IsNull(FLAG))),
        ("name LIKE 'a%'", Like(NAME, ("a", None))),
        ("name LIKE '%%__b'", Like(NAME, (None, 2, "b"))),
        ("name LIKE 'a/%' ESCAPE '/'", Compare(NAME, "=", "a%")),
        ("name NOT LIKE 'a'", Not(Compare(NAME, "=", "a"))),
        ("endswith(name, '%')", Like(NAME, (None, "%"))),
        ("contains(name, '')", Like(NAME, (None,))),
        ("name = 'it''s'", Compare(NAME, "=", "it's")),
        ("name = 'a' 'b'", Compare(NAME, "=", "ab")),
        (r"name = '\u0041\n'", Compare(NAME, "=", "A\n")),
        (r"name = r'\u0041\n'", Compare(NAME, "=", r"\u0041\n")),
        ("name = name", CompareColumns(NAME, "=", NAME)),
        ("at = '1970-01-01 01:00:00+01:00'", Compare(AT, "=", 0)),
        ("`a.b` = 1", Compare(PredicateColumn(("a.b",), pa.int32()), "=", 1)),
        ("end = 1", Compare(PredicateColumn(("end",), pa.int32()), "=", 1)),
        ("tags IS NULL", IsNull(PredicateColumn(("tags",), TYPES["tags"]))),
        ("__bucket = 1", Compare(PredicateColumn(("__bucket",), pa.int32()), "=", 1)),
        ("'a' < 'b'", Constant(True)),
        ("id = 1 -- why", Compare(ID, "=", 1)),
    ],
)
def test_an_expression_becomes_this_tree(text: str, root: Node) -> None:
    assert _root(text) == root


def test_and_binds_tighter_than_or_and_not_tighter_than_both() -> None:
    one, two, three = (Compare(ID, "=", n) for n in (1, 2, 3))

    assert _root("NOT id = 1 OR id = 2 AND id = 3") == Or((Not(one), And((two, three))))


@pytest.mark.parametrize(
    ("text", "piece"),
    [
        ("id + 1 = 2", "id + 1"),
        ("upper(name) = 'A'", "UPPER(name)"),
        ("name ILIKE 'a'", "ILIKE"),
        ("name RLIKE 'a'", "RLIKE"),
        ("name LIKE ANY ('a')", "LIKE ANY"),
        ("id IN (SELECT 1)", "SELECT 1"),
        ("id IN (id)", "id"),
        ("id IN (1, '2')", "mixes strings"),
        ("id BETWEEN SYMMETRIC 2 AND 1", "BETWEEN"),
        ("id = 1 = flag", "id = 1"),
        ("tags[0] = 'a'", "tags[0]"),
        ("tags = tags", "tags"),
        ("place = 1", "place"),
        ("date(at) = at", "CAST(at AS DATE) = at"),
        ("at > current_timestamp()", "CURRENT_TIMESTAMP"),
        ("CASE WHEN flag THEN true END", "CASE"),
        ("id = :id", ":id"),
        ("id = 'x'", "'x'"),
        ("name = 3", "3"),
        ("flag = 1", "1"),
        ("day = 1", "1"),
        ("day = 'today'", "'today'"),
        ("at = '2024-01-01 00:00:00 Europe/Paris'", "Europe/Paris"),
        ("local = '2024-01-01 00:00:00Z'", "time zone"),
        ("amount = 1e999", "1e999"),
        ("price = 0.1234567890123456789012345678901234567", "38 digits"),
        ("try_cast('1' as int) = id", "TRY_CAST"),
        ("isnan(id)", "ISNAN(id)"),
        ("id LIKE '1'", "id"),
        ("raw LIKE 'a'", "raw"),
        (r"name = '\ud800'", "Unicode"),
    ],
)
def test_what_is_not_supported_is_named_with_the_way_out(text: str, piece: str) -> None:
    message = _message(text)

    assert piece in message
    assert message.startswith("where: ")
    assert message.endswith("filter the rows after the read")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "empty"),
        ("  ", "empty"),
        ("id = 1; DROP TABLE t", "near"),
        ("id = 1 ORDER BY id", "near 'ORDER BY'"),
        ("id = ", "near '='"),
        ("name = 'open", "quote"),
        ("id", "not a condition"),
        # In Spark double quotes make a text.
        ("\"name\" = 'tea'", "the column is name or `name`, without quotes"),
        ("'5' < \"ID\"", "the column is id or `id`"),
        ("'name' <=> 'x'", "the column is name"),
        ("name LIKE 'a/b' ESCAPE '/'", "escape character '/'"),
        ("name LIKE 'a' ESCAPE 'xy'", "one character"),
        ("name = '\ud800'", "Unicode"),
    ],
)
def test_what_is_no_condition_is_refused_in_a_sentence(text: str, words: str) -> None:
    assert words in _message(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nmae = 'a'", "table 'db.t' has no column 'nmae'; did you mean 'name'?"),
        ("place.zon = 1", "has no field 'zon'; did you mean 'zone'?"),
        ("id.x = 1", "column 'id' of table 'db.t' is not a struct"),
        ("__retracts = 1", "no column '__retracts'"),
    ],
)
def test_an_unknown_column_is_named_with_a_suggestion(text: str, words: str) -> None:
    with pytest.raises(UnknownColumnError) as caught:
        _root(text)

    assert words in str(caught.value)


def test_limits_are_refused_before_they_cost_anything() -> None:
    assert "nested deeper" in _message("(" * 60 + "flag" + ")" * 60)
    assert "nested deeper" in _message("NOT " * 60 + "flag")
    assert "10001 values" in _message(f"id IN ({', '.join(map(str, range(10_001)))})")
    assert "characters" in _message("flag AND " * 40_000 + "flag")
    assert "conditions" in _message(" OR ".join(["flag"] * 5_001))


def test_long_flat_expressions_within_the_limits_are_fine() -> None:
    chain = _root(" AND ".join(["flag"] * 4_000))
    listed = _root(f"id IN ({', '.join(map(str, range(10_000)))})")

    assert isinstance(chain, And)
    assert len(chain.children) == 4_000
    assert isinstance(listed, In)
    assert len(listed.values) == 10_000
