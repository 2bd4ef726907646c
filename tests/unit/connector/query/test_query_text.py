"""Which tables a statement names, and its text with others in their place."""

from __future__ import annotations

import pytest

from streamhouse.connector.query._query_text import QueryText


def _filled(text: str) -> str:
    """Return the text with V0, V1, ... for the tables in order."""
    read = QueryText.of(text)
    fields = {name: f"v{number}" for number, name in enumerate(read.names)}
    return read.template(fields).format(**{field: field.upper() for field in fields.values()})


@pytest.mark.parametrize(
    ("text", "filled"),
    [
        ("SELECT id FROM db.t", "SELECT id FROM V0 AS `t`"),
        ("SELECT x.id FROM db.t x", "SELECT x.id FROM V0 x"),
        ("SELECT 1 FROM `db`.`t$lake` AS x", "SELECT 1 FROM V0 AS x"),
        ("SELECT db.t.id, db.t.* FROM db.t", "SELECT t.id, t.* FROM V0 AS `t`"),
        ("SELECT t.place.zone FROM db.t", "SELECT t.place.zone FROM V0 AS `t`"),
        (
            "SELECT db.t.place.zone.x FROM db.t JOIN db.u USING (id)",
            "SELECT t.place.zone.x FROM V0 AS `t` JOIN V1 AS `u` USING (id)",
        ),
        (
            "WITH c AS (SELECT * FROM db.t) SELECT 1 FROM c, d /* db.t */ WHERE x = 'db.t {}'",
            "WITH c AS (SELECT * FROM V0 AS `t`) SELECT 1 FROM c, V1 AS `d` /* db.t */"
            " WHERE x = 'db.t {}'",
        ),
        (
            "SELECT 1 FROM db.t WHERE x IN (SELECT y FROM db.t WHERE z = 'it''s \\' é')",
            "SELECT 1 FROM V0 AS `t` WHERE x IN (SELECT y FROM V0 AS `t` WHERE z = 'it''s \\' é')",
        ),
        ("SELECT 1 FROM db.t AS x(a, b)", "SELECT 1 FROM V0 AS x(a, b)"),
        ("SELECT db.t.id FROM e.db db, db.t", "SELECT db.t.id FROM V0 db, V1 AS `t`"),
        (
            "SELECT 1 FROM db.t TABLESAMPLE (5 PERCENT) x",
            "SELECT 1 FROM V0 TABLESAMPLE (5 PERCENT) x",
        ),
    ],
)
def test_only_names_of_tables_are_replaced(text: str, filled: str) -> None:
    assert _filled(text) == filled


@pytest.mark.parametrize(
    "text",
    [
        "SELECT 1",
        "INSERT INTO db.t SELECT 1",
        "SELECT FROM WHERE ((",
        "SELECT 1 FROM db.t; SELECT 2",
        "SELECT 1 FROM db.t VERSION AS OF 3",
        "SELECT * FROM db.t PIVOT (sum(a) FOR b IN (1, 2))",
        "SELECT * FROM range(3)",
    ],
)
def test_what_is_not_surely_read_names_no_table(text: str) -> None:
    read = QueryText.of(text)

    assert read.names == ()
    assert read.template({}).format() == text


@pytest.mark.parametrize(
    ("text", "template"),
    [
        ("SELECT t.a FROM d.t TABLESAMPLE (5 ROWS) WHERE a",
         "SELECT t.a FROM {f} TABLESAMPLE (5 ROWS) AS `t` WHERE a"),
        ("SELECT 1 FROM d.t TABLESAMPLE (1 PERCENT) REPEATABLE (7), d.t AS u",
         "SELECT 1 FROM {f} TABLESAMPLE (1 PERCENT) REPEATABLE (7) AS `t`, {f} AS u"),
        ("SELECT 1 FROM d.t TABLESAMPLE (1 PERCENT) x",
         "SELECT 1 FROM {f} TABLESAMPLE (1 PERCENT) x"),
    ],
)  # fmt: skip
def test_the_alias_of_a_sampled_table_stands_behind_the_sample(text: str, template: str) -> None:
    assert QueryText.of(text).template({("d", "t"): "f"}) == template
