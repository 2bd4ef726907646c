"""Each statement, and each micro-batch, reads a table as it is when it is planned: on one cut."""

from __future__ import annotations

import threading
import warnings

import pytest
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

import streamhouse
from integration.spark_world import SparkWorld, event_rows, world
from streamhouse.connector.format._spark_readers import PUSHDOWN

__all__ = ["world"]

pytestmark = pytest.mark.spark


@pytest.mark.end_to_end
def test_each_statement_reads_the_newest_rows_of_both_tiers(world: SparkWorld) -> None:
    path = world.table(rows=1_000)
    frame = world.load(path)
    assert frame.count() == 1_000

    world.append(path, 1_000, 1_500)
    assert frame.count() == 1_500
    world.tier(path)
    world.append(path, 1_500, 1_600)

    assert world.ids(frame) == list(range(1_600))
    assert frame.columns == event_rows(0, 0).column_names
    assert frame.select("id").schema["id"].nullable is False


def test_a_cached_frame_and_a_bounded_one_stay_as_they_are(world: SparkWorld) -> None:
    path = world.table(rows=10)
    cached, bounded = world.load(path).cache(), world.load(path, endingOffsets='{"0": 10}')
    assert cached.count() == 10

    world.append(path, 10, 20)

    assert cached.count() == 10
    assert bounded.count() == 10
    cached.unpersist()


def test_one_statement_reads_one_cut_while_rows_arrive(world: SparkWorld) -> None:
    path = world.table(rows=10)
    frame = world.load(path)
    frame.createOrReplaceTempView("arriving")
    ends, is_over = [10], threading.Event()

    def append() -> None:
        while not is_over.is_set():
            world.append(path, ends[0], ends[0] + 10)
            ends[0] += 10

    thread = threading.Thread(target=append)
    thread.start()
    try:
        for _ in range(5):
            both = frame.alias("a").join(frame.alias("b"), "id", "full")
            found = both.agg(
                F.count("*"), F.count("a.small"), F.count("b.small"), F.max("id")
            ).first()
            assert found is not None
            assert found[0] == found[1] == found[2] == found[3] + 1
            row = world.spark.sql(
                "select (select max(id) from arriving) as a, max(id) as b, count(*) - 1 as c"
                " from arriving where id >= 0"
            ).first()
            assert row is not None
            assert row.a == row.b == row.c
    finally:
        is_over.set()
        thread.join()


def test_a_schema_of_ones_own_is_planned_afresh_too(world: SparkWorld) -> None:
    path = world.table(rows=5)
    first = world.reader().schema("id bigint").load(path)
    second = world.reader().load(path, schema=first.schema)
    third = world.spark.read.load(path, "streamhouse", "small tinyint", endpoint=world.endpoint)
    assert [frame.count() for frame in (first, second, third)] == [5, 5, 5]

    world.append(path, 5, 8)

    assert [frame.count() for frame in (first, second, third)] == [8, 8, 8]
    assert (first.columns, second.columns, third.columns) == (["id"], ["id"], ["small"])


def test_tables_that_describe_a_table_are_read_afresh(world: SparkWorld) -> None:
    path = world.table(rows=5)
    buckets = world.load(f"{path}$buckets")
    ends = [buckets.select("high_watermark").first()]

    world.append(path, 5, 8)
    ends.append(buckets.select("high_watermark").first())

    assert [end and end[0] for end in ends] == [5, 8]
    assert "high_watermark" in buckets.columns
    assert not [column for column in buckets.columns if column.startswith("__")]


def test_a_table_made_again_under_its_name_is_refused(world: SparkWorld) -> None:
    path = world.table(rows=5)
    frame = world.load(path)
    assert frame.count() == 5
    world.client.drop_table(path)
    world.client.create_table(path, event_rows(0, 0).schema)

    with pytest.raises(Exception, match="dropped and made again after this DataFrame was loaded"):
        frame.count()


@pytest.mark.parametrize("how", ["inner", "left"])
@pytest.mark.parametrize("static", ["load", "view", "attached"])
def test_a_stream_joins_the_newest_rows_in_each_micro_batch(
    world: SparkWorld, how: str, static: str
) -> None:
    facts, users = world.table(), world.table()
    frame, name = _static_side(world, users, static)
    seen: list[dict[int, str | None]] = []

    def note(batch: DataFrame, _: int) -> None:
        seen.append({row.id: row.region for row in batch.collect()})

    stream = world.stream(facts).select("id")
    joined = (
        stream.join(frame.select("id", "region"), "id", how)
        if frame is not None
        else _by_sql(world, stream, name, how)
    )
    query = joined.writeStream.foreachBatch(note).start()
    try:
        for number in range(3):
            world.append(users, number, number + 1)
            world.append(facts, number, number + 1)
            query.processAllAvailable()
    finally:
        query.stop()

    regions = event_rows(0, 3).column("region").to_pylist()
    assert [batch for batch in seen if batch] == [{n: regions[n]} for n in range(3)]


