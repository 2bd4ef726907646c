"""Primary key tables in real Spark: rows over two tiers, changes, and streams of both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame
from pyspark.sql.streaming import StreamingQuery

import streamhouse
from integration.spark_world import SparkWorld, world

__all__ = ["world"]

pytestmark = [pytest.mark.spark, pytest.mark.slow]

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("region", pa.string()),
        pa.field("n", pa.int64()),
    ]
)
Row = tuple[int, str, int]


def rows(*ids: int, add: int = 0) -> pa.Table:
    """Return one row an id; `add` makes another version of it."""
    return pa.table(
        {
            "id": pa.array(ids, pa.int64()),
            "region": ["eu" if (i + add) % 2 else "us" for i in ids],
            "n": pa.array([i + add for i in ids], pa.int64()),
        },
        schema=SCHEMA,
    )


def keys(*ids: int) -> pa.Table:
    return pa.table({"id": pa.array(ids, pa.int64())})


class KeyTable:
    """A primary key table of 3,000 rows in the lake, 300 of which have changed since."""

    def __init__(self, world: SparkWorld, name: str, *, tail: bool = True) -> None:
        self.world, self.path = world, f"default.{name}"
        world.client.create_table(self.path, SCHEMA, primary_key=["id"], bucket_count=2)
        world.client.upsert(self.path, rows(*range(3_000)))
        world.tier(self.path)
        self.expected = {(i, "eu" if i % 2 else "us", i) for i in range(3_000)}
        if tail:
            self.change()

    def change(self) -> None:
        """Update 200 rows, delete 100, insert 50."""
        self.world.client.upsert(self.path, rows(*range(200), add=10_001))
        self.world.client.delete(self.path, keys(*range(200, 300)))
        self.world.client.upsert(self.path, rows(*range(5_000, 5_050)))
        self.expected = {row for row in self.expected if row[0] >= 300}
        for table in (rows(*range(200), add=10_001), rows(*range(5_000, 5_050))):
            self.expected |= {(r["id"], r["region"], r["n"]) for r in table.to_pylist()}


def found(frame: DataFrame) -> set[Row]:
    """Return the rows, which must differ."""
    collected = [(row.id, row.region, row.n) for row in frame.collect()]
    assert len(collected) == len(set(collected))
    return set(collected)


def checkpointed(path: Path) -> dict[str, str]:
    return {"checkpointLocation": str(path / "checkpoint")}


def run(
    frame: DataFrame, sink: Callable[[DataFrame, int], None], folder: Path, *, wait: bool = True
) -> StreamingQuery:
    writer = frame.writeStream.foreachBatch(sink).options(**checkpointed(folder))
    query: StreamingQuery = writer.trigger(availableNow=True).start()
    if wait:
        query.awaitTermination()
    return query


class Batches:
    """Collects (change type, id, n) of micro-batches; may fail one on purpose."""

    def __init__(self, *, fail_at: int | None = None) -> None:
        self.seen: dict[int, set[Any]] = {}
        self._fail_at = fail_at

    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        collected = [(r["__change_type"], r["id"], r["n"]) for r in frame.collect()]
        assert len(collected) == len(set(collected))
        self.seen[batch_id] = set(collected)
        if batch_id == self._fail_at:
            raise RuntimeError("failed as planned")

    @property
    def changes(self) -> set[Any]:
        return set().union(*self.seen.values())


@pytest.mark.end_to_end
def test_rows_of_both_tiers(world: SparkWorld) -> None:
    table = KeyTable(world, "both")

    frame = world.load(table.path)

    assert frame.columns == SCHEMA.names
    assert found(frame) == table.expected
    assert frame.count() == len(table.expected) == world.client.count(table.path)
    assert world.load(f"{table.path}$lake").count() == 3_000
    eu = world.load(table.path, where="region = 'eu' AND n > 100")
    assert found(eu) == {row for row in table.expected if row[1] == "eu" and row[2] > 100}
    only_n = world.load(table.path, columns="n")
    assert sorted(row.n for row in only_n.collect()) == sorted(row[2] for row in table.expected)
    whole = world.client.read(table.path)
    assert {(r["id"], r["region"], r["n"]) for r in whole.to_pylist()} == table.expected


def test_changes_and_their_bounds(world: SparkWorld) -> None:
    table = KeyTable(world, "changes")

    log = world.load(f"{table.path}$changelog")
    counts = {
        row["__change_type"]: row["count"] for row in log.groupBy("__change_type").count().collect()
    }

    assert log.columns == [*SCHEMA.names, "__change_type", "__bucket", "__offset", "__timestamp"]
    assert counts == {"+I": 3_050, "-U": 200, "+U": 200, "-D": 100}
    tiered = world.client.table_state(table.path).lake.tiered_offsets
    starts = "{" + ",".join(f'"{b}": {end}' for b, end in tiered.items()) + "}"
    since = world.load(f"{table.path}$changelog", startingOffsets=starts, columns="id")
    assert since.count() == 550


def test_a_frame_joined_with_itself_and_sql(world: SparkWorld, tmp_path: Path) -> None:
    table = KeyTable(world, "joined")
    frame = world.load(table.path)

    twice = frame.alias("a").join(frame.alias("b"), "id").where("a.n = b.n")
    name = streamhouse.attach(world.spark, table.path, "keyed", endpoint=world.endpoint)
    before = world.spark.sql(f"SELECT count(*) FROM {name}").first()
    world.client.delete(table.path, keys(1))
    after = world.spark.sql(f"SELECT count(*) FROM {name}").first()

    assert twice.count() == len(table.expected) - 1
    assert before is not None
    assert after is not None
    assert (before[0], after[0]) == (len(table.expected), len(table.expected) - 1)
    with pytest.raises(Exception, match="set option 'readChangeFeed' to 'true'"):
        run(world.spark.readStream.table(name), lambda *_: None, tmp_path / "rows")
    changelog = f"{table.path}$changelog"
    changes = streamhouse.attach(world.spark, changelog, "keyed_changes", endpoint=world.endpoint)
    sink = Batches()
    run(world.spark.readStream.table(changes), sink, tmp_path / "changes")
    assert ("-D", 1, 10_002) in sink.changes


def test_as_of_a_time(world: SparkWorld) -> None:
    table = KeyTable(world, "as_of", tail=False)
    then = world.load(table.path, includeMetadata="true").toArrow()["__timestamp"]
    before = set(table.expected)
    table.change()

    moment = max(then.to_pylist()).isoformat()

    assert found(world.load(table.path, asOfTimestamp=moment)) == before


@pytest.mark.end_to_end
def test_a_stream_resumes_in_the_middle_of_its_bootstrap(world: SparkWorld, tmp_path: Path) -> None:
    table = KeyTable(world, "resumed", tail=False)
    start = {("+I", i, n) for i, _, n in table.expected}
    first, second = Batches(fail_at=1), Batches()

    query = run(world.stream(table.path, maxOffsetsPerTrigger=1_000), first, tmp_path, wait=False)
    with pytest.raises(Exception, match="as planned"):
        query.awaitTermination()
    # What is read next has changed meanwhile, and the lake has moved on.
    table.change()
    world.tier(table.path)
    run(world.stream(table.path, maxOffsetsPerTrigger=1_000), second, tmp_path)

    assert second.seen[1] == first.seen[1]
    bootstrap = first.seen[0] | second.seen[1] | second.seen[2]
    assert bootstrap == start
    live = set().union(*(batch for i, batch in second.seen.items() if i > 2))
    kinds = [kind for kind, _, _ in live]
    assert {k: kinds.count(k) for k in set(kinds)} == {"+I": 50, "-U": 200, "+U": 200, "-D": 100}
    assert world.client.pinned_snapshots(table.path) == {}


def test_upserts_only(world: SparkWorld, tmp_path: Path) -> None:
    table = KeyTable(world, "upserts")
    seen: list[Any] = []

    def collect(frame: DataFrame, batch_id: int) -> None:
        assert frame.columns == SCHEMA.names
        seen.extend((row.id, row.n) for row in frame.collect())

    run(world.stream(table.path, readChangeFeed="false"), collect, tmp_path)

    assert sorted(seen) == sorted(
        [(i, i) for i in range(3_000)]
        + [(i, i + 10_001) for i in range(200)]
        + [(i, i) for i in range(5_000, 5_050)]
    )
