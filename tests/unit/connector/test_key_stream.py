"""Streams of a primary key table without a JVM: bootstrap from a pinned snapshot, then changes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from streamhouse.connector._spark_versions import ReadAllAvailable, ReadMaxRows
from streamhouse.connector.stream._stream_reader import StreamhouseStreamReader
from streamhouse.core.errors import (
    InvalidRequestError,
    OffsetOutOfRangeError,
    SnapshotNotFoundError,
)
from streamhouse.reading.options.options import STREAM, ShapeOptions, read_options, shape_options
from streamhouse.reading.plan.row_form import shape_columns, stream_form
from streamhouse.reading.scan.split_reader import read_split
from tests.support.key_table_world import KeyTableWorld

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("n", pa.int64())])
ALL = ReadAllAvailable()
Change = tuple[str, int, int]
"""Change type, id and n."""


@pytest.fixture
def world(tmp_path: Path) -> Iterator[KeyTableWorld]:
    """Keys 0 to 9 in the lake, of which 3 was updated and 4 deleted before it was tiered."""
    with KeyTableWorld(tmp_path) as opened:
        opened.create_key_table(SCHEMA)
        opened.upsert(*({"id": i, "n": i} for i in range(10)))
        opened.upsert({"id": 3, "n": 33})
        opened.delete({"id": 4})
        yield opened


def reader(world: KeyTableWorld, part: str = "", **options: str) -> StreamhouseStreamReader:
    given = {"table": f"{KeyTableWorld.PATH}{part}", "endpoint": "http://memory", **options}
    if not part:
        given.setdefault("readChangeFeed", "true")
    state = world.union.state()
    output = shape_columns(state.table, shape_options(given))
    schema = pa.schema([column.to_arrow() for column in output])
    read = read_options(given, use=STREAM)
    return StreamhouseStreamReader(read, state, output, schema, world.union.client)


def changes(world: KeyTableWorld, stream: StreamhouseStreamReader, *ends: Any) -> list[Change]:
    found = []
    for partition in stream.partitions(*ends):
        split, context = partition.split, partition.context  # type: ignore[attr-defined]
        for batch in read_split(split, context, client=world.union.client):
            found += [(r.get("__change_type", ""), r["id"], r["n"]) for r in batch.to_pylist()]
    return found


def drain(
    world: KeyTableWorld,
    stream: StreamhouseStreamReader,
    position: Mapping[str, Any],
    *,
    rows: int = 4,
) -> tuple[list[list[Change]], dict[str, Any]]:
    """Run micro-batches until nothing is new, each position through the checkpoint's JSON."""
    batches = []
    at = json.loads(json.dumps(position))
    while True:
        end = json.loads(json.dumps(stream.latestOffset(at, ReadMaxRows(rows))))
        if end == at:
            return batches, at
        batches.append(changes(world, stream, at, end))
        at = end


BOOTSTRAP = [("+I", i, i) for i in (0, 1, 2, 5, 6, 7, 8, 9)] + [("+I", 3, 33)]


def test_a_stream_starts_with_the_rows_and_goes_on_with_changes(world: KeyTableWorld) -> None:
    world.tiering.tier()
    world.upsert({"id": 3, "n": 333})
    world.delete({"id": 0})
    stream = reader(world, longPollMs="0")

    batches, _ = drain(world, stream, stream.initialOffset())

    # The snapshot covers 13 offsets; 3, 4, 10 and 12 are of no row that it has.
    assert [len(batch) for batch in batches] == [3, 3, 3, 0, 3]
    rows = [change for batch in batches for change in batch]
    assert rows == [*BOOTSTRAP, ("-U", 3, 33), ("+U", 3, 333), ("-D", 0, 0)]


def test_the_snapshot_is_pinned_while_the_bootstrap_lasts(world: KeyTableWorld) -> None:
    world.tiering.tier()
    snapshot_id = world.union.state().lake.snapshot_id
    stream = reader(world, longPollMs="0")
    start = stream.initialOffset()

    middle = stream.latestOffset(start, ReadMaxRows(5))
    pinned = world.tiering.service.pinned_snapshots(world.PATH)
    drain(world, stream, middle)

    assert list(pinned.values()) == [snapshot_id]
    assert middle["bootstrap"]["snapshot_id"] == str(snapshot_id)
    assert world.tiering.service.pinned_snapshots(world.PATH) == {}


def test_a_restart_in_the_middle_reads_the_same_snapshot(world: KeyTableWorld) -> None:
    world.tiering.tier()
    first = reader(world, longPollMs="0")
    start = first.initialOffset()
    middle = first.latestOffset(start, ReadMaxRows(5))
    next_end = first.latestOffset(middle, ReadMaxRows(5))
    before = changes(world, first, middle, next_end)
    world.tiering.service.clear_pins(world.PATH)

    world.upsert({"id": 9, "n": 99}, {"id": 1, "n": 11})
    world.tiering.tier()
    second = reader(world, longPollMs="0")
    after = changes(world, second, middle, next_end)
    pinned = world.tiering.service.pinned_snapshots(world.PATH)
    batches, _ = drain(world, second, next_end)

    assert after == before
    assert list(pinned.values()) == [int(middle["bootstrap"]["snapshot_id"])]
    rest = [change for batch in batches for change in batch]
    assert changes(world, first, start, middle) + before + rest == [
        *BOOTSTRAP,
        ("-U", 9, 9),
        ("+U", 9, 99),
        ("-U", 1, 1),
        ("+U", 1, 11),
    ]


def test_an_expired_snapshot_fails_the_bootstrap_by_name(world: KeyTableWorld) -> None:
    world.tiering.tier()
    stream = reader(world)
    start = stream.initialOffset()
    end = stream.latestOffset(start, ALL)
    world.upsert({"id": 9, "n": 99})
    world.tiering.tier()
    world.union.expire_old_snapshots()

    with pytest.raises(SnapshotNotFoundError, match="was expired; it is kept only while"):
        stream.partitions(start, end)


