"""Batch reads in real Spark: both tiers as one table, pinned, projected and filtered exactly."""

from __future__ import annotations

import pytest
from pyspark.sql import functions as F

import streamhouse
from integration.spark_world import EVENTS, EXPIRING, SparkWorld, event_rows, world
from streamhouse.core.errors import AlreadyExistsError

__all__ = ["world"]

pytestmark = [pytest.mark.spark, pytest.mark.slow]


@pytest.mark.end_to_end
def test_both_tiers_are_read_as_one_table(world: SparkWorld) -> None:
    path = world.table(rows=3_000, bucket_count=2, partitioned_by=["region"])
    world.tier(path)
    world.append(path, 3_000, 5_000)

    found = world.load(path).toArrow().sort_by("id")

    # Spark labels instants with the session's zone; the schema is otherwise the table's own.
    assert found.cast(EVENTS).equals(event_rows(0, 5_000))
    assert world.load(f"{path}$lake").count() == 3_000
    assert world.load(path).where("region = 'eu'").count() == 1_667


@pytest.mark.end_to_end
def test_a_relation_filtered_twice_gives_both_answers(world: SparkWorld) -> None:
    """Spark 4.3's filter pushdown mixes up the two scans of one relation; ours has none."""
    path = world.table(rows=100)
    frame = world.load(path)
    both = frame.where("id = 3").union(frame.where("id = 7"))

    assert world.ids(both) == [3, 7]
    assert frame.where("id = 3").count() == 1
    assert frame.count() == 100
    frame.createOrReplaceTempView("twice")
    joined = world.spark.sql("select a.id, b.id from twice a join twice b on a.id=3 and b.id=7")
    assert [tuple(row) for row in joined.collect()] == [(3, 7)]


def test_where_and_columns_are_exact_over_both_tiers(world: SparkWorld) -> None:
    path = world.table(rows=2_000, bucket_count=2, partitioned_by=["region"])
    world.tier(path)
    world.append(path, 2_000, 3_000)
    where = "region = 'eu' and id >= 1500 and id < 2500"

    frame = world.load(path, where=where, columns="small,id")

    assert frame.columns == ["small", "id"]
    expected = [i for i in range(1_500, 2_500) if i % 3 == 0]
    assert world.ids(frame) == expected
    assert world.ids(world.load(path).where(where)) == expected
    assert [r.small for r in frame.where("id = 1500").collect()] == [0]


def test_a_schema_with_fewer_columns_reads_only_those(world: SparkWorld) -> None:
    path = world.table(rows=10)

    frame = world.reader().schema("SMALL tinyint, id bigint").load(path)

    assert sorted(tuple(row) for row in frame.collect()) == [(i, i) for i in range(10)]


def test_metadata_columns_say_where_a_row_lies(world: SparkWorld) -> None:
    path = world.table(rows=20_000, bucket_count=2)
    world.tier(path)
    world.append(path, 20_000, 20_100)

    frame = world.load(path, includeMetadata="true")

    assert frame.columns[-3:] == ["__bucket", "__offset", "__timestamp"]
    ends = {row[0]: row[1] for row in frame.groupBy("__bucket").agg(F.max("__offset")).collect()}
    positions = world.client.positions(path)
    assert ends == {b: p.high_watermark - 1 for b, p in positions.items()}
    assert frame.select("__bucket", "__offset").distinct().count() == 20_100


def test_offsets_bound_a_read_wherever_the_rows_are(world: SparkWorld) -> None:
    path = world.table(rows=1_000)
    world.tier(path)
    world.append(path, 1_000, 1_200)

    frame = world.load(path, startingOffsets='{"0": 990}', endingOffsets='{"0": 1010}')

    assert world.ids(frame) == list(range(990, 1_010))
    assert world.load(f"{path}$log", startingOffsets='{"0": 1100}').count() == 100


@pytest.mark.end_to_end
def test_time_travel(world: SparkWorld) -> None:
    path = world.table(rows=500)
    world.tier(path)
    snapshot = world.load(f"{path}$snapshots").collect()[0]
    moment = world.load(path, includeMetadata="true").agg(F.max("__timestamp")).toArrow()
    world.append(path, 500, 700)
    world.tier(path)
    last = moment.column(0)[0].as_py().isoformat()

    assert world.load(path, asOfSnapshot=snapshot.snapshot_id).count() == 500
    assert world.load(path, asOfTimestamp=last).count() == 500
    assert world.ids(world.load(path, asOfTimestamp=last)) == list(range(500))
    assert world.load(path, startingTimestamp="2001-01-01", endingTimestamp=last).count() == 0


