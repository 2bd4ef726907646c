"""`MERGE INTO`, `UPDATE`, `DELETE FROM` and `TRUNCATE TABLE` as texts, against a model of SQL."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from py4j.protocol import Py4JJavaError
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import functions as F

import streamhouse
from integration.spark_world import SparkWorld, world
from streamhouse.core.errors import InvalidRequestError, StreamhouseError

__all__ = ["world"]

pytestmark = pytest.mark.spark

ROWS = pa.schema(
    [pa.field("id", pa.int64(), nullable=False), ("v", pa.int32()), ("w", pa.string())]
)
Row = tuple[int | None, int | None, str | None]
_numbers = itertools.count()


def _table(world: SparkWorld, rows: dict[int, Row], **options: Any) -> str:
    path = f"default.changed_{next(_numbers)}"
    options = {"primary_key": ("id",)} | options
    world.client.create_table(path, ROWS, **options)
    if rows:
        columns = zip(*rows.values(), strict=True)
        data = pa.table(dict(zip(ROWS.names, map(list, columns), strict=True)), schema=ROWS)
        (world.client.upsert if options["primary_key"] else world.client.append)(path, data)
    return path


def _rows(world: SparkWorld, path: str) -> dict[int, Row]:
    return {row["id"]: tuple(row.values()) for row in world.client.read(path).to_pylist()}


def _sql(world: SparkWorld, text: str, **arguments: Any) -> dict[str, int]:
    rows = streamhouse.sql(world.spark, text, endpoint=world.endpoint, **arguments).collect()
    return rows[0].asDict() if rows else {}


@pytest.fixture
def acc(world: SparkWorld) -> Iterator[str]:
    """An attached name of a table with the keys 0 to 4."""
    path = _table(world, {i: (i, 10 * i, f"n{i}") for i in range(5)})
    streamhouse.attach(world.spark, path, "acc", endpoint=world.endpoint)
    world.spark.sql(
        "SELECT * FROM VALUES (1L, 5, 'x'), (2L, -1, 'y'), (9L, 7, 'z') AS p(id, amount, w)"
    ).createOrReplaceTempView("pay")
    yield path
    world.spark.sql("DROP TABLE IF EXISTS acc")


# -- a model of SQL --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Condition:
    """A condition as text, and as a function of both rows: true, false or null."""

    text: str
    holds: Callable[[Row | None, Row | None], bool | None]


def _compared(text: str, sides: tuple[tuple[int, int], Any], operator: str) -> Condition:
    (side, place), other = sides

    def holds(target: Row | None, source: Row | None) -> bool | None:
        def value(at: Any) -> Any:
            if not isinstance(at, tuple):
                return at
            row = (target, source)[at[0]]
            return None if row is None else row[at[1]]

        left, right = value((side, place)), value(other)
        if operator == "IS NULL":
            return left is None
        if operator == "<=>":
            return bool(left == right)
        if left is None or right is None:
            return None
        return bool({"=": left == right, "<": left < right, "<>": left != right}[operator])

    return Condition(text, holds)


def _condition(random: Random, sides: str, depth: int = 1) -> Condition:
    if depth and random.random() < 0.5:
        first, second = (_condition(random, sides, depth - 1) for _ in range(2))
        word = random.choice(["AND", "OR", "NOT", "CASE"])
        if word == "NOT":
            return Condition(
                f"NOT ({first.text})",
                lambda t, s: None if (a := first.holds(t, s)) is None else not a,
            )
        if word == "CASE":
            return Condition(
                f"CASE WHEN {first.text} THEN {second.text} ELSE false END",
                lambda t, s: second.holds(t, s) if first.holds(t, s) else False,
            )
        decides = word == "OR"

        def both(target: Row | None, source: Row | None) -> bool | None:
            values = [first.holds(target, source), second.holds(target, source)]
            if decides in values:
                return decides
            return None if None in values else not decides

        return Condition(f"({first.text}) {word} ({second.text})", both)
    side, column = random.choice(sides), random.randrange(3)
    left = (0 if side == "t" else 1, column)
    operator = random.choice(["=", "<", "<>", "<>", "<=>", "IS NULL"])
    text = f"{side}.{ROWS.names[column]} {operator}"
    if operator == "IS NULL":
        return _compared(text, (left, None), operator)
    other = random.choice(sides)
    if other != side:
        return _compared(
            f"{text} {other}.{ROWS.names[column]}",
            (left, (0 if other == "t" else 1, column)),
            operator,
        )
    literal = random.choice("ab") if column == 2 else random.randrange(4)
    return _compared(f"{text} {literal!r}", (left, literal), operator)


@dataclass(frozen=True)
class Clause:
    """A clause of a merge: `values` are (text, function) by column; None is `*`, or a deletion."""

    side: str
    action: str
    condition: Condition | None = None
    values: dict[str, tuple[str, Callable[[Row | None, Row | None], Any]]] | None = None

    @property
    def text(self) -> str:
        condition = f" AND {self.condition.text}" if self.condition else ""
        action = self.action
        if action == "UPDATE SET":
            sets = (f"{name} = {text}" for name, (text, _) in (self.values or {}).items())
            action += f" {', '.join(sets) if self.values else '*'}"
        if action == "INSERT" and self.values is not None:
            texts = ", ".join(text for text, _ in self.values.values())
            action += f" ({', '.join(self.values)}) VALUES ({texts})"
        elif action == "INSERT":
            action += " *"
        return f"WHEN {self.side}{condition} THEN {action}"

    def takes(self, target: Row | None, source: Row | None) -> bool:
        return self.condition is None or self.condition.holds(target, source) is True

    def applied(self, target: Row | None, source: Row | None) -> Row | None:
        if self.action == "DELETE":
            return None
        if self.values is None:
            return source
        old = target if self.action == "UPDATE SET" and target is not None else (None,) * 3
        new = {name: value(target, source) for name, (_, value) in self.values.items()}
        key, number, text = (new.get(name, old[i]) for i, name in enumerate(ROWS.names))
        return key, number, text


def _plus(row: Row | None) -> int | None:
    return None if row is None or row[1] is None else row[1] + 1


_UPDATES = [
    {"v": ("t.v + 1", lambda t, s: _plus(t)), "w": ("s.w", lambda t, s: s[2])},
    {"w": ("NULL", lambda t, s: None)},
    None,
]
_INSERTS = [
    {"id": ("id", lambda t, s: s[0]), "v": ("v + 1", lambda t, s: _plus(s))},
    {"v": ("s.v", lambda t, s: s[1]), "id": ("s.id", lambda t, s: s[0])},
    {"id": ("s.id + 1", lambda t, s: None if s[0] is None else s[0] + 1)},
    None,
]
_BY_SOURCE = [{"v": ("v + 1", lambda t, s: _plus(t))}, {"w": ("'gone'", lambda t, s: "gone")}]


def _clauses(random: Random, *, has_star: bool) -> list[Clause]:
    kinds = {"MATCHED": "ts", "NOT MATCHED": "s", "NOT MATCHED BY SOURCE": "t"}
    clauses = []
    for side in random.choices(list(kinds), [3, 2, 1], k=random.randint(1, 4)):
        action = "INSERT" if side == "NOT MATCHED" else random.choice(["DELETE", "UPDATE SET"])
        choices = {"MATCHED": _UPDATES, "NOT MATCHED": _INSERTS}.get(side, _BY_SOURCE)
        if side == "MATCHED" and not has_star:
            choices = choices[:-1]
        values = None if action == "DELETE" else random.choice(choices)
        condition = _condition(random, kinds[side])
        clauses.append(Clause(side, action, condition, values))
    if random.random() < 0.6:
        clauses[-1] = dataclasses.replace(clauses[-1], condition=None)
    return clauses


def _merged(
    rows: dict[int, Row], source: list[Row], on: Condition, clauses: list[Clause]
) -> tuple[dict[int, Row], dict[str, int]] | None:
    """Return the rows behind a merge, and the counts; None for an error."""

    def first(side: str, target: Row | None, from_source: Row | None) -> Clause | None:
        of_side = (c for c in clauses if c.side == side)
        return next((c for c in of_side if c.takes(target, from_source)), None)

    result = dict(rows)
    counts = dict.fromkeys(("UPDATE SET", "DELETE", "INSERT"), 0)
    changed: list[int | None] = []

    def change(clause: Clause | None, target: Row | None, from_source: Row | None) -> None:
        if clause is None:
            return
        new = clause.applied(target, from_source)
        key = new[0] if target is None and new is not None else target[0] if target else None
        changed.append(key)
        counts[clause.action] += 1
        if new is None:
            del result[key]  # type: ignore[arg-type]
        else:
            result[key] = (key, *new[1:])  # type: ignore[index,assignment]

    try:
        for row in source:
            matches = [t for t in rows.values() if on.holds(t, row) is True]
            for target in matches:
                change(first("MATCHED", target, row), target, row)
            if not matches:
                change(first("NOT MATCHED", None, row), None, row)
        for target in rows.values():
            if not any(on.holds(target, row) is True for row in source):
                change(first("NOT MATCHED BY SOURCE", target, None), target, None)
    except KeyError:
        return None  # a second deletion of a row
    if len(set(changed)) < len(changed) or None in changed:
        return None
    return result, counts


def _value(random: Random) -> tuple[int | None, str | None]:
    return random.choice([None, 0, 1, 2, 3]), random.choice([None, "a", "b", "Ä'"])


_EQUAL = _compared("t.id = s.id", ((0, 0), (1, 0)), "=")


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 1 << 40))
def test_a_merge_is_sqls(world: SparkWorld, seed: int) -> None:
    random = Random(seed)
    rows: dict[int, Row] = {i: (i, *_value(random)) for i in range(random.randint(0, 4))}
    keys: list[int | None] = list(random.sample(range(6), random.randint(1, 4)))
    keys += random.choices([None, 1, 5], k=1) if random.random() < 0.2 else []
    source_rows: list[Row] = [(key, *_value(random)) for key in keys]
    on = random.choice([_EQUAL, _EQUAL, _compared("t.w = s.w", ((0, 2), (1, 2)), "=")])
    clauses = _clauses(random, has_star=on is _EQUAL)
    if on is _EQUAL and random.random() < 0.3:
        more = _condition(random, "ts", 0)
        on = Condition(
            f"t.id = s.id AND {more.text}",
            lambda t, s: _EQUAL.holds(t, s) is True and more.holds(t, s) is True,
        )
    path = _table(world, rows)
    frame = world.spark.createDataFrame(source_rows, "id bigint, v int, w string")
    frame.createOrReplaceTempView("merge_source")
    text = f"MERGE INTO {path} AS t USING merge_source s ON {on.text} " + " ".join(
        clause.text for clause in clauses
    )
    expected = _merged(rows, source_rows, on, clauses)
    existing = {
        key for key in _inserted_keys(rows, source_rows, on, clauses) if key is None or key in rows
    }
    unreachable = any(
        clause.condition is None and clause.side in [c.side for c in clauses[at + 1 :]]
        for at, clause in enumerate(clauses)
    )
    if expected is None or existing or unreachable:
        with pytest.raises(StreamhouseError):
            _sql(world, text)
        assert _rows(world, path) == rows
        return
    result, counts = expected
    assert _sql(world, text) == {
        "num_affected_rows": sum(counts.values()),
        "num_updated_rows": counts["UPDATE SET"],
        "num_deleted_rows": counts["DELETE"],
        "num_inserted_rows": counts["INSERT"],
    }
    assert _rows(world, path) == result


def _inserted_keys(
    rows: dict[int, Row], source: list[Row], on: Condition, clauses: list[Clause]
) -> Iterator[int | None]:
    inserts = [clause for clause in clauses if clause.action == "INSERT"]
    for row in source:
        if not any(on.holds(target, row) is True for target in rows.values()):
            clause = next((c for c in inserts if c.takes(None, row)), None)
            if clause is not None and (new := clause.applied(None, row)) is not None:
                yield new[0]


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 1 << 40))
def test_an_update_and_a_delete_are_sqls(world: SparkWorld, seed: int) -> None:
    random = Random(seed)
    rows: dict[int, Row] = {i: (i, *_value(random)) for i in range(8)}
    where = _condition(random, "t", 2) if random.random() < 0.9 else None
    is_update = random.random() < 0.5
    path = _table(world, rows)
    text = f"UPDATE {path} t SET v = t.v + 1" if is_update else f"DELETE FROM {path} t"
    changed = {k: r for k, r in rows.items() if where is None or where.holds(r, None) is True}

    counts = _sql(world, text if where is None else f"{text} WHERE {where.text}")

    assert counts == {"num_affected_rows": len(changed)}
    updated: dict[int, Row] = {k: (k, _plus(r), r[2]) for k, r in changed.items()}
    kept = {k: r for k, r in rows.items() if k not in changed}
    assert _rows(world, path) == kept | (updated if is_update else {})


# -- doors -----------------------------------------------------------------------------------------


@pytest.mark.end_to_end
def test_statements_on_a_name_change_the_table_once_and_return_counts(
    world: SparkWorld, acc: str
) -> None:
    sql = world.spark.sql
    merged = sql("""
        MERGE INTO acc USING pay ON acc.id = pay.id
        WHEN MATCHED AND amount < 0 THEN DELETE
        WHEN MATCHED THEN UPDATE SET v = v + pay.amount, acc.w = pay.w
        WHEN NOT MATCHED THEN INSERT (id, v, w) VALUES (id, amount, upper(w))
    """)
    after = _rows(world, acc)
    assert after == {0: (0, 0, "n0"), 1: (1, 15, "x"), 3: (3, 30, "n3"), 4: (4, 40, "n4")} | {
        9: (9, 7, "Z")
    }
    for _ in range(2):
        assert merged.collect() == [(3, 1, 1, 1)]
    assert merged.columns == [
        "num_affected_rows", "num_updated_rows", "num_deleted_rows", "num_inserted_rows",
    ]  # fmt: skip
    assert _rows(world, acc) == after
    assert [tuple(t) for t in sql("UPDATE acc SET v = 1 WHERE id < 2").collect()] == [(2,)]
    with_ctes = "WITH c AS (SELECT 9L AS id) DELETE FROM acc WHERE id IN (SELECT id FROM c)"
    assert sql(with_ctes).collect() == [(1,)]
    assert sql("DELETE FROM acc a WHERE EXISTS (SELECT 1 FROM pay p WHERE p.id = a.id)").collect()
    assert set(_rows(world, acc)) == {0, 3, 4}
    history = streamhouse.Table(world.spark, acc, endpoint=world.endpoint).history()
    assert history.where("kind = 'transaction' AND status = 'committed'").count() == 4
    assert sql("TRUNCATE TABLE acc").collect() == []
    assert _rows(world, acc) == {}


def test_parameters_and_dataframes_are_the_statements(world: SparkWorld, acc: str) -> None:
    sql = world.spark.sql
    sql("UPDATE acc SET w = :w, v = :v WHERE id = :id", args={"id": 1, "w": "it's", "v": None})
    sql("DELETE FROM acc WHERE id > ? AND w <> '?'", args=[2])
    source = world.spark.range(7, 9).selectExpr("id", "7 AS v", "'new' AS w")
    sql("MERGE INTO acc USING {s} s ON acc.id = s.id WHEN NOT MATCHED THEN INSERT *", s=source)
    assert _rows(world, acc) == {
        0: (0, 0, "n0"), 1: (1, None, "it's"), 2: (2, 20, "n2"), 7: (7, 7, "new"), 8: (8, 7, "new"),
    }  # fmt: skip
    with pytest.raises(StreamhouseError, match=r":v is a column.*streamhouse\.Table"):
        sql("UPDATE acc SET v = :v", args={"v": F.lit(1)})


def test_explain_says_what_is_read_and_written_and_executes_nothing(
    world: SparkWorld, acc: str
) -> None:
    before = _rows(world, acc)
    world.tier(acc)
    streamhouse.sql(world.spark, f"UPDATE {acc} SET v = 11 WHERE id = 1", endpoint=world.endpoint)
    before[1] = (1, 11, "n1")

    def explained(text: str) -> str:
        plan: str = world.spark.sql(f"EXPLAIN {text}").collect()[0].plan
        return plan

    by_key = explained("MERGE INTO acc USING pay ON acc.id = pay.id WHEN MATCHED THEN DELETE")
    assert f"reads {acc}: the keys of the source, looked up at the service\n" in by_key
    assert f"writes {acc}: in one transaction the changed rows by the primary key (id)" in by_key
    assert "== Physical Plan ==" in by_key
    pruned = explained("EXTENDED DELETE FROM acc WHERE v > 1000")
    assert "columns id, v; rows where" in pruned
    assert "`v` > 1000" in pruned
    assert "0 of 1 lake files; log offsets " in pruned
    assert "== Optimized Logical Plan ==" in pruned
    whole = explained("MERGE INTO acc USING pay ON acc.w = pay.w WHEN MATCHED THEN DELETE")
    assert "all rows; 1 of 1 lake files; log offsets 5 to " in whole
    assert "2 keys, looked up at the service" in explained(
        "FORMATTED UPDATE acc SET v = 1 WHERE id IN (1, 2)"
    )
    assert "reads nothing" in explained("TRUNCATE TABLE acc")
    lookup = "looked up at the service; the keys of the rows to insert, looked up at the service\n"
    inserts = "MERGE INTO acc USING pay ON acc.id = pay.id WHEN NOT MATCHED THEN INSERT (id) VALUES"
    assert lookup in explained(f"{inserts} (pay.id + 1)")
    assert lookup not in explained(f"{inserts} (pay.id)")
    assert _rows(world, acc) == before


def test_names_of_the_other_side_are_unresolved_and_a_star_sets_no_key(
    world: SparkWorld, acc: str
) -> None:
    before = _rows(world, acc)
    for text in (
        "ON acc.id = pay.id WHEN NOT MATCHED THEN INSERT (id, v) VALUES (pay.id, acc.v)",
        "ON acc.id = pay.id WHEN NOT MATCHED THEN INSERT (id, v) VALUES (pay.id, v)",
        "ON acc.id = pay.id WHEN NOT MATCHED AND v > 1 THEN INSERT (id) VALUES (pay.id)",
        "ON acc.id = pay.id WHEN NOT MATCHED BY SOURCE AND amount IS NULL THEN DELETE",
        "ON acc.id = pay.id WHEN MATCHED THEN UPDATE SET v = id",
    ):
        with pytest.raises(AnalysisException):
            world.spark.sql(f"MERGE INTO acc USING pay {text}")
    source = "(SELECT 7L AS id, 1L AS user, 1 AS v, 'n1' AS w)"
    for text in (
        "ON acc.id = s.user WHEN MATCHED THEN UPDATE SET *",
        "ON acc.w = s.w WHEN MATCHED THEN UPDATE SET *",
        "ON acc.id = s.user WHEN NOT MATCHED THEN INSERT *",
    ):
        with pytest.raises(StreamhouseError, match="sets every column, also 'id'"):
            world.spark.sql(f"MERGE INTO acc USING {source} s {text}")
    assert _rows(world, acc) == before


def test_a_name_that_is_not_the_table_is_refused(world: SparkWorld, acc: str) -> None:
    spark, before = world.spark, _rows(world, acc)
    streamhouse.attach(spark, acc, "some", where="id < 2", endpoint=world.endpoint)
    streamhouse.attach(spark, f"{acc}$changelog", "changed", endpoint=world.endpoint)
    spark.sql("DECLARE OR REPLACE VARIABLE q STRING DEFAULT concat('DELETE F', 'ROM acc')")
    for statement, sentence in {
        "DELETE FROM some": "option where = 'id < 2'",
        "TRUNCATE TABLE some": "option where = 'id < 2'",
        "DELETE FROM changed": "can only be read",
        "EXECUTE IMMEDIATE q": "DELETE FROM and TRUNCATE TABLE work as texts of their own",
        "EXECUTE IMMEDIATE 'DELETE FROM acc'": "reaches no table.*by itself",
        "BEGIN UPDATE acc SET v = 1; END": "reaches no table.*by itself",
        "BEGIN DECLARE p STRING DEFAULT concat('DELETE F', 'ROM acc'); EXECUTE IMMEDIATE p; END": (
            "Spark lost the error.*TRUNCATE TABLE work as texts of their own"
        ),
    }.items():
        with pytest.raises(StreamhouseError, match=sentence):
            spark.sql(statement)
    for name in ("some", "changed"):
        spark.sql(f"DROP TABLE {name}")
    with pytest.raises(InvalidRequestError, match="option 'where' has no meaning"):
        _sql(world, f"DELETE FROM {acc}", where="id = 1")
    assert _rows(world, acc) == before


def test_an_application_version_happens_once_and_cached_rows_are_dropped(
    world: SparkWorld, acc: str
) -> None:
    text = f"UPDATE {acc} SET v = v + 1 WHERE id = 1"
    once = {"app.id": "nightly", "app.version": 3}
    assert _sql(world, text, **once) == {"num_affected_rows": 1}
    assert _sql(world, text, **once) == {"num_affected_rows": 0}
    assert _rows(world, acc)[1] == (1, 11, "n1")
    world.spark.sql("CACHE TABLE acc")
    world.spark.sql("DELETE FROM acc WHERE id = 1")
    assert world.spark.sql("SELECT count(*) FROM acc").first()[0] == 4  # type: ignore[index]
    if hasattr(world.spark.catalog, "truncateTable"):  # new in PySpark 4.2
        world.spark.catalog.truncateTable("acc")
    else:
        world.spark.sql("TRUNCATE TABLE acc")
    assert world.spark.sql("SELECT count(*) FROM acc").first()[0] == 0  # type: ignore[index]
    world.spark.sql("UNCACHE TABLE acc")


def test_tables_without_a_key_are_truncated_and_otherwise_refused(world: SparkWorld) -> None:
    path = _table(world, {1: (1, 1, "a")}, primary_key=())
    for text in (
        f"DELETE FROM {path}",
        f"UPDATE {path} SET v = 1",
        f"EXPLAIN DELETE FROM {path}",
        f"MERGE INTO {path} t USING (SELECT 1L AS id) s ON t.id = s.id WHEN MATCHED THEN DELETE",
    ):
        with pytest.raises(StreamhouseError, match="no primary key"):
            _sql(world, text)
    assert len(_rows(world, path)) == 1
    assert _sql(world, f"TRUNCATE TABLE {path}") == {}
    assert _rows(world, path) == {}


def test_a_source_may_be_a_table_of_the_service_or_the_table_itself(
    world: SparkWorld, acc: str
) -> None:
    other = _table(world, {3: (3, 1, "o"), 30: (30, 2, "p")})
    counts = world.spark.sql(
        f"MERGE INTO acc USING {other} ON acc.id = {other}.id WHEN MATCHED THEN UPDATE SET *"
        " WHEN NOT MATCHED THEN INSERT *"
    ).collect()
    assert counts == [(2, 1, 0, 1)]
    world.spark.sql(
        "MERGE INTO acc USING (SELECT id, v + 1 AS v FROM acc WHERE id > 3) s ON acc.id = s.id"
        " WHEN MATCHED THEN UPDATE SET acc.v = s.v WHEN NOT MATCHED BY SOURCE THEN DELETE"
    )
    assert _rows(world, acc) == {4: (4, 41, "n4"), 30: (30, 3, "p")}


@pytest.mark.parametrize("is_name", [True, False])
def test_subqueries_read_tables_of_the_service(
    world: SparkWorld, acc: str, *, is_name: bool
) -> None:
    other = _table(world, {1: (1, 100, "o"), 3: (3, 300, "{p}")})
    name = "acc" if is_name else acc
    for text, count in {
        f"DELETE FROM {name} WHERE id IN (SELECT id FROM {other} WHERE w = '{{p}}')": 1,
        f"WITH c AS (SELECT id FROM {other}) DELETE FROM {name} WHERE id IN (SELECT id FROM c)": 1,
        f"UPDATE {name} t SET v = (SELECT max({other}.v) FROM {other}) WHERE EXISTS"
        f" (SELECT 1 FROM {other} o WHERE o.id + 1 = t.id)": 2,
        # The subquery is of the rows before the change.
        f"DELETE FROM {name} WHERE v < (SELECT avg(v) FROM {acc}) AND w <> '(SELECT 1)'": 1,
        f"MERGE INTO {name} t USING pay s ON t.id = s.id WHEN MATCHED AND t.id IN"
        f" (SELECT id + 1 FROM {other}) THEN UPDATE SET w = (SELECT max(w) FROM {other})"
        f" WHEN NOT MATCHED THEN INSERT (id, v) VALUES (s.id, (SELECT min(v) FROM {other}))": 3,
        f"EXPLAIN DELETE FROM {name} WHERE id IN (SELECT id FROM {other})": 0,
    }.items():
        run = functools.partial(streamhouse.sql, world.spark, endpoint=world.endpoint)
        row = (world.spark.sql if is_name else run)(text).first()
        assert row is not None
        assert row.asDict().get("num_affected_rows", 0) == count, text
    assert _rows(world, acc) == {
        1: (1, 100, None), 2: (2, 300, "{p}"), 4: (4, 300, "n4"), 9: (9, 100, None),
    }  # fmt: skip
    assert not [t for t in world.spark.catalog.listTables() if t.name.startswith("streamhouse_")]


def test_a_name_is_the_table_that_spark_finds_under_it(world: SparkWorld, acc: str) -> None:
    spark, before = world.spark, _rows(world, acc)
    assert spark.sql("DELETE FROM SPARK_CATALOG.Default.`ACC` WHERE id = 4").collect() == [(1,)]
    del before[4]
    spark.sql("CREATE DATABASE elsewhere")
    try:
        spark.sql("USE elsewhere")
        spark.sql("CREATE TABLE elsewhere.acc USING parquet AS SELECT 1L AS id")
        with pytest.raises((PySparkException, Py4JJavaError, StreamhouseError)):
            spark.sql("DELETE FROM acc WHERE id = 1")
        assert spark.sql("DELETE FROM default.acc WHERE id = 1").collect() == [(1,)]
        del before[1]
    finally:
        spark.sql("USE default")
        spark.sql("DROP TABLE IF EXISTS elsewhere.acc")
        spark.sql("DROP DATABASE elsewhere")
    spark.sql("DROP TABLE acc")
    spark.sql("CREATE TABLE acc USING parquet AS SELECT 1L AS id")
    with pytest.raises((PySparkException, Py4JJavaError, StreamhouseError)):
        spark.sql("DELETE FROM acc WHERE id = 2")
    assert _rows(world, acc) == before


def test_clauses_on_a_path_work_or_say_what_to_use(world: SparkWorld, acc: str) -> None:
    sampled = f"SELECT count(*) AS rows FROM {acc} TABLESAMPLE (2 ROWS) WHERE {acc}.id IS NOT NULL"
    assert _sql(world, sampled) == {"rows": 2}
    for statement in (
        f"SELECT * FROM {acc} WITH (where = 'id < 2')",
        f"SELECT * FROM {acc} TIMESTAMP AS OF '2030-01-01'",
        f"INSERT INTO {acc} VALUES (9L, 1, 'a')",
        f"DESCRIBE {acc}",
    ):
        with pytest.raises(StreamhouseError, match=rf"'{acc}' in queries.*attach\(spark"):
            _sql(world, statement)
    with pytest.raises(AnalysisException):
        _sql(world, "SELECT * FROM default.nothing_here")
    for frame, hint in {
        "SELECT 1L AS id, 2 AS v": "'w' is missing.*mergeSchema = 'true'.*write.mode = 'partial'",
        "SELECT 1L AS id, 2 AS v, 'a' AS w, 1 AS x": "no column 'x'.*mergeSchema = 'true' adds",
    }.items():
        with pytest.raises(Exception, match=hint):
            world.write(world.spark.sql(frame), acc)
    partial = {"mergeSchema": "true", "write.mode": "partial"}
    world.write(world.spark.sql("SELECT 1L AS id, 5 AS x"), acc, **partial)
    assert world.client.read(acc).filter(pc.field("id") == 1).to_pylist() == [
        {"id": 1, "v": 10, "w": "n1", "x": 5}
    ]
