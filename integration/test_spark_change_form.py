"""Spark's CHANGES on our names: the statements, `changes(...)`, streams, and their refusals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame

import streamhouse
from integration.spark_world import EXPIRING, SparkWorld, world
from streamhouse.connector.names._attached_names import run_as_spark
from streamhouse.core.errors import UnsupportedError

__all__ = ["world"]

pytestmark = pytest.mark.spark

_SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), ("v", pa.int64())])
_FIRST = [("insert", 1, 1), ("insert", 2, 1)]
_SECOND = [
    ("update_preimage", 1, 1),
    ("update_postimage", 1, 2),
    ("update_preimage", 2, 1),
    ("update_postimage", 2, 2),
]
_THIRD = [("delete", 2, 2)]
_NET = [("insert", 1, 2)]


@pytest.fixture
def keys(world: SparkWorld) -> Iterator[str]:
    """A table with three commits, attached; two rows are inserted, updated, and one is deleted."""
    path = world.table()
    name = path.partition(".")[2]
    world.client.drop_table(path)
    world.client.create_table(path, _SCHEMA, primary_key=["id"], bucket_count=2)
    world.client.upsert(path, pa.table({"id": [1, 2], "v": [1, 1]}, _SCHEMA))
    world.client.upsert(path, pa.table({"id": [1, 2], "v": [2, 2]}, _SCHEMA))
    world.client.delete(path, pa.table({"id": [2]}, pa.schema([_SCHEMA.field("id")])))
    streamhouse.attach(world.spark, path, name, endpoint=world.endpoint)
    yield name
    run_as_spark(world.spark, f"DROP TABLE IF EXISTS {name}")


def _versions(world: SparkWorld, name: str) -> list[int]:
    frame = world.load(f"default.{name}$changes")
    return sorted(row[0] for row in frame.select("_commit_version").distinct().collect())


def _changes(frame: DataFrame) -> Counter[Any]:
    return Counter(map(tuple, frame.select("_change_type", "id", "v").collect()))


def _two(changes: list[Any]) -> list[Any]:
    kinds = {"update_preimage": "delete", "update_postimage": "insert"}
    return [(kinds.get(kind, kind), *rest) for kind, *rest in changes]


def _drain(world: SparkWorld, frame: DataFrame, name: str) -> Counter[Any]:
    query = frame.writeStream.format("memory").queryName(name).trigger(availableNow=True).start()
    query.awaitTermination()
    return _changes(world.spark.table(name))


@pytest.mark.end_to_end
def test_the_statements_and_calls_read_the_same_changes(world: SparkWorld, keys: str) -> None:
    spark = world.spark
    first, second, third = _versions(world, keys)
    everything = Counter(_two(_FIRST + _SECOND + _THIRD))
    images = "WITH (computeUpdates = true)"
    clause = f"CHANGES FROM VERSION {first}"

    assert _changes(spark.sql(f"SELECT * FROM {keys} {clause}")) == everything
    statement = f"SELECT * FROM {keys} {clause} TO VERSION {second} {images}"
    assert _changes(spark.sql(statement)) == Counter(_FIRST + _SECOND)
    assert _changes(streamhouse.sql(spark, statement)) == Counter(_FIRST + _SECOND)
    exclusive = f"CHANGES FROM VERSION {first} EXCLUSIVE TO VERSION '{third}' EXCLUSIVE {images}"
    qualified = f"SELECT c.*, '{{x}}' AS text FROM {keys} {exclusive} AS c WHERE c.id > 0"
    assert _changes(spark.sql(qualified)) == Counter(_SECOND)
    net = f"SELECT {keys}.* FROM {keys} {clause} WITH (deduplicationMode = 'netChanges')"
    assert _changes(spark.sql(net)) == Counter(_NET)
    since = f"SELECT * FROM {keys} CHANGES FROM TIMESTAMP '2020-01-01' TO TIMESTAMP '2200-01-01'"
    assert _changes(spark.sql(since)) == everything
    joined = spark.sql(
        f"SELECT count(*) FROM {keys} {clause} {images} a JOIN {keys} ON a.id = {keys}.id"
        f" WHERE a._change_type = 'update_postimage'"
    )
    assert joined.first()[0] == 1
    unattached = f"SELECT * FROM default.{keys} {clause} {images}"
    options = {"endpoint": world.endpoint}
    assert _changes(streamhouse.sql(spark, unattached, **options)) == Counter(
        _FIRST + _SECOND + _THIRD
    )

    called = streamhouse.changes(
        spark, f"default.{keys}", startingVersion=second, computeUpdates=True, **options
    )
    assert _changes(called) == Counter(_SECOND + _THIRD)
    if hasattr(spark.read, "changes"):
        read = spark.read.option("startingVersion", second).options(computeUpdates="true")
        assert _changes(read.changes(keys)) == Counter(_SECOND + _THIRD)
        exact = spark.read.option("startingVersion", second).option("endingVersion", second)
        assert _changes(exact.changes(keys)) == Counter(_two(_SECOND))

    # A kept DataFrame reads the newest changes.
    world.client.upsert(f"default.{keys}", pa.table({"id": [9], "v": [9]}, _SCHEMA))
    assert _changes(called)[("insert", 9, 9)] == 1


def test_streams_of_changes(world: SparkWorld, keys: str) -> None:
    spark = world.spark
    _, second, _ = _versions(world, keys)
    all_changes = _FIRST + _SECOND + _THIRD

    since = spark.sql(f"SELECT * FROM STREAM {keys} CHANGES FROM VERSION {second}")
    assert since.isStreaming
    assert _drain(world, since, f"{keys}_since") == Counter(_two(_SECOND + _THIRD))
    every = spark.sql(f"SELECT * FROM STREAM {keys} CHANGES WITH (computeUpdates = true) AS c")
    assert _drain(world, every, f"{keys}_every") == Counter(all_changes)
    called = streamhouse.changes(
        spark, f"default.{keys}", stream=True, computeUpdates=True, endpoint=world.endpoint
    )
    assert _drain(world, called, f"{keys}_called") == Counter(all_changes)
    net = world.stream(f"default.{keys}$changes", deduplicationMode="netChanges")
    assert _drain(world, net, f"{keys}_net") == Counter(_NET)
    rows = world.stream(f"default.{keys}", changeFormat="spark")
    assert _drain(world, rows, f"{keys}_rows") == Counter(all_changes)
    if hasattr(spark.readStream, "changes"):
        read = spark.readStream.option("startingVersion", second).changes(keys)
        assert _drain(world, read, f"{keys}_read") == Counter(_two(_SECOND + _THIRD))


def test_changes_write_into_a_table(world: SparkWorld, keys: str) -> None:
    spark = world.spark
    first, *_ = _versions(world, keys)
    spark.sql(
        f"CREATE TABLE copy_{keys} USING streamhouse OPTIONS (table 'default.copy_{keys}',"
        f" endpoint '{world.endpoint}') AS SELECT * FROM {keys} CHANGES FROM VERSION {first}"
        " WITH (deduplicationMode = 'netChanges')"
    )
    assert world.client.read(f"default.copy_{keys}").num_rows == 1
    insert = f"INSERT INTO copy_{keys} SELECT * FROM {keys} CHANGES FROM VERSION {first}"
    every = len(_FIRST + _SECOND + _THIRD)
    spark.sql(insert)
    assert world.client.read(f"default.copy_{keys}").num_rows == 1 + every
    streamhouse.sql(spark, insert)
    assert world.client.read(f"default.copy_{keys}").num_rows == 1 + 2 * every
    explained = streamhouse.sql(spark, f"EXPLAIN SELECT * FROM {keys} CHANGES FROM VERSION 1")
    assert "streamhouse" in explained.first()[0]
    with pytest.raises(UnsupportedError, match="CHANGES works for an attached name"):
        _sql_of(world)(insert.replace(f"FROM {keys}", f"FROM {world.table()}"))


def test_what_cannot_be_read_is_refused_by_a_sentence(world: SparkWorld, keys: str) -> None:
    spark = world.spark
    since = f"SELECT * FROM {keys} CHANGES FROM VERSION 9"
    tries = {
        f"CREATE TEMP VIEW w AS {since}": "streamhouse.changes(",
        f"{since} TO VERSION 8": "before they start",
        f"{since} WITH (deduplicationMode = 'all')": "not 'all'",
        f"{since} WITH (asOf = '2')": "unknown option 'asof'",
    }
    for statement, sentence in tries.items():
        with pytest.raises(Exception) as refusal:  # noqa: PT011 - Spark's class or ours
            spark.sql(statement).collect()
        assert sentence in str(refusal.value), statement
    # An alias is no clause.
    assert spark.sql(f"SELECT changes.id FROM {keys} changes").count() == 1


_MERGED = (
    " AS c ON t.id = c.id WHEN MATCHED AND c._change_type = 'delete' THEN DELETE"
    " WHEN MATCHED THEN UPDATE SET v = c.v"
    " WHEN NOT MATCHED AND c._change_type <> 'delete' THEN INSERT (id, v) VALUES (c.id, c.v)"
)


def test_changes_are_the_source_of_a_merge(world: SparkWorld, keys: str) -> None:
    spark, copy, options = world.spark, f"copy_of_{keys}", {"endpoint": world.endpoint}
    first, second, third = _versions(world, keys)
    world.client.create_table(f"default.{copy}", _SCHEMA, primary_key=["id"], bucket_count=3)
    world.client.upsert(f"default.{copy}", pa.table({"id": [2, 7], "v": [0, 7]}, _SCHEMA))
    streamhouse.attach(spark, f"default.{copy}", copy, **options)
    net = "WITH (computeUpdates = true, deduplicationMode = 'netChanges')"

    def rows() -> list[tuple[int, int]]:
        return sorted((r["id"], r["v"]) for r in world.client.read(f"default.{copy}").to_pylist())

    # The relation itself, of an attached name: inserts of both rows.
    bounds = f"CHANGES FROM VERSION {first} TO VERSION {first}"
    counts = spark.sql(f"MERGE INTO {copy} AS t USING {keys} {bounds} {net}{_MERGED}").first()
    assert tuple(counts) == (2, 1, 0, 1)
    assert rows() == [(1, 1), (2, 1), (7, 7)]
    # A query of `db.table`, and again: nothing is left to change.
    query = f"(SELECT * FROM default.{keys} CHANGES FROM VERSION {second} {net})"
    later = f"{query[:-1]} WHERE _change_type <> 'update_preimage')"
    statement = f"MERGE INTO default.{copy} AS t USING {later}{_MERGED}"
    plan = streamhouse.sql(spark, f"EXPLAIN {statement}", **options).first()[0]
    assert "Streamhouse: MERGE" in plan
    assert rows() == [(1, 1), (2, 1), (7, 7)]
    assert tuple(streamhouse.sql(spark, statement, **options).first()) == (2, 1, 1, 0)
    assert rows() == [(1, 2), (7, 7)]
    # In a WITH in front, in a condition and in a value, without an alias.
    spark.sql(
        f"WITH c AS (SELECT * FROM {keys} CHANGES FROM VERSION {third})"
        f" MERGE INTO {copy} AS t USING c ON t.id = c.id WHEN NOT MATCHED THEN INSERT *"
    )
    assert rows() == [(1, 2), (2, 2), (7, 7)]
    spark.sql(
        f"UPDATE {copy} SET v = (SELECT count(*) FROM {keys} CHANGES FROM VERSION {first})"
        f" WHERE id IN (SELECT id FROM {keys} CHANGES FROM VERSION {third})"
    )
    assert rows() == [(1, 2), (2, 7), (7, 7)]
    spark.sql(
        f"MERGE INTO {copy} USING {keys} CHANGES FROM VERSION :v ON {copy}.id = {keys}.id"
        " WHEN MATCHED THEN DELETE",
        args={"v": third},
    )
    assert rows() == [(1, 2), (7, 7)]
    for statement in (f"DELETE FROM {copy} WHERE", f"UPDATE {copy} SET v = 1 WHERE"):
        bound = "timestamp_micros(1)"
        with pytest.raises(Exception, match="bounds are numbers or texts"):
            spark.sql(f"{statement} id IN (SELECT id FROM {keys} CHANGES FROM TIMESTAMP {bound})")
    stream = f"MERGE INTO {copy} AS t USING STREAM {keys} CHANGES{_MERGED}"
    expression = f"MERGE INTO {copy} AS t USING {keys} CHANGES FROM VERSION (:v + 1){_MERGED}"
    several = f"MERGE INTO {copy} AS t USING {keys} CHANGES FROM VERSION {first}{_MERGED}"
    for refused, sentence in (
        (stream, "leave out STREAM"),
        (expression, "bounds are numbers or texts"),
        (several, "id"),
    ):
        with pytest.raises(Exception, match=sentence):
            spark.sql(refused, args={"v": first})
    assert rows() == [(1, 2), (7, 7)]
    assert not [name.name for name in spark.catalog.listTables() if "streamhouse_" in name.name]
    run_as_spark(spark, f"DROP TABLE {copy}")


def test_views_of_changes(world: SparkWorld, keys: str) -> None:
    spark, options = world.spark, {"endpoint": world.endpoint}
    first, *_ = _versions(world, keys)
    for definition in ("CREATE TEMP VIEW w AS", "CREATE OR REPLACE VIEW w AS", "ALTER VIEW w AS"):
        for name, execute in ((keys, spark.sql), (f"default.{keys}", _sql_of(world))):
            statement = f"{definition} SELECT * FROM {name} CHANGES FROM VERSION {first}"
            with pytest.raises(UnsupportedError, match=r"use streamhouse\.changes\("):
                execute(statement)
    # What is advised works, also as the source of a merge, and shows the newest changes.
    changes = streamhouse.changes(
        spark, f"default.{keys}", startingVersion=first, computeUpdates=True, **options
    )
    changes.createOrReplaceTempView(f"view_{keys}")
    assert _changes(spark.table(f"view_{keys}")) == Counter(_FIRST + _SECOND + _THIRD)
    world.client.upsert(f"default.{keys}", pa.table({"id": [9], "v": [9]}, _SCHEMA))
    assert _changes(spark.sql(f"SELECT * FROM view_{keys}"))[("insert", 9, 9)] == 1
    assert _changes(streamhouse.sql(spark, f"SELECT * FROM view_{keys}"))[("insert", 9, 9)] == 1
    merge = (
        f"MERGE INTO {keys} AS t USING (SELECT * FROM view_{keys} WHERE id = 9) AS c"
        " ON t.id = c.id WHEN MATCHED THEN DELETE"
    )
    assert spark.sql(merge).first()[0] == 1
    # A view of a table's rows has no changes.
    spark.table(keys).createOrReplaceTempView(f"rows_{keys}")
    with pytest.raises(UnsupportedError, match=r"not for a view.*use streamhouse\.changes\("):
        spark.sql(f"SELECT * FROM rows_{keys} CHANGES FROM VERSION {first}").collect()
    spark.catalog.dropTempView(f"view_{keys}")
    spark.catalog.dropTempView(f"rows_{keys}")


def _sql_of(world: SparkWorld) -> Any:
    return lambda text: streamhouse.sql(world.spark, text, endpoint=world.endpoint)


def test_a_cut_history_names_the_property(world: SparkWorld) -> None:
    path = world.table()
    world.client.drop_table(path)
    world.client.create_table(path, _SCHEMA, primary_key=["id"], properties=EXPIRING)
    for value in range(3):
        world.client.upsert(path, pa.table({"id": [1], "v": [value]}, _SCHEMA))
    world.tier(path)
    world.expire_log(path)

    cut = streamhouse.changes(world.spark, path, startingVersion=0, endpoint=world.endpoint)
    with pytest.raises(Exception, match=r"table\.datalake\.changelog"):
        cut.collect()


def test_changes_of_others_are_applied_to_a_table(world: SparkWorld) -> None:
    path = world.table()
    world.client.drop_table(path)
    delta = world.spark.sql(
        "SELECT * FROM VALUES (1L, 1L, 'insert', 1L), (2L, 1L, 'insert', 1L),"
        " (1L, 1L, 'update_preimage', 2L), (1L, 2L, 'update_postimage', 2L), (2L, 1L, 'delete', 3L)"
        " AS c(id, v, _change_type, _commit_version)"
    ).selectExpr("*", "timestamp_micros(_commit_version) AS _commit_timestamp")
    ordered = delta.orderBy("_commit_version", "_change_type")

    world.write(ordered, path, **{"primary.key": "id"})

    assert world.client.describe_table(path).schema.names == ["id", "v"]
    assert world.client.read(path).to_pylist() == [{"id": 1, "v": 2}]
    iceberg = world.spark.sql(
        "SELECT * FROM VALUES (1L, 2L, 'DELETE', 0), (1L, 3L, 'INSERT', 0), (5L, 5L, 'INSERT', 0),"
        " (5L, 5L, 'Update_Before', 1), (5L, 6L, 'UPDATE_AFTER', 1)"
        " AS c(id, v, _change_type, _change_ordinal)"
    ).selectExpr("*", "7L AS _commit_snapshot_id")
    world.write(iceberg.orderBy("_change_ordinal", "_change_type"), path)
    rows = sorted(world.client.read(path).to_pylist(), key=lambda row: row["id"])
    assert rows == [{"id": 1, "v": 3}, {"id": 5, "v": 6}]

    refusals = {
        "'+U' AS __change_type, 'insert' AS _change_type": "drop one of the columns",
        "'inserted' AS _change_type": r"of row 0 is 'inserted'; use",
    }
    for columns, sentence in refusals.items():
        with pytest.raises(Exception, match=sentence):
            world.write(world.spark.sql(f"SELECT 1L AS id, 9L AS v, {columns}"), path)
    log = world.table()
    with pytest.raises(Exception, match="drop column '_change_type', or rename it"):
        world.write(world.spark.sql("SELECT 1L AS id, 'insert' AS _change_type"), log)
    assert sorted(row["v"] for row in world.client.read(path).to_pylist()) == [3, 6]


def test_a_stream_of_changes_makes_the_same_table(
    world: SparkWorld, keys: str, tmp_path: Any
) -> None:
    copy = f"default.copied_{keys}"
    changes = world.stream(f"default.{keys}$changes")
    query = (
        changes.writeStream.format("streamhouse")
        .options(endpoint=world.endpoint, **{"primary.key": "id"})
        .option("checkpointLocation", str(tmp_path))
        .trigger(availableNow=True)
        .start(copy)
    )
    query.awaitTermination()

    assert world.client.read(copy).to_pylist() == [{"id": 1, "v": 2}]


def test_a_stream_of_net_changes_is_merged_batch_by_batch(
    world: SparkWorld, keys: str, tmp_path: Any
) -> None:
    """The recipe for a table of Iceberg, here into a table of ours, which runs the statement."""
    copy = f"merged_{keys}"
    world.client.create_table(f"default.{copy}", _SCHEMA, primary_key=["id"])
    streamhouse.attach(world.spark, f"default.{copy}", copy, endpoint=world.endpoint)
    numbers: list[int] = []

    def merge(batch: DataFrame, number: int) -> None:
        numbers.append(number)
        rows = batch.where("_change_type <> 'update_preimage'")
        # Twice, as after a failure.
        for _ in range(2):
            batch.sparkSession.sql(f"MERGE INTO {copy} AS t USING {{rows}}{_MERGED}", rows=rows)

    changes = world.stream(
        f"default.{keys}$changes", deduplicationMode="netChanges", maxOffsetsPerTrigger=2
    )
    query = (
        changes.writeStream.foreachBatch(merge)
        .option("checkpointLocation", str(tmp_path))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()

    assert len(numbers) > 1
    assert world.client.read(f"default.{copy}").to_pylist() == [{"id": 1, "v": 2}]
    run_as_spark(world.spark, f"DROP TABLE {copy}")
