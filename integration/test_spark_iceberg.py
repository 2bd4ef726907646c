"""Tables that others write with Iceberg, as rows and as streams in real Spark."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.table import Table
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame

from integration.spark_world import SparkWorld, world
from tests.support.iceberg_world import numbered

__all__ = ["world"]

pytestmark = [pytest.mark.spark, pytest.mark.slow]


@pytest.fixture(scope="module")
def catalog(world: SparkWorld) -> Iterator[Catalog]:
    opened = load_catalog("lake", type="rest", uri=world.endpoint + "/iceberg")
    with contextlib.closing(opened):
        opened.create_namespace("legacy")
        yield opened


def created(catalog: Catalog, name: str) -> Table:
    return catalog.create_table(f"legacy.{name}", numbered(0, 0).schema)


def run(world: SparkWorld, path: str, seen: list[list[int]], checkpoint: Path, **more: Any) -> None:
    """Read what there is, a micro-batch after the other."""

    def collect(frame: DataFrame, _: int) -> None:
        seen.append(world.ids(frame))

    stream = world.stream(f"{path}$iceberg", **more)
    writer = stream.writeStream.foreachBatch(collect).trigger(availableNow=True)
    writer.option("checkpointLocation", str(checkpoint)).start().awaitTermination()


@pytest.mark.end_to_end
def test_a_foreign_table_is_rows_and_a_stream_of_its_appends(
    world: SparkWorld, catalog: Catalog, tmp_path: Path
) -> None:
    table = created(catalog, "clicks")
    table.append(numbered(0, 100))
    table.append(numbered(100, 150))
    read = world.load("legacy.clicks$iceberg", where="id >= 90", columns="id")
    assert world.ids(read) == list(range(90, 150))

    seen: list[list[int]] = []
    run(world, "legacy.clicks", seen, tmp_path, maxOffsetsPerTrigger=100)
    assert seen == [list(range(100)), list(range(100, 150))]

    table.append(numbered(150, 160))
    table.append(numbered(160, 170))
    run(world, "legacy.clicks", seen, tmp_path)
    run(world, "legacy.clicks", seen, tmp_path)
    assert seen[2:] == [list(range(150, 170))]


def test_a_stream_that_runs_sees_appends_and_says_what_it_cannot_follow(
    world: SparkWorld, catalog: Catalog, tmp_path: Path
) -> None:
    table = created(catalog, "visits")
    stream = world.stream("legacy.visits$iceberg", longPollMs=20)
    query = stream.writeStream.format("memory").queryName("visits").start()
    try:
        for start in range(0, 30, 10):
            table.append(numbered(start, start + 10))
            query.processAllAvailable()
            assert world.ids(world.spark.table("visits")) == list(range(start + 10))
        table.delete("id < 5")
        with pytest.raises(StreamingQueryException, match=r"streaming-skip-overwrite-snapshots"):
            query.processAllAvailable()
    finally:
        query.stop()


def test_the_lake_of_a_log_table_is_a_stream_too(
    world: SparkWorld, catalog: Catalog, tmp_path: Path
) -> None:
    path = world.table(rows=200, bucket_count=2)
    world.tier(path)
    seen: list[list[int]] = []
    run(world, path, seen, tmp_path)
    world.append(path, 200, 300)
    world.tier(path)
    run(world, path, seen, tmp_path)

    assert seen == [list(range(200)), list(range(200, 300))]
