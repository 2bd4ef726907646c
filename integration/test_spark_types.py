"""Times, zones, types and names of columns are what they are in Spark."""

from __future__ import annotations

import datetime

import pyarrow as pa
import pytest
from pyspark.sql import functions as F

import streamhouse
from integration.spark_world import SparkWorld

pytestmark = pytest.mark.spark

# `spark_session` is in New York: midnight there is 5 hours after midnight in UTC.
MIDNIGHT = datetime.datetime(2024, 1, 1, 5, tzinfo=datetime.UTC)
TIMES = pa.schema([("id", pa.int64()), ("at", pa.timestamp("us", tz="UTC"))])


def test_epoch_microseconds_reach_the_last_write(world: SparkWorld) -> None:
    path = world.table(rows=20)
    addressed = world.load(path, includeMetadata="true")
    last = addressed.agg(F.expr("unix_micros(max(__timestamp))")).first()

    assert last is not None
    assert world.load(path, asOfTimestamp=last[0]).count() == 20
    assert world.load(path, asOfTimestamp=last[0] - 1).count() == 0
    assert world.load(path, startingTimestamp=last[0]).count() == 20
    assert world.load(path, asOfTimestamp=last[0] // 1_000 + 1).count() == 20
    with pytest.raises(Exception, match=r"has 10 digits, .* multiply seconds by 1000"):
        world.load(path, asOfTimestamp=last[0] // 1_000_000).count()


def test_where_keeps_the_rows_of_filter_in_the_session_s_zone(world: SparkWorld) -> None:
    path = "default.times"
    world.client.create_table(path, TIMES)
    hours = [MIDNIGHT + datetime.timedelta(hours=hour) for hour in range(-8, 8)]
    world.client.append(path, pa.table({"id": range(16), "at": hours}, schema=TIMES))
    new_year = "at >= '2024-01-01'"

    for where in (new_year, "date(at) = '2023-12-31'", "year(at) = 2024"):
        expected = world.ids(world.load(path).filter(where))
        assert world.ids(world.load(path, where=where)) == expected
        assert len(expected) == 8
    assert world.ids(world.load(path, where=new_year, timeZone="UTC")) == list(range(3, 16))

    streamhouse.attach(world.spark, path, "times", endpoint=world.endpoint, where=new_year)
    assert world.ids(world.spark.table("times")) == list(range(8, 16))
    stream = world.stream(path, where=new_year).writeStream.format("memory").queryName("times_seen")
    query = stream.trigger(availableNow=True).start()
    query.awaitTermination()
    assert world.ids(world.spark.table("times_seen")) == list(range(8, 16))


def test_a_time_without_a_zone_is_in_the_session_s(world: SparkWorld) -> None:
    path = world.table(rows=5)
    written = world.load(path, includeMetadata="true").agg(
        F.expr("date_format(max(__timestamp), 'yyyy-MM-dd HH:mm:ss.SSSSSS')")
    )
    (text,) = written.collect()[0]

    assert world.load(path, asOfTimestamp=text).count() == 5
    assert world.load(path, endingTimestamp=text).count() == 0
