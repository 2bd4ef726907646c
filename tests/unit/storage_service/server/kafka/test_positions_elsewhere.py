"""Positions of groups in tables that other shards have, or that are on their way between shards."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from streamhouse.storage_service.kafka.groups.placement import coordinator_of
from streamhouse.storage_service.model.table import TablePath
from tests.support.held_step import around
from tests.support.in_process_service import InProcessService, event_rows
from tests.support.kafka_world import KafkaClient, kafka_door
from tests.support.memory_store import MemoryStore
from tests.support.shard_world import ShardWorld, frozen_move

OFFSET_COMMIT, OFFSET_FETCH, METADATA = 8, 9, 3
GROUP = next(f"g{n}" for n in range(100) if coordinator_of(f"g{n}", {"a", "b"}) == "a")
_EVENTS = TablePath("default", "events")


class _Shards:
    """Shards a and b, and a client of a, which coordinates `GROUP`."""

    def __init__(self, world: ShardWorld, client: KafkaClient) -> None:
        self.world, self.client = world, client

    def service(self, shard: str) -> InProcessService:
        """Return the service of a shard."""
        return self.world.services[f"http://{shard}:1"]

    async def events_in(self, shard: str) -> InProcessService:
        """Make a table of 10 rows there."""
        service = self.service(shard)
        assert service.service.shards is not None
        await service.service.shards.claim(_EVENTS)
        await service.create_table(bucket_count=2)
        await service.append([(0, 0, event_rows(0, 10)), (1, 0, event_rows(0, 10))])
        return service

    async def commit(self, offsets: dict[int, int], *, topic: str = "events") -> dict[int, Any]:
        """Commit positions; return what each partition was answered."""
        partitions = [
            {"partition_index": one, "committed_offset": at, "committed_metadata": ""}
            for one, at in offsets.items()
        ]
        answer = await self.client.call(
            OFFSET_COMMIT,
            8,
            group_id=GROUP,
            generation_id_or_member_epoch=-1,
            member_id="",
            topics=[{"name": topic, "partitions": partitions}],
        )
        return {p.partition_index: p.error_code for p in answer.topics[0].partitions}

    async def position(self, *, topic: str = "events") -> int | ErrorCode:
        """Return the group's position in partition 0, or what is answered instead."""
        asked = [{"group_id": GROUP, "topics": [{"name": topic, "partition_indexes": [0]}]}]
        answer = await self.client.call(OFFSET_FETCH, 8, groups=asked)
        (group,) = answer.groups
        (partition,) = group.topics[0].partitions
        error = group.error_code or partition.error_code
        return ErrorCode(error) if error else int(partition.committed_offset)


@contextlib.asynccontextmanager
async def _shards(tmp_path: Path) -> AsyncIterator[_Shards]:
    world = ShardWorld(tmp_path, MemoryStore())
    async with world.shard("a") as a, world.shard("b"), kafka_door(a) as door:
        yield _Shards(world, await door.client())


async def test_a_group_has_its_positions_or_none_are_known_while_a_table_opens_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None at all would make its members begin anew, and skip rows or read them again."""
    is_opening, go_on = asyncio.Event(), asyncio.Event()

    async def held(real: Any, *arguments: Any) -> Any:
        is_opening.set()
        await go_on.wait()
        return await real(*arguments)

    async with _shards(tmp_path) as shards:
        a = await shards.events_in("a")
        assert await shards.commit({0: 7}) == {0: ErrorCode.none}
        desk, ticket = await frozen_move(a, _EVENTS, "b")
        around(monkeypatch, "table-opening", held)
        ending = asyncio.ensure_future(desk.moves.end(ticket))
        await is_opening.wait()

        position = await shards.position()
        seen = await shards.client.call(METADATA, 12, topics=[{"name": "events"}])
        answer = await a.call("GET", "/v1/tables/events")

        go_on.set()
        assert not await ending
        assert position is ErrorCode.not_coordinator
        assert seen.topics[0].error_code is ErrorCode.not_leader_or_follower
        assert answer.status == 503
        assert await shards.position() == 7


async def test_a_table_that_leaves_its_shard_while_it_is_asked_has_positions_nobody_knows(
    tmp_path: Path,
) -> None:
    async with _shards(tmp_path) as shards:
        b = await shards.events_in("b")
        assert await shards.commit({0: 7}) == {0: ErrorCode.none}
        shards.world.is_asked.clear()
        shards.world.go_on.clear()
        asked = asyncio.ensure_future(shards.position())
        await shards.world.is_asked.wait()
        await b.service.manager.drop_table(_EVENTS)
        shards.world.go_on.set()

        assert await asked is ErrorCode.not_coordinator
        assert await shards.position() == -1


async def test_a_commit_to_a_shard_that_is_busy_for_a_moment_is_to_be_repeated(
    tmp_path: Path,
) -> None:
    async with _shards(tmp_path) as shards:
        b = await shards.events_in("b")
        b.service.open_requests += 1_000_000
        assert await shards.commit({0: 7}) == {0: ErrorCode.not_coordinator}
        b.service.open_requests -= 1_000_000
        assert await shards.commit({0: 7}) == {0: ErrorCode.none}


async def test_a_table_of_another_shard_has_only_so_many_groups(tmp_path: Path) -> None:
    async with _shards(tmp_path) as shards:
        b = await shards.events_in("b")
        consumers = b.service.table("events").consumers
        for number in range(100):
            await consumers.report(
                f"other{number}", owner="owner", offsets={}, reads_lake=True, ttl_ms=1_000_000
            )
        assert await shards.commit({0: 7}) == {0: ErrorCode.policy_violation}


async def test_a_commit_that_nobody_knows_the_outcome_of_is_to_be_repeated(tmp_path: Path) -> None:
    async with _shards(tmp_path) as shards:
        await shards.events_in("b")
        shards.world.loses_answers = True
        assert await shards.commit({0: 7}) == {0: ErrorCode.not_coordinator}
