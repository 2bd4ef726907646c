"""A table that is made again under its name: positions of the one before are not its."""

from __future__ import annotations

import dataclasses
import datetime
import struct
import typing
import uuid
from pathlib import Path
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from streamhouse.core.model.records.record_format import RAW_TOPIC
from streamhouse.storage_service.kafka.messages.requests import request_class
from streamhouse.storage_service.kafka.messages.shapes import shape_of
from streamhouse.storage_service.kafka_door._apis import APIS
from streamhouse.storage_service.kafka_door.topics._table_identity import epoch_of
from tests.support.fetch_world import (
    FETCH,
    LIST_OFFSETS,
    append,
    fetch,
    fetched,
    list_offsets,
    raw_rows,
)
from tests.support.kafka_world import KafkaClient, KafkaWorld, kafka_world

METADATA, OFFSET_COMMIT, OFFSET_FETCH, JOIN, SYNC, FOR_EPOCH = 3, 8, 9, 11, 14, 23
OUT_OF_RANGE = ErrorCode.offset_out_of_range
FENCED = ErrorCode.fenced_leader_epoch
SESSION = datetime.timedelta(minutes=5)


async def make(world: KafkaWorld, first: int, count: int = 8) -> int:
    """Make table clicks of two buckets with so many rows in each; return its leader epoch."""
    await world.http.create_table("clicks", RAW_TOPIC, bucket_count=2)
    for bucket in range(2):
        await append(world, "clicks", bucket, raw_rows(first, first + count))
    return epoch_of(world.service.table("clicks"))


async def make_again(world: KafkaWorld, first: int = 100) -> int:
    assert (await world.http.call("DELETE", "/v1/tables/clicks")).status == 204
    return await make(world, first)


async def topic_ids(client: KafkaClient) -> dict[str, uuid.UUID]:
    answer = await client.call(METADATA, 12, topics=None)
    return {topic.name: topic.topic_id for topic in answer.topics}


def keys(answer: Any) -> list[list[bytes | None] | ErrorCode]:
    return [
        found if isinstance(found, ErrorCode) else [record.key for record in found]
        for found in fetched(answer).values()
    ]


def rows(start: int, end: int) -> list[bytes]:
    return [b"k%d" % number for number in range(start, end)]


@pytest.mark.parametrize("version", range(4, 14))
async def test_an_open_consumer_is_told_once_that_its_position_is_of_another_table(
    tmp_path: Path, version: int
) -> None:
    async with kafka_world(tmp_path) as world:
        await make(world, 0)
        client = await world.client()

        async def read(*offsets: int) -> list[list[bytes | None] | ErrorCode]:
            ids = {} if version < 13 else {"topic_ids": await topic_ids(client)}
            asked = {"clicks": dict(enumerate(offsets))}
            return keys(await fetch(client, asked, version=version, **ids))

        assert await read(3, 0) == [rows(3, 8), rows(0, 8)]
        await make_again(world)
        # Tools and clients ask where the end is also to show how far a consumer is behind.
        assert await list_offsets(client, "clicks", 0, -1) == (8, -1)
        assert await read(8) == [OUT_OF_RANGE]
        assert await read(0, 5) == [rows(100, 108), OUT_OF_RANGE]
        assert await read(5, 5) == [rows(105, 108), rows(105, 108)]
        assert keys(await fetch(await world.client(), {"clicks": {0: 7}})) == [rows(107, 108)]


@pytest.mark.parametrize("version", [12, 13])
async def test_records_by_the_newest_versions(tmp_path: Path, version: int) -> None:
    async with kafka_world(tmp_path) as world:
        await make(world, 0, count=200)
        client = await world.client()
        ids = await topic_ids(client)
        identity = {"topic_ids": ids} if version == 13 else {}

        answer = await fetch(client, {"clicks": {0: 0, 1: 199, 7: 0}}, version=version, **identity)

        unknown = ErrorCode.unknown_topic_or_partition
        assert keys(answer) == [rows(0, 200), rows(199, 200), unknown]
        assert [key[0] for key in fetched(answer)] == [
            ids["clicks"] if version == 13 else "clicks"
        ] * 3