def test_one_micro_batch_sees_one_cut_of_a_side_that_it_uses_twice(world: SparkWorld) -> None:
    facts, path = world.table(), world.table(rows=1)
    side = world.load(path).select("id")
    whole = side.agg(F.max("id").alias("last"), F.count("*").alias("rows"))
    stream = world.stream(facts).select(F.col("id").alias("fact"))
    seen: list[tuple[int, ...]] = []
    is_over = threading.Event()

    def note(batch: DataFrame, _: int) -> None:
        found = batch.agg(F.count("*"), F.max("id"), F.max("last"), F.max("rows")).collect()
        seen.extend(tuple(row) for row in found if row[0])

    def append() -> None:
        number = 1
        while not is_over.is_set():
            world.append(path, number, number + 1)
            number += 1

    thread = threading.Thread(target=append)
    query = stream.crossJoin(side).crossJoin(whole).writeStream.foreachBatch(note).start()
    thread.start()
    try:
        for number in range(3):
            world.append(facts, number, number + 1)
            query.processAllAvailable()
    finally:
        is_over.set()
        thread.join()
        query.stop()

    assert len(seen) == 3
    for rows, last_row, last, counted in seen:
        assert rows == counted == last + 1 == last_row + 1


def _static_side(world: SparkWorld, path: str, static: str) -> tuple[DataFrame | None, str]:
    frame = world.load(path)
    if static == "load":
        return frame, ""
    if static == "view":
        frame.createOrReplaceTempView("static_view")
        return None, "static_view"
    return None, streamhouse.attach(world.spark, path, "static_name", endpoint=world.endpoint)


def _by_sql(world: SparkWorld, stream: DataFrame, name: str, how: str) -> DataFrame:
    stream.createOrReplaceTempView("the_stream")
    return world.spark.sql(
        f"select s.id, u.region from the_stream s {how} join {name} u on s.id = u.id"
    )


def test_without_the_setting_a_frame_keeps_its_rows_and_says_so(world: SparkWorld) -> None:
    path = world.table(rows=5)
    world.spark.conf.set(PUSHDOWN, "false")
    try:
        with pytest.warns(UserWarning, match="keeps the rows of its first use"):
            frame = world.load(path)
        assert frame.count() == 5
        world.append(path, 5, 8)
        assert frame.count() == 5
    finally:
        world.spark.conf.set(PUSHDOWN, "true")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert world.load(path).count() == 8


@pytest.mark.parametrize("how", ["spark.table", "cross join u", "join u on s.id <=> u.id"])
def test_a_stream_that_compares_nothing_reads_afresh_by_table_and_else_warns(
    world: SparkWorld, how: str
) -> None:
    facts, users = world.table(), world.table()
    name = streamhouse.attach(world.spark, users, "compared", endpoint=world.endpoint)
    stream = world.stream(facts).select("id")
    stream.createOrReplaceTempView("s")
    counts: list[int] = []
    if how == "spark.table":
        joined = stream.crossJoin(world.spark.table(name).select("region"))
    else:
        joined = world.spark.sql(f"select s.id from s {how.replace(' u', f' {name} u', 1)}")
    start = joined.writeStream.foreachBatch(lambda batch, _: counts.append(batch.count())).start
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        query = start()
    try:
        for number in range(2):
            world.append(users, number, number + 1)
            world.append(facts, number, number + 1)
            query.processAllAvailable()
    finally:
        query.stop()

    said = [str(one.message) for one in caught if "attached name" in str(one.message)]
    if how == "spark.table":
        assert (said, [count for count in counts if count]) == ([], [1, 2])
    else:
        (sentence,) = said
        assert "'default.compared'" in sentence
        assert "spark.table" in sentence


def test_a_stream_that_compares_columns_of_a_name_starts_without_a_warning(
    world: SparkWorld,
) -> None:
    facts, users = world.table(), world.table()
    name = streamhouse.attach(world.spark, users, "compared", endpoint=world.endpoint)
    world.stream(facts).select("id").createOrReplaceTempView("s")
    joined = world.spark.sql(f"select s.id from s left join {name} u on s.id < u.id")

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        query = joined.writeStream.format("noop").trigger(availableNow=True).start()
    query.awaitTermination()


def test_a_name_that_is_attached_without_the_setting_says_so(world: SparkWorld) -> None:
    path = world.table(rows=1)
    world.spark.conf.set(PUSHDOWN, "false")
    try:
        with pytest.warns(UserWarning, match="a stream that joins 'unplanned'"):
            world.spark.sql(
                "CREATE TABLE unplanned USING streamhouse OPTIONS"
                f" (table '{path}', endpoint '{world.endpoint}')"
            )
    finally:
        world.spark.conf.set(PUSHDOWN, "true")
    world.spark.sql("DROP TABLE unplanned")
