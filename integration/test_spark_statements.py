"""What each statement does on our format and on attached names: it works, or says what to use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

import streamhouse
from integration.spark_world import SparkWorld, last_line, world
from streamhouse.connector.names._attached_names import run_as_spark
from streamhouse.core.errors import StreamhouseError

__all__ = ["world"]

pytestmark = pytest.mark.spark

ITEMS = pa.schema([pa.field("id", pa.int64()), pa.field("name", pa.string())])


@pytest.fixture
def items(world: SparkWorld) -> Iterator[str]:
    """A table of two rows, attached under its own name; dropped at the end."""
    path = world.table()
    name = path.partition(".")[2]
    world.client.drop_table(path)
    world.client.create_table(path, ITEMS)
    world.client.append(path, pa.table({"id": [1, 2], "name": ["a", "b"]}, schema=ITEMS))
    streamhouse.attach(world.spark, path, name, endpoint=world.endpoint)
    yield name
    run_as_spark(world.spark, f"DROP TABLE IF EXISTS {name}")


def rows(world: SparkWorld, query: str) -> list[tuple[Any, ...]]:
    return sorted(map(tuple, world.spark.sql(query).collect()))


# -- tables of our format ------------------------------------------------------------------------


@pytest.mark.end_to_end
def test_create_table_makes_a_table_and_a_name_for_it(world: SparkWorld) -> None:
    sql = world.spark.sql
    sql("CREATE DATABASE IF NOT EXISTS created")
    statement = (
        "CREATE TABLE IF NOT EXISTS created.orders (id BIGINT COMMENT 'a number', at TIMESTAMP,"
        " sum DECIMAL(10,2) NOT NULL, tags ARRAY<STRING>) USING streamhouse"
        " PARTITIONED BY (day(at))"
        f" TBLPROPERTIES ('primary.key' = 'id', 'bucket.num' = '2', endpoint = '{world.endpoint}')"
    )
    assert sql(statement).collect() == []
    sql(statement)

    info = world.client.describe_table("created.orders")
    assert (info.descriptor.primary_key, info.bucket_count) == (("id",), 2)
    assert [str(field) for field in info.descriptor.partitioned_by] == ["day(at)"]
    assert [c.nullable for c in info.schema.columns] == [False, True, False, True]
    assert info.schema.columns[0].comment == "a number"
    sql("INSERT INTO created.orders VALUES (1, current_timestamp(), 1.5, array('x'))")
    sql("INSERT INTO created.orders VALUES (1, current_timestamp(), 2.5, null)")
    assert rows(world, "SELECT id, cast(sum AS STRING) FROM created.orders") == [(1, "2.50")]
    with pytest.raises(StreamhouseError, match="already; DROP TABLE"):
        sql(statement.replace("IF NOT EXISTS", ""))
    sql("DROP TABLE created.orders")
    with pytest.raises(StreamhouseError, match="without columns and query makes it a name"):
        sql(statement.replace("IF NOT EXISTS", ""))
    sql(f"CREATE TABLE created.orders USING streamhouse OPTIONS (endpoint '{world.endpoint}')")
    assert rows(world, "SELECT count(*) FROM created.orders") == [(1,)]


@pytest.mark.end_to_end
def test_constraints_of_statements_hold_for_writes_of_spark(world: SparkWorld) -> None:
    sql, spark = world.spark.sql, world.spark
    sql("CREATE DATABASE IF NOT EXISTS held")
    options = f"TBLPROPERTIES (endpoint = '{world.endpoint}')"
    sql(
        "CREATE TABLE held.sums (id BIGINT, sum BIGINT, CONSTRAINT positive CHECK (sum > 0 AND"
        f" sum < 1000)) USING streamhouse {options}"
    )
    sql("INSERT INTO held.sums VALUES (1, 10), (2, null)")
    with pytest.raises(Exception, match=r"constraint 'positive', CHECK \(sum > 0 AND"):
        sql("INSERT INTO held.sums VALUES (3, 10), (4, -1)")

    with pytest.raises(StreamhouseError, match="1 of its rows break constraint 'small'"):
        sql("ALTER TABLE held.sums ADD CONSTRAINT small CHECK (sum < 5)")
    sql("ALTER TABLE held.sums ADD CONSTRAINT small CHECK (sum < 5) NOT ENFORCED FOR EXISTING")
    with pytest.raises(StreamhouseError, match="has a constraint 'SMALL' already"):
        sql("ALTER TABLE held.sums ADD CONSTRAINT SMALL CHECK (sum < 6)")
    frame = spark.createDataFrame([(5, 4), (6, 5), (7, -7)], "id bigint, sum bigint")
    writer = frame.write.format("streamhouse").option("endpoint", world.endpoint).mode("append")
    writer.option("on.error", "reject").save("held.sums")
    assert rows(world, "SELECT id FROM held.sums") == [(1,), (2,), (5,)]
    rejected = spark.read.format("streamhouse").option("endpoint", world.endpoint)
    reasons = sorted(row.reason for row in rejected.load("held.sums$rejected").collect())
    assert reasons == [
        "breaks constraint 'positive', CHECK (sum > 0 AND sum < 1000): sum = -7",
        "breaks constraint 'small', CHECK (sum < 5): sum = 5",
    ]
    tables = world.client.status()["tables"]
    (constraints,) = [entry["constraints"] for entry in tables if entry["table"] == "held.sums"]
    assert [entry["rejected_rows"] for entry in constraints] == [1, 1]

    sql("ALTER TABLE held.sums DROP CONSTRAINT small")
    sql("ALTER TABLE held.sums DROP CONSTRAINT IF EXISTS small")
    with pytest.raises(StreamhouseError, match="no constraint 'small'; it has positive"):
        sql("ALTER TABLE held.sums DROP CONSTRAINT small")
    sql("INSERT INTO held.sums VALUES (6, 5)")
    with pytest.raises(Exception, match=r"table\.check\.positive = sum > 0 AND"):
        writer.option("table.check.positive", "sum > 1").mode("append").save("held.sums")
    with pytest.raises(StreamhouseError, match="a default is fixed when a column is added"):
        sql(f"CREATE TABLE held.other (id BIGINT DEFAULT 5) USING streamhouse {options}")
    with pytest.raises(StreamhouseError, match="__offset"):
        sql(
            "CREATE TABLE held.other (id BIGINT GENERATED ALWAYS AS IDENTITY) USING streamhouse"
            f" {options}"
        )
    with pytest.raises(StreamhouseError, match="no literal: a default is one value"):
        sql("ALTER TABLE held.sums ADD COLUMN day DATE DEFAULT current_date()")
    sql("ALTER TABLE held.sums ADD COLUMN unit STRING DEFAULT 'it''s kg' COMMENT 'u' AFTER sum")
    assert rows(world, "SELECT DISTINCT unit FROM held.sums WHERE unit <> 'x'") == [("it's kg",)]


def test_create_table_as_select_copies_rows_and_names_a_table(
    world: SparkWorld, items: str
) -> None:
    options = f"OPTIONS (table 'copies.of_items', endpoint '{world.endpoint}')"
    world.spark.sql(f"CREATE TABLE copied USING streamhouse {options} AS SELECT * FROM {items}")
    world.spark.sql("INSERT INTO copied VALUES (3, 'c')")

    assert rows(world, "SELECT * FROM copied") == [(1, "a"), (2, "b"), (3, "c")]
    assert world.client.read("copies.of_items").num_rows == 3
    world.spark.sql("DROP TABLE copied")


REFUSED_DEFINITIONS = {
    "CREATE OR REPLACE TABLE made (id BIGINT) USING streamhouse": "INSERT OVERWRITE",
    "REPLACE TABLE made USING streamhouse AS SELECT 1 AS id": "INSERT OVERWRITE",
    "CREATE TEMP VIEW made USING streamhouse OPTIONS (path 'a.b')": "createOrReplaceTempView",
    "CREATE TABLE made (id BIGINT) USING streamhouse LOCATION '/x'": "leave the rest out",
    "CREATE TABLE made USING streamhouse OPTIONS (endpoint '{endpoint}')": "name its columns",
    "CREATE TABLE made (id BIGINT) USING streamhouse OPTIONS (nowhere 'x')": "nowhere",
    "CREATE TABLE made (id VARCHAR(3)) USING streamhouse OPTIONS (endpoint '{endpoint}')": (
        r"'id' is VARCHAR\(3\), .* write STRING"
    ),
    "CREATE TABLE no_such.made (id BIGINT) USING streamhouse": "CREATE DATABASE first",
    "CREATE TABLE made LIKE {items}": "the same table",
    "BEGIN CREATE TABLE made (id BIGINT) USING streamhouse; END": "by itself",
    "EXECUTE IMMEDIATE 'CREATE TABLE made (id BIGINT) USING streamhouse'": "by itself",
    "BEGIN IF true THEN CREATE TABLE made LIKE {items}; END IF; END": "by itself",
}


@pytest.mark.parametrize("statement", REFUSED_DEFINITIONS)
def test_a_definition_that_cannot_be_is_refused_and_leaves_no_name(
    world: SparkWorld, items: str, statement: str
) -> None:
    with pytest.raises(StreamhouseError, match=REFUSED_DEFINITIONS[statement]):
        world.spark.sql(statement.format(endpoint=world.endpoint, items=items))

    assert not world.spark.catalog.tableExists("made")


DEFINING_CALLS: dict[str, Callable[[SparkWorld, DataFrame, str], Any]] = {
    "saveAsTable": lambda w, df, name: df.write.format("streamhouse").saveAsTable(name),
    "saveAsTable by argument": lambda w, df, name: df.write.saveAsTable(
        name, format="streamhouse", mode="append"
    ),
    "writeTo create": lambda w, df, name: df.writeTo(name).using("streamhouse").create(),
    "writeTo replace": lambda w, df, name: df.writeTo(name).using("streamhouse").replace(),
    "writeTo createOrReplace": lambda w, df, name: (
        df.writeTo(name).using("streamhouse").createOrReplace()
    ),
    "createTable": lambda w, df, name: w.spark.catalog.createTable(name, source="streamhouse"),
    "toTable": lambda w, df, name: (
        w.spark.readStream.format("rate").load().writeStream.format("streamhouse").toTable(name)
    ),
}


@pytest.mark.parametrize("call", DEFINING_CALLS)
def test_a_call_that_would_make_a_name_without_a_table_is_refused(
    world: SparkWorld, call: str
) -> None:
    with pytest.raises(StreamhouseError, match=r"made.*save\('database\.table'\)"):
        DEFINING_CALLS[call](world, world.spark.range(1), "made")

    assert not world.spark.catalog.tableExists("made")


UNTAKEN_CALLS: dict[str, tuple[Callable[[SparkWorld, DataFrame], Any], str]] = {
    "no mode": (lambda w, df: _writer(w, df).save("default.untaken"), r"mode\('append'\)"),
    "ignore": (
        lambda w, df: _writer(w, df).mode("ignore").save("default.untaken"),
        r"'ignore'.*mode\('append'\)",
    ),
    "error by argument": (
        lambda w, df: df.write.save("default.untaken", "streamhouse", "error", **_at(w)),
        r"'error'.*mode\('append'\)",
    ),
    "partitionBy": (
        lambda w, df: _writer(w, df).partitionBy("id").mode("append").save("default.untaken"),
        "partitioned.by",
    ),
    "partitionBy by argument": (
        lambda w, df: _writer(w, df).save("default.untaken", mode="append", partitionBy="id"),
        "partitioned.by",
    ),
    "bucketBy": (
        lambda w, df: _writer(w, df).bucketBy(2, "id").mode("append").save("default.untaken"),
        "bucket.num",
    ),
    "clusterBy": (
        lambda w, df: _writer(w, df).clusterBy("id").mode("append").save("default.untaken"),
        "partitioned.by",
    ),
    "partitionBy of a stream": (
        lambda w, df: _stream_writer(w).partitionBy("id").start("default.untaken"),
        "partitioned.by",
    ),
    "partitionBy of a stream by argument": (
        lambda w, df: _stream_writer(w).start("default.untaken", partitionBy="id"),
        "partitioned.by",
    ),
    "clusterBy of a stream": (
        lambda w, df: _stream_writer(w).clusterBy("id").start("default.untaken"),
        "partitioned.by",
    ),
}


def _at(world: SparkWorld) -> dict[str, str]:
    return {"endpoint": world.endpoint}


def _writer(world: SparkWorld, frame: DataFrame) -> Any:
    return frame.write.format("streamhouse").options(**_at(world))


def _stream_writer(world: SparkWorld) -> Any:
    source = world.spark.readStream.format("rate").load().selectExpr("value AS id")
    return source.writeStream.format("streamhouse").options(**_at(world))


@pytest.mark.parametrize("call", UNTAKEN_CALLS)
def test_what_a_write_cannot_take_from_sparks_writer_is_refused_by_what_to_use(
    world: SparkWorld, call: str
) -> None:
    write, sentence = UNTAKEN_CALLS[call]
    with pytest.raises(StreamhouseError, match=sentence):
        write(world, world.spark.range(1))

    assert "default.untaken" not in world.client.list_tables()


# -- attached names ------------------------------------------------------------------------------


def test_a_name_sees_the_columns_that_its_table_gets(world: SparkWorld, items: str) -> None:
    path = f"default.{items}"
    held = world.spark.table(items)
    world.client.alter_schema(
        path,
        [
            {"add": "unit", "type": "string", "first": True},
            {"add": "odd `name", "type": {"type": "array", "element": "decimal(10,2)"}},
        ],
    )
    assert world.spark.table(items).columns == ["unit", "id", "name", "odd `name"]
    assert rows(world, f"SELECT unit, id, `odd ``name` FROM {items}") == [
        (None, 1, None),
        (None, 2, None),
    ]
    assert sorted(map(tuple, held.collect())) == [(1, "a"), (2, "b")]

    world.client.rename_column(path, "name", "title")
    world.spark.sql(f"INSERT INTO {items} VALUES ('kg', 3, 'c', array(1.5))")
    assert rows(world, f"SELECT title, unit FROM {items} WHERE id = 3") == [("c", "kg")]

    more = world.spark.sql(f"SELECT *, 1.5D AS weight FROM {items} WHERE id = 3")
    world.write(more, path, mergeSchema="true")
    assert rows(world, f"SELECT DISTINCT weight FROM {items} WHERE id = 3 AND weight > 0") == [
        (1.5,)
    ]
    stream = world.spark.readStream.table(items)
    assert stream.columns[-1] == "weight"


def test_a_frame_of_a_name_that_is_kept_reads_the_newest_rows(
    world: SparkWorld, items: str
) -> None:
    spark, path = world.spark, f"default.{items}"
    held = spark.table(items)
    bounded = spark.read.option("where", "id > 1").table(f"default.{items}")
    assert (held.count(), bounded.count()) == (2, 1)

    world.client.append(path, pa.table({"id": [3], "name": ["c"]}, schema=ITEMS))

    assert (held.count(), bounded.count()) == (3, 2)
    assert held.select(f"{items}.id").where(f"{items}.name = 'c'").first() == (3,)
    spark.range(1).createOrReplaceTempView(items)
    assert spark.table(items).columns == ["id"]
    spark.catalog.dropTempView(items)
    spark.catalog.cacheTable(items)
    world.client.append(path, pa.table({"id": [4], "name": ["d"]}, schema=ITEMS))
    assert spark.table(items).count() == 4
    world.client.append(path, pa.table({"id": [5], "name": ["e"]}, schema=ITEMS))
    assert spark.table(items).count() == 4
    assert held.count() == 5
    spark.catalog.uncacheTable(items)


def test_what_spark_knows_without_us_stays_as_it_was(world: SparkWorld, items: str) -> None:
    """A Python source is never asked for columns again: the day it is, this fails, and hooks go."""
    world.client.add_column(f"default.{items}", "unit", pa.string())

    assert run_as_spark(world.spark, f"SELECT * FROM {items}").columns == ["id", "name"]


def test_alter_table_changes_the_table_itself(world: SparkWorld, items: str) -> None:
    sql, path = world.spark.sql, f"default.{items}"
    sql(f"ALTER TABLE {items} ADD COLUMNS (size INT COMMENT 'in kg' AFTER id, s STRUCT<a: INT>)")
    sql(f"ALTER TABLE {items} RENAME COLUMN name TO title")
    sql(f"ALTER TABLE {items} ALTER COLUMN size TYPE BIGINT")
    sql(f"ALTER TABLE {items} SET TBLPROPERTIES ('table.log.ttl' = '1d')")
    assert world.client.describe_table(path).properties().log_ttl_ms == 86_400_000
    sql(f"ALTER TABLE {items} UNSET TBLPROPERTIES ('table.log.ttl')")
    sql(f"INSERT INTO {items} VALUES (3, 5000000000, 'c', named_struct('a', 1))")
    sql(f"ALTER TABLE {items} DROP COLUMN s")
    sql(f"COMMENT ON COLUMN default.{items}.title IS 'on the box'")

    assert rows(world, f"SELECT * FROM {items}") == [
        (1, None, "a"),
        (2, None, "b"),
        (3, 5_000_000_000, "c"),
    ]
    info = world.client.describe_table(path)
    assert [(c.name, c.comment) for c in info.schema.columns] == [
        ("id", ""),
        ("size", "in kg"),
        ("title", "on the box"),
    ]
    sql(f"COMMENT ON COLUMN {items}.title IS NULL")
    assert world.client.describe_table(path).schema.columns[-1].comment == ""


def test_not_null_is_dropped_by_sql_and_rows_may_be_null(world: SparkWorld) -> None:
    sql = world.spark.sql
    sql(
        "CREATE TABLE strict (id BIGINT, size INT NOT NULL) USING streamhouse OPTIONS"
        f" (endpoint '{world.endpoint}')"
    )
    with pytest.raises(Exception, match="--drop-not-null size"):
        sql("INSERT INTO strict VALUES (1, null)")
    sql("ALTER TABLE strict ALTER COLUMN size DROP NOT NULL")
    sql("INSERT INTO strict VALUES (1, null)")
    world.tier("default.strict")
    sql("INSERT INTO strict VALUES (2, null)")

    assert rows(world, "SELECT * FROM strict") == [(1, None), (2, None)]
    sql("DROP TABLE strict")


REFUSED_ON_NAMES = {
    "ALTER TABLE {items} RENAME TO other": "streamhouse.attach",
    "ALTER TABLE {items} ADD COLUMN a INT NOT NULL": "what can be is ADD COLUMNS",
    "ALTER TABLE {items} REPLACE COLUMNS (a INT)": "what can be is ADD COLUMNS",
    "ALTER TABLE {items} SET LOCATION '/x'": "what can be is ADD COLUMNS",
    "ALTER TABLE {items} ADD COLUMN a INTERVAL DAY": "INTERVAL|interval|duration",
    "ALTER TABLE {items} ALTER COLUMN id TYPE INT": "cannot become int32",
    "ALTER TABLE {items} DROP COLUMN nothing": "no column 'nothing'",
    "DELETE FROM {items} WHERE id = 1": r"no primary key.*\.delete\(\.\.\., rewrite=True\)",
    "UPDATE {items} SET name = 'x'": r"no primary key.*\.update\(\.\.\., rewrite=True\)",
    "MERGE INTO {items} USING {items} s ON false WHEN MATCHED THEN DELETE": "no primary key",
    "CREATE OR REPLACE TABLE {items} AS SELECT 1 AS id": "INSERT OVERWRITE",
    "COMMENT ON TABLE {items} IS 'x'": "COMMENT ON COLUMN",
    "SELECT * FROM {items} TIMESTAMP AS OF '2030-01-01'": "asOfTimestamp",
    "SELECT * FROM {items} VERSION AS OF 1": "asOfSnapshot",
    "INSERT INTO {items} REPLACE WHERE id = 1 SELECT 1L, 'z'": "INSERT OVERWRITE replaces all",
    "INSERT OVERWRITE {items} PARTITION (name = 'a') SELECT 1L": "INSERT OVERWRITE replaces all",
    "ANALYZE TABLE {items} COMPUTE STATISTICS": "needs no such statement",
    "SHOW PARTITIONS {items}": "needs no such statement",
    "SELECT * FROM streamhouse.`default.{items}`": r"streamhouse\.sql",
    "COMMENT ON COLUMN {items}.nothing IS 'x'": "no column 'nothing'",
    "EXECUTE IMMEDIATE 'ALTER TABLE {items} ADD COLUMNS (zz INT)'": "by itself",
    "BEGIN TRUNCATE TABLE {items}; END": "by itself",
    "BEGIN COMMENT ON COLUMN {items}.id IS 'x'; END": "by itself",
}


@pytest.mark.parametrize("statement", REFUSED_ON_NAMES)
def test_what_a_name_cannot_do_is_refused_at_once(
    world: SparkWorld, items: str, statement: str
) -> None:
    with pytest.raises(Exception, match=REFUSED_ON_NAMES[statement]):
        world.spark.sql(statement.format(items=items))

    assert rows(world, f"SELECT * FROM {items}") == [(1, "a"), (2, "b")]


def test_calls_that_would_replace_a_name_or_change_rows_are_refused(
    world: SparkWorld, items: str
) -> None:
    frame = world.spark.sql("SELECT 3L AS id, 'c' AS name")
    for call in (
        lambda: frame.write.mode("overwrite").saveAsTable(items),
        lambda: frame.writeTo(items).createOrReplace(),
        lambda: frame.writeTo(items).replace(),
        lambda: frame.mergeInto(items, F.lit(True)),
        lambda: frame.writeTo(items).overwrite(F.col("id") == 1),
        lambda: frame.writeTo(items).overwritePartitions(),
    ):
        with pytest.raises(StreamhouseError, match=r"insertInto|streamhouse\.Table|DELETE FROM"):
            call()
    assert rows(world, f"SELECT * FROM {items}") == [(1, "a"), (2, "b")]


def test_writes_through_a_name_write_to_its_table(
    world: SparkWorld, items: str, tmp_path: Path
) -> None:
    def frame(number: int) -> DataFrame:
        return world.spark.sql(f"SELECT {number}L AS id, 'n' AS name")

    def ids() -> list[int]:
        return world.ids(world.spark.table(items))

    frame(3).write.insertInto(items)
    frame(4).writeTo(items).append()
    frame(5).write.mode("append").saveAsTable(items)
    world.spark.sql(f"INSERT INTO {items} (name, id) VALUES ('n', 6)")
    assert ids() == [1, 2, 3, 4, 5, 6]
    world.spark.sql(f"INSERT OVERWRITE {items} VALUES (7, 'n')")
    assert ids() == [7]
    frame(8).write.insertInto(items, overwrite=True)
    assert ids() == [8]
    frame(8).writeTo(items).overwrite(F.lit(True))
    assert ids() == [8]
    source = world.stream(world.table(rows=5)).selectExpr("id", "region AS name")
    query = (
        source.writeStream.trigger(availableNow=True)
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .toTable(items)
    )
    query.awaitTermination()
    assert ids() == [0, 1, 2, 3, 4, 8]


def test_statements_that_describe_cache_or_drop_a_name(world: SparkWorld, items: str) -> None:
    sql = world.spark.sql
    assert [row.col_name for row in sql(f"DESCRIBE {items}").collect()] == ["id", "name"]
    shown = sql(f"SHOW CREATE TABLE {items}").collect()[0][0]
    assert "id BIGINT" in shown

    sql(f"CACHE TABLE {items}")
    world.client.append(f"default.{items}", pa.table({"id": [3], "name": ["c"]}, schema=ITEMS))
    assert rows(world, f"SELECT count(*) FROM {items}") == [(2,)]
    sql(f"REFRESH TABLE {items}")
    assert rows(world, f"SELECT count(*) FROM {items}") == [(3,)]
    sql(f"UNCACHE TABLE {items}")

    sql(f"DROP TABLE {items}")
    assert not world.spark.catalog.tableExists(items)
    assert world.client.describe_table(f"default.{items}").schema.names == ["id", "name"]


def test_a_name_that_was_dropped_and_used_again_is_sparks(world: SparkWorld, items: str) -> None:
    run_as_spark(world.spark, f"DROP TABLE {items}")
    world.spark.sql(f"CREATE TABLE {items} USING parquet AS SELECT 1 AS id")
    world.client.add_column(f"default.{items}", "unit", pa.string())

    assert rows(world, f"SELECT * FROM {items}") == [(1,)]
    world.spark.sql(f"TRUNCATE TABLE {items}")
    assert rows(world, f"SELECT * FROM {items}") == []


def test_a_write_through_columns_that_the_table_has_not_says_so(
    world: SparkWorld, items: str
) -> None:
    """As a program would see it that shares the catalog and does not ask us."""
    world.client.rename_column(f"default.{items}", "name", "title")

    with pytest.raises(Exception, match="attach it again, or REFRESH TABLE it") as read:
        run_as_spark(world.spark, f"SELECT name FROM {items}").collect()
    assert "no column 'name'" in last_line(read.value)
    with pytest.raises(Exception, match="attach it again, or REFRESH TABLE it"):
        run_as_spark(world.spark, f"INSERT INTO {items} VALUES (3, 'c')")


def test_refresh_table_heals_a_name_whose_columns_another_program_changed(
    world: SparkWorld, items: str
) -> None:
    for heal in (
        lambda: world.spark.sql(f"REFRESH TABLE {items}"),
        lambda: world.spark.catalog.refreshTable(items),
    ):
        run_as_spark(world.spark, f"ALTER TABLE {items} ADD COLUMNS (zz INT)")
        with pytest.raises(Exception, match=r"no column 'zz'.*REFRESH TABLE it"):
            world.spark.sql(f"SELECT * FROM {items}").collect()
        heal()
        assert rows(world, f"SELECT * FROM {items}") == [(1, "a"), (2, "b")]
