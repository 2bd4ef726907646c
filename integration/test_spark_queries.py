"""`streamhouse.sql` and `streamhouse.read`: they read less, and give the same answer."""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import LongType

import streamhouse
from integration.query_statements import SCHEMA, rows, statements
from integration.spark_world import SentRows, SparkWorld, world
from streamhouse.connector._spark_versions import ASKS_FOR_FILTERS
from tests.support.examples import examples
from tests.support.held_step import around
from tests.support.tpch import queries, tpch_tables

__all__ = ["world"]

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def small(world: SparkWorld) -> SparkWorld:
    """Tables `small.a` (lake and log), `small.b` (by key, changed since the lake), `small.c`."""
    world.client.create_database("small")
    world.client.create_table("small.a", SCHEMA, bucket_count=2)
    world.client.create_table("small.b", SCHEMA, primary_key=["id"], bucket_count=2)
    world.client.create_table("small.c", SCHEMA)
    world.client.append("small.a", rows(0, 20))
    world.client.upsert("small.b", rows(0, 20))
    world.tier("small.a")
    world.tier("small.b")
    world.client.append("small.a", rows(15, 30))
    changed = rows(30, 40).set_column(0, SCHEMA.field("id"), [pa.array(range(5, 15))])
    world.client.upsert("small.b", changed)
    world.client.append("small.c", rows(3, 9))
    for name in "abc":
        world.load(f"small.{name}").createOrReplaceTempView(f"plain_{name}")
    return world


def _sql(world: SparkWorld, statement: str, **options: Any) -> DataFrame:
    return streamhouse.sql(world.spark, statement, endpoint=world.endpoint, **options)


def _read(world: SparkWorld, table: str, **options: Any) -> Any:
    return streamhouse.read(world.spark, table, endpoint=world.endpoint, **options)


def _named(statement: str, prefix: str) -> str:
    for name in "abc":
        statement = statement.replace(f"{{{name}}}", f"{prefix}{name}")
    return statement


def _answer(frame: DataFrame) -> tuple[Any, ...]:
    # NaN is no key of a Counter: it does not equal itself.
    found = collections.Counter(str(row) for row in frame.collect())
    return frame.columns, [field.dataType for field in frame.schema], found


