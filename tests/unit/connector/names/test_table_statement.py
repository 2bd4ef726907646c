"""What a SQL statement is about."""

from __future__ import annotations

from typing import Any

import pytest

from streamhouse.client.values._ddl import schema_of_ddl
from streamhouse.connector.names._alteration import alteration_of
from streamhouse.connector.names._constraints import AddedConstraint, DroppedConstraint
from streamhouse.connector.names._definition import definition_of
from streamhouse.connector.names._table_statement import (
    TableStatement,
    name_parts,
    statement_of,
    statements_within,
)
from streamhouse.core.errors import UnsupportedError


def _of(text: str) -> TableStatement:
    found = statement_of(text)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("text", "verb", "name", "provider", "like"),
    [
        ("CREATE TABLE a.b (using int) USING streamhouse",
         "CREATE TABLE", "a.b", "streamhouse", None),
        ("create table if not exists t using `Streamhouse`",
         "CREATE TABLE", "t", "Streamhouse", None),
        ("CREATE TABLE t USING parquet AS SELECT * FROM a JOIN b USING (id)",
         "CREATE TABLE", "t", "parquet", None),
        ("CREATE TABLE t AS SELECT * FROM a JOIN b USING (id)", "CREATE TABLE", "t", None, None),
        ("CREATE TABLE t LIKE `a`.b USING parquet", "CREATE TABLE", "t", "parquet", "a.b"),
        ("CREATE OR REPLACE TABLE t (a int)", "REPLACE TABLE", "t", None, None),
        ("REPLACE TABLE t USING streamhouse", "REPLACE TABLE", "t", "streamhouse", None),
        ("CREATE OR REPLACE GLOBAL TEMPORARY VIEW v USING streamhouse OPTIONS (path 'x')",
         "CREATE VIEW", "v", "streamhouse", None),
        ("-- a comment\n/* and one */ ALTER TABLE `a b`.t ADD COLUMN c int",
         "ALTER TABLE", "a b.t", None, None),
        ("TRUNCATE TABLE t", "TRUNCATE TABLE", "t", None, None),
        ("DELETE FROM t WHERE 'USING streamhouse' = x", "DELETE", "t", None, None),
        ("UPDATE t SET a = 1", "UPDATE", "t", None, None),
        ("MERGE INTO a.t USING s ON true", "MERGE", "a.t", None, None),
        ("MERGE WITH SCHEMA EVOLUTION INTO t USING s ON true", "MERGE", "t", None, None),
        ("REFRESH TABLE t", "REFRESH TABLE", "t", None, None),
        ("-- a comment\rDELETE FROM t", "DELETE", "t", None, None),
        ("-- a comment \\\nDELETE FROM u\nDELETE FROM t", "DELETE", "t", None, None),
    ],
)  # fmt: skip
def test_a_statement_names_a_table_and_a_format(
    text: str, verb: str, name: str, provider: str | None, like: str | None
) -> None:
    found = _of(text)

    assert (found.verb, ".".join(found.name), found.provider) == (verb, name, provider)
    assert found.like == (None if like is None else tuple(like.split(".")))


@pytest.mark.parametrize(
    "text",
    ["SELECT 1", "INSERT INTO t SELECT 1", "DROP TABLE t", "", "CREATE", "ALTER TABLE",
     "CREATE DATABASE d", "CREATE FUNCTION f AS 'x'", "ALTER VIEW v AS SELECT 1", "'", "MERGE",
     "DESCRIBE t", "\x00"],
)  # fmt: skip
def test_other_statements_are_sparks(text: str) -> None:
    assert statement_of(text) is None


def test_a_name_has_parts() -> None:
    assert name_parts("`a.b`.c") == ("a.b", "c")
    assert name_parts("a") == ("a",)
    assert name_parts("a b") == ()


