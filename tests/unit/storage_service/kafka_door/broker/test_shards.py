"""Several shards as brokers: each partition has its shard's address, whichever is asked."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from streamhouse.core.errors import UnavailableError
from streamhouse.core.model.records.record_sequence import (
    SEQUENCE_COUNT,
    RecordSequence,
)
from streamhouse.core.model.table import TablePath
from streamhouse.storage_service.kafka.groups.coordinator_shard import coordinator_of
from streamhouse.storage_service.kafka.topics import node_id_of
from streamhouse.storage_service.kafka_door.broker._group_desk import GroupDesk
from streamhouse.storage_service.kafka_door.broker._other_brokers import OtherBrokers
from streamhouse.storage_service.kafka_door.broker._producers import RefusedPlaces
from streamhouse.storage_service.ownership.journal.store.object_store import ObjectEntry
from streamhouse.storage_service.server.shards.peers import HttpPeers, PeerAnswer, PeerRequest
from tests.support.in_process_service import ids_of
from tests.support.kafka_batches import produced, records
from tests.support.kafka_world import kafka_door
from tests.support.memory_store import MemoryStore
from tests.support.registry_world import ORDER, register
from tests.support.shard_world import ShardWorld, frozen_move

_EVENTS = TablePath("default", "events")
PRODUCE = 0
METADATA, CREATE, DELETE, DESCRIBE, CLUSTER, COORDINATOR = 3, 19, 20, 32, 60, 10
OFFSET_FETCH = 9
HANDSHAKE, AUTHENTICATE = 17, 36


@contextlib.asynccontextmanager
async def _doors(
    tmp_path: Path, store: MemoryStore | None = None
) -> AsyncIterator[tuple[ShardWorld, dict[str, Any]]]:
    """Run shards a and b, each with a door and a client."""
    world = ShardWorld(tmp_path, store or MemoryStore())
    async with contextlib.AsyncExitStack() as stack:
        clients = dict[str, Any]()
        for shard in "ab":
            http = await stack.enter_async_context(world.shard(shard))
            door = await stack.enter_async_context(kafka_door(http))
            clients[shard] = await door.client()
        yield world, clients


def _asked(*names: str, makes: bool = False) -> dict[str, Any]:
    topics = [{"name": name} for name in names]
    return {"topics": topics, "allow_auto_topic_creation": makes}


async def test_a_topic_of_another_shard_has_that_shards_address(tmp_path: Path) -> None:
    async with _doors(tmp_path) as (world, clients):
        topics: Any = [
            {"name": f"t-{n}", "num_partitions": 2, "replication_factor": 1} for n in range(4)
        ]
        made = await clients["a"].call(CREATE, 7, topics=topics)
        assert [t.error_code for t in made.topics] == [ErrorCode.none] * 4

        answers = [
            await clients[shard].call(METADATA, 12, **asked)
            for shard in "ab"
            for asked in ({"topics": None}, _asked("t-0", "t-1", "t-2", "t-3"))
        ]

        owners = {
            f"t-{path.table[2:]}": node_id_of(shard)
            for shard in "ab"
            for path in world.services[f"http://{shard}:1"].service.manager.list_tables(None)
        }
        assert len(owners) == 4
        assert set(owners.values()) == {node_id_of("a"), node_id_of("b")}
        for answer in answers:
            assert {b.node_id for b in answer.brokers} == {node_id_of("a"), node_id_of("b")}
            assert {t.name: {p.leader_id for p in t.partitions} for t in answer.topics} == {
                name: {node_id} for name, node_id in owners.items()
            }
        ports = [{b.node_id: b.port for b in answer.brokers} for answer in answers]
        assert all(found == ports[0] for found in ports)


async def test_a_topic_of_another_shard_gets_the_columns_of_its_first_schema(
    tmp_path: Path,
) -> None:
    async with _doors(tmp_path) as (world, clients):
        await clients["a"].call(METADATA, 12, **_asked("t0", "t1", makes=True))

        for topic in ("t0", "t1"):
            for shard in "ba":
                http = world.services[f"http://{shard}:1"]
                assert (await register(http, f"{topic}-value", ORDER))[0] == 200

        tables = {
            path.table: service.service.table(str(path)).info.schema.names
            for service in world.services.values()
            for path in service.service.manager.list_tables(None)
        }
        assert tables == {"t0": ["id", "note"], "t1": ["id", "note"]}


async def test_any_shard_describes_and_drops_a_topic_of_another(tmp_path: Path) -> None:
    async with _doors(tmp_path) as (world, clients):
        topics: Any = [
            {"name": f"t{n}", "num_partitions": 1, "replication_factor": 1} for n in range(2)
        ]
        await clients["a"].call(CREATE, 7, topics=topics)
        resources = [{"resource_type": 2, "resource_name": f"t{n}"} for n in range(2)]

        for client in clients.values():
            described = await client.call(DESCRIBE, 4, resources=resources)
            assert [r.error_code for r in described.results] == [ErrorCode.none] * 2
        dropped = await clients["b"].call(DELETE, 6, topics=[{"name": "t0"}, {"name": "t1"}])

        assert [r.error_code for r in dropped.responses] == [ErrorCode.none] * 2
        for service in world.services.values():
            assert service.service.manager.list_tables(None) == []


class _CountingStore(MemoryStore):
    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def list_objects(self, folder: str, **arguments: Any) -> list[ObjectEntry]:
        self.reads += 1
        return super().list_objects(folder, **arguments)

    def get(self, key: str, *, bytes_max: int) -> memoryview:
        self.reads += 1
        return super().get(key, bytes_max=bytes_max)


async def test_names_of_a_request_are_listed_and_not_looked_up_one_by_one(tmp_path: Path) -> None:
    store, count = _CountingStore(), 500
    async with _doors(tmp_path, store) as (world, clients):
        await world.services["http://b:1"].create_table()
        names = [*(f"n{n}" for n in range(count)), "events"]
        resources = [{"resource_type": 2, "resource_name": name} for name in names]
        positions = [{"name": name, "partition_indexes": [0]} for name in names]
        group = await _group_of("a", clients["a"])

        async def asked(api_key: int, version: int, **values: Any) -> tuple[Any, int]:
            before = store.reads
            return await clients["a"].call(api_key, version, **values), store.reads - before

        found, of_metadata = await asked(METADATA, 12, **_asked(*names))
        described, of_describe = await asked(DESCRIBE, 4, resources=resources)
        fetched, of_fetch = await asked(OFFSET_FETCH, 7, group_id=group, topics=positions)
        dropped, of_delete = await asked(DELETE, 5, topic_names=names)

        unknown = [ErrorCode.unknown_topic_or_partition] * count
        assert [one.error_code for one in found.topics] == [*unknown, ErrorCode.none]
        assert [one.error_code for one in described.results] == [*unknown, ErrorCode.none]
        assert {one.partitions[0].error_code for one in fetched.topics} == {ErrorCode.none}
        assert [one.error_code for one in dropped.responses] == [*unknown, ErrorCode.none]
        assert max(of_metadata, of_describe, of_fetch, of_delete) < 100


async def test_topics_that_are_made_after_the_names_were_listed_are_found(tmp_path: Path) -> None:
    async with _doors(tmp_path) as (_, clients):
        answer = await clients["a"].call(
            METADATA, 12, **_asked(*(f"n{n}" for n in range(24)), makes=True)
        )

        assert {one.error_code for one in answer.topics} == {ErrorCode.none}
        assert {one.partitions[0].leader_id for one in answer.topics[16:]} == {
            node_id_of("a"),
            node_id_of("b"),
        }


async def _group_of(shard: str, client: Any) -> str:
    keys = [f"g{n}" for n in range(50)]
    answer = await client.call(COORDINATOR, 4, key_type=0, coordinator_keys=keys)
    return next(c.key for c in answer.coordinators if c.node_id == node_id_of(shard))


class _Noting:
    """Notes what other shards are asked."""

    def __init__(self, peers: HttpPeers) -> None:
        self._peers = peers
        self.asked: list[PeerRequest] = []

    async def ask(self, endpoint: str, request: PeerRequest) -> PeerAnswer:
        self.asked.append(request)
        return await self._peers.ask(endpoint, request)


async def test_a_password_that_nobody_asked_for_is_shown_to_no_other_shard(
    tmp_path: Path,
) -> None:
    async with _doors(tmp_path) as (world, clients):
        shards = world.services["http://a:1"].service.shards
        shards.peers = peers = _Noting(shards.peers)
        client = clients["a"]
        await client.call(HANDSHAKE, 1, mechanism="PLAIN")
        signed_in = await client.call(AUTHENTICATE, 2, auth_bytes=b"\0me\0two\r\nlines")
        assert signed_in.error_code is ErrorCode.none

        names = [f"t{n}" for n in range(4)]
        made = await client.call(METADATA, 12, **_asked(*names, makes=True))
        resources = [{"resource_type": 2, "resource_name": name} for name in names]
        described = await client.call(DESCRIBE, 4, resources=resources)

        assert {topic.error_code for topic in made.topics} == {ErrorCode.none}
        assert {topic.error_code for topic in described.results} == {ErrorCode.none}
        assert peers.asked
        assert not [request for request in peers.asked if "authorization" in request.headers]


async def test_both_shards_name_the_same_coordinator(tmp_path: Path) -> None:
    async with _doors(tmp_path) as (_, clients):
        keys = [f"g{n}" for n in range(20)]
        found = [
            {c.key: (c.error_code, c.node_id, c.port) for c in answer.coordinators}
            for client in clients.values()
            for answer in [await client.call(COORDINATOR, 4, key_type=0, coordinator_keys=keys)]
        ]

        assert found[0] == found[1]
        assert {node_id for _, node_id, _ in found[0].values()} == {
            node_id_of("a"),
            node_id_of("b"),
        }


async def test_a_shard_that_is_gone_is_no_broker(tmp_path: Path) -> None:
    async with _doors(tmp_path) as (world, clients):
        world.away.add("b")

        answer = await clients["a"].call(CLUSTER, 1)

        assert [b.broker_id for b in answer.brokers] == [node_id_of("a")]


async def test_who_asks_while_the_shards_are_first_asked_for_is_told_no_other_coordinator() -> None:
    may_answer = asyncio.Event()

    async def states() -> list[Any]:
        await may_answer.wait()
        return [SimpleNamespace(shard=shard, is_live=True) for shard in "ab"]

    shards = SimpleNamespace(own="a", states=states)
    service: Any = SimpleNamespace(shards=shards, on_drain=[])
    desk = GroupDesk(service)
    group_id = next(g for g in map(str, range(100)) if coordinator_of(g, "ab") == "b")
    first = asyncio.ensure_future(desk.shard_of(group_id))
    await asyncio.sleep(0)
    beside = asyncio.ensure_future(desk.shard_of(group_id))
    await asyncio.sleep(0)

    may_answer.set()

    assert await asyncio.gather(first, beside) == ["b", "b"]


async def test_who_asks_while_the_shards_are_asked_anew_waits_for_that_answer() -> None:
    may_answer, asked = asyncio.Event(), list[None]()

    async def states() -> list[Any]:
        asked.append(None)
        await may_answer.wait()
        return []

    shards = SimpleNamespace(own="a", states=states)
    one: Any = SimpleNamespace(
        caller=SimpleNamespace(name="etl"), service=SimpleNamespace(shards=shards)
    )
    others = OtherBrokers()
    may_answer.set()
    assert await others.all(one) == []
    may_answer.clear()

    anew = asyncio.ensure_future(others.all(one, is_fresh=True))
    while len(asked) < 2:
        await asyncio.sleep(0)
    beside = asyncio.ensure_future(others.all(one))
    await asyncio.sleep(0)
    may_answer.set()

    assert await anew == await beside == []
    assert len(asked) == 2


async def test_no_batch_is_taken_before_one_that_was_refused_while_its_table_was_to_move(
    tmp_path: Path,
) -> None:
    """A producer had sent the second one before it was told that the first one is refused."""
    async with _doors(tmp_path) as (world, clients):
        service = world.services["http://a:1"]
        await service.create_table(primary_key=("id",))
        client = clients["a"]
        desk, ticket = await frozen_move(service, _EVENTS, "b")

        assert await _produced(client, 0) is ErrorCode.not_leader_or_follower
        assert not await desk.moves.end(ticket)

        assert await _produced(client, 1) is ErrorCode.not_leader_or_follower
        assert await _produced(client, 0) is ErrorCode.none
        assert await _produced(client, 1) is ErrorCode.none
        assert ids_of(service.service.manager.table(_EVENTS)) == [0, 1]


async def test_a_topic_that_moves_keeps_its_partitions(tmp_path: Path) -> None:
    """The members of a group share out what they are told of: none would read the topic."""
    async with _doors(tmp_path) as (world, clients):
        service = world.services["http://a:1"]
        await service.create_table(bucket_count=3)
        manager = service.service.manager
        table = manager.table(_EVENTS)
        desk, ticket = await frozen_move(service, _EVENTS, "b", is_ready=True)
        manager.end_reads(table)

        for shard in "ab":
            for asked in ({"topics": None}, _asked("events")):
                (topic,) = (await clients[shard].call(METADATA, 12, **asked)).topics
                assert topic.error_code is ErrorCode.none
                assert [(p.partition_index, p.leader_id) for p in topic.partitions] == [
                    (bucket, -1) for bucket in range(3)
                ]
                assert {p.error_code for p in topic.partitions} == {ErrorCode.leader_not_available}

        assert await desk.moves.decide(ticket)
        # It has left the source, and the destination has not been told yet.
        await desk.moves.settle(ticket, is_moved=True)

        for shard in "ab":
            (topic,) = (await clients[shard].call(METADATA, 12, **_asked("events"))).topics
            assert [p.leader_id for p in topic.partitions] == [-1] * 3


def test_a_batch_that_was_refused_long_ago_was_stored_elsewhere() -> None:
    """Its table has moved and come back; the connection is the same."""
    now_s = 0.0
    refused = RefusedPlaces(lambda: now_s)
    refused.note(_EVENTS, 7, RecordSequence(0, 10, 5))
    refused.check(_EVENTS, 7, RecordSequence(0, 10, 5))
    refused.check(_EVENTS, 8, RecordSequence(0, 20, 5))
    refused.check(_EVENTS, 7, RecordSequence(1, 0, 5))
    with pytest.raises(UnavailableError, match="from 10 on"):
        refused.check(_EVENTS, 7, RecordSequence(0, 15, 5))

    now_s = 5.0

    refused.check(_EVENTS, 7, RecordSequence(0, 15, 5))


def test_of_batches_that_were_refused_the_first_one_holds_up_those_behind_it_alone() -> None:
    refused = RefusedPlaces(lambda: 0.0)
    last = SEQUENCE_COUNT - 5
    # They are refused in any order, and sequences go round.
    for base in (0, last, 5):
        refused.note(_EVENTS, 7, RecordSequence(0, base, 5))

    refused.check(_EVENTS, 7, RecordSequence(0, last - 5, 5))
    refused.check(_EVENTS, 7, RecordSequence(0, last, 3))
    for base in (0, 5):
        with pytest.raises(UnavailableError, match=f"from {last} on"):
            refused.check(_EVENTS, 7, RecordSequence(0, base, 5))

    refused.stored(_EVENTS, 7, RecordSequence(0, last - 5, 5))
    with pytest.raises(UnavailableError):
        refused.check(_EVENTS, 7, RecordSequence(0, 0, 5))
    refused.stored(_EVENTS, 7, RecordSequence(0, last, 5))
    refused.check(_EVENTS, 7, RecordSequence(0, 0, 5))


async def _produced(client: Any, number: int) -> ErrorCode:
    """Send a batch of one record, which upserts the row of this number."""
    batch = produced(
        records([b'{"id": %d, "name": "n"}' % number]), producer_id=7, epoch=0, sequence=number
    )
    data: Any = [{"index": 0, "records": batch}]
    answer = await client.call(
        PRODUCE,
        9,
        acks=-1,
        timeout=timedelta(seconds=10),
        topic_data=[{"name": "events", "partition_data": data}],
    )
    return ErrorCode(answer.responses[0].partition_responses[0].error_code)
