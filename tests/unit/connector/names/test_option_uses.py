"""A text says which names it gives options, and which it uses without any."""

from __future__ import annotations

import pytest

from streamhouse.connector.names._option_uses import is_defined_in, plain_uses, uses_with_options


@pytest.mark.parametrize(
    ("text", "uses"),
    [
        ("SELECT * FROM t", []),
        ("SELECT * FROM t WITH (where = 'id < 3')", [(("t",), {"where": "id < 3"})]),
        (
            "SELECT * FROM db.`t` WITH(`asOfTimestamp` '1', 'Columns'='a,b') x JOIN u with (n = 3)",
            [(("db", "t"), {"asoftimestamp": "1", "columns": "a,b"}), (("u",), {"n": "3"})],
        ),
        ("INSERT INTO t WITH (a = 1) SELECT * FROM t", []),
        ("INSERT INTO TABLE t WITH (a = 1) SELECT 1", []),
        ("WITH c AS (SELECT 't WITH (where = 1)') SELECT * FROM c -- t WITH (a = 1)", []),
        ("WITH (SELECT 1)", []),
    ],
)
def test_names_with_options(text: str, uses: list[tuple[tuple[str, ...], dict[str, str]]]) -> None:
    assert list(map(tuple, uses_with_options(text))) == uses


def test_names_without_options() -> None:
    text = "SELECT a.id, b FROM t a, db.u JOIN `v` w WITH x, y WITH (n = 1)"
    names = list(plain_uses(text))
    assert [name for name in names if name[-1] in "tuv"] == [("t",), ("db", "u"), ("v",)]
    assert ("y",) not in names


def test_a_query_of_the_statement_is_no_table() -> None:
    text = "WITH a AS (SELECT 1), `b` (x) AS (SELECT 2) SELECT * FROM a WITH (where = 'x'), c"
    assert is_defined_in(("a",), text)
    assert is_defined_in(("b",), text)
    assert not is_defined_in(("c",), text)
    assert not is_defined_in(("db", "a"), text)
