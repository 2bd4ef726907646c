"""Streams in real Spark: history, then live, each row once, and the same rows after a restart."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame
from pyspark.sql.streaming import StreamingQuery

from integration.spark_world import EXPIRING, SparkWorld, world

__all__ = ["world"]

pytestmark = [pytest.mark.spark, pytest.mark.slow]


class Batches:
    """Collects (batch id, ids) of a query's micro-batches; may fail one on purpose."""

    def __init__(self, *, fail_at: int | None = None) -> None:
        self.seen: list[tuple[int, list[int]]] = []
        self._fail_at = fail_at

    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        self.seen.append((batch_id, sorted(row.id for row in frame.select("id").collect())))
        if batch_id == self._fail_at:
            raise RuntimeError("as planned")

    @property
    def ids(self) -> list[int]:
        return sorted(i for _, ids in self.seen for i in ids)


def start(
    world: SparkWorld,
    path: str,
    sink: Callable[[DataFrame, int], None],
    checkpoint: Path,
    *,
    trigger: dict[str, Any] | None = None,
    **options: Any,
) -> StreamingQuery:
    writer = world.stream(path, **options).writeStream.foreachBatch(sink)
    writer = writer.option("checkpointLocation", str(checkpoint))
    return (writer.trigger(**trigger) if trigger else writer).start()


def run_available(
    world: SparkWorld, path: str, sink: Batches, checkpoint: Path, **options: Any
) -> StreamingQuery:
    query = start(world, path, sink, checkpoint, trigger={"availableNow": True}, **options)
    query.awaitTermination()
    return query


@pytest.mark.end_to_end
def test_history_comes_first_then_live_rows_each_once(world: SparkWorld, tmp_path: Path) -> None:
    path = world.table(rows=4_000, bucket_count=2)
    world.tier(path)
    world.append(path, 4_000, 5_000)
    sink = Batches()
    query = start(world, path, sink, tmp_path, maxOffsetsPerTrigger=1_500)
    try:
        query.processAllAvailable()
        assert sink.ids == list(range(5_000))
        assert max(len(ids) for _, ids in sink.seen) == 1_500

        for first in range(5_000, 5_500, 100):
            world.append(path, first, first + 100)
        query.processAllAvailable()
        world.tier(path)
        world.append(path, 5_500, 5_600)
        query.processAllAvailable()
    finally:
        query.stop()

    assert sink.ids == list(range(5_600))


@pytest.mark.end_to_end
def test_a_failed_batch_is_replayed_from_the_lake_when_its_rows_left_the_log(
    world: SparkWorld, tmp_path: Path
) -> None:
    path = world.table(rows=3_000, properties=EXPIRING)
    first = Batches(fail_at=1)
    query = start(world, path, first, tmp_path, maxOffsetsPerTrigger=1_000)
    with pytest.raises(Exception, match="as planned"):
        query.awaitTermination()
    failed = first.seen[-1]
    world.tier(path)
    world.append(path, 3_000, 6_000)
    assert world.expire_log(path)[0] >= 2_000

    second = Batches()
    run_available(world, path, second, tmp_path, maxOffsetsPerTrigger=1_000)

    assert failed == (1, list(range(1_000, 2_000)))
    assert second.seen[0] == failed
    assert sorted(first.seen[0][1] + second.ids) == list(range(6_000))


def test_rows_that_expired_unread_fail_the_stream_by_name(
    world: SparkWorld, tmp_path: Path
) -> None:
    path = world.table(rows=100, properties={**EXPIRING, "table.datalake.enabled": "false"})
    run_available(world, path, Batches(), tmp_path)
    for first in range(100, 9_100, 3_000):
        world.append(path, first, first + 3_000)
    start_offset = world.expire_log(path)[0]

    with pytest.raises(Exception, match="are gone from the log") as caught:
        run_available(world, path, Batches(), tmp_path)
    skipping = Batches()
    run_available(world, path, skipping, tmp_path, failOnDataLoss="false")

    text = str(caught.value)
    assert f"table '{path}', bucket 0: rows [100, " in text
    assert "failOnDataLoss=false" in text
    assert all(i >= start_offset for i in skipping.ids)


