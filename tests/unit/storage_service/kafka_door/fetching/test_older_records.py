"""Records that have left the log: one range of offsets over lake and log, whatever moves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from kio.schema.errors import ErrorCode

from streamhouse.core.errors import SnapshotNotFoundError, UnavailableError
from streamhouse.core.model.lake.coverage import CoveredOffsets
from streamhouse.core.model.lake.facts import LakeState, SideLakeState
from streamhouse.core.model.records.record_format import RAW_TOPIC
from streamhouse.storage_service.kafka_door.fetching._partition_records import TableRecords
from tests.support.fetch_world import (
    ROWS,
    TIMES_US,
    FetchedRecord,
    MemoryHistory,
    append,
    fetch,
    fetched,
    list_offsets,
    next_offset_after,
    raw_rows,
    records_in,
    tiered_clicks,
)
from tests.support.in_process_service import EVENTS, append_body, event_rows
from tests.support.kafka_batches import produced, records
from tests.support.kafka_world import KafkaClient, kafka_world

EARLIEST = -2
PRODUCE = 0


async def read_all(client: KafkaClient, offset: int, **how: Any) -> list[FetchedRecord]:
    """What a consumer reads from an offset to the end, fetch by fetch."""
    records: list[FetchedRecord] = []
    while offset < ROWS:
        found = fetched(await fetch(client, {"clicks": {0: offset}}, **how))["clicks", 0]
        assert isinstance(found, list), found
        found = [record for record in found if record.offset >= offset]
        assert found
        records += found
        offset = found[-1].offset + 1
    return records


def offsets_of(records: list[FetchedRecord]) -> list[int]:
    assert all(record.key == b"k%d" % record.offset for record in records)
    return [record.offset for record in records]


@pytest.mark.parametrize("each", [1, 300, 1 << 20])
@pytest.mark.parametrize("start", [0, 15, 20, 25])
async def test_no_offset_is_missing_or_double_at_the_border(
    tmp_path: Path, start: int, each: int
) -> None:
    history = MemoryHistory()
    async with kafka_world(tmp_path, history=history) as world:
        await tiered_clicks(world, history)
        client = await world.client()

        records = await read_all(client, start, partition_max_bytes=each)

        assert offsets_of(records) == [*range(start, ROWS)]


async def test_a_consumer_that_reads_on_has_one_place_in_the_lake(tmp_path: Path) -> None:
    history = MemoryHistory()
    async with kafka_world(tmp_path, history=history) as world:
        await tiered_clicks(world, history)
        client = await world.client()

        await read_all(client, 0, partition_max_bytes=200)

        assert history.opened == 1


async def test_an_update_that_has_left_the_log_has_both_rows_wherever_a_read_ends(
    tmp_path: Path,
) -> None:
    history = MemoryHistory()
    async with kafka_world(tmp_path, history=history) as world:
        properties = {"kafka.changes.format": "debezium-json", "table.datalake.changelog": "true"}
        await world.http.create_table("keyed", EVENTS, primary_key=("id",), properties=properties)
        # The first read of the lake is of 1,024 rows, and ends between those of an update.
        updates = pa.record_batch([pa.array([5, 6]), ["five", "six"]], schema=EVENTS)
        for rows in (event_rows(0, 1_023), updates):
            body = append_body(rows.schema, [(None, 0, rows)])
            answer = await world.http.call("POST", "/v1/tables/keyed/upsert", body=body)
            assert answer.status == 200, answer.body
        table = world.service.table("keyed")
        tablet, records = table.tablet(0), TableRecords.of(table)
        frames = tablet.read(0, bytes_max=1 << 30)
        history.keep(0, 0, TIMES_US[0], pa.concat_batches(map(records.rows, frames)))
        side = SideLakeState(snapshot_id=1, table_uuid="u", tiered_offsets={0: 1_027})
        table.keep_lake(
            LakeState(snapshot_id=1, table_uuid="u", tiered_offsets={0: 1_027}, changelog=side)
        )
        tablet.truncate(1_027)
        client = await world.client()
        for start in (0, 1_022, 1_023, 1_024, 1_025, 1_026):
            found, offset = [], start
            while offset < 1_027:
                answer = await fetch(client, {"keyed": {0: offset}})
                data = answer.responses[0].partitions[0].records
                found += records_in(data, since=offset)
                offset = next_offset_after(data)

            values = [(record.offset, json.loads(record.value or b"")) for record in found]
            assert [(at, value["before"]) for at, value in values if at >= 1_023] == [
                (at, {"id": number, "name": f"n{number}"})
                for at, number in ((1_024, 5), (1_026, 6))
                if at >= start
            ]


async def test_files_that_moved_are_looked_for_again(tmp_path: Path) -> None:
    history = MemoryHistory(failures=[SnapshotNotFoundError("a file is gone") for _ in range(3)])
    async with kafka_world(tmp_path, history=history) as world:
        await tiered_clicks(world, history)
        client = await world.client()

        assert offsets_of(await read_all(client, 0)) == [*range(ROWS)]


async def test_a_store_that_does_not_answer_is_said_of_its_partition(tmp_path: Path) -> None:
    history = MemoryHistory(failures=[UnavailableError("the store is away")])
    async with kafka_world(tmp_path, history=history) as world:
        await tiered_clicks(world, history)
        await world.http.create_table("views", RAW_TOPIC)
        await append(world, "views", 0, raw_rows(0, 1))
        client = await world.client()

        found = fetched(await fetch(client, {"clicks": {0: 0}, "views": {0: 0}}))

        assert found["clicks", 0] is ErrorCode.not_leader_or_follower
        assert isinstance(found["views", 0], list)
        assert len(found["views", 0]) == 1
        # The next one is answered.
        assert offsets_of(await read_all(client, 0)) == [*range(ROWS)]


async def test_offsets_whose_rows_are_gone_from_the_lake_are_passed_over(tmp_path: Path) -> None:
    history = MemoryHistory()
    async with kafka_world(tmp_path, history=history) as world:
        await tiered_clicks(world, history)
        del history.runs[0][1]
        client = await world.client()

        assert offsets_of(await read_all(client, 0)) == [*range(10), *range(20, ROWS)]


async def test_a_gap_up_to_the_end_lets_the_consumer_go_on_behind_it(tmp_path: Path) -> None:
    history = MemoryHistory()
    async with kafka_world(tmp_path, history=history) as world:
        await tiered_clicks(world, history, end=ROWS, log_start=ROWS)
        client = await world.client()
        # Another engine has deleted the last rows.
        history.runs[0][-1] = (ROWS, TIMES_US[0], raw_rows(0, 0))
        answer = await fetch(client, {"clicks": {0: 50}})

        records = answer.responses[0].partitions[0].records
        # A batch without records that covers the offsets 50 to 59.
        assert len(records) == 61
        assert int.from_bytes(records[:8], "big") == 50
        assert int.from_bytes(records[23:27], "big") == 9


@pytest.mark.parametrize(
    ("lake", "start"),
    [
        ({}, 0),
        ({"expired_offsets": {0: 7}}, 7),
        ({"expired_offsets": {0: 33}}, 33),
        ({"diverged": "another history"}, 20),
        ({"snapshot_id": None}, 20),
    ],
)
async def test_where_a_partition_begins(
    tmp_path: Path, lake: Mapping[str, Any], start: int
) -> None:
    history = MemoryHistory()
    async with kafka_world(tmp_path, history=history) as world:
        await tiered_clicks(world, history)
        table = world.service.table("clicks")
        table.keep_lake(replace(table.lake, **lake))
        client = await world.client()

        assert await list_offsets(client, "clicks", 0, EARLIEST) == (start, -1)
        answer = await fetch(client, {"clicks": {0: start}})
        assert answer.responses[0].partitions[0].log_start_offset == start
        below = fetched(await fetch(client, {"clicks": {0: start - 1}}))
        assert below["clicks", 0] is ErrorCode.offset_out_of_range
        data = [{"index": 0, "records": produced(records([b"new"]))}]
        values = {"acks": -1, "timeout": timedelta(seconds=10)}
        stored = await client.call(
            PRODUCE, 9, **values, topic_data=[{"name": "clicks", "partition_data": data}]
        )
        assert stored.responses[0].partition_responses[0].log_start_offset == start


async def test_a_range_begins_above_rows_that_left_the_log_while_the_lake_was_off(
    tmp_path: Path,
) -> None:
    history = MemoryHistory()
    properties = {"table.datalake.enabled": "false", "table.log.segment-bytes": "64kb"}
    async with kafka_world(tmp_path, history=history) as world:
        await world.http.create_table("clicks", RAW_TOPIC, properties=properties)
        rows = [raw_rows(i, i + 100, value_bytes=1_000) for i in range(0, 400, 100)]
        await append(world, "clicks", 0, *rows)
        table = world.service.table("clicks")
        tablet = table.tablet(0)
        tablet.apply_retention(timestamp_us_before=tablet.now_us() + 1, offset_max=200)
        start = tablet.log_start_offset
        assert start > 0
        # The lake is on again: it has all that the log still has.
        history.keep(0, start, TIMES_US[0], raw_rows(start, 400))
        table.keep_lake(LakeState(snapshot_id=1, table_uuid="u", tiered_offsets={0: 400}))
        tablet.truncate(300)
        client = await world.client()

        assert await list_offsets(client, "clicks", 0, EARLIEST) == (start, -1)
        found = fetched(await fetch(client, {"clicks": {0: start - 1}}))
        assert found["clicks", 0] is ErrorCode.offset_out_of_range
        found = fetched(await fetch(client, {"clicks": {0: start}}))
        assert offsets_of(found["clicks", 0]) == [*range(start, 400)]


async def test_a_lake_of_another_history_is_not_read(tmp_path: Path) -> None:
    history = MemoryHistory(covered=CoveredOffsets(tiered_offsets={0: ROWS + 1}, epoch=1))
    async with kafka_world(tmp_path, history=history) as world:
        await tiered_clicks(world, history)
        client = await world.client()

        found = fetched(await fetch(client, {"clicks": {0: 0}}))

        assert found["clicks", 0] is ErrorCode.unknown_server_error