def _altered(text: str) -> Any:
    found = alteration_of(_of(f"ALTER TABLE t {text}"), type_of=lambda written: written)
    return list(found.changes) or found.updates or list(found.removals)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ADD COLUMN a int", [{"add": "a", "type": "int"}]),
        ("ADD COLUMNS (a int DEFAULT -5 AFTER c, b date COMMENT 'x' default DATE '2026-01-02')",
         [{"add": "a", "type": "int", "default": "-5", "after": "c"},
          {"add": "b", "type": "date", "default": "2026-01-02", "comment": "x"}]),
        ("ADD COLUMN a decimal(9, 2) DEFAULT 1.50",
         [{"add": "a", "type": "decimal(9, 2)", "default": "1.50"}]),
        ("ADD COLUMN a boolean DEFAULT true", [{"add": "a", "type": "boolean", "default": "true"}]),
        ("ADD COLUMN a string DEFAULT 'DEFAULT'",
         [{"add": "a", "type": "string", "default": "DEFAULT"}]),
        ("ADD COLUMN a binary DEFAULT X'00ff'",
         [{"add": "a", "type": "binary", "default": "00ff"}]),
        ("ADD COLUMN a string DEFAULT NULL", [{"add": "a", "type": "string"}]),
        ("ADD COLUMNS (a decimal(10, 2) COMMENT 'it''s', `b c` map<string, int> AFTER a)",
         [{"add": "a", "type": "decimal(10, 2)", "comment": "it's"},
          {"add": "b c", "type": "map<string, int>", "after": "a"}]),
        ("add columns a int first, b string", [{"add": "a", "type": "int", "first": True},
                                               {"add": "b", "type": "string"}]),
        ("ADD COLUMNS (a.b int FIRST, `a.b` string, a.`b c`.element.d array<int> AFTER e)",
         [{"add": ["a", "b"], "type": "int", "first": True}, {"add": "a.b", "type": "string"},
          {"add": ["a", "b c", "element", "d"], "type": "array<int>", "after": "e"}]),
        ("DROP COLUMN a", [{"drop": "a", "confirm": "a"}]),
        ("DROP COLUMNS (a, `b`)", [{"drop": "a", "confirm": "a"}, {"drop": "b", "confirm": "b"}]),
        ("RENAME COLUMN a TO `b c`", [{"rename": "a", "to": "b c"}]),
        ("ALTER COLUMN a TYPE bigint", [{"widen": "a", "to": "bigint"}]),
        ("ALTER COLUMN a.`b c`.element TYPE decimal(9, 2)",
         [{"widen": ["a", "b c", "element"], "to": "decimal(9, 2)"}]),
        ("CHANGE a COMMENT 'x'", [{"comment": "a", "to": "x"}]),
        ("ALTER COLUMN a DROP NOT NULL", [{"drop_not_null": "a"}]),
        ("SET TBLPROPERTIES ('table.log.ttl' = '1d', a.b = 'c')",
         {"table.log.ttl": "1d", "a.b": "c"}),
        ("UNSET TBLPROPERTIES ('table.log.ttl', a.b)", ["table.log.ttl", "a.b"]),
    ],
)  # fmt: skip
def test_an_alteration_is_changes_of_the_table(text: str, expected: Any) -> None:
    assert _altered(text) == expected


@pytest.mark.parametrize(
    "text",
    ["ADD COLUMN a int NOT NULL", "ADD COLUMN a", "SET LOCATION 'x'",
     "ALTER COLUMN a SET NOT NULL", "ALTER COLUMN a FIRST", "REPLACE COLUMNS (a int)",
     "ADD PARTITION (a = 1)", "SET TBLPROPERTIES ('a')", "", "CLUSTER BY (a)"],
)  # fmt: skip
def test_what_a_table_has_not_is_refused_with_what_can_be_altered(text: str) -> None:
    with pytest.raises(UnsupportedError, match=r"what can be is ADD COLUMNS"):
        _altered(text)


def test_a_constraint_is_a_property() -> None:
    def constraint(text: str) -> Any:
        return alteration_of(_of(f"ALTER TABLE t {text}"), type_of=str).constraint

    assert constraint("ADD CONSTRAINT c CHECK (a < 3 AND b IN ('x', ')'))") == AddedConstraint(
        "c", "a < 3 AND b IN ('x', ')')", is_for_new_rows=False
    )
    assert constraint("add constraint `c` check ((a > 0)) not enforced for existing") == (
        AddedConstraint("c", "(a > 0)", is_for_new_rows=True)
    )
    assert constraint("DROP CONSTRAINT IF EXISTS c") == DroppedConstraint("c", if_exists=True)
    made = definition_of(
        _of(
            "CREATE TABLE t (a int, CONSTRAINT least CHECK (a < 3 AND b >= 0), b map<int, array<"
            "int>>, check int) USING streamhouse"
        )
    )
    assert made.columns == "a int, b map<int, array<int>>, check int"
    assert made.options == {"table.check.least": "a < 3 AND b >= 0"}


@pytest.mark.parametrize(
    ("clause", "advice"),
    [
        ("GENERATED ALWAYS AS (b + 1)", "computes no columns"),
        ("GENERATED ALWAYS AS IDENTITY", "__offset"),
        ("GENERATED BY DEFAULT AS IDENTITY (START WITH 1 INCREMENT BY 2)", "__offset"),
        ("PRIMARY KEY", "option primary.key"),
        ("UNIQUE", "only the primary key is unique"),
        ("REFERENCES other (id)", "not checked against other tables"),
        ("CHECK (a > 0)", "CONSTRAINT name CHECK"),
        ("CONSTRAINT c CHECK (a > 0)", "CONSTRAINT name CHECK"),
    ],
)
def test_clauses_of_columns_are_refused_by_name(clause: str, advice: str) -> None:
    created = _of(f"CREATE TABLE t (b int, a int {clause}) USING streamhouse")
    with pytest.raises(UnsupportedError, match=f"column 'a': .*{advice}"):
        definition_of(created)
    with pytest.raises(UnsupportedError, match=f"column 'a': .*{advice}"):
        _altered(f"ADD COLUMNS (b string, a int {clause})")
    with pytest.raises(UnsupportedError, match=f"column 'a': .*{advice}"):
        schema_of_ddl(f"b int, a int {clause}, c string")


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("ADD CONSTRAINT c PRIMARY KEY (a)", "option primary.key"),
        ("ADD PRIMARY KEY (a)", "option primary.key"),
        ("ADD CONSTRAINT c UNIQUE (a)", "only the primary key is unique"),
        ("ADD CONSTRAINT c FOREIGN KEY (a) REFERENCES u (a)", "not checked against other"),
        ("ADD CHECK (a > 0)", "CONSTRAINT name CHECK"),
        ("ADD CONSTRAINT c CHECK (a > 0) NOT ENFORCED", "NOT ENFORCED FOR EXISTING"),
        ("ADD CONSTRAINT c CHECK (a > 0) RELY", "NOT ENFORCED FOR EXISTING"),
        ("ADD CONSTRAINT c CHECK", "NOT ENFORCED FOR EXISTING"),
        ("DROP CONSTRAINT c CASCADE", r"DROP CONSTRAINT \[IF EXISTS\] name"),
        ("ALTER COLUMN a SET DEFAULT 5", "a default is fixed"),
        ("ALTER COLUMN a DROP DEFAULT", "a default is fixed"),
    ],
)
def test_constraints_of_other_kinds_are_refused(text: str, advice: str) -> None:
    with pytest.raises(UnsupportedError, match=advice):
        _altered(text)


