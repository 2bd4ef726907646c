"""ListOffsets over a socket: by name, by time, over log and lake; a leader epoch's end."""

from __future__ import annotations

from pathlib import Path

import pytest
from kio.schema.errors import ErrorCode

from streamhouse.core.model.records.record_format import RAW_TOPIC
from streamhouse.storage_service.kafka_door.topics._table_identity import epoch_of
from tests.support.fetch_world import TIMES_US, MemoryHistory, list_offsets, tiered_clicks
from tests.support.held_step import lower
from tests.support.kafka_world import kafka_world

LATEST, EARLIEST, LATEST_TIME, EARLIEST_IN_LOG, LATEST_IN_LAKE = -1, -2, -3, -4, -5


async def test_a_lake_that_does_not_reach_the_log_is_left_out(tmp_path: Path) -> None:
    history = MemoryHistory()
    async with kafka_world(tmp_path, history=history) as world:
        await tiered_clicks(world, history, end=10, log_start=20)
        client = await world.client()

        assert await list_offsets(client, "clicks", 0, EARLIEST) == (20, -1)


async def test_a_time_is_found_in_the_lake_and_in_the_log(tmp_path: Path) -> None:
    history = MemoryHistory()
    async with kafka_world(tmp_path, history=history) as world:
        await tiered_clicks(world, history)
        client = await world.client()
        times_ms = [time // 1_000 for time in TIMES_US]

        assert await list_offsets(client, "clicks", 0, 0) == (0, times_ms[0])
        assert await list_offsets(client, "clicks", 0, times_ms[0]) == (0, times_ms[0])
        assert await list_offsets(client, "clicks", 0, times_ms[0] + 1) == (10, times_ms[1])
        log = world.service.table("clicks").tablet(0)
        found = await list_offsets(client, "clicks", 0, times_ms[2] + 1)
        assert found == (20, log.read(20, bytes_max=1)[0].timestamp_us // 1_000)
        last_ms = log.read(59, bytes_max=1)[0].timestamp_us // 1_000
        assert await list_offsets(client, "clicks", 0, last_ms + 1) == (-1, -1)


async def test_offsets_by_name(tmp_path: Path) -> None:
    history = MemoryHistory()
    async with kafka_world(tmp_path, history=history) as world:
        await tiered_clicks(world, history)
        client = await world.client()
        last_us = world.service.table("clicks").tablet(0).read(59, bytes_max=1)[0].timestamp_us

        for version in range(1, 10):
            found = {
                name: await list_offsets(client, "clicks", 0, name, version=version)
                for name in (LATEST, EARLIEST, LATEST_TIME, EARLIEST_IN_LOG, LATEST_IN_LAKE)
            }
            assert found == {
                LATEST: (60, -1),
                EARLIEST: (0, -1),
                LATEST_TIME: (59, last_us // 1_000),
                EARLIEST_IN_LOG: (20, -1),
                LATEST_IN_LAKE: (29, -1),
            }


async def test_the_latest_time_is_that_of_the_last_row_wherever_it_is(tmp_path: Path) -> None:
    history = MemoryHistory()
    async with kafka_world(tmp_path, history=history) as world:
        await tiered_clicks(world, history, end=60, log_start=60)
        client = await world.client()

        assert await list_offsets(client, "clicks", 0, LATEST_TIME) == (59, TIMES_US[2] // 1_000)


async def test_a_time_that_is_looked_for_while_the_lake_is_busy_is_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = MemoryHistory()
    async with kafka_world(tmp_path, history=history) as world:
        await tiered_clicks(world, history)
        client = await world.client()
        with monkeypatch.context() as busy:
            lower(busy, "history-reads", 0)

            assert await list_offsets(client, "clicks", 0, 0) == ErrorCode.request_timed_out
            assert await list_offsets(client, "clicks", 0, EARLIEST) == (0, -1)

        assert await list_offsets(client, "clicks", 0, 0) == (0, TIMES_US[0] // 1_000)


async def test_a_service_that_is_busy_says_so_of_each_partition(tmp_path: Path) -> None:
    async with kafka_world(tmp_path, open_requests_max=1) as world:
        await tiered_clicks(world, MemoryHistory())
        client = await world.client()
        world.service.open_requests += 1

        assert await list_offsets(client, "clicks", 0, EARLIEST) == ErrorCode.request_timed_out

        world.service.open_requests -= 1
        assert await list_offsets(client, "clicks", 0, EARLIEST) == (0, -1)


async def test_the_end_of_what_was_read_under_a_leader_epoch(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        await world.http.create_table("before", RAW_TOPIC)
        await tiered_clicks(world, MemoryHistory())
        epoch = epoch_of(world.service.table("clicks"))
        client = await world.client()
        asked = [
            (0, epoch, epoch),
            # Of a version in which all tables had one epoch.
            (0, epoch, 0),
            # Of an earlier table of the name: nothing of it is here.
            (0, epoch, epoch - 1),
            (0, epoch, epoch + 1),
            (0, epoch - 1, epoch),
            (0, epoch + 1, epoch),
            (9, epoch, epoch),
        ]
        none, unknown = ErrorCode.none, ErrorCode.unknown_topic_or_partition

        for version in (2, 3, 4):
            replica = {"replica_id": -1} if version >= 3 else {}
            found = []
            for partition, current, leader in asked:
                one = {
                    "partition": partition,
                    "current_leader_epoch": current,
                    "leader_epoch": leader,
                }
                answer = await client.call(
                    23, version, **replica, topics=[{"topic": "clicks", "partitions": [one]}]
                )
                found += [
                    (p.error_code, p.leader_epoch, p.end_offset)
                    for p in answer.topics[0].partitions
                ]
            assert found == [
                (none, epoch, 60),
                (none, epoch, 60),
                (none, epoch, 0),
                (none, -1, -1),
                (ErrorCode.fenced_leader_epoch, -1, -1),
                (ErrorCode.unknown_leader_epoch, -1, -1),
                (unknown, -1, -1),
            ]