def test_upserts_only(world: KeyTableWorld) -> None:
    world.tiering.tier()
    world.upsert({"id": 3, "n": 333}, {"id": 20, "n": 20})
    world.delete({"id": 0})
    stream = reader(world, readChangeFeed="false", longPollMs="0")

    batches, _ = drain(world, stream, stream.initialOffset(), rows=100)

    assert batches == [[("", i, n) for _, i, n in BOOTSTRAP], [("", 3, 333), ("", 20, 20)]]


def test_without_a_lake_all_changes_are_the_bootstrap(world: KeyTableWorld) -> None:
    stream = reader(world, longPollMs="0")

    batches, _ = drain(world, stream, stream.initialOffset(), rows=100)

    assert [change for change, _, _ in batches[0]] == ["+I"] * 10 + ["-U", "+U", "-D"]


def test_a_cut_log_without_a_lake_cannot_be_bootstrapped(world: KeyTableWorld) -> None:
    world.union.expire_log(0, 5)

    with pytest.raises(OffsetOutOfRangeError, match=r"changes \[0, 5\) have left the log"):
        reader(world).initialOffset()
    assert reader(world, startingOffsets="earliest").initialOffset()["offsets"] == {"0": 5}
    assert reader(world, failOnDataLoss="false").initialOffset()["offsets"] == {"0": 5}


def test_starting_points(world: KeyTableWorld) -> None:
    time_ms = str(world.moments[1].timestamp_us // 1_000)
    expected = {"earliest": 0, "latest": 13, '{"0": 7}': 7, time_ms: 10}

    for starting, offset in expected.items():
        position = reader(world, startingOffsets=starting).initialOffset()
        assert position["offsets"] == {"0": offset}, starting
        assert "bootstrap" not in position


def test_the_changelog_is_streamed_from_its_first_change(world: KeyTableWorld) -> None:
    world.tiering.tier()
    stream = reader(world, "$changelog", longPollMs="0")

    batches, _ = drain(world, stream, stream.initialOffset(), rows=100)

    assert [change for change, _, _ in batches[0]] == ["+I"] * 10 + ["-U", "+U", "-D"]


def test_available_now_ends_at_what_was_there(world: KeyTableWorld) -> None:
    world.tiering.tier()
    world.upsert({"id": 3, "n": 333})
    stream = reader(world)
    stream.prepareForTriggerAvailableNow()
    start = stream.initialOffset()
    world.upsert({"id": 3, "n": 0})

    batches, end = drain(world, stream, start, rows=100)

    assert batches == [BOOTSTRAP, [("-U", 3, 33), ("+U", 3, 333)]]
    assert end["offsets"] == {"0": 15}


def test_a_stream_must_say_what_its_rows_are(world: KeyTableWorld) -> None:
    table = world.union.state().table
    unsaid = {"table": KeyTableWorld.PATH, "endpoint": "http://memory"}
    options = read_options(unsaid, use=STREAM)
    changelog = read_options(
        {**unsaid, "table": "db.t$changelog", "readChangeFeed": "false"}, use=STREAM
    )

    with pytest.raises(InvalidRequestError, match="set option 'readChangeFeed' to 'true'"):
        stream_form(table, options, shape_columns(table, shape_options(unsaid)))
    with pytest.raises(InvalidRequestError, match="columns lack __change_type"):
        stream_form(table, replace(options, read_change_feed=True), ())
    with pytest.raises(InvalidRequestError, match=r"cannot be used with 'db.t[$]changelog'"):
        stream_form(table, changelog, ())


def test_a_marked_stream_has_the_change_type(world: KeyTableWorld) -> None:
    table = world.union.state().table

    def names(columns: tuple[str, ...] | None, *, feed: bool | None) -> list[str]:
        shape = ShapeOptions(
            connection=shape_options({"table": KeyTableWorld.PATH}).connection,
            columns=columns,
            include_metadata=False,
            read_change_feed=feed,
            is_stream=True,
        )
        return [column.name for column in shape_columns(table, shape)]

    assert names(None, feed=None) == ["id", "n", "__change_type"]
    assert names(("n",), feed=None) == ["n", "__change_type"]
    assert names(("__change_type", "n"), feed=None) == ["__change_type", "n"]
    assert names(None, feed=False) == ["id", "n"]


def test_a_stream_reaches_back_through_full_history(tmp_path: Path) -> None:
    with KeyTableWorld(tmp_path) as world:
        world.create_key_table(SCHEMA, properties={"table.datalake.changelog": "true"})
        world.upsert({"id": 1, "n": 1}, {"id": 2, "n": 2})
        world.upsert({"id": 1, "n": 11})
        world.tiering.tier()
        world.union.expire_log(0, 4)
        world.upsert({"id": 3, "n": 3})
        stream = reader(world, startingOffsets="earliest", longPollMs="0")
        upserts = reader(world, startingOffsets="earliest", readChangeFeed="false", longPollMs="0")
        since = reader(world, startingOffsets=str(world.moments[1].timestamp_us // 1_000))

        batches, _ = drain(world, stream, stream.initialOffset(), rows=3)
        versions, _ = drain(world, upserts, upserts.initialOffset(), rows=100)

        assert batches == [
            [("+I", 1, 1), ("+I", 2, 2), ("-U", 1, 1)],
            [("+U", 1, 11), ("+I", 3, 3)],
        ]
        assert versions == [[("", 1, 1), ("", 2, 2), ("", 1, 11), ("", 3, 3)]]
        assert since.initialOffset()["offsets"] == {"0": 2}
