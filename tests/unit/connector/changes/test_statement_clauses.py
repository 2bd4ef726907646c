"""Row-level statements as text: their clauses, their refusals, their parameters and names."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum
from typing import Any

import pytest

from streamhouse.connector.changes._bound_text import bound_text
from streamhouse.connector.changes._side_names import with_qualifiers
from streamhouse.connector.changes._statement_clauses import (
    MergeText,
    RowText,
    check_truncation,
    merge_of,
    rows_of,
)
from streamhouse.connector.names._name_loads import ChangesUse
from streamhouse.connector.names._row_changes import Arguments
from streamhouse.connector.names._table_statement import statement_of
from streamhouse.core.errors import InvalidRequestError, StreamhouseError, UnsupportedError


def _clauses(text: str) -> Any:
    statement = statement_of(text)
    assert statement is not None
    if statement.verb == "TRUNCATE TABLE":
        return check_truncation(statement)
    return (merge_of if statement.verb == "MERGE" else rows_of)(statement)


def test_a_merge_is_read_into_its_clauses_and_keeps_the_text_of_expressions() -> None:
    merge = _clauses("""
        WITH c AS (SELECT 1 AS id) -- the source
        MERGE INTO shop.acc t USING (SELECT *, 'WHEN MATCHED' AS w FROM c) AS s
        ON t.id = s.id AND t.x > 'a''b'
        WHEN MATCHED AND CASE WHEN s.a THEN s.b ELSE s.c END THEN DELETE
        WHEN MATCHED AND EXISTS (SELECT 1 FROM c) THEN UPDATE SET t.v = s.v + 1, `w x` == f(s.a, 3)
        WHEN MATCHED THEN UPDATE SET *
        WHEN NOT MATCHED BY TARGET AND s.x > 1 THEN INSERT (id, v) VALUES (s.id, greatest(1, 2))
        WHEN NOT MATCHED THEN INSERT *
        WHEN NOT MATCHED BY SOURCE THEN UPDATE SET v = 0;
    """)
    assert isinstance(merge, MergeText)
    with_c = "WITH c AS (SELECT 1 AS id)"
    assert merge.source == f"{with_c} SELECT * FROM (SELECT *, 'WHEN MATCHED' AS w FROM c) AS s"
    assert (merge.target_alias, merge.source_alias) == ("t", "s")
    assert merge.on == "(t.id = s.id AND t.x > 'a''b'\n)"
    assert merge.equal_columns == {"id": "id"}
    assert [(c.method, c.condition, c.values) for c in merge.clauses] == [
        ("when_matched_delete", "(CASE WHEN s.a THEN s.b ELSE s.c END\n)", None),
        (
            "when_matched_update",
            f"(EXISTS ({with_c} (SELECT 1 FROM c))\n)",
            {"v": "(s.v + 1\n)", "w x": "(f(s.a, 3)\n)"},
        ),
        ("when_matched_update_all", None, None),
        ("when_not_matched_insert", "(s.x > 1\n)", {"id": "s.id", "v": "(greatest(1, 2)\n)"}),
        ("when_not_matched_insert_all", None, None),
        ("when_not_matched_by_source_update", None, {"v": "(0\n)"}),
    ]


def test_names_of_tables_are_shortened_to_aliases() -> None:
    merge = _clauses(
        "MERGE INTO shop.acc USING shop.pay ON shop.acc.id = shop.pay.user"
        " WHEN MATCHED THEN UPDATE SET shop.acc.v = shop.pay.v"
    )
    assert merge.on == "acc.id = pay.user"
    assert merge.clauses[0].values == {"v": "pay.v"}
    assert _clauses("DELETE FROM a.t WHERE a.t.id = 'a.t.id'") == RowText(
        alias="t", where="(t.id = 'a.t.id'\n)"
    )


def test_updates_and_deletes_are_read() -> None:
    assert _clauses("UPDATE t AS x SET x.v = v IS DISTINCT FROM 1, w = a[1] WHERE r'\\' = x.p") == (
        RowText(
            alias="x",
            where="(r'\\' = x.p\n)",
            values={"v": "(v IS DISTINCT FROM 1\n)", "w": "(a[1]\n)"},
        )
    )
    assert _clauses("UPDATE t SET v = 1. WHERE id = 2") == (
        RowText(alias="t", where="(id = 2\n)", values={"v": "(1.\n)"})
    )
    assert _clauses("DELETE FROM t -- old\rWHERE id = 2").where == "(id = 2\n)"
    assert _clauses("DELETE FROM t") == RowText(alias="t", where=None)
    assert _clauses("TRUNCATE TABLE t;") is None


@pytest.mark.parametrize("condition", ["a OR t.id = s.id", "t.x BETWEEN 1 AND t.id = s.id"])
def test_a_comparison_that_need_not_hold_equates_no_columns(condition: str) -> None:
    merge = _clauses(f"MERGE INTO t USING s ON {condition} WHEN MATCHED THEN DELETE")
    assert merge.equal_columns == {}


_MERGE = "MERGE INTO t USING s ON t.id = s.id "


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("DELETE FROM t LIMIT 3", "'LIMIT 3' behind the table is no alias"),
        ("DELETE FROM t USING s WHERE t.id = s.id", "clause USING.*MERGE INTO"),
        ("DELETE FROM t WHERE id = 3) OR (true", "closes nothing"),
        ("DELETE FROM t WHERE (id = 3", "has no end"),
        ("DELETE FROM t WHERE", "needs a condition"),
        ("UPDATE t SET a = 1 FROM s WHERE t.id = s.id", "clause FROM.*MERGE INTO"),
        ("UPDATE t SET a = 1, A = 2", "'A' is named twice"),
        ("UPDATE t SET a.b = 1", "a field inside a column"),
        ("UPDATE t SET a", "SET takes column = value"),
        ("UPDATE t SET a =", "expression is missing"),
        ("UPDATE t SET a = DEFAULT", "value DEFAULT"),
        (
            "MERGE INTO t USING u CHANGES FROM VERSION :v s ON t.a = s.a WHEN MATCHED THEN DELETE",
            "bounds that are numbers or texts",
        ),
        ("UPDATE t", "SET column = value"),
        ("TRUNCATE TABLE t PARTITION (a = 1)", "clause PARTITION.*DELETE FROM"),
        (_MERGE, "WHEN"),
        ("MERGE INTO t USING s ON WHEN MATCHED THEN DELETE", "USING source ON condition"),
        ("MERGE INTO t USING s x y ON true WHEN MATCHED THEN DELETE", "USING takes"),
        (_MERGE + "WHEN MATCHED THEN DELETE WHEN MATCHED THEN DELETE", "only the last"),
        (_MERGE + "WHEN NOT MATCHED THEN DELETE", "is no clause; the clauses are"),
        (_MERGE + "WHEN NOT MATCHED BY FRIENDS THEN INSERT *", "is no clause"),
        (_MERGE + "WHEN NOT MATCHED BY SOURCE THEN UPDATE SET *", "needs a source"),
        (_MERGE + "WHEN MATCHED AND THEN DELETE", "expression is missing"),
        (_MERGE + "WHEN NOT MATCHED THEN INSERT VALUES (1)", "an insert is"),
        (_MERGE + "WHEN NOT MATCHED THEN INSERT (a, b) VALUES (1)", "2 columns .* and 1 values"),
        ("MERGE WITH SCHEMA EVOLUTION INTO t USING s ON true WHEN MATCHED THEN DELETE", "ADD COL"),
    ],
)
def test_a_clause_that_cannot_be_is_refused_by_its_name(text: str, sentence: str) -> None:
    with pytest.raises(StreamhouseError, match=sentence):
        _clauses(text)


@pytest.mark.parametrize(
    ("text", "explain", "ctes"),
    [
        ("EXPLAIN DELETE FROM t", "", ""),
        ("explain formatted with c as (select ')') delete from t", "FORMATTED",
         "with c as (select ')')"),
        ("WITH c (a) AS (SELECT 1), d AS (SELECT 2) DELETE FROM t", None,
         "WITH c (a) AS (SELECT 1), d AS (SELECT 2)"),
    ],
)  # fmt: skip
def test_a_statement_may_stand_behind_explain_and_ctes(
    text: str, explain: str | None, ctes: str
) -> None:
    statement = statement_of(text)
    assert statement is not None
    assert (statement.verb, statement.name) == ("DELETE", ("t",))
    assert (statement.explain, statement.ctes) == (explain, ctes)


@pytest.mark.parametrize(
    "text",
    ["EXPLAIN SELECT 'delete'", "WITH c AS (SELECT 1) SELECT * FROM c -- update",
     "WITH update AS (SELECT 1) SELECT * FROM update", "EXPLAIN ALTER TABLE t DROP COLUMN merge"],
)  # fmt: skip
def test_a_query_that_names_a_verb_is_sparks(text: str) -> None:
    assert statement_of(text) is None


def _bound(text: str, args: Any = None, **values: Any) -> str:
    with bound_text(text, Arguments(args, values)) as bound:
        return bound


def test_parameters_become_literals_of_their_types() -> None:
    assert _bound("a = :a AND b = ':a' AND c::int = :b", {"a": 1, "b": None, "int": 2}) == (
        "a = (1) AND b = ':a' AND c::int = NULL"
    )
    args = [True, 1.5, Decimal("1.50"), "it", "it's", b"\x01", date(2026, 1, 2), float("inf")]
    assert _bound("?|?|?|?|?|?|?|?|'?'", args) == (
        "TRUE|(1.5D)|(1.50BD)|'it'|CAST(X'69742773' AS STRING)|X'01'|DATE '2026-01-02'"
        "|CAST('inf' AS DOUBLE)|'?'"
    )
    # A sign behind a minus begins no comment, and a member of an Enum is its value.
    colors = Enum("colors", {"RED": "red"}, type=str)
    sizes = Enum("sizes", {"SMALL": -1}, type=int)
    assert _bound(
        "a -:d-:i-:e = :c", {"d": Decimal(-1), "i": -2, "e": sizes.SMALL, "c": colors.RED}
    ) == ("a -(-1BD)-(-2)-(-1) = 'red'")
    moment = datetime(2026, 1, 2, 3, 4, 5, 67, UTC)
    assert _bound("{at}{{}}", at=moment) == "timestamp_micros(1767323045000067L){}"


@pytest.mark.parametrize(
    ("text", "args"),
    [
        ("USING t CHANGES FROM VERSION :v TO VERSION :w c ON", {"v": 7, "w": "9"}),
        ("USING t CHANGES FROM VERSION ? TO VERSION ? c ON", [7, 9]),
    ],
)
def test_parameters_are_bounds_of_changes(text: str, args: Any) -> None:
    uses: list[ChangesUse] = []
    with bound_text(text, Arguments(args, {}), lambda use: uses.append(use)) as bound:
        assert "(7)" in bound  # No DataFrame was loaded, so the clause stays.
    assert [dict(use.options) for use in uses] == [{"startingversion": "7", "endingversion": "9"}]


@pytest.mark.parametrize(
    ("text", "args", "sentence"),
    [
        ("a = ?", [1, 2], r"has 1 parameters '\?', and args has 2"),
        ("a = ? AND b = ?", [1], r"more than 1 parameters"),
        ("a = :a", {"a": [1]}, ":a is a list"),
    ],
)
def test_parameters_that_do_not_fit_are_refused(text: str, args: Any, sentence: str) -> None:
    with pytest.raises((InvalidRequestError, UnsupportedError), match=sentence):
        _bound(text, args)
    with pytest.raises(InvalidRequestError, match="placeholder"):
        _bound("{b}", a=1)


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("id", "`s`.id"),
        ("s.id + v", "s.id + v"),
        ("(place.zone + `id`\n)", "(`s`.place.zone + `s`.`id`\n)"),
        ("transform(tags, id -> id + 1)", "transform(tags, id -> id + 1)"),
        ("named_struct('id', id)", "named_struct('id', `s`.id)"),
        ("id IN (SELECT id FROM x)", "`s`.id IN (SELECT id FROM x)"),
        ("id +", "id +"),
    ],
)
def test_a_column_of_both_sides_gets_the_name_of_its_side(expression: str, expected: str) -> None:
    assert with_qualifiers(expression, "s", {"id", "place", "day"}) == expected