@pytest.mark.end_to_end
def test_available_now_ends_at_what_was_there(world: SparkWorld, tmp_path: Path) -> None:
    path = world.table(rows=900, bucket_count=2)

    class Appending(Batches):
        """Appends while the query runs; those rows are for the next run."""

        def __call__(self, frame: DataFrame, batch_id: int) -> None:
            super().__call__(frame, batch_id)
            if batch_id == 0:
                world.append(path, 900, 1_000)

    first, second = Appending(), Batches()
    run_available(world, path, first, tmp_path, maxOffsetsPerTrigger=300)
    run_available(world, path, second, tmp_path, maxOffsetsPerTrigger=300)

    assert [len(ids) for _, ids in first.seen] == [300, 300, 300]
    assert first.ids == list(range(900))
    assert second.ids == list(range(900, 1_000))


def test_starting_points(world: SparkWorld, tmp_path: Path) -> None:
    path = world.table(rows=300)
    world.tier(path)
    written = world.load(path, includeMetadata="true").toArrow()["__timestamp"]
    world.append(path, 300, 400)
    expected = {
        "full": list(range(400)),
        "earliest": list(range(400)),
        "latest": [],
        '{"0": 250}': list(range(250, 400)),
        written[0].as_py().isoformat(): list(range(400)),
        "2261-01-01": [],
    }

    for number, (starting, ids) in enumerate(expected.items()):
        sink = Batches()
        run_available(world, path, sink, tmp_path / str(number), startingOffsets=starting)
        assert sink.ids == ids, starting


def test_columns_and_where_apply_to_both_tiers(world: SparkWorld, tmp_path: Path) -> None:
    path = world.table(rows=300)
    world.tier(path)
    world.append(path, 300, 600)
    sink = Batches()

    run_available(world, path, sink, tmp_path, where="region = 'eu'", columns="id")

    assert sink.ids == list(range(0, 600, 3))


def test_the_checkpoint_holds_one_offset_a_bucket(world: SparkWorld, tmp_path: Path) -> None:
    path = world.table(rows=100)

    run_available(world, path, Batches(), tmp_path)

    table_id = world.client.describe_table(path).table_id
    offset = json.loads((tmp_path / "offsets" / "0").read_text().splitlines()[-1])
    # PySpark before 4.2 does not ask for the table's end: it comes with the offset.
    offset.pop("newest", None)
    assert offset.pop("consumer").startswith("spark-")
    assert offset == {"version": 1, "table": path, "table_id": table_id, "offsets": {"0": 100}}


def test_a_table_created_again_is_another_table(world: SparkWorld, tmp_path: Path) -> None:
    path = world.table(rows=10)
    run_available(world, path, Batches(), tmp_path)
    info = world.client.describe_table(path)
    world.client.drop_table(path)
    world.client.create_table(path, info.schema.to_arrow())

    with pytest.raises(Exception, match="dropped and created again") as caught:
        run_available(world, path, Batches(), tmp_path)

    assert path in str(caught.value)


@pytest.mark.parametrize(
    ("part", "options", "sentence"),
    [
        ("$lake", {}, "cannot be read as a stream"),
        ("", {"startingOffsets": '{"0": 99}'}, "the valid range is"),
    ],
)
def test_a_stream_that_cannot_be_read_says_why(
    world: SparkWorld, tmp_path: Path, part: str, options: dict[str, str], sentence: str
) -> None:
    path = world.table(rows=10)

    with pytest.raises(Exception, match=sentence) as caught:
        run_available(world, f"{path}{part}", Batches(), tmp_path, **options)

    assert "Traceback" not in str(caught.value)
