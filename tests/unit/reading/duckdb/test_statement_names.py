"""Which columns of tables a statement can mean: the others may be left out, DuckDB itself says."""

from __future__ import annotations

import json
from typing import Any

import duckdb
import pytest

from streamhouse.reading.duckdb._statement_names import columns_named, has_joins, tables_named

T, U = ("db", "t"), ("", "u")
COLUMNS = {T: ("id", "a", "b", "place", "x"), U: ("id", "c", "d")}


def _tree(statement: str) -> Any:
    row = duckdb.execute("SELECT json_serialize_sql(?)", [statement]).fetchone()
    assert row is not None
    tree = json.loads(row[0])
    assert not tree["error"], tree
    return tree


def _answer(statement: str, columns: dict[tuple[str, str], list[str]]) -> list[Any]:
    """What the statement finds where the tables have these columns only."""
    values = {
        "id": "i",
        "a": "i % 3",
        "b": "i * 2",
        "c": "i % 2",
        "d": "i + 5",
        "x": "i % 4",
        "place": "{'zone': i % 5, 'a': i}",
    }
    with duckdb.connect() as connection:
        connection.execute("CREATE SCHEMA db")
        for (database, table), names in columns.items():
            selected = ", ".join(f"{values[name]} AS {name}" for name in names)
            name = f"{database or 'main'}.{table}"
            connection.execute(f"CREATE TABLE {name} AS SELECT {selected} FROM range(6) r(i)")
        found = connection.execute(statement)
        header = [column[0] for column in found.description]
        return [header, *sorted(found.fetchall(), key=repr)]


NAMED = {
    "SELECT a FROM db.t": ({"a"}, {"a"}),
    "SELECT T.A, u.c FROM db.t JOIN u USING (id)": ({"id", "a", "t", "u", "c"},) * 2,
    "SELECT x.b FROM db.t AS x, u WHERE x.id = u.id AND EXISTS (SELECT * FROM u WHERE u.c = x.a)": (
        {"x", "b", "id", "u", "c", "a"},
    )
    * 2,
    "SELECT * FROM (SELECT a FROM db.t) q": ({"a"}, {"a"}),
    "SELECT place.zone FROM db.t": ({"place", "zone"},) * 2,
    "SELECT count(*) FROM db.t, u": (set(), set()),
    "SELECT sum(t.t) FROM (SELECT a AS t FROM db.t AS r) t": ({"a", "t"},) * 2,
    "SELECT *, c FROM u": ({"c"}, None),
    "SELECT * FROM u, (SELECT a FROM db.t) q": ({"a"}, None),
    "SELECT x.* FROM db.t x JOIN u ON x.id = u.id": (None, None),
    "SELECT x FROM db.t x": (None, {"x"}),
    "SELECT t FROM db.t": (None, {"t"}),
    "SELECT db.t FROM db.t": (None, {"db", "t"}),
    "SELECT (SELECT t.a) FROM db.t": ({"t", "a"},) * 2,
    "SELECT a FROM db.t NATURAL JOIN u": (None, None),
    "SELECT p FROM u AS v(p, q, r)": ({"p"}, None),
    "FROM db.t PIVOT (sum(b) FOR a IN (0, 1))": (None, {"a", "b"}),
    "SELECT a, #2 FROM db.t": (None, {"a"}),
    "SELECT COLUMNS('i.*') FROM u": (set(), None),
    "SELECT column_name FROM (DESCRIBE u)": ({"column_name"}, None),
    "WITH u AS (SELECT 7 AS n) SELECT n FROM u, db.t": ({"n"},) * 2,
    "SELECT a FROM db.t UNION BY NAME SELECT c FROM u": ({"a", "c"},) * 2,
    "SELECT a, count(*) FROM db.t GROUP BY ALL": ({"a"},) * 2,
    "SELECT a FROM db.t WHERE id IN (SELECT c FROM u)": ({"a", "id", "c"},) * 2,
}


@pytest.mark.parametrize("statement", NAMED)
def test_all_columns_that_a_statement_can_mean_are_named(statement: str) -> None:
    tree = _tree(statement)
    named = columns_named(tree, [T, U])

    for table, expected in zip((T, U), NAMED[statement], strict=True):
        if table in tables_named(tree):
            assert named[table] == expected
    kept = {
        table: [c for c in columns if names is None or c in names] or [columns[0]]
        for (table, columns), names in zip(COLUMNS.items(), named.values(), strict=True)
    }
    assert _answer(statement, kept) == _answer(statement, {t: [*c] for t, c in COLUMNS.items()})


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("WITH c AS (SELECT * FROM db.t) SELECT sum(a) FROM c", False),
        ("SELECT a FROM db.t UNION SELECT c FROM u", False),
        ("SELECT a FROM db.t, u", True),
        ("SELECT a FROM db.t WHERE id IN (SELECT id FROM u)", True),
    ],
)
def test_joins_are_seen(statement: str, expected: bool) -> None:
    assert has_joins(_tree(statement)) is expected