def test_a_definition_has_columns_or_a_query_and_options() -> None:
    made = definition_of(
        _of(
            "CREATE TABLE IF NOT EXISTS a.t (id int NOT NULL, s struct<x: int>) USING streamhouse"
            " PARTITIONED BY (day(at), region)"
            " TBLPROPERTIES ('primary.key'='id', table.log.ttl '1d', bucket.num = 4);"
        )
    )
    copied = definition_of(_of("CREATE TABLE t USING streamhouse AS SELECT ')' FROM a;"))

    assert made.columns == "id int NOT NULL, s struct<x: int>"
    assert made.only_if_absent
    assert made.options == {
        "partitioned.by": "day(at), region",
        "primary.key": "id",
        "table.log.ttl": "1d",
        "bucket.num": "4",
    }
    assert (copied.columns, copied.query, copied.only_if_absent) == (
        None,
        "SELECT ')' FROM a",
        False,
    )


@pytest.mark.parametrize("clause", ["LOCATION 'x'", "CLUSTERED BY (a) INTO 4 BUCKETS", "OPTIONS"])
def test_a_clause_that_means_nothing_is_refused(clause: str) -> None:
    with pytest.raises(UnsupportedError, match="leave the rest out"):
        definition_of(_of(f"CREATE TABLE t (a int) USING streamhouse {clause}"))


@pytest.mark.parametrize(
    "text",
    ["RENAME COLUMN a.b TO c", "DROP COLUMN a.b", "DROP COLUMNS (a.b)",
     "ALTER COLUMN a.b DROP NOT NULL", "CHANGE a.`b c` COMMENT 'x'"],
)  # fmt: skip
def test_a_field_inside_a_column_is_only_added_and_widened(text: str) -> None:
    with pytest.raises(UnsupportedError, match="a field inside a column can be added and widened"):
        _altered(text)


@pytest.mark.parametrize(
    ("text", "within"),
    [
        ("BEGIN CREATE TABLE t (id INT) USING streamhouse; ALTER TABLE u ADD COLUMN a INT; END",
         ["CREATE TABLE t", "ALTER TABLE u"]),
        ("-- a script\nbegin if x then truncate table t; end if; end", ["TRUNCATE TABLE t"]),
        ("EXECUTE IMMEDIATE 'ALTER TABLE t RENAME COLUMN a TO `b''s`'", ["ALTER TABLE t"]),
        ("BEGIN DECLARE q STRING DEFAULT 'COMMENT ON TABLE t IS \\'x\\''; EXECUTE IMMEDIATE q; END",
         ["COMMENT ON TABLE t"]),
        ("BEGIN INSERT INTO t VALUES ('DELETE FROM t'); END", []),
        ("EXECUTE IMMEDIATE 'SELECT 1'", []),
        ("SELECT 'EXECUTE IMMEDIATE'", []),
        ("EXPLAIN ALTER TABLE t ADD COLUMN a INT", []),
    ],
)  # fmt: skip
def test_the_statements_of_a_script(text: str, within: list[str]) -> None:
    found = statements_within(text)
    assert [f"{one.verb} {'.'.join(one.name)}" for one in found] == within


@pytest.mark.parametrize("text", ["now()", "1 + 1", "concat('a', 'b')", "current_date"])
def test_a_default_is_a_literal(text: str) -> None:
    with pytest.raises(UnsupportedError, match=r"is no literal: a default is one value"):
        _altered(f"ADD COLUMNS (b string, a int DEFAULT {text})")
    with pytest.raises(UnsupportedError, match=r"column 'a': .*a default is fixed when a column"):
        definition_of(_of(f"CREATE TABLE t (b int, a int DEFAULT {text}) USING streamhouse"))
    with pytest.raises(UnsupportedError, match=r"column 'a': .*a default is fixed when a column"):
        schema_of_ddl(f"b int, a int DEFAULT {text}, c string")