@pytest.mark.parametrize("zone", ["Europe/Amsterdam", "Africa/Accra", "Europe/Oslo"])
def test_old_times_are_those_of_java_s_zones(world: SparkWorld, zone: str) -> None:
    """Java and this machine may have other clocks for 1930: `where` goes by Java's."""
    spark, name = world.spark, "spark.sql.session.timeZone"
    path = f"default.old_times_{zone.partition('/')[2].lower()}"
    before = spark.conf.get(name)
    spark.conf.set(name, zone)
    try:
        rows = spark.sql(
            "select id, make_timestamp(1930, 6, 1, 0, cast(id as int) * 5, 0) at from range(12)"
        )
        world.write(rows, path)
        for text in (
            "at < '1930-06-01 00:20:00'",
            "date(at) = '1930-06-01'",
            "at = timestamp'1930-06-01 00:15:00'",
        ):
            wanted = world.ids(world.load(path).filter(text))
            assert world.ids(world.load(path, where=text)) == wanted
            assert world.ids(world.load(path, where=text, timeZone=zone)) == wanted
    finally:
        spark.conf.set(name, before)


def test_metadata_tables(world: SparkWorld) -> None:
    path = world.table(rows=100, bucket_count=2, bucket_key=["id"])
    world.tier(path)
    world.append(path, 100, 130)

    buckets = world.load(f"{path}$buckets").orderBy("bucket").collect()
    files = world.load(f"{path}$files", columns="row_count,bucket").collect()
    snapshots = world.load(f"{path}$snapshots").collect()

    assert [row.bucket for row in buckets] == [0, 1]
    assert sum(row.high_watermark for row in buckets) == 130
    assert sum(row.tiered_offset for row in buckets) == 100
    assert sum(row.row_count for row in files) == 100
    assert snapshots[0].tiered_offsets == {row.bucket: row.tiered_offset for row in buckets}
    assert snapshots[0].operation == "append"


def test_an_empty_table_has_columns_and_no_rows(world: SparkWorld) -> None:
    path = world.table()

    frame = world.load(path)

    assert frame.count() == 0
    assert frame.columns == EVENTS.names
    assert world.load(f"{path}$snapshots").count() == 0


def test_a_plan_whose_rows_left_the_log_fails_by_name(world: SparkWorld) -> None:
    path = world.table(rows=3_000, properties=EXPIRING)
    frame = world.load(path)
    assert len(frame.collect()) == 3_000
    world.tier(path)
    world.append(path, 3_000, 6_000)
    world.expire_log(path)

    with pytest.raises(Exception, match="left the log after this read was planned") as caught:
        frame.collect()  # Spark plans once what one DataFrame collects

    assert f"table '{path}', bucket 0: rows [0, 3000)" in str(caught.value)
    assert frame.count() == world.load(path).count() == 6_000


@pytest.mark.end_to_end
def test_attached_tables_plan_afresh_and_take_inserts(world: SparkWorld) -> None:
    path = world.table(rows=10)
    name = streamhouse.attach(world.spark, path, "attached", endpoint=world.endpoint)
    sql = world.spark.sql

    assert name == "attached"
    assert sql("select count(*) from attached").first()[0] == 10
    world.append(path, 10, 20)
    assert sql("select count(*) from attached").first()[0] == 20
    assert sql("select count(*) from attached with (where = 'id < 5')").first()[0] == 5
    sql("insert into attached select id + 20, region, small, price, at, tags, place from attached")
    assert sql("select max(id) from attached").first()[0] == 39
    assert sql("select count(*) from attached a join attached b on a.id = b.id").first()[0] == 40
    world.spark.table("attached").where("id = 0").writeTo("attached").append()
    assert sql("select count(*) from attached where id = 0").first()[0] == 2


def test_attaching_again_replaces_options_and_spares_other_tables(world: SparkWorld) -> None:
    path = world.table(rows=30)
    spark = world.spark
    streamhouse.attach(spark, path, "again", endpoint=world.endpoint)

    streamhouse.attach(spark, path, "again", endpoint=world.endpoint, where="id < 5")

    assert spark.sql("select count(*) from again").first()[0] == 5
    spark.sql("insert into again select * from again where id = 0")
    spark.sql("create table mine (x int) using parquet")
    try:
        with pytest.raises(AlreadyExistsError, match="'mine'"):
            streamhouse.attach(spark, path, "mine", endpoint=world.endpoint)
        assert spark.table("mine").columns == ["x"]
        spark.range(1).createOrReplaceTempView("view_of_mine")
        with pytest.raises(AlreadyExistsError, match="'view_of_mine'"):
            streamhouse.attach(spark, path, "view_of_mine", endpoint=world.endpoint)
    finally:
        spark.sql("drop table mine")
