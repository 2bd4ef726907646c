"""The clause CHANGES in a statement: what is replaced, with which options, and what stays."""

from __future__ import annotations

import pytest

from streamhouse.connector.names._name_loads import ChangesUse, replace_changes
from streamhouse.core.errors import UnsupportedError

_FIELD = "streamhouse_changes_0"


def _replaced(text: str) -> tuple[str, list[ChangesUse]]:
    uses: list[ChangesUse] = []

    def load(use: ChangesUse) -> object:
        uses.append(use)
        return object()

    return replace_changes(text, load)[0], uses


@pytest.mark.parametrize(
    ("relation", "expected", "options"),
    [
        ("t CHANGES FROM VERSION 1", f"{_FIELD} AS `t`", {"startingversion": "1"}),
        ("a.`b c` changes from version '7' c", f"{_FIELD} c", {"startingversion": "7"}),
        (
            "t CHANGES FROM VERSION 1 EXCLUSIVE TO VERSION 2 INCLUSIVE AS c",
            f"{_FIELD} AS c",
            {
                "startingversion": "1",
                "startingboundinclusive": "false",
                "endingversion": "2",
                "endingboundinclusive": "true",
            },
        ),
        (
            "t CHANGES FROM TIMESTAMP '2026-01-01' TO TIMESTAMP TIMESTAMP '2026-01-02' WHERE 1=1",
            f"{_FIELD} AS `t` WHERE 1=1",
            {"startingtimestamp": "2026-01-01", "endingtimestamp": "2026-01-02"},
        ),
        (
            "t CHANGES FROM SYSTEM_VERSION 3 WITH (computeUpdates = true, 'x' = ')') JOIN u",
            f"{_FIELD} AS `t` JOIN u",
            {"startingversion": "3", "computeupdates": "true", "x": ")"},
        ),
        (
            "t CHANGES FROM VERSION (1) TO VERSION ('2') c",
            f"{_FIELD} c",
            {"startingversion": "1", "endingversion": "2"},
        ),
        ("STREAM t CHANGES", f"{_FIELD} AS `t`", {}),
        ("STREAM t CHANGES FROM VERSION 1 q", f"{_FIELD} q", {"startingversion": "1"}),
    ],
)
def test_a_relation_with_changes_is_replaced(
    relation: str, expected: str, options: dict[str, str]
) -> None:
    text, (use,) = _replaced(f"SELECT * FROM {relation}")

    assert text == f"SELECT * FROM {expected}"
    assert dict(use.options) == options
    assert use.is_stream == relation.startswith("STREAM")


@pytest.mark.parametrize(
    "definition",
    [
        "CREATE VIEW v",
        "CREATE OR REPLACE GLOBAL TEMPORARY VIEW v",
        "ALTER VIEW v",
        "BEGIN SELECT 1; CREATE TEMP VIEW v",
        "CREATE FUNCTION f() RETURNS INT RETURN",
    ],
)
def test_a_text_that_outlives_the_changes_is_refused(definition: str) -> None:
    with pytest.raises(UnsupportedError, match=r"use streamhouse\.changes\("):
        _replaced(f"{definition} AS SELECT max(v) FROM t CHANGES FROM VERSION 1")
    assert _replaced(f"{definition} AS SELECT max(v) FROM t")[1] == []


@pytest.mark.parametrize(
    "text",
    [
        "SELECT changes FROM t",
        "SELECT a changes FROM version",
        "SELECT b, a changes FROM version v",
        "SELECT b, a changes FROM version WHERE b > 1",
        "SELECT * FROM t changes",
        "SELECT * FROM t AS changes JOIN u",
        "SELECT 'FROM t CHANGES FROM VERSION 1' FROM t",
        "SELECT * FROM t -- CHANGES FROM VERSION 1",
    ],
)
def test_other_text_stays(text: str) -> None:
    assert _replaced(text) == (text, [])


@pytest.mark.parametrize(
    "bounds",
    [
        "FROM TIMESTAMP current_timestamp()",
        "FROM VERSION :v",
        "FROM VERSION {v}",
        "FROM VERSION 1 TO VERSION (2 + 1) c",
        "FROM VERSION (-2)",
        "FROM VERSION (a)",
    ],
)
def test_a_bound_that_is_an_expression_is_refused(bounds: str) -> None:
    with pytest.raises(UnsupportedError, match="bounds are numbers or texts, as in"):
        _replaced(f"SELECT * FROM t CHANGES {bounds}")
    # Tables of others are Spark's.
    assert replace_changes(f"SELECT * FROM t CHANGES {bounds}", lambda _: None)[1] == {}


def test_the_source_of_a_merge_is_a_relation() -> None:
    text, (use,) = _replaced("MERGE INTO t USING u CHANGES FROM VERSION 1 ON t.a = u.a WHEN")

    assert text == f"MERGE INTO t USING {_FIELD} AS `u` ON t.a = u.a WHEN"
    assert use.name == ("u",)


def test_several_relations_are_replaced() -> None:
    text, uses = _replaced(
        "SELECT * FROM t CHANGES FROM VERSION 1 a, u CHANGES FROM VERSION 2 TO VERSION 3 b"
    )

    assert text == "SELECT * FROM streamhouse_changes_0 a, streamhouse_changes_1 b"
    assert [use.name for use in uses] == [("t",), ("u",)]
