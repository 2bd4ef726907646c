"""Appends from real Spark, batch and stream; what does not fit is refused before a row moves."""

from __future__ import annotations

from pathlib import Path

import pytest

from integration.spark_world import SparkWorld, event_rows, last_line, world

__all__ = ["world"]

pytestmark = [pytest.mark.spark, pytest.mark.slow]


@pytest.mark.end_to_end
def test_what_is_appended_is_read_back(world: SparkWorld) -> None:
    source, path = world.table(rows=25_000, bucket_count=2), world.table(bucket_count=2)

    world.write(world.load(source), path)

    found = world.client.read(path).sort_by("id")
    assert found.equals(event_rows(0, 25_000))
    # Spark's batches of 10,000 rows are put together: few appends, few syncs.
    assert sum(p.high_watermark for p in world.client.positions(path).values()) == 25_000


def test_a_missing_table_is_created_as_the_frame_describes_it(world: SparkWorld) -> None:
    frame = world.spark.range(1_000).selectExpr(
        "id", "concat('c', id % 7) as customer", "timestamp_micros(id) as at", "id > 5 as flag"
    )
    options = {
        "bucket.num": "3",
        "bucket.key": "customer",
        "partitioned.by": "day(at), customer",
        "table.log.ttl": "1d",
    }

    world.write(frame, "shop.created", **options)

    info = world.client.describe_table("shop.created")
    assert info.schema.names == ["id", "customer", "at", "flag"]
    assert info.bucket_count == 3
    assert info.descriptor.bucket_key == ("customer",)
    assert [str(f) for f in info.descriptor.partitioned_by] == ["day(at)", "customer"]
    assert info.properties().log_ttl_ms == 86_400_000
    assert world.load("shop.created").count() == 1_000


def test_what_a_write_creates_may_be_null_unless_it_is_told_otherwise(world: SparkWorld) -> None:
    frame = world.spark.range(2).selectExpr("id", "'x' AS word")
    frame = frame.withMetadata("word", {"comment": "what it says"})

    world.write(frame, "default.loose")
    world.write(frame, "default.strict", keepNullability="true", **{"primary.key": "id"})

    loose, strict = (
        world.client.describe_table(f"default.{t}").schema for t in ("loose", "strict")
    )
    assert [column.nullable for column in loose.columns] == [True, True]
    assert [column.nullable for column in strict.columns] == [False, False]
    assert [column.comment for column in loose.columns] == ["", "what it says"]
    nulls = world.spark.sql("SELECT 7L AS id, CAST(NULL AS STRING) AS word")
    world.write(nulls, "default.loose")
    with pytest.raises(Exception, match="'word' must not be null"):
        world.write(nulls, "default.strict")
    world.write(nulls, "default.strict", mergeSchema="true")
    relaxed = world.client.describe_table("default.strict").schema
    assert [column.nullable for column in relaxed.columns] == [False, True]
    assert world.ids(world.load("default.strict")) == [0, 1, 7]


@pytest.mark.parametrize("case_sensitive", ["true", "false"])
def test_names_of_a_table_have_no_case_whatever_spark_is_told(
    world: SparkWorld, case_sensitive: str
) -> None:
    path = world.table(rows=2)
    world.spark.conf.set("spark.sql.caseSensitive", case_sensitive)
    try:
        frame = world.load(path).selectExpr("id AS ID", *world.load(path).columns[1:])
        world.write(frame, path)
        assert world.load(path, columns="ID, Region").columns == ["id", "region"]
    finally:
        world.spark.conf.unset("spark.sql.caseSensitive")

    assert world.ids(world.load(path)) == [0, 0, 1, 1]


def test_timestamps_survive_the_sessions_time_zone(world: SparkWorld) -> None:
    frame = world.spark.sql(
        "select 1 as id, timestamp'2026-07-01 08:00:00' as at, timestamp_ntz'2026-07-01 08:00:00'"
        " as local"
    )

    world.write(frame, "default.zones")

    row = world.client.read("default.zones").to_pylist()[0]
    assert row["at"].isoformat() == "2026-07-01T12:00:00+00:00"
    assert row["local"].isoformat() == "2026-07-01T08:00:00"
    assert world.load("default.zones").collect()[0].local.hour == 8


@pytest.mark.end_to_end
def test_rows_that_do_not_fit_are_refused_whole(world: SparkWorld) -> None:
    path = world.table(rows=5)
    good = world.load(path)
    wrong = {
        "price": good.selectExpr("id", "region", "small", "cast(id as string) price", "at", "tags",
                                 "place"),
        "smal": good.withColumnRenamed("small", "smal"),
        "tags": good.drop("tags"),
    }  # fmt: skip

    for column, frame in wrong.items():
        with pytest.raises(Exception, match=f"'{column}'") as caught:
            world.write(frame, path)
        assert path in last_line(caught.value)

    nulls = good.selectExpr("if(id = 3, null, id) id", *good.columns[1:])
    with pytest.raises(Exception, match="'id' must not be null"):
        world.write(nulls, path)
    assert world.load(path).count() == 5


@pytest.mark.end_to_end
def test_an_overwrite_replaces_all_rows_of_both_tiers(world: SparkWorld) -> None:
    path = world.table(rows=50, bucket_count=2)
    world.tier(path)
    world.append(path, 50, 60)
    before = world.load(path)

    world.write(before.where("id >= 40"), path, mode="overwrite")

    assert world.ids(world.load(path)) == list(range(40, 60))
    assert world.ids(before) == list(range(40, 60))
    world.tier(path)
    assert world.ids(world.load(path)) == world.ids(world.load(f"{path}$lake"))
    assert world.load(path).count() == 20

    world.write(world.load(path).where("id < 0"), path, mode="overwrite")
    assert world.load(path).count() == 0
    world.write(world.load(path), "default.overwritten_first", mode="overwrite")
    assert world.load("default.overwritten_first").count() == 0


def test_a_stream_behind_an_overwrite_says_so_or_skips(world: SparkWorld, tmp_path: Path) -> None:
    source, path = world.table(rows=10), world.table()

    def run(**options: str) -> None:
        frame = world.stream(source, **options)
        writer = frame.writeStream.format("streamhouse").option("endpoint", world.endpoint)
        writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
        query = writer.trigger(availableNow=True).start(path)
        query.awaitTermination()

    run()
    world.append(source, 10, 20)
    frame = world.spark.range(0).sparkSession.createDataFrame(
        world.client.read(source).slice(0, 3).to_pandas(), schema=world.load(source).schema
    )
    world.write(frame, source, mode="overwrite")
    with pytest.raises(Exception, match="because it was overwritten"):
        run()
    run(failOnDataLoss="false")
    assert world.load(path).count() == 13


def test_a_stream_writes_every_row_once(world: SparkWorld, tmp_path: Path) -> None:
    source, path = world.table(rows=3_000, bucket_count=2), world.table(bucket_count=2)

    def run() -> None:
        frame = world.stream(source, maxOffsetsPerTrigger=1_000)
        writer = frame.writeStream.format("streamhouse").option("endpoint", world.endpoint)
        writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
        query = writer.trigger(availableNow=True).start(path)
        query.awaitTermination()

    run()
    world.append(source, 3_000, 3_500)
    run()

    assert world.ids(world.load(path)) == list(range(3_500))


def test_an_empty_frame_writes_nothing(world: SparkWorld) -> None:
    path = world.table()

    world.write(world.load(path), path)

    assert world.client.positions(path)[0].high_watermark == 0
