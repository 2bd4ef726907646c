"""Positions of groups in tables that other shards have, or that are on their way between shards."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from streamhouse.core.model.table import TablePath
from streamhouse.storage_service.kafka.groups.coordinator_shard import coordinator_of
from tests.support.held_step import around
from tests.support.in_process_service import InProcessService, event_rows, until
from tests.support.kafka_world import KafkaClient, kafka_door
from tests.support.memory_store import MemoryStore
from tests.support.shard_world import ShardWorld, frozen_move

OFFSET_COMMIT, OFFSET_FETCH, METADATA = 8, 9, 3
JOIN, HEARTBEAT, SYNC = 11, 12, 14
GROUP = next(f"g{n}" for n in range(100) if coordinator_of(f"g{n}", {"a", "b"}) == "a")
_EVENTS = TablePath("default", "events")


class _Shards:
    """Shards a and b, and a client of a, which coordinates `GROUP`."""

    def __init__(self, world: ShardWorld, client: KafkaClient | None = None) -> None:
        self.world, self._client = world, client

    @property
    def client(self) -> KafkaClient:
        """The client, where there is one."""
        assert self._client is not None
        return self._client

    def service(self, shard: str) -> InProcessService:
        """Return the service of a shard."""
        return self.world.services[f"http://{shard}:1"]

    async def events_in(
        self, shard: str, *, name: str = "events", **properties: str
    ) -> InProcessService:
        """Make a table there, with 10 rows in each of its two buckets."""
        service = self.service(shard)
        assert service.service.shards is not None
        await service.service.shards.claim(TablePath("default", name))
        await service.create_table(name, bucket_count=2, properties=properties)
        await service.append([(0, 0, event_rows(0, 10)), (1, 0, event_rows(0, 10))], path=name)
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

        try:
            position = await shards.position()
            seen = await shards.client.call(METADATA, 12, topics=[{"name": "events"}])
            answer = await a.call("GET", "/v1/tables/events")
        finally:
            go_on.set()
        assert not await ending
        assert position is ErrorCode.coordinator_load_in_progress
        assert {p.error_code for p in seen.topics[0].partitions} == {ErrorCode.leader_not_available}
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

        assert await asked is ErrorCode.coordinator_load_in_progress
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


async def test_an_offset_that_is_refused_refuses_no_others_of_a_table_elsewhere(
    tmp_path: Path,
) -> None:
    async with _shards(tmp_path) as shards:
        await shards.events_in("b")
        unknown, beyond = ErrorCode.unknown_topic_or_partition, ErrorCode.offset_out_of_range
        none = ErrorCode.none
        for refused in ({1: 11}, {1: -3}, {2: 0}, {-1: 0}, {1_000_000: 0}):
            (bucket,) = refused
            code = beyond if bucket == 1 else unknown
            assert await shards.commit({0: 7, **refused}) == {0: none, bucket: code}
        assert await shards.position() == 7
        assert await shards.commit({1: 11}) == {1: beyond}


async def test_a_commit_of_no_offset_lets_a_group_begin_anew_in_a_table_elsewhere(
    tmp_path: Path,
) -> None:
    async with _shards(tmp_path) as shards:
        await shards.events_in("b")
        none, unknown = ErrorCode.none, ErrorCode.unknown_topic_or_partition
        assert await shards.commit({0: 7, 1: 3}) == {0: none, 1: none}
        assert await shards.commit({0: -1, 2: -2}) == {0: none, 2: unknown}
        assert await shards.position() == -1


async def test_a_topic_is_not_that_of_another_name_elsewhere(tmp_path: Path) -> None:
    async with _shards(tmp_path) as shards:
        await shards.events_in("b", name="a_b_c", **{"kafka.topic": "a.b.c"})
        assert await shards.commit({0: 7}, topic="a.b.c") == {0: ErrorCode.none}

        wrong = ErrorCode.invalid_topic_exception
        assert await shards.commit({0: 9}, topic="a-b-c") == {0: wrong}
        assert await shards.position(topic="a-b-c") is wrong
        assert await shards.position(topic="a.b.c") == 7


@pytest.mark.parametrize("shard", ["a", "b"])
async def test_a_damaged_table_keeps_a_group_from_none_of_its_others(
    tmp_path: Path, shard: str
) -> None:
    world = ShardWorld(tmp_path, MemoryStore())
    async with world.shard("a"), world.shard("b"):
        shards = _Shards(world)
        service = await shards.events_in(shard)
        table_id = service.service.table("events").info.table_id
    (tmp_path / shard / "tables" / str(table_id) / "lake.json").write_text("{")
    async with _shards(tmp_path) as shards:
        await shards.events_in("a", name="whole")
        topics = [{"name": name, "partition_indexes": [0]} for name in ("events", "whole")]
        answer = await shards.client.call(
            OFFSET_FETCH, 8, groups=[{"group_id": GROUP, "topics": topics}]
        )
        everything = await shards.client.call(
            OFFSET_FETCH, 8, groups=[{"group_id": GROUP, "topics": None}]
        )

        damaged = ErrorCode.kafka_storage_error
        assert answer.groups[0].error_code is ErrorCode.none
        found = {t.name: t.partitions[0].error_code for t in answer.groups[0].topics}
        assert found == {"events": damaged, "whole": ErrorCode.none}
        assert everything.groups[0].error_code is ErrorCode.none
        assert await shards.commit({0: 1}) == {0: damaged}


async def test_a_heartbeat_does_not_wait_for_another_shard(tmp_path: Path) -> None:
    async with _shards(tmp_path) as shards:
        await shards.events_in("b")
        session = datetime.timedelta(minutes=5)
        asked: dict[str, Any] = {
            "group_id": GROUP,
            "session_timeout": session,
            "rebalance_timeout": session,
            "protocol_type": "consumer",
            "protocols": [{"name": "range", "metadata": b""}],
            "group_instance_id": "one",
        }
        joined = await shards.client.call(JOIN, 9, member_id="", **asked)
        member = {
            "group_id": GROUP,
            "generation_id": joined.generation_id,
            "member_id": joined.member_id,
            "group_instance_id": "one",
        }
        await shards.client.call(SYNC, 5, assignments=[], **member)
        committed = await shards.client.call(
            OFFSET_COMMIT,
            8,
            group_id=GROUP,
            generation_id_or_member_epoch=joined.generation_id,
            member_id=joined.member_id,
            group_instance_id="one",
            topics=[
                {
                    "name": "events",
                    "partitions": [
                        {"partition_index": 0, "committed_offset": 7, "committed_metadata": ""}
                    ],
                }
            ],
        )
        assert committed.topics[0].partitions[0].error_code is ErrorCode.none
        consumers = shards.service("b").service.table("events").consumers
        (before,) = consumers.current(1_000_000)
        shards.world.is_asked.clear()
        shards.world.go_on.clear()

        beats = [await shards.client.call(HEARTBEAT, 4, **member) for _ in range(2)]

        assert [beat.error_code for beat in beats] == [ErrorCode.none] * 2
        await shards.world.is_asked.wait()
        shards.world.go_on.set()
        await until(lambda: consumers.current(1_000_000)[0].reported_us > before.reported_us)
        assert consumers.current(1_000_000)[0].offsets == {0: 7}