async def test_topics_are_read_by_their_ids_alone(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        await make(world, 0)
        client = await world.client()
        former = await topic_ids(client)
        nothing = {"clicks": uuid.uuid4()}
        unknown = [ErrorCode.unknown_topic_id]

        assert keys(await fetch(client, {"clicks": {0: 0}}, version=13, topic_ids=nothing)) == (
            unknown
        )
        await make_again(world)
        assert keys(await fetch(client, {"clicks": {0: 0}}, version=13, topic_ids=former)) == (
            unknown
        )
        await world.http.call("DELETE", "/v1/tables/clicks")
        assert keys(await fetch(client, {"clicks": {0: 0}}, version=13, topic_ids=former)) == (
            unknown
        )


async def test_records_have_the_leader_epoch_of_their_table(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        first = await make(world, 0)
        second = await make_again(world)
        client = await world.client()
        answer = await fetch(client, {"clicks": {0: 0}})
        (told,) = struct.unpack_from(">i", answer.responses[0].partitions[0].records, 12)
        metadata = await client.call(METADATA, 12, topics=None)

        assert 0 < first < second == told
        assert {p.leader_epoch for p in metadata.topics[0].partitions} == {second}


async def test_a_record_of_another_leader_epoch_is_not_followed_by_those_of_the_table(
    tmp_path: Path,
) -> None:
    async with kafka_world(tmp_path) as world:
        first = await make(world, 0)
        second = await make_again(world)
        client = await world.client()

        async def read(epoch: int) -> Any:
            asked: dict[str, Any] = {"version": 12, "last_fetched_epoch": epoch}
            return keys(await fetch(client, {"clicks": {0: 5}}, **asked))

        assert await read(first) == [OUT_OF_RANGE]
        assert await read(second) == await read(-1) == [rows(105, 108)]


def _fields(kind: Any) -> set[str]:
    found = set[str]()
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        found.add(field.name)
        element = shape_of(hints[field.name]).element
        if dataclasses.is_dataclass(element):
            found |= _fields(element)
    return found


def _with_epoch(field: str) -> set[tuple[int, int]]:
    return {
        (api.key, version)
        for api in APIS.values()
        for version in range(api.versions[0], api.versions[1] + 1)
        if field in _fields(request_class(api.key, version))
    }


@pytest.mark.parametrize(("key", "version"), sorted(_with_epoch("current_leader_epoch")))
async def test_whoever_names_a_leader_epoch_is_told_if_it_is_another(
    tmp_path: Path, key: int, version: int
) -> None:
    async with kafka_world(tmp_path) as world:
        first = await make(world, 0)
        second = await make_again(world)
        client = await world.client()
        ids = await topic_ids(client)

        async def ask(epoch: int) -> ErrorCode:
            if key == FETCH:
                identity: dict[str, Any] = {"topic_ids": ids} if version == 13 else {}
                answer = await fetch(
                    client,
                    {"clicks": {0: 8}},
                    version=version,
                    current_leader_epoch=epoch,
                    **identity,
                )
                return ErrorCode(answer.responses[0].partitions[0].error_code)
            # An API that is not here asks for a line of its own.
            named = {LIST_OFFSETS: ("name", "partition_index"), FOR_EPOCH: ("topic", "partition")}
            topic, partition = named[key]
            asked = {partition: 0, "current_leader_epoch": epoch}
            asked |= {"timestamp": -1} if key == LIST_OFFSETS else {"leader_epoch": first}
            has_replica = key == LIST_OFFSETS or version >= 3
            answer = await client.call(
                key,
                version,
                **({"replica_id": -1} if has_replica else {}),
                **({"isolation_level": 0} if key == LIST_OFFSETS else {}),
                topics=[{topic: "clicks", "partitions": [asked]}],
            )
            return ErrorCode(answer.topics[0].partitions[0].error_code)

        assert await ask(first) is FENCED
        assert await ask(second + 1) is ErrorCode.unknown_leader_epoch
        assert await ask(second) is await ask(-1) is ErrorCode.none


def test_no_other_request_tells_where_a_position_is_from() -> None:
    assert {key for key, _ in _with_epoch("committed_leader_epoch")} == {OFFSET_COMMIT}
    assert {key for key, _ in _with_epoch("last_fetched_epoch")} == {FETCH}
    assert {key for key, _ in _with_epoch("leader_epoch")} == {FOR_EPOCH}


# -- committed positions -------------------------------------------------------------------------


async def commit(
    client: KafkaClient, offset: int, *, epoch: int = -1, version: int = 8, joined: Any = None
) -> ErrorCode:
    position = {"partition_index": 0, "committed_offset": offset, "committed_metadata": ""}
    position |= {"committed_leader_epoch": epoch} if version >= 6 else {}
    answer = await client.call(
        OFFSET_COMMIT,
        version,
        group_id="g",
        generation_id_or_member_epoch=-1 if joined is None else joined.generation_id,
        member_id="" if joined is None else joined.member_id,
        topics=[{"name": "clicks", "partitions": [position]}],
    )
    return ErrorCode(answer.topics[0].partitions[0].error_code)


async def committed(client: KafkaClient, *, asks_all: bool = False) -> tuple[int, int]:
    """Return the offset and the leader epoch."""
    topics = None if asks_all else [{"name": "clicks", "partition_indexes": [0]}]
    answer = await client.call(OFFSET_FETCH, 8, groups=[{"group_id": "g", "topics": topics}])
    (found,) = answer.groups[0].topics[0].partitions
    return found.committed_offset, found.committed_leader_epoch


async def test_positions_of_a_dropped_table_are_not_those_of_the_next(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        first = await make(world, 0)
        client = await world.client()
        assert await commit(client, 5, epoch=first) is ErrorCode.none
        assert await committed(client) == await committed(client, asks_all=True) == (5, first)
        second = await make_again(world)

        assert await committed(client) == (-1, -1)
        assert await commit(client, 6, epoch=first) is FENCED
        assert await committed(client) == (-1, -1)
        assert await commit(client, 7, epoch=second) is ErrorCode.none
        assert await committed(client) == (7, second)


@pytest.mark.parametrize("offset", [-1, -2])
async def test_a_commit_of_no_offset_lets_the_group_begin_anew(tmp_path: Path, offset: int) -> None:
    async with kafka_world(tmp_path) as world:
        await make(world, 0)
        client = await world.client()
        for before in (-1, 4):
            if before >= 0:
                assert await commit(client, before) is ErrorCode.none
            assert await commit(client, offset) is ErrorCode.none
            assert await committed(client) == (-1, -1)
        assert await commit(client, offset - 2) is OUT_OF_RANGE


@pytest.mark.parametrize("has_asked", [True, False])
async def test_who_tells_no_leader_epoch_commits_in_the_table_where_it_stood(
    tmp_path: Path, has_asked: bool
) -> None:
    async with kafka_world(tmp_path) as world:
        await make(world, 0)
        client, other = await world.client(), await world.client()
        if has_asked:
            assert await committed(client) == (-1, -1)
        assert await commit(client, 3, version=5) is ErrorCode.none
        await make_again(world)

        assert await commit(client, 5) is FENCED
        assert await commit(client, 5, version=2) is FENCED
        assert await committed(other) == (-1, -1)
        assert await committed(client) == (-1, -1)
        assert await commit(client, 2) is ErrorCode.none


async def test_a_member_that_tells_no_leader_epoch_joins_again(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        await make(world, 0)
        client = await world.client()
        joined = await client.call(
            JOIN,
            3,
            group_id="g",
            session_timeout=SESSION,
            rebalance_timeout=SESSION,
            member_id="",
            protocol_type="consumer",
            protocols=[{"name": "range", "metadata": b""}],
        )
        await client.call(
            SYNC,
            3,
            group_id="g",
            generation_id=joined.generation_id,
            member_id=joined.member_id,
            assignments=[{"member_id": joined.member_id, "assignment": b"all"}],
        )
        await committed(client)
        assert await commit(client, 3, joined=joined) is ErrorCode.none
        await make_again(world)

        assert await commit(client, 5, joined=joined) is ErrorCode.unknown_member_id
        # It was alone, so its group is gone.
        assert await commit(client, 5, joined=joined) is ErrorCode.illegal_generation
        assert await committed(client) == (-1, -1)
