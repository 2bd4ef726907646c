"""The stream reader without a JVM: offsets, micro-batches, and which tier a batch touches."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from streamhouse.connector._spark_versions import ReadAllAvailable, ReadMaxRows
from streamhouse.connector.stream._stream_reader import RefusedStreamReader, StreamhouseStreamReader
from streamhouse.core.errors import (
    LogCutError,
    OffsetOutOfRangeError,
    StreamhouseError,
    TableNotFoundError,
    UnsupportedError,
)
from streamhouse.reading.follow._stream_plan import LOG_ROWS_PREFERRED_MAX
from streamhouse.reading.options.options import STREAM, read_options
from streamhouse.reading.plan.scan_schema import output_columns
from streamhouse.reading.scan.split_reader import read_split
from tests.support.held_step import around
from tests.support.tiering_world import SCHEMA, rows
from tests.support.union_world import UnionWorld

ALL = ReadAllAvailable()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[UnionWorld]:
    """Two buckets with 30 rows each."""
    with UnionWorld(tmp_path) as opened:
        opened.tiering.create_table(UnionWorld.PATH, SCHEMA, bucket_count=2)
        for bucket in (0, 1):
            for start in range(0, 30, 10):
                opened.append(bucket, rows(start, 10))
        yield opened


def reader(world: UnionWorld, **options: str) -> StreamhouseStreamReader:
    read = read_options(
        {"table": UnionWorld.PATH, "endpoint": "http://memory", **options}, use=STREAM
    )
    state = world.state()
    output = output_columns(
        state.table.schema, columns=None, include_metadata=True, table=UnionWorld.PATH
    )
    return StreamhouseStreamReader(read, state, output, SCHEMA, world.client)


def offsets(position: Mapping[str, Any]) -> list[int]:
    """Return a position's offsets by bucket, after a trip through the checkpoint's JSON."""
    found: dict[str, int] = json.loads(json.dumps(position))["offsets"]
    return [found[b] for b in sorted(found)]


def position(world: UnionWorld, *ends: int) -> dict[str, Any]:
    table_id = world.state().table.table_id
    return {"version": 1, "table_id": table_id, "offsets": {str(b): o for b, o in enumerate(ends)}}


def addresses(
    world: UnionWorld, stream: StreamhouseStreamReader, *ends: Any
) -> set[tuple[int, int]]:
    """Return (bucket, offset) of every row between two positions."""
    found = []
    for partition in stream.partitions(*ends):
        split, context = partition.split, partition.context  # type: ignore[attr-defined]
        for batch in read_split(split, context, client=world.client):
            found += zip(batch["__bucket"].to_pylist(), batch["__offset"].to_pylist(), strict=True)
    assert len(found) == len(set(found))
    return set(found)


def test_a_stream_starts_at_the_oldest_row_and_says_so_again(world: UnionWorld) -> None:
    stream = reader(world)
    first = stream.initialOffset()
    world.append(0, rows(30, 5))

    assert offsets(first) == [0, 0]
    assert stream.initialOffset() == first
    assert offsets(reader(world, startingOffsets="latest").initialOffset()) == [35, 30]


def test_latest_is_decided_once(world: UnionWorld) -> None:
    stream = reader(world, startingOffsets="latest")
    first = stream.initialOffset()
    world.append(0, rows(30, 5))

    assert stream.initialOffset() == first


def test_a_trigger_reads_at_most_its_limit(world: UnionWorld) -> None:
    stream = reader(world, maxOffsetsPerTrigger="7")
    limit = stream.getDefaultReadLimit()

    end = stream.latestOffset(stream.initialOffset(), limit)

    assert limit == ReadMaxRows(7)
    assert sum(offsets(end)) == 7
    assert offsets(stream.latestOffset(end, ALL)) == [30, 30]
    assert offsets(stream.reportLatestOffset() or {}) == [30, 30]


def test_available_now_ends_where_it_began(world: UnionWorld) -> None:
    stream = reader(world)
    start = stream.initialOffset()
    stream.prepareForTriggerAvailableNow()
    world.append(1, rows(30, 9))

    end = stream.latestOffset(start, ReadMaxRows(40))
    last = stream.latestOffset(end, ReadMaxRows(40))

    assert sum(offsets(end)) == 40
    assert offsets(last) == [30, 30]
    assert stream.latestOffset(last, ReadMaxRows(40)) == last


def test_live_rows_are_read_without_the_lake(
    world: UnionWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.tiering.tier()
    world.append(0, rows(30, 5))

    def no_lake(*_: Any, **__: Any) -> Any:
        raise AssertionError("the lake was opened")

    around(monkeypatch, "lake-planning", no_lake)
    start, end = position(world, 30, 30), position(world, 35, 30)

    assert addresses(world, reader(world), start, end) == {(0, o) for o in range(30, 35)}
    # Tiered while the trigger ran, but still in the log.
    assert len(addresses(world, reader(world), position(world, 20, 20), end)) == 25


def test_history_is_read_from_the_lake(world: UnionWorld) -> None:
    world.append(0, rows(30, LOG_ROWS_PREFERRED_MAX))
    world.tiering.tier()
    reads = world.tiering.service.reads
    start, end = position(world, 0, 0), position(world, 30 + LOG_ROWS_PREFERRED_MAX, 30)

    assert len(addresses(world, reader(world), start, end)) == 60 + LOG_ROWS_PREFERRED_MAX
    assert world.tiering.service.reads == reads


def test_a_replay_of_expired_rows_finds_them_in_the_lake(world: UnionWorld) -> None:
    start, end = position(world, 3, 17), position(world, 25, 19)
    before = addresses(world, reader(world), start, end)
    world.tiering.tier()
    world.expire_log(0, 30)
    world.expire_log(1, 18)

    assert addresses(world, reader(world), start, end) == before


def test_rows_in_no_tier_fail_by_name(world: UnionWorld) -> None:
    world.expire_log(1, 20)
    start, end = position(world, 0, 5), position(world, 30, 30)

    with pytest.raises(OffsetOutOfRangeError, match=r"bucket 1: rows \[5, 20\) are gone"):
        reader(world).partitions(start, end)
    kept = addresses(world, reader(world, failOnDataLoss="false"), start, end)
    assert {o for b, o in kept if b == 1} == set(range(20, 30))


def test_an_empty_range_has_no_partition(world: UnionWorld) -> None:
    at = position(world, 30, 30)

    assert reader(world).partitions(at, at) == []


def test_a_table_created_again_is_refused_even_with_other_buckets(world: UnionWorld) -> None:
    stream, start = reader(world), position(world, 1, 1)
    world.tiering.service.drop_table(UnionWorld.PATH)
    world.tiering.create_table(UnionWorld.PATH, SCHEMA, bucket_count=1)

    for again in (stream, reader(world)):
        with pytest.raises(TableNotFoundError, match="dropped and created again"):
            again.latestOffset(start, ALL)


def test_a_range_is_planned_on_a_state_that_covers_it(world: UnionWorld) -> None:
    """After a restart Spark asks for partitions before it asks for offsets."""
    stream = reader(world)
    world.append(0, rows(30, 10))
    start, end = position(world, 30, 30), position(world, 40, 30)
    asked = world.tiering.service.states

    assert len(stream.partitions(start, end)) == 1
    assert world.tiering.service.states == asked + 1
    assert len(stream.partitions(start, end)) == 1
    assert world.tiering.service.states == asked + 1


def test_what_is_shipped_to_executors_holds_no_secret(world: UnionWorld) -> None:
    stream = reader(world, token="s3cret")

    shipped = pickle.dumps(stream)

    assert b"s3cret" not in shipped
    assert len(shipped) < 2_000


def test_a_stream_that_cannot_be_read_says_why_whatever_is_asked() -> None:
    refused = RefusedStreamReader(UnsupportedError("no such stream"))

    assert refused.getDefaultReadLimit() == ALL
    for ask in (
        refused.initialOffset,
        lambda: refused.latestOffset({}, ALL),
        lambda: refused.partitions({}, {}),
    ):
        with pytest.raises(StreamhouseError, match=r"\[unsupported\] no such stream"):
            ask()


def test_a_stream_over_rows_that_were_lost_fails_and_reads_no_others(world: UnionWorld) -> None:
    service = world.tiering.service
    service.may_lose_rows = True
    stream = reader(world)
    start = stream.initialOffset()
    middle = json.loads(json.dumps(stream.latestOffset(start, ReadMaxRows(20))))
    end = json.loads(json.dumps(stream.latestOffset(middle, ALL)))
    assert middle["fingerprints"] == {"0": "first-0-10", "1": "first-1-10"}
    assert stream.latestOffset(end, ALL) == end
    assert len(addresses(world, stream, middle, end)) == 40

    service.lose(20)

    assert len(addresses(world, reader(world), start, middle)) == 20
    with pytest.raises(LogCutError, match="bucket 0: rows below 30 were lost"):
        reader(world).partitions(middle, end)


def test_a_stream_of_a_service_that_loses_nothing_says_nothing(world: UnionWorld) -> None:
    stream = reader(world)
    start = stream.initialOffset()

    assert "fingerprints" not in stream.latestOffset(start, ALL)


def test_a_position_from_before_fingerprints_goes_on(world: UnionWorld) -> None:
    world.tiering.service.may_lose_rows = True
    stream = reader(world)
    start, end = position(world, 10, 10), position(world, 30, 10)

    assert len(addresses(world, stream, start, end)) == 20
    # The bucket that stays has none: the same position is the same JSON.
    assert stream.latestOffset(end, ReadMaxRows(1))["fingerprints"] == {"1": "first-1-11"}


def said_by(world: UnionWorld, stream: StreamhouseStreamReader) -> dict[str, Any]:
    """Return what the stream's consumers have told the service: name -> offsets."""
    stream._follower.flush_reports()
    said = world.tiering.service.consumers_said
    assert all(reads_lake for _, reads_lake in said.values())
    return {consumer: at for (_, consumer), (at, _) in said.items()}


