"""Streams with a checkpoint, when the table they read goes on from its lake table alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame

from integration.spark_world import SparkWorld, event_rows, world

__all__ = ["world"]

pytestmark = [pytest.mark.spark, pytest.mark.slow]


class Follower:
    """A stream that is run now and then, until nothing is left."""

    def __init__(self, world: SparkWorld, path: str, checkpoint: Path, **options: str) -> None:
        self._world, self._path, self._options = world, path, options
        self._checkpoint = str(checkpoint)
        self.seen: list[str] = []

    def run(self) -> list[str]:
        """Return what came, a change each, sorted; fails as the query does."""
        self.seen.clear()
        stream = self._world.stream(self._path, maxOffsetsPerTrigger="100", **self._options)
        writer = stream.writeStream.foreachBatch(self._collect).trigger(availableNow=True)
        query = writer.option("checkpointLocation", self._checkpoint).start()
        query.awaitTermination()
        return sorted(self.seen)

    def _collect(self, frame: DataFrame, _: int) -> None:
        is_feed = "__change_type" in frame.columns
        for row in frame.collect():
            self.seen.append(f"{row['__change_type'] if is_feed else ''}{row.id}")


def _lose(world: SparkWorld, path: str) -> None:
    """What only the service had is gone; the table goes on under another id."""
    before = world.client.describe_table(path).table_id
    world.client.drop_table(path)
    assert world.client.adopt_table(path).table_id > before


def _ids(start: int, end: int, *kinds: str) -> list[str]:
    return sorted(f"{kind}{i}" for i in range(start, end) for kind in (kinds or ("",)))


def test_a_stream_goes_on_where_it_was(world: SparkWorld, tmp_path: Path) -> None:
    path = world.table(rows=300, bucket_count=3, bucket_key=["id"])
    follower = Follower(world, path, tmp_path)
    world.tier(path)
    assert follower.run() == _ids(0, 300)

    world.append(path, 300, 350)
    world.tier(path)
    world.append(path, 9_000, 9_010)
    _lose(world, path)
    world.append(path, 350, 380)
    assert follower.run() == _ids(300, 380)
    world.tier(path)
    world.append(path, 380, 390)
    assert follower.run() == _ids(380, 390)


def test_a_stream_that_read_what_was_lost_is_refused(world: SparkWorld, tmp_path: Path) -> None:
    path = world.table(rows=100)
    world.tier(path)
    world.append(path, 100, 120)
    follower = Follower(world, path, tmp_path)
    assert follower.run() == _ids(0, 120)

    _lose(world, path)
    world.append(path, 500, 600)
    with pytest.raises(StreamingQueryException, match=r"read up to offset 120, but the table has"):
        follower.run()
    assert follower.seen == []


@pytest.mark.parametrize("has_history", [True, False])
def test_changes_since_the_checkpoint_need_a_history(
    world: SparkWorld, tmp_path: Path, has_history: bool
) -> None:
    properties: Mapping[str, str] = {"table.datalake.changelog": str(has_history).lower()}
    path = world.table(primary_key=["id"], bucket_count=2, properties=properties)
    world.client.upsert(path, event_rows(0, 100))
    follower = Follower(world, path, tmp_path)
    world.tier(path)
    assert follower.run() == _ids(0, 100, "+I")
    changed = event_rows(0, 150).set_column(2, "small", event_rows(7, 157)["small"])
    world.client.upsert(path, changed)
    world.tier(path)

    _lose(world, path)
    world.client.delete(path, event_rows(0, 10).select(["id"]))
    if has_history:
        changes = [*_ids(0, 100, "-U", "+U"), *_ids(100, 150, "+I"), *_ids(0, 10, "-D")]
        assert follower.run() == sorted(changes)
    else:
        with pytest.raises(StreamingQueryException, match="gone from the log"):
            follower.run()
        # A stream that begins now has all there is.
        fresh = Follower(world, path, tmp_path / "fresh")
        assert set(_ids(10, 150, "+I")) <= set(fresh.run())
