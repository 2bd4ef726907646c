"""Writes of one micro-batch to one table, and streams under one app.id: done, or refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame

import streamhouse
from integration.spark_world import SparkWorld, world
from streamhouse.connector import write_batch

__all__ = ["world"]

pytestmark = pytest.mark.spark

_tables = itertools.count()


def _target(world: SparkWorld, **options: Any) -> str:
    path = f"default.versions_{next(_tables)}"
    frame = world.spark.sql("SELECT id, 0 AS n FROM range(0)")
    world.write(frame, path, **{"primary.key": "id"}, **options)
    return path


def _run(
    world: SparkWorld, source: str, checkpoint: Path, write: Callable[[DataFrame, int], None]
) -> None:
    stream = world.stream(source, columns="id").writeStream.foreachBatch(write)
    stream.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start(
    ).awaitTermination()  # fmt: skip


def _ids(world: SparkWorld, path: str) -> list[int]:
    return world.ids(world.load(path))


def _statuses(world: SparkWorld, path: str) -> list[tuple[str, int]]:
    table = streamhouse.Table(world.spark, path, endpoint=world.endpoint)
    rows = table.history().where("app_version IS NOT NULL").orderBy("at").collect()
    return [(row.status, row.app_version) for row in rows]


@pytest.mark.end_to_end
def test_two_writes_of_one_micro_batch_are_both_done_or_refused(
    world: SparkWorld, tmp_path: Path
) -> None:
    source = world.table(rows=15)
    endpoint = world.endpoint

    def by_write_batch(frame: DataFrame, batch: int, path: str, app_id: str | None) -> None:
        frame = frame.selectExpr("id", "1 AS n")
        write_batch(frame, batch, table=path, app_id=app_id, endpoint=endpoint)

    def by_writer(frame: DataFrame, batch: int, path: str, app_id: str | None) -> None:
        options = {"app.id": app_id or "writer", "app.version": batch}
        world.write(frame.selectExpr("id", "1 AS n"), path, **options)

    def by_merge(frame: DataFrame, batch: int, path: str, app_id: str | None) -> None:
        table = streamhouse.Table(frame.sparkSession, path, endpoint=endpoint)
        merge = table.merge(frame.selectExpr("id", "1 AS n")).when_not_matched_insert_all()
        merge.execute(app_id=app_id or "merge", app_version=batch)

    for write in (by_write_batch, by_writer, by_merge):
        path = _target(world)

        def twice(frame: DataFrame, batch: int, second: str | None = None) -> None:
            write(frame.where("id % 2 = 0"), batch, path, None)  # noqa: B023 - called at once
            write(frame.where("id % 2 = 1"), batch, path, second)  # noqa: B023

        checkpoint = tmp_path / write.__name__
        with pytest.raises(StreamingQueryException, match="second time in one micro-batch"):
            _run(world, source, checkpoint, twice)
        assert _ids(world, path) == list(range(0, 15, 2))
        # Started again with two ids the first write is a repetition, and the second is done.
        _run(world, source, checkpoint, lambda frame, batch: twice(frame, batch, "second"))
        assert _ids(world, path) == list(range(15))
        assert ("skipped", 0) in _statuses(world, path)


@pytest.mark.end_to_end
def test_a_new_checkpoint_under_an_old_app_id_is_refused(world: SparkWorld, tmp_path: Path) -> None:
    source = world.table(rows=10)
    path = _target(world)

    def by_sink(checkpoint: Path, app_id: str) -> None:
        frame = world.stream(source, columns="id").selectExpr("id", "1 AS n")
        writer = frame.writeStream.format("streamhouse").option("endpoint", world.endpoint)
        writer.options(**{"app.id": app_id, "checkpointLocation": str(checkpoint)}).trigger(
            availableNow=True
        ).start(path).awaitTermination()

    def by_batches(checkpoint: Path, app_id: str) -> None:
        def write(frame: DataFrame, batch: int) -> None:
            frame = frame.selectExpr("id", "1 AS n")
            write_batch(frame, batch, table=path, app_id=app_id, endpoint=world.endpoint)

        _run(world, source, checkpoint, write)

    for run in (by_sink, by_batches):
        app_id, folder = run.__name__, tmp_path / run.__name__
        run(folder / "old", app_id)
        world.append(source, world.client.count(source), world.client.count(source) + 5)
        run(folder / "old", app_id)
        table = streamhouse.Table(world.spark, path, endpoint=world.endpoint)
        table.delete("id < 3")
        with pytest.raises(StreamingQueryException, match="another checkpoint, begins version 0"):
            run(folder / "new", app_id)
        assert not set(_ids(world, path)) & {0, 1, 2}
        run(folder / "new", f"{app_id}-2")
        assert _ids(world, path) == list(range(world.client.count(source)))


def test_complete_mode_names_what_takes_its_place(world: SparkWorld, tmp_path: Path) -> None:
    path = _target(world)
    counts = world.stream(world.table(rows=5)).groupBy("region").count()
    writer = counts.writeStream.format("streamhouse").outputMode("complete")
    writer.options(endpoint=world.endpoint, checkpointLocation=str(tmp_path))
    with pytest.raises(StreamingQueryException, match=r"upsert_stream\(df\)"):
        writer.start(path).awaitTermination()