def test_a_stream_tells_how_far_it_has_read_under_a_name_its_checkpoint_keeps(
    world: UnionWorld,
) -> None:
    stream = reader(world)
    start = stream.initialOffset()
    end = stream.latestOffset(start, ReadMaxRows(40))
    [(name, at)] = said_by(world, stream).items()
    assert (name, at) == (start["consumer"], {0: 0, 1: 0})
    assert (start["table"], end["consumer"]) == (UnionWorld.PATH, name)
    assert (stream.reportLatestOffset() or {})["lag_ms"] >= 60_000

    again = reader(world)
    last = again.latestOffset(end, ALL)
    assert sum(said_by(world, again)[name].values()) == 40
    again.latestOffset(last, ALL)
    assert said_by(world, again) == {name: {0: 30, 1: 30}}
    assert (again.reportLatestOffset() or {})["lag_ms"] == 0


def test_a_stream_may_be_named(world: UnionWorld) -> None:
    stream = reader(world, consumer="billing")
    start = stream.initialOffset()
    stream.prepareForTriggerAvailableNow()
    stream.latestOffset(stream.latestOffset(start, ALL), ALL)

    assert "consumer" not in start
    # At the end of the query nobody has to ask for it: the process ends.
    said = world.tiering.service.consumers_said
    assert said == {(UnionWorld.PATH, "billing"): ({0: 30, 1: 30}, True)}


def test_a_position_without_table_and_consumer_goes_on_unchanged_until_it_moves(
    world: UnionWorld,
) -> None:
    stream = reader(world, longPollMs="0")
    old = position(world, 30, 30)
    assert stream.latestOffset(old, ALL) == old
    world.append(0, rows(30, 5))

    moved = stream.latestOffset(old, ALL)

    assert offsets(moved) == [35, 30]
    assert moved["table"] == UnionWorld.PATH
    assert said_by(world, stream).keys() == {moved["consumer"]}