def _explained(frame: Any, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    frame.explain()
    return capsys.readouterr().out.partition("== Physical Plan ==")[0]


_EXAMPLES = settings(
    max_examples=examples(40),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@_EXAMPLES
@given(statement=statements())
def test_the_answer_is_that_of_the_plain_read(small: SparkWorld, statement: str) -> None:
    wanted = small.spark.sql(_named(statement, "plain_"))

    found = _sql(small, _named(statement, "small."))

    assert _answer(found) == _answer(wanted)


@_EXAMPLES
@given(statement=statements())
def test_so_it_is_where_the_plan_is_not_known(small: SparkWorld, statement: str) -> None:
    wanted = small.spark.sql(_named(statement, "plain_"))

    with _unknown_plan():
        found = _sql(small, _named(statement, "small."))

    assert _answer(found) == _answer(wanted)


@contextlib.contextmanager
def _unknown_plan() -> Iterator[None]:
    """Let what a query needs be told by its text, as under Spark Connect."""
    with pytest.MonkeyPatch.context() as patch:
        around(patch, "plan-asking", lambda _needs_of, _frame: None)
        yield


def test_the_text_of_a_statement_says_what_it_needs_where_the_plan_is_not_known(
    small: SparkWorld, capsys: pytest.CaptureFixture[str]
) -> None:
    query = (
        "SELECT x.word, y.price FROM small.a x LEFT JOIN small.b y ON x.id = y.id"
        " WHERE x.k >= 1 AND x.day < '2026-01-04' AND y.flag"
    )
    with _unknown_plan():
        narrow = _sql(small, query)
        counted = _sql(small, "SELECT count(*) AS n FROM small.a")
        starred = _sql(small, "SELECT * FROM small.a WHERE k = 1")
    small.spark.conf.set("spark.sql.ansi.enabled", "false")
    try:
        with _unknown_plan():
            lenient = _sql(small, "SELECT id FROM small.a WHERE k = 1")
    finally:
        small.spark.conf.unset("spark.sql.ansi.enabled")

    shown = _explained(narrow, capsys)
    assert "small.a: columns id, k, word, price, day, flag; rows where (" in shown
    assert "`k` >= 1" in shown
    assert "small.b: columns id, k, word, price, day, flag; all rows" in shown
    assert "number of rows" in _explained(counted, capsys)
    assert counted.collect() == [(35,)]
    assert "small.a: all columns; all rows" in _explained(starred, capsys)
    assert "small.a: columns id, k; all rows" in _explained(lenient, capsys)


def test_aliases_that_differ_in_case_alone_are_two(small: SparkWorld) -> None:
    query = "SELECT x.id FROM {a} x JOIN {a} X ON x.id = X.k WHERE X.k = 1 AND X.id > 3"
    small.spark.conf.set("spark.sql.caseSensitive", "true")
    try:
        wanted = small.spark.sql(query.replace("{a}", "plain_a")).collect()
        with _unknown_plan():
            found = _sql(small, query.replace("{a}", "small.a")).collect()
    finally:
        small.spark.conf.unset("spark.sql.caseSensitive")

    assert len(found) > 1
    assert found == wanted


def test_an_attached_name_is_narrowed_too(
    small: SparkWorld, capsys: pytest.CaptureFixture[str]
) -> None:
    spark = small.spark
    streamhouse.attach(spark, "small.a", "named_a", endpoint=small.endpoint, where="id < 25")
    plain = spark.sql("SELECT word FROM plain_a WHERE id < 25 AND k = 1")
    try:
        narrow = _sql(small, "SELECT word FROM named_a WHERE k = 1")
        qualified = _sql(small, "SELECT named_a.word FROM default.named_a WHERE named_a.k = 1")
        # Only Spark knows the name in this way, so it is read as Spark reads it.
        full = _sql(small, "SELECT spark_catalog.default.named_a.word FROM named_a WHERE k = 1")
        with _unknown_plan():
            by_text = _sql(small, "SELECT word FROM named_a WHERE k = 1")

        shown = _explained(narrow, capsys)
        assert "small.a: columns k, word; rows where (id < 25) AND (" in shown
        assert "small.a: columns k, word; rows where" in _explained(by_text, capsys)
        assert "small.a" not in _explained(full, capsys)
        for frame in (narrow, qualified, full, by_text):
            assert _answer(frame)[2] == _answer(plain)[2]
        spark.range(2).createOrReplaceTempView("named_a")
        assert _sql(small, "SELECT id FROM named_a").count() == 2
    finally:
        spark.catalog.dropTempView("named_a")
        spark.sql("DROP TABLE named_a")


def test_only_columns_and_rows_that_matter_are_read(
    small: SparkWorld, capsys: pytest.CaptureFixture[str]
) -> None:
    query = "SELECT word, count(*) FROM small.a WHERE k >= 1 AND day < '2026-01-04' GROUP BY word"

    shown = _explained(_sql(small, query), capsys)

    assert "small.a: columns k, word, day; rows where" in shown
    assert "`day` < DATE '2026-01-04'" in shown
    assert "`k` >= 1)" in shown


def test_a_table_that_is_used_twice_is_read_once_for_both_uses(
    small: SparkWorld, capsys: pytest.CaptureFixture[str]
) -> None:
    query = "SELECT x.word FROM small.a x, small.a y WHERE x.id = y.id AND x.k = 1 AND y.k = 2"

    shown = _explained(_sql(small, query), capsys)

    assert shown.count("small.") == 1
    assert "columns id, k, word" in shown
    assert " OR " in shown


def test_an_outer_join_does_not_lose_the_rows_that_it_keeps(small: SparkWorld) -> None:
    query = "SELECT count(*) FROM {a} x LEFT JOIN {b} y ON x.id = y.id WHERE y.word IS NULL"

    found = _sql(small, _named(query, "small."))

    assert _answer(found) == _answer(small.spark.sql(_named(query, "plain_")))


def test_what_depends_on_the_moment_drops_no_rows(
    small: SparkWorld, capsys: pytest.CaptureFixture[str]
) -> None:
    small.spark.sql("DECLARE OR REPLACE VARIABLE border DATE DEFAULT current_date()")
    for moment in ("current_date()", "CAST('today' AS DATE)", "border"):
        frame = _sql(small, f"SELECT id FROM small.a WHERE day < {moment}")

        assert "small.a: columns id, day; all rows" in _explained(frame, capsys)
        assert (
            frame.count() == small.spark.sql("SELECT 1 FROM plain_a WHERE day IS NOT NULL").count()
        )


@pytest.mark.end_to_end
def test_all_rows_are_counted_from_positions(
    world: SparkWorld, capsys: pytest.CaptureFixture[str]
) -> None:
    path = world.table(rows=100)
    world.tier(path)
    world.append(path, 100, 130)
    counted = _sql(world, f"SELECT count(*) AS n FROM {path}")
    read = _read(world, path)

    assert "number of rows" in _explained(counted, capsys)
    with SentRows(world) as sent:
        assert counted.collect() == [(130,)]
        assert read.count() == 130
    assert sent.rows == 0
    assert [(f.name, f.dataType, f.nullable) for f in counted.schema] == [("n", LongType(), False)]
    world.append(path, 130, 150)
    assert counted.select("n").collect() == [(150,)]
    assert read.count() == 150
    assert _read(world, path, endingOffsets='{"0": 110}').count() == 110
    assert _read(world, path, where="id < 10").count() == 10
    assert _read(world, f"{path}$lake").count() == 100
    assert _read(world, f"{path}$buckets").count() == 1
    assert _read(world, path).where("id >= 145").count() == 5


def test_live_rows_of_a_table_with_a_primary_key_are_counted(small: SparkWorld) -> None:
    assert _sql(small, "SELECT count(1) FROM small.b").collect() == [(20,)]
    assert _read(small, "small.b").count() == 20
    assert _read(small, "small.b$changelog").count() == small.load("small.b$changelog").count()


def test_a_dataframe_of_a_query_reads_the_newest_rows(world: SparkWorld) -> None:
    path = world.table(rows=10)
    frame = _sql(world, f"SELECT id FROM {path} WHERE id >= 5")
    assert frame.count() == 5

    world.append(path, 10, 13)

    assert world.ids(frame) == list(range(5, 13))


@pytest.mark.skipif(
    not ASKS_FOR_FILTERS, reason="each scan has a cut of its own before PySpark 4.1"
)
def test_a_statement_reads_one_cut_of_a_table_while_rows_arrive(world: SparkWorld) -> None:
    path = world.table(rows=10)
    frame = _sql(
        world,
        f"SELECT x.id FROM (SELECT id FROM {path} WHERE small >= 0) x FULL JOIN"
        f" (SELECT id FROM {path} WHERE price >= 0) y ON x.id = y.id"
        " WHERE x.id IS NULL OR y.id IS NULL",
    )
    ends, is_over = [10], threading.Event()

    def append() -> None:
        while not is_over.is_set():
            world.append(path, ends[0], ends[0] + 10)
            ends[0] += 10

    thread = threading.Thread(target=append)
    thread.start()
    try:
        assert [frame.count() for _ in range(3)] == [0, 0, 0]
    finally:
        is_over.set()
        thread.join()


def test_names_of_spark_go_before_the_services(small: SparkWorld) -> None:
    spark = small.spark
    spark.sql("CREATE DATABASE shadow")
    spark.range(3).write.saveAsTable("shadow.c")
    small.client.create_database("shadow")
    small.client.create_table("shadow.c", SCHEMA)
    streamhouse.attach(spark, "small.c", "attached_c", endpoint=small.endpoint)
    try:
        assert _sql(small, "SELECT count(*) FROM shadow.c").collect() == [(3,)]
        assert _sql(small, "SELECT count(*) FROM attached_c").collect() == [(6,)]
        query = (
            "WITH a AS (SELECT * FROM small.c) SELECT count(*) FROM a JOIN plain_c p ON a.id = p.id"
        )
        assert _sql(small, query).collect() == [(6,)]
        assert _sql(small, "SELECT small.c.id, c.place.zone FROM small.c").count() == 6
        assert _sql(small, "SELECT :n + id FROM small.c WHERE id = :n", args={"n": 3}).first() == (
            6,
        )
    finally:
        spark.sql("DROP TABLE attached_c")
        spark.sql("DROP DATABASE shadow CASCADE")


def test_a_wrong_statement_fails_as_spark_says(small: SparkWorld) -> None:
    with pytest.raises(AnalysisException, match="no_such_column"):
        _sql(small, "SELECT no_such_column FROM small.c")
    with pytest.raises(AnalysisException, match="TABLE_OR_VIEW_NOT_FOUND"):
        _sql(small, "SELECT 1 FROM small.no_such_table")


def test_a_read_remembers_what_is_done_with_it(
    small: SparkWorld, capsys: pytest.CaptureFixture[str]
) -> None:
    table = _read(small, "small.a")
    narrow = table.select("id", "k", "price").where(F.col("k") > 1).where(table.id < 25)
    grouped = table.where("k = 2").groupBy("word").agg(F.sum("id").alias("n"))
    plain = small.load("small.a")

    shown = _explained(narrow, capsys)

    assert isinstance(table, DataFrame)
    assert table.columns == SCHEMA.names
    assert "columns id, k, price; rows where" in shown
    assert "`k` > 1)" in shown
    assert _answer(narrow) == _answer(plain.select("id", "k", "price").where("k > 1 AND id < 25"))
    assert "columns id, k, word; rows where" in _explained(grouped, capsys)
    assert _answer(grouped) == _answer(
        plain.where("k = 2").groupBy("word").agg(F.sum("id").alias("n"))
    )
    assert narrow.count() == len(narrow.toArrow())
    assert _answer(table.drop("place")) == _answer(plain.drop("place"))


def test_reads_are_joined_with_reads_and_with_frames(
    small: SparkWorld, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = _read(small, "small.a"), _read(small, "small.b")
    joined = a.join(b, a.id == b["id"]).select(a.k, b.word)
    plain = small.spark.sql("SELECT x.k, y.word FROM plain_a x JOIN plain_b y ON x.id = y.id")

    shown = _explained(joined, capsys)

    assert "small.a: columns id, k;" in shown
    assert "small.b: columns id, word;" in shown
    assert _answer(joined) == _answer(plain)
    some = small.spark.range(4, 8)
    assert a.join(some, "id", "semi").count() == 4
    assert some.join(b, "id").count() == 4
    assert a.select("id").union(b.select("id")).distinct().count() == 30


def test_tpch_has_the_same_answers(world: SparkWorld, capsys: pytest.CaptureFixture[str]) -> None:
    world.client.create_database("tpch")
    for name, table in tpch_tables(0.001).items():
        world.client.create_table(f"tpch.{name}", table.schema)
        half = table.num_rows // 2
        world.client.append(f"tpch.{name}", table.slice(0, half))
        world.tier(f"tpch.{name}")
        world.client.append(f"tpch.{name}", table.slice(half))
        world.load(f"tpch.{name}").cache().createOrReplaceTempView(name)
    answered = 0
    ours = queries("tpch")
    for number, query in queries().items():
        wanted = _answer(world.spark.sql(query))
        found = _sql(world, ours[number])

        assert _answer(found) == wanted, f"query {number}"
        assert "all columns" not in _explained(found, capsys), f"query {number}"
        answered += bool(wanted[2])
    assert answered >= 15
