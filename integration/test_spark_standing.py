"""A Spark stream says how far it is: to the service, in its progress, and in its checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql.streaming import StreamingQuery

import streamhouse
from integration.spark_world import SparkWorld, world

__all__ = ["world"]

pytestmark = [pytest.mark.spark, pytest.mark.slow]


def _run(world: SparkWorld, path: str, checkpoint: Path, **options: object) -> StreamingQuery:
    writer = world.stream(path, **options).writeStream.format("noop")
    writer = writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True)
    query = writer.start()
    query.awaitTermination()
    return query


def _standing(world: SparkWorld, path: str) -> dict[str, tuple[dict[str, int], int, bool]]:
    return {
        one["name"]: (one["offsets"], one["lag_rows"], one["reads_lake"])
        for one in world.client.consumers(path)
    }


def test_a_named_stream_is_known_to_the_service_and_its_progress_says_its_lag(
    world: SparkWorld, tmp_path: Path
) -> None:
    path = world.table(rows=1_000)

    query = _run(world, path, tmp_path, consumer="dashboard", maxOffsetsPerTrigger=600)

    assert _standing(world, path) == {"dashboard": ({"0": 1_000}, 0, True)}
    [first] = streamhouse.lag(query.recentProgress[0])
    [last] = streamhouse.lag(query.lastProgress)
    assert (first.table, first.rows) == (path, 400)
    assert (last.table, last.rows, last.seconds) == (path, 0, 0.0)
    world.append(path, 1_000, 1_010)
    assert _standing(world, path)["dashboard"][1] == 10


def test_a_checkpoint_keeps_the_streams_name_and_belongs_to_one_table(
    world: SparkWorld, tmp_path: Path
) -> None:
    path, other = world.table(rows=10), world.table(rows=10)
    _run(world, path, tmp_path)
    [name] = _standing(world, path)
    assert name.startswith("spark-")
    world.append(path, 10, 30)
    _run(world, path, tmp_path)
    assert _standing(world, path) == {name: ({"0": 30}, 0, True)}

    world.append(other, 10, 40)
    with pytest.raises(Exception, match="position is of table") as refused:
        _run(world, other, tmp_path)
    assert f"'{path}', and this stream reads '{other}'" in str(refused.value)
