"""Schemas that change under Spark: writes that merge, streams that go on with theirs."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from integration.spark_world import SparkWorld, world

__all__ = ["world"]

pytestmark = [pytest.mark.spark, pytest.mark.slow]


@pytest.mark.end_to_end
def test_a_stream_goes_on_with_the_schema_it_began_with(world: SparkWorld, tmp_path: Path) -> None:
    schema = pa.schema([pa.field("id", pa.int64()), pa.field("name", pa.string())])
    world.client.create_table("evolving", schema)
    world.client.append("evolving", pa.table({"id": [1], "name": ["a"]}, schema=schema))
    stream = (
        world.stream("evolving")
        .writeStream.format("memory")
        .queryName("evolving_seen")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .start()
    )
    try:
        stream.processAllAvailable()
        world.client.alter_schema(
            "evolving", [{"rename": "name", "to": "title"}, {"add": "unit", "type": "string"}]
        )
        world.client.append("evolving", pa.table({"id": [2], "title": ["b"], "unit": ["kg"]}))
        world.tier("evolving")
        world.client.append("evolving", pa.table({"id": [3], "title": ["c"], "unit": ["m"]}))
        stream.processAllAvailable()
    finally:
        stream.stop()

    seen = world.spark.table("evolving_seen")
    assert seen.columns == ["id", "name"]
    assert sorted(map(tuple, seen.collect())) == [(1, "a"), (2, "b"), (3, "c")]
    rows = sorted(map(tuple, world.load("evolving").collect()))
    assert rows == [(1, "a", None), (2, "b", "kg"), (3, "c", "m")]


def test_a_write_that_merges_adds_columns_and_an_older_program_goes_on(world: SparkWorld) -> None:
    def write(*columns: str, **options: str) -> None:
        world.write(world.spark.range(1).selectExpr(*columns), "merging", **options)

    write("1 AS id", "'a' AS name", **{"primary.key": "id"})
    write("2 AS id", "'b' AS name", "2.5D AS size", mergeSchema="true")
    write("3 AS id", "'c' AS name")

    assert sorted(map(tuple, world.load("merging").collect())) == [
        (1, "a", None),
        (2, "b", 2.5),
        (3, "c", None),
    ]
