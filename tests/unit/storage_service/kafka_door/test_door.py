"""The Kafka door over a socket: versions, topics, order, and connections that are no client's."""

from __future__ import annotations

import asyncio
import struct
from pathlib import Path
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from streamhouse.storage_service.kafka.messages import answers, shapes
from streamhouse.storage_service.kafka.messages.requests import request_class, response_class
from streamhouse.storage_service.kafka_door._apis import APIS
from tests.support.in_process_service import until
from tests.support.kafka_world import KafkaClient, kafka_world, request_bytes

API_VERSIONS = 18
METADATA = 3


async def test_versions_lists_every_api(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        client = await world.client()
        for version in range(4):
            answer = await client.call(API_VERSIONS, version)

            assert answer.error_code is ErrorCode.none
            assert {a.api_key: (a.min_version, a.max_version) for a in answer.api_keys} == {
                api.key: (api.listed_from, api.versions[1]) for api in APIS.values()
            }


async def test_a_version_of_versions_that_is_not_known_is_answered_with_one_that_is(
    tmp_path: Path,
) -> None:
    async with kafka_world(tmp_path) as world:
        client = await world.client()
        client.writer.write(struct.pack(">ihhih", 13, API_VERSIONS, 99, 7, -1) + b"\0\0\0")

        data = await client.frame()

        assert struct.unpack_from(">ih", data) == (7, ErrorCode.unsupported_version.value)
        assert (await client.call(API_VERSIONS, 3)).error_code is ErrorCode.none


async def test_metadata_has_the_tables_as_topics(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        await world.http.create_table("events", bucket_count=3)
        await world.http.call("POST", "/v1/databases", json_body={"name": "sales"})
        await world.http.create_table("sales.orders")
        client = await world.client()

        for version in range(13):
            answer = await client.call(METADATA, version, topics=None if version else ())

            assert {t.name: len(t.partitions) for t in answer.topics} == {
                "events": 3,
                "sales.orders": 1,
            }
            assert all(p.leader_id == 0 for t in answer.topics for p in t.partitions)
            address = world.door.address
            assert [(b.node_id, b.host, b.port) for b in answer.brokers] == [
                (0, address.host, address.port)
            ]


async def test_metadata_of_named_topics_keeps_their_names(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        await world.http.create_table("events")
        client = await world.client()

        answer = await client.call(
            METADATA,
            12,
            topics=[{"name": n} for n in ("events", "default.events", "other", "no topic", "a-b")],
            allow_auto_topic_creation=False,
        )

        assert [(t.name, t.error_code) for t in answer.topics] == [
            ("events", ErrorCode.none),
            ("default.events", ErrorCode.none),
            ("other", ErrorCode.unknown_topic_or_partition),
            ("no topic", ErrorCode.invalid_topic_exception),
            ("a-b", ErrorCode.unknown_topic_or_partition),
        ]
        assert answer.topics[0].topic_id == answer.topics[1].topic_id is not None
        none = await client.call(METADATA, 12, topics=[], allow_auto_topic_creation=False)
        assert none.topics == ()


async def test_answers_leave_in_the_order_of_requests(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        client = await world.client()

        numbers = [client.send(METADATA, 12, topics=[]) for _ in range(50)]

        for number in numbers:
            await client.answer(METADATA, 12, number)


async def test_what_reads_and_writes_messages_is_made_when_the_door_opens(tmp_path: Path) -> None:
    caches = (request_class, response_class, shapes._entity, answers._fields)
    for cache in caches:
        cache.cache_clear()
    async with kafka_world(tmp_path) as world:
        await world.door.preparing.wait_done()
        client = await world.client()
        asked: Any = [(METADATA, n, {"topics": [{"name": "events"}]}) for n in range(13)]
        for one in asked:
            # The client's own request has fields, too.
            request_bytes(*one)
        made = [cache.cache_info().misses for cache in caches]

        for api_key, version, values in asked:
            await client.call(api_key, version, **values)

        assert [cache.cache_info().misses for cache in caches] == made
        assert made[0] == sum(a.versions[1] - a.versions[0] + 1 for a in APIS.values())


async def test_a_request_may_arrive_byte_by_byte(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        client = await world.client()
        for byte in request_bytes(METADATA, 12, {"topics": []}, correlation_id=1):
            client.writer.write(bytes([byte]))
            await client.writer.drain()
            await asyncio.sleep(0)

        await client.answer(METADATA, 12, 1)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack(">i", -1),
        struct.pack(">i", 1) + b"\0",
        struct.pack(">ihhih", 10, 9_999, 0, 1, -1),
        struct.pack(">ihhih", 10, METADATA, 99, 1, -1),
        # A client id of more bytes than there are.
        struct.pack(">ihhih", 10, METADATA, 1, 1, 500),
        # Metadata with an array of two billion topics: kio would end the process at this.
        struct.pack(">ihhihi", 14, METADATA, 1, 1, -1, 0x7FFF_FFFF),
        # The same in a flexible version.
        struct.pack(">ihhih", 16, METADATA, 12, 1, -1) + b"\0\xff\xff\xff\xff\x07",
        # Large, and no rows in it.
        struct.pack(">ihh", 60 << 20, METADATA, 12) + bytes(100),
    ],
)
async def test_what_is_no_request_ends_its_connection_alone(tmp_path: Path, data: bytes) -> None:
    async with kafka_world(tmp_path) as world:
        other, client = await world.client(), await world.client()
        client.writer.write(data)

        assert await client.is_closed()
        assert (await other.call(API_VERSIONS, 3)).error_code is ErrorCode.none
        await until(lambda: len(world.service.connections) == 1)
        assert world.service.body_memory.held == 0
        assert world.service.open_requests == 0


async def test_bytes_after_a_message_are_passed_over(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        client = await world.client()
        # As librdkafka asks for all topics.
        asked = struct.pack(">hhih", METADATA, 12, 1, -1) + b"\0\0\0\0\0\1\0\0"
        client.writer.write(struct.pack(">i", len(asked)) + asked)

        assert (await client.answer(METADATA, 12, 1)).topics == ()


async def test_half_a_request_is_given_up(tmp_path: Path) -> None:
    async with kafka_world(tmp_path, body_read_timeout_ms=50) as world:
        client = await world.client()
        client.writer.write(request_bytes(METADATA, 12, {"topics": []})[:-1])

        assert await client.is_closed()
        assert world.service.body_memory.held == 0


async def test_an_idle_connection_is_closed(tmp_path: Path) -> None:
    async with kafka_world(tmp_path, kafka_idle_timeout_ms=50) as world:
        client = await world.client()

        assert await client.is_closed()


async def test_the_one_idle_for_longest_makes_room_for_another(tmp_path: Path) -> None:
    async with kafka_world(tmp_path, connections_max=2) as world:
        first, second = await world.client(), await world.client()
        await second.call(API_VERSIONS, 3)

        third = await world.client()

        assert (await third.call(API_VERSIONS, 3)).error_code is ErrorCode.none
        assert await first.is_closed()
        assert (await second.call(API_VERSIONS, 3)).error_code is ErrorCode.none


async def test_a_stopping_service_closes_its_connections(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        client = await world.client()
        await client.call(API_VERSIONS, 3)
        await world.service.drain()

        client.send(METADATA, 12, topics=[])

        assert await client.is_closed()
        await world.stop_listening()
        assert world.door.address is None


async def test_requests_are_counted(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        client = await world.client()
        topics: Any = [{"name": "none"}]
        await client.call(METADATA, 12, topics=topics, allow_auto_topic_creation=False)
        await client.call(API_VERSIONS, 3)

        text = (await world.http.call("GET", "/metrics")).body.decode()

        for labels in (
            '{api="metadata",error="unknown_topic_or_partition"}',
            '{api="api_versions",error="none"}',
        ):
            assert f"streamhouse_kafka_requests_total{labels} 1.0" in text


async def test_who_reads_no_answers_is_cut_off(tmp_path: Path) -> None:
    async with kafka_world(tmp_path, answer_stall_timeout_ms=50) as world:
        client = await world.client(limit=1)
        topics: Any = [{"name": f"{n:0240}"} for n in range(2_000)]
        asked = request_bytes(METADATA, 8, {"topics": topics, "allow_auto_topic_creation": False})
        sending = asyncio.ensure_future(_send_for_ever(client, asked))

        await until(lambda: len(world.service.connections) == 0)

        assert world.service.body_memory.held == 0
        with pytest.raises(ConnectionError):
            await sending


async def _send_for_ever(client: KafkaClient, asked: bytes) -> None:
    while True:
        client.writer.write(asked)
        await client.writer.drain()


async def test_many_requests_at_once_leave_turns_to_other_connections(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        many, other = await world.client(), await world.client()
        many.writer.write(request_bytes(API_VERSIONS, 0, {}) * 4_000)
        await other.call(API_VERSIONS, 3)

        counted = world.door._counts._requests.labels("api_versions", "none")
        assert counted._value.get() < 4_000
        for _ in range(4_000):
            await many.frame()


async def test_many_small_pieces_of_requests_are_as_much_as_many_bytes(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        client = await world.client()
        await client.call(API_VERSIONS, 3)
        (connection,) = world.door._open
        request = request_bytes(API_VERSIONS, 0, {}, client_id="c" * 1_000)
        for byte in request:
            connection.data_received(bytes([byte]))

        assert connection._is_reading_paused
        await client.frame()
        assert not connection._is_reading_paused
