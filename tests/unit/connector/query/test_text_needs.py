"""What a statement's own text says that it needs of its tables."""

from __future__ import annotations

import pytest

from streamhouse.connector.query._plan_needs import PlanNeeds, ScanNeeds
from streamhouse.connector.query._query_text import QueryText
from streamhouse.connector.query._text_needs import TextTable, needs_of_text

_COLUMNS = ("id", "k", "word", "day", "place", "odd name")


def _needs(text: str, *, has_usual_literals: bool = True) -> PlanNeeds | None:
    statement = QueryText.of(text)
    tables = {name: TextTable(".".join(name), _COLUMNS) for name in statement.names}
    return needs_of_text(statement, tables, has_usual_literals=has_usual_literals)


def _only(text: str) -> ScanNeeds:
    found = _needs(text)
    assert found is not None
    (scan,) = found.scans
    return scan


def test_columns_are_those_whose_names_stand_in_the_statement() -> None:
    assert _only("SELECT word, k + 1 FROM d.t ORDER BY DAY").columns == ("k", "word", "day")
    assert _only("SELECT `odd name` FROM d.t WHERE idk = 1").columns == ("odd name",)
    assert _only('SELECT count(*) FROM d.t WHERE "k" = 1').columns == ("k",)


@pytest.mark.parametrize(
    "text",
    [
        "SELECT * FROM d.t",
        "SELECT x.* FROM d.t x",
        "SELECT k, place.* FROM d.t",
        "SELECT count(x.*) FROM d.t x",
        "SELECT struct(*) FROM d.t",
        "FROM d.t",
        "FROM d.t |> WHERE k = 1",
        "SELECT k FROM d.t NATURAL JOIN d.u",
        "SELECT a FROM d.t AS x(a, b, c, d, e, f)",
        "SELECT k FROM d.t x PIVOT (sum(k) FOR word IN ('a', 'b'))",
        "SELECT IDENTIFIER('k') FROM d.t",
        "SELECT ${column} FROM d.t",
        "SELECT `(id)?+.+` FROM d.t",
        "SELECT \u017fum(\u212a) FROM d.t",
        "SELECT u.k FROM (d.t JOIN d.u ON t.id = u.id)",
    ],
)
def test_a_statement_that_may_use_unnamed_columns_needs_all(text: str) -> None:
    assert _needs(text) is None


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("SELECT 1 FROM d.t WHERE k > 1 AND word = 'a'", ["(`k` > 1)", "(`word` = 'a')"]),
        ("SELECT 1 FROM d.t x WHERE x.k > 1 OR X.k IS NULL", ["(`k` > 1 OR `k` IS NULL)"]),
        ("SELECT 1 FROM d.t WHERE t.k = 1 AND d.t.id = 2", ["(`k` = 1)", "(`id` = 2)"]),
        ("SELECT 1 FROM d.t WHERE t.place.zone = 1", ["(`place`.`zone` = 1)"]),
        ("SELECT 1 FROM d.t x LEFT JOIN o y ON x.id = y.id WHERE x.k = 1", ["(`k` = 1)"]),
        ("SELECT 1 FROM o y LEFT JOIN d.t x ON x.id = y.id WHERE x.k = 1", []),
        ("SELECT 1 FROM d.t x RIGHT JOIN o y ON x.id = y.id WHERE x.k = 1", []),
        ("SELECT 1 FROM d.t x FULL JOIN o y ON x.id = y.id WHERE x.k = 1", []),
        ("SELECT 1 FROM o y, d.t x WHERE x.k = 1 AND k = 2 AND y.k = 3", ["(`k` = 1)"]),
        ("SELECT 1 FROM d.t LATERAL VIEW explode(word) AS k WHERE k = 1", []),
        ("SELECT 1 FROM d.t TABLESAMPLE (10 PERCENT) x WHERE k = 1", []),
        ("SELECT 1 FROM d.t WHERE day < 'today' AND k = 1", ["(`k` = 1)"]),
        ("SELECT 1 FROM d.t WHERE day < current_date() AND other = 1", ["(`day` < CURRENT_DATE)"]),
        ("SELECT 1 FROM d.t WHERE k IN (SELECT k FROM o WHERE k = 1)", []),
        ("SELECT 1 FROM d.t WHERE word = 'it\\'s' AND k = 1", []),
        ("SELECT 1 FROM d.t day WHERE day.zone = 1", []),
        ("SELECT 1 FROM o WHERE k IN (SELECT x.k FROM d.t x WHERE x.id = o.id)", []),
    ],
)
def test_conditions_are_of_the_table_alone(text: str, wanted: list[str]) -> None:
    found = _needs(text)

    assert found is not None
    (conditions,) = [scan.conditions for scan in found.scans if scan.key == "d.t"]
    assert list(conditions) == wanted


def test_other_literals_drop_no_rows() -> None:
    found = _needs("SELECT id FROM d.t WHERE k = 1", has_usual_literals=False)

    assert found == PlanNeeds((ScanNeeds("d.t", ("id", "k"), (), is_filtered=False),))


def test_each_use_of_a_table_says_what_it_needs() -> None:
    found = _needs("SELECT x.id FROM d.t x, d.t y WHERE x.k = 1 AND y.word = 'a'")

    assert found is not None
    assert [scan.conditions for scan in found.scans] == [("(`k` = 1)",), ("(`word` = 'a')",)]


def test_only_a_count_of_all_rows_is_one() -> None:
    counts = {
        "SELECT count(*) FROM d.t": True,
        "SELECT count(*) AS n FROM d.t x": True,
        "SELECT count(k) FROM d.t": False,
        "SELECT count(*) FROM d.t WHERE k = 1": False,
        "SELECT count(*) FROM d.t GROUP BY k": False,
        "SELECT count(*) FROM d.t HAVING count(*) > 1": False,
        "SELECT count(*) FROM d.t LIMIT 0": False,
        "SELECT count(*) FROM d.t TABLESAMPLE (10 PERCENT) x": False,
        "SELECT count(*) + 1 FROM d.t": False,
        "SELECT count(*) FILTER (WHERE true) FROM d.t": False,
        "SELECT count(DISTINCT *) FROM d.t": False,
    }

    for text, is_counted in counts.items():
        found = _needs(text)
        assert (found is not None and found.counted == "d.t") == is_counted, text
