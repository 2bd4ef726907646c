"""Rows looked up for a DataFrame's rows: in a batch, in a stream, in SQL; and what is refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame

import streamhouse
from integration.spark_world import SentRows, SparkWorld, last_line
from integration.spark_world import world as world
from streamhouse.connector._spark_versions import has_arrow_functions
from streamhouse.core.errors import (
    InvalidRequestError,
    SchemaMismatchError,
    StreamhouseError,
    UnknownColumnError,
    UnknownOptionError,
    UnsupportedError,
)

pytestmark = pytest.mark.spark

USERS = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("name", pa.string()),
        pa.field("joined", pa.timestamp("us", tz="UTC")),
        pa.field("tags", pa.list_(pa.field("element", pa.string()))),
    ]
)
PLACES = pa.schema(
    [
        pa.field("country", pa.string(), nullable=False),
        pa.field("place", pa.int32(), nullable=False),
        pa.field("name", pa.string(), nullable=False),
    ]
)
COUNTRIES = ("fr", "no", "se")


@pytest.fixture(scope="module")
def tables(world: SparkWorld) -> SparkWorld:
    """A world with `dim.users` (ids 0 to 99) and `dim.places`, three countries of four."""
    world.client.create_database("dim")
    world.client.create_table("dim.users", USERS, primary_key=["id"], bucket_count=2)
    users = {
        "id": list(range(100)),
        "name": [None if i == 7 else f"user {i}" for i in range(100)],
        "joined": [i * 1_000_000 for i in range(100)],
        "tags": [[f"t{i}"] * (i % 3) for i in range(100)],
    }
    world.client.upsert("dim.users", pa.table(users, schema=USERS))
    world.client.create_table(
        "dim.places", PLACES, primary_key=["country", "place"], bucket_count=2
    )
    places = [
        {"country": country, "place": i, "name": f"{country}{i}"}
        for country in COUNTRIES
        for i in range(4)
    ]
    world.client.upsert("dim.places", pa.Table.from_pylist(places, schema=PLACES))
    return world


def lookup(world: SparkWorld, df: DataFrame, *arguments: Any, **options: Any) -> DataFrame:
    return streamhouse.lookup_join(df, *arguments, endpoint=world.endpoint, **options)


@pytest.mark.end_to_end
def test_rows_get_the_columns_of_their_keys(tables: SparkWorld) -> None:
    clicks = tables.spark.sql(
        "SELECT id AS click, CAST(id * 40 AS INT) AS User, timestamp_micros(id) AS at FROM range(4)"
        " UNION ALL SELECT 9, NULL, NULL ORDER BY click"
    )

    left = lookup(tables, clicks, "dim.users", {"user": "id"})
    inner = lookup(
        tables, clicks, "dim.users", {"user": "id"}, columns={"name": "who"}, how="inner"
    )
    semi = lookup(tables, clicks, "dim.users", {"user": "ID"}, columns=[], how="inner")

    assert left.columns == ["click", "User", "at", "name", "joined", "tags"]
    assert left.schema["name"].nullable
    assert left.schema["joined"].dataType == clicks.schema["at"].dataType
    rows = {row.click: row for row in left.collect()}
    expected = {row.click: row for row in clicks.collect()}
    assert {c: row.at for c, row in rows.items()} == {c: row.at for c, row in expected.items()}
    assert {c: row.name for c, row in rows.items()} == {
        0: "user 0", 1: "user 40", 2: "user 80", 3: None, 9: None,
    }  # fmt: skip
    assert (rows[1].tags, rows[2].tags, rows[3].tags) == (["t40"], ["t80", "t80"], None)
    stored = tables.load("dim.users").where("id = 40").first()
    assert stored is not None
    assert rows[1].joined == stored.joined
    assert sorted(row.who for row in inner.collect()) == ["user 0", "user 40", "user 80"]
    assert semi.columns == clicks.columns
    assert sorted(row.click for row in semi.collect()) == [0, 1, 2]


def test_a_row_is_looked_up_once_and_other_columns_stay_in_spark(tables: SparkWorld) -> None:
    rows = tables.spark.sql("SELECT id AS `a.user`, id AS row, 'x' AS X, 'y' AS Y FROM range(200)")

    found = lookup(tables, rows, "dim.users", {"a.user": "id"}, columns={"name": "_row"})
    some = found.where("_row LIKE 'user%' AND row < 50").select("Y", "_row")

    # Spark would call a function twice, once for the filter, that may answer the same always.
    plan = str(some._jdf.queryExecution().executedPlan())
    if has_arrow_functions():
        assert plan.count("ArrowEvalPython") == 1
        assert "MapInArrow" not in plan
        assert " AS X#" not in plan
    assert found.columns == ["a.user", "row", "X", "Y", "_row"]
    assert {row["_row"] for row in some.collect()} == {f"user {i}" for i in range(50)} - {"user 7"}


def test_distinct_keys_are_asked_for_once_and_kept_as_long_as_one_allows(
    tables: SparkWorld,
) -> None:
    frame = tables.spark.range(10_000, numPartitions=1).selectExpr("id % 10 AS user")

    def names(**options: int) -> int:
        joined = streamhouse.lookup_join(
            frame,
            "dim.users",
            {"user": "id"},
            columns=["name"],
            endpoint=tables.endpoint,
            **options,
        )
        return joined.where("name IS NOT NULL").count()

    found = []
    with SentRows(tables) as once:
        found.append(names())
    with SentRows(tables) as again:
        found.append(names())
    with SentRows(tables) as kept:
        found += [names(cache_ms=600_000) for _ in range(6)]

    assert found == [9_000] * 8
    assert [once.rows, again.rows] == [10, 10]
    # Each of Spark's two Python workers keeps rows of its own.
    assert kept.rows in (10, 20)


@pytest.mark.parametrize("column", ["name", "joined", "tags"])
def test_one_column_is_no_struct_to_spark(tables: SparkWorld, column: str) -> None:
    rows = tables.spark.sql("SELECT id * 7 AS user FROM range(20) UNION ALL SELECT NULL")

    one = lookup(tables, rows, "dim.users", {"user": "id"}, columns=[column])
    all_of_them = lookup(tables, rows, "dim.users", {"user": "id"})

    assert "struct" not in str(one._jdf.queryExecution().executedPlan())
    assert one.schema[column].dataType == tables.load("dim.users").schema[column].dataType
    wanted = all_of_them.select("user", column).collect()
    assert sorted(map(repr, one.collect())) == sorted(map(repr, wanted))


def test_it_equals_sparks_own_join(tables: SparkWorld) -> None:
    places = tables.load("dim.places").withColumnRenamed("name", "theirs")
    rows = tables.spark.sql(
        "SELECT id, array('fr', 'no', 'dk', NULL)[id % 4] AS country, CAST(id % 6 AS INT) AS place"
        " FROM range(50)"
    )
    for on in (["country", "place"], ["country"]):
        for how in ("left", "inner"):
            wanted = [name for name in ("place", "name") if name not in on]
            named = {name: f"its_{name}" for name in wanted}
            ours = lookup(tables, rows, "dim.places", on, columns=named, how=how)
            theirs = rows.join(
                places.withColumnsRenamed({"theirs": "its_name", "place": "its_place"})
                if len(on) == 1
                else places.withColumnRenamed("theirs", "its_name"),
                on,
                how,
            ).select(*ours.columns)
            assert sorted(map(repr, ours.collect())) == sorted(map(repr, theirs.collect()))
            assert ours.schema["its_name"].nullable == (how == "left")


def test_a_stream_sees_what_was_written_before_its_micro_batch(
    tables: SparkWorld, tmp_path: Path
) -> None:
    schema = pa.schema([("user", pa.int64())])
    tables.client.create_table("clicks", schema)
    frame = lookup(tables, tables.stream("clicks"), "dim.users", {"user": "id"}, columns=["name"])
    query = (
        frame.writeStream.format("memory").queryName("looked_up")
        .option("checkpointLocation", str(tmp_path)).start()
    )  # fmt: skip
    try:
        for version in range(3):
            row = {"id": [500], "name": [f"version {version}"]}
            tables.client.upsert("dim.users", pa.table(row), columns=["id", "name"])
            tables.client.append("clicks", pa.table({"user": [500, 1, None]}, schema=schema))
            query.processAllAvailable()
    finally:
        query.stop()
    rows = [(row.user, row.name) for row in tables.spark.table("looked_up").collect()]
    assert sorted(rows, key=repr) == sorted(
        [(500, f"version {i}") for i in range(3)] + [(1, "user 1")] * 3 + [(None, None)] * 3,
        key=repr,
    )


def test_sql_gets_a_function(tables: SparkWorld) -> None:
    spark, endpoint = tables.spark, tables.endpoint
    if not has_arrow_functions():
        with pytest.raises(UnsupportedError, match=r"^register_lookup needs PySpark 4\.1 or later"):
            streamhouse.register_lookup(spark, "dim.users", "lookup_user", endpoint=endpoint)
        return
    streamhouse.register_lookup(spark, "dim.users", "lookup_user", endpoint=endpoint)
    streamhouse.register_lookup(
        spark, "dim.places", "lookup_place", columns=["name"], endpoint=endpoint
    )

    rows = spark.sql(
        "SELECT u.*, lookup_user(u.user).name AS name, lookup_user(u.user).tags AS tags,"
        " lookup_place('no', CAST(user % 5 AS INT)).name AS place,"
        " lookup_user(u.user) IS NULL AS gone"
        " FROM (SELECT id * 30 AS user FROM range(30000)) u"
    )

    got = {row.user: row for row in rows.collect()}
    assert len(got) == 30_000
    assert (got[30].name, got[30].tags, got[30].gone) == ("user 30", [], False)
    assert (got[120].name, got[120].tags, got[120].gone) == (None, None, True)
    assert {row.place for row in got.values()} == {"no0"}
    with pytest.raises(PySparkException) as error:
        spark.sql("SELECT lookup_place('no')").collect()
    assert "takes its key (country, place), so 2 arguments, not 1" in str(error.value)
    with pytest.raises(PySparkException) as error:
        spark.sql("SELECT lookup_user('Ann')").collect()
    assert "'id' does not fit its column 'id', which is bigint" in str(error.value)


def test_what_cannot_be_looked_up_is_refused_at_the_call(tables: SparkWorld) -> None:
    tables.client.create_table("plain", pa.schema([("id", pa.int64())]))
    df = tables.spark.sql("SELECT id AS user, 'x' AS name, 'fr' AS country FROM range(3)")

    def refused(kind: type[StreamhouseError], *arguments: Any, **options: Any) -> str:
        with pytest.raises(kind) as error:
            lookup(tables, df, *arguments, **options)
        return error.value.message

    by_user = {"user": "id"}
    assert "two columns 'name'; give the table's another name: columns={'name': 'users_name'}" in (
        refused(InvalidRequestError, "dim.users", by_user, columns=["name"])
    )
    assert (
        "table 'dim.users': column 'id' is bigint, but the data has string, in its column 'name'"
        in (refused(SchemaMismatchError, "dim.users", {"name": "id"}, columns=["tags"]))
    )
    assert "has no column 'tag'; did you mean 'tags'?" in (
        refused(UnknownColumnError, "dim.users", by_user, columns=["tag"])
    )
    assert "the DataFrame has no column 'usr'; did you mean 'user'?" in (
        refused(UnknownColumnError, "dim.users", {"usr": "id"})
    )
    assert "by the primary key (country, place) or by its first columns, not by (place)" in (
        refused(InvalidRequestError, "dim.places", {"user": "place"})
    )
    assert "has no primary key" in refused(UnsupportedError, "plain", by_user)
    assert "how is 'left' or 'inner', not 'outer'" in (
        refused(InvalidRequestError, "dim.users", by_user, how="outer")
    )
    assert "not in its part '$log'" in refused(InvalidRequestError, "dim.users$log", by_user)
    assert "has no option 'cache'" in refused(UnknownOptionError, "dim.users", by_user, cache="1")


def test_a_task_that_needs_much_of_a_table_reads_it(tables: SparkWorld) -> None:
    count = 60_000
    schema = pa.schema([pa.field("k", pa.string(), nullable=False), pa.field("v", pa.int64())])
    tables.client.create_table("dim.many", schema, primary_key=["k"], bucket_count=2)
    rows = pa.table({"k": [f"k{i}" for i in range(count)], "v": range(count)}, schema=schema)
    tables.client.upsert("dim.many", rows)
    tables.tier("dim.many")
    tables.client.upsert("dim.many", pa.table({"k": ["k1"], "v": [-1]}, schema=schema))
    tables.client.delete("dim.many", pa.table({"k": ["k2"]}))
    df = tables.spark.range(200_000, numPartitions=2).selectExpr(
        f"concat('k', id % {count + 5}) AS k"
    )

    joined = lookup(tables, df, "dim.many", "k")

    tables.spark.sql("SELECT 1").collect()
    wrong = joined.where("v IS DISTINCT FROM CAST(substr(k, 2) AS BIGINT)").distinct().collect()
    assert {row.k: row.v for row in wrong} == {
        "k1": -1, "k2": None, **{f"k{i}": None for i in range(count, count + 5)},
    }  # fmt: skip
    assert joined.count() == 200_000
    # The tasks of one executor share what is read, and whoever comes later sees what is there then.
    assert len(_shared_files(tables)) == 1
    tables.client.upsert("dim.many", pa.table({"k": ["k1"], "v": [-9]}, schema=schema))
    assert {row.v for row in joined.where("k = 'k1'").distinct().collect()} == {-9}
    found = lookup(tables, df, "dim.many", "k")
    assert found.where("v = -9").count() == df.where("k = 'k1'").count()
    # What they find has one change more than what was read, so it is no other file.
    assert [path.suffix for path in _shared_files(tables)] == [""]


def _shared_files(world: SparkWorld) -> list[Path]:
    tasks = world.spark.sparkContext.parallelize([0], 1)
    directory = tasks.map(lambda _: os.environ["SPARK_LOCAL_DIRS"].partition(",")[0]).first()
    return list(Path(directory, "streamhouse-lookup").iterdir())


def test_an_error_of_a_task_is_one_sentence(tables: SparkWorld) -> None:
    schema = pa.schema([pa.field("k", pa.int64(), nullable=False), pa.field("v", pa.int64())])
    tables.client.create_table("dim.gone", schema, primary_key=["k"])
    joined = lookup(tables, tables.spark.range(3).toDF("k"), "dim.gone", "k")
    tables.client.drop_table("dim.gone")
    with pytest.raises(PySparkException) as error:
        joined.collect()
    assert "[table_not_found]" in str(error.value)
    assert "Traceback" not in last_line(error.value)
