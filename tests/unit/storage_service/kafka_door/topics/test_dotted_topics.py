"""`orders.created`: a table of database `orders` if there is one, else `default.orders_created`.

A table that is there stays the topic's, whatever is made later.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from streamhouse.core.errors import InvalidNameError
from streamhouse.core.model.records.record_format import RAW_TOPIC
from streamhouse.core.model.table import TablePath
from streamhouse.storage_service.kafka.topics import (
    TopicTable,
    first_created,
    is_same_topic,
    needs_property,
    table_paths_of,
    topic_name_of,
)
from streamhouse.storage_service.server.access._grants import token_hash
from tests.support.fetch_world import fetch, fetched
from tests.support.in_process_service import InProcessService, table_descriptor
from tests.support.kafka_batches import produced, records
from tests.support.kafka_world import KafkaClient, kafka_door, kafka_world
from tests.support.memory_store import MemoryStore
from tests.support.registry_world import ORDER, ask, register
from tests.support.shard_world import ShardWorld

PRODUCE, FETCH, METADATA, CREATE, DELETE, DESCRIBE = 0, 1, 3, 19, 20, 32
HANDSHAKE, AUTHENTICATE = 17, 36
TOPIC = "orders.created"
FLAT, DOTTED = "default.orders_created", "orders.created"


async def _asked(client: KafkaClient, *, makes: bool = False, topic: str = TOPIC) -> Any:
    answer = await client.call(
        METADATA, 12, topics=[{"name": topic}], allow_auto_topic_creation=makes
    )
    return answer.topics[0]


async def _created(client: KafkaClient, topic: str = TOPIC) -> Any:
    new = {"name": topic, "num_partitions": 1, "replication_factor": 1}
    return (await client.call(CREATE, 7, topics=[new])).topics[0]


async def _produced(client: KafkaClient, value: bytes) -> ErrorCode:
    data = [{"index": 0, "records": produced(records([value]))}]
    answer = await client.call(
        PRODUCE,
        9,
        acks=-1,
        timeout=timedelta(seconds=10),
        topic_data=[{"name": TOPIC, "partition_data": data}],
    )
    code: ErrorCode = answer.responses[0].partition_responses[0].error_code
    return code


async def _listed(client: KafkaClient) -> list[str]:
    return [topic.name for topic in (await client.call(METADATA, 12, topics=None)).topics]


async def _database(service: InProcessService, name: str = "orders") -> None:
    answer = await service.call("POST", "/v1/databases", json_body={"name": name})
    assert answer.status == 201, answer.body


def _rows(service: InProcessService, path: str) -> int:
    return sum(tablet.high_watermark for tablet in service.service.table(path).tablets)


def _tables(service: InProcessService) -> list[str]:
    return [str(path) for path in service.service.manager.list_tables(None)]


@pytest.mark.parametrize("is_asked_for", [False, True])
async def test_without_such_a_database_it_is_a_table_of_default(
    tmp_path: Path, is_asked_for: bool
) -> None:
    async with kafka_world(tmp_path) as world:
        client = await world.client()

        made = await (_asked(client, makes=True) if is_asked_for else _created(client))

        assert made.error_code is ErrorCode.none
        assert _tables(world.http) == [FLAT]
        properties = world.service.table(FLAT).info.descriptor.properties
        assert properties["kafka.topic"] == TOPIC
        assert await _listed(client) == [TOPIC]
        assert await _produced(client, b"x") is ErrorCode.none
        found = fetched(await fetch(client, {TOPIC: {0: 0}}))[TOPIC, 0]
        assert [record.value for record in found] == [b"x"]
        again = await _created(client)
        assert again.error_code is ErrorCode.topic_already_exists
        dropped = await client.call(DELETE, 6, topics=[{"name": TOPIC}])
        assert dropped.responses[0].error_code is ErrorCode.none
        assert _tables(world.http) == []


async def test_in_a_database_that_is_there_it_is_a_table_of_that(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        await _database(world.http)
        client = await world.client()

        assert (await _asked(client, makes=True)).error_code is ErrorCode.none

        assert _tables(world.http) == [DOTTED]
        assert "kafka.topic" not in world.service.table(DOTTED).info.descriptor.properties
        assert await _listed(client) == [TOPIC]


async def test_a_database_and_a_table_made_later_change_nothing(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        client = await world.client()
        first = (await _asked(client, makes=True)).topic_id
        await _database(world.http)

        assert (await _asked(client, makes=True)).topic_id == first
        assert (await _created(client)).error_code is ErrorCode.topic_already_exists
        await world.http.create_table(DOTTED, RAW_TOPIC)
        assert (await _asked(client, makes=True)).topic_id == first
        assert await _produced(client, b"x") is ErrorCode.none
        assert (_rows(world.http, FLAT), _rows(world.http, DOTTED)) == (1, 0)
        assert await _listed(client) == [TOPIC]

        await world.http.call("DELETE", f"/v1/tables/{FLAT}")

        assert (await _asked(client, makes=True)).topic_id != first
        assert await _produced(client, b"y") is ErrorCode.none
        assert _rows(world.http, DOTTED) == 1


async def test_a_table_of_default_that_names_the_topic_later_does_not_take_it(
    tmp_path: Path,
) -> None:
    async with kafka_world(tmp_path) as world:
        await _database(world.http)
        client = await world.client()
        assert (await _created(client)).error_code is ErrorCode.none
        await world.http.create_table(FLAT, RAW_TOPIC, properties={"kafka.topic": TOPIC})

        assert await _produced(client, b"x") is ErrorCode.none

        assert (_rows(world.http, FLAT), _rows(world.http, DOTTED)) == (0, 1)


async def test_the_table_of_another_topic_is_none_of_it(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        client = await world.client()
        assert (await _created(client, "orders-created")).error_code is ErrorCode.none

        other = await _asked(client, makes=True)
        await _database(world.http)

        assert other.error_code is ErrorCode.invalid_topic_exception
        assert (await _asked(client, makes=True)).error_code is ErrorCode.none
        assert await _listed(client) == ["orders-created", TOPIC]


async def _signed_in(client: KafkaClient, token: str) -> KafkaClient:
    await client.call(HANDSHAKE, 1, mechanism="PLAIN")
    answer = await client.call(AUTHENTICATE, 2, auth_bytes=f"\0me\0{token}".encode())
    assert answer.error_code is ErrorCode.none
    return client


def _grants(path: Path, **wanted: list[str]) -> Path:
    path.write_text(
        "\n".join(
            f'[[token]]\nname = "{name}"\nsha256 = "{token_hash(name.encode())}"\ngrants = {of}\n'
            for name, of in wanted.items()
        )
    )
    path.chmod(0o600)
    return path


async def test_the_grants_are_those_of_the_table_that_it_is(tmp_path: Path) -> None:
    wanted = {"flat": [f"admin:{FLAT}"], "dotted": [f"admin:{DOTTED}"]}
    grants = _grants(tmp_path / "grants.toml", **wanted)
    async with kafka_world(tmp_path / "data", grants_file=grants) as world:
        flat = await _signed_in(await world.client(), "flat")
        dotted = await _signed_in(await world.client(), "dotted")

        assert (await _asked(dotted, makes=True)).error_code is (
            ErrorCode.topic_authorization_failed
        )
        assert (await _asked(flat, makes=True)).error_code is ErrorCode.none
        assert await _produced(flat, b"x") is ErrorCode.none
        assert await _produced(dotted, b"x") is ErrorCode.topic_authorization_failed
        assert await _listed(dotted) == []


async def test_its_subjects_are_those_of_the_same_table(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        client = await world.client()
        assert (await register(world.http, f"{TOPIC}-value", ORDER))[0] == 200

        assert _tables(world.http) == [FLAT]
        assert await _listed(client) == [TOPIC]
        await _database(world.http)
        assert (await register(world.http, f"{TOPIC}-key", ORDER))[0] == 200
        assert _tables(world.http) == [FLAT]
        status, found = await ask(world.http, "GET", f"/subjects/{TOPIC}-value/versions/1")
        assert (status, found["subject"]) == (200, f"{TOPIC}-value")
        status, subjects = await ask(world.http, "GET", "/subjects")
        assert subjects == [f"{TOPIC}-key", f"{TOPIC}-value"]


@contextlib.asynccontextmanager
async def _shards(
    path: Path, **config: Any
) -> AsyncIterator[tuple[list[InProcessService], list[KafkaClient]]]:
    """Run shards a and b, each with a door and a client."""
    world = ShardWorld(path, MemoryStore())
    async with contextlib.AsyncExitStack() as stack:
        services, clients = [], []
        for name in "ab":
            services.append(await stack.enter_async_context(world.shard(name, **config)))
            door = await stack.enter_async_context(kafka_door(services[-1]))
            clients.append(await door.client())
        yield services, clients


def _with_table(services: list[InProcessService], clients: list[KafkaClient]) -> Iterator[Any]:
    for service, client in zip(services, clients, strict=True):
        if _tables(service):
            yield service, client


async def test_all_shards_agree_which_table_it_is(tmp_path: Path) -> None:
    async with _shards(tmp_path) as (services, clients):
        first = await _asked(clients[0], makes=True)
        assert first.error_code is ErrorCode.none
        service, leader = next(_with_table(services, clients))
        other = services[1 - services.index(service)]
        await _database(other)

        for client in clients:
            found = await _asked(client, makes=True)
            assert (found.error_code, found.topic_id) == (ErrorCode.none, first.topic_id)
            resource = {"resource_type": 2, "resource_name": TOPIC}
            described = await client.call(DESCRIBE, 4, resources=[resource])
            assert described.results[0].error_code is ErrorCode.none
            assert (await _created(client)).error_code is ErrorCode.topic_already_exists
        assert await _produced(leader, b"x") is ErrorCode.none
        for one in services:
            status, answer = await register(one, f"{TOPIC}-value", ORDER)
            assert (status, answer["error_code"]) == (409, 409)
        assert sorted(_tables(services[0]) + _tables(services[1])) == [FLAT]


async def test_a_later_table_of_another_shard_changes_nothing(tmp_path: Path) -> None:
    async with _shards(tmp_path) as (services, clients):
        first = await _asked(clients[0], makes=True)
        await _database(services[0])
        body = table_descriptor(DOTTED, RAW_TOPIC).to_json()
        for service in services:
            answer = await service.call("POST", "/v1/tables", json_body=body)
            if answer.status == 201:
                break
        assert sorted(_tables(services[0]) + _tables(services[1])) == [FLAT, DOTTED]
        assert {len(_tables(service)) for service in services} == {1}

        for client in clients:
            found = await client.call(METADATA, 12, topics=None)
            assert [(t.name, t.topic_id) for t in found.topics] == [(TOPIC, first.topic_id)]
            assert (await _asked(client)).topic_id == first.topic_id


async def test_a_shard_without_the_table_asks_for_no_other_grant(tmp_path: Path) -> None:
    """Clients ask anew where a topic is; who is told of grants gives up."""
    grants = _grants(tmp_path / "grants.toml", me=["admin:orders.*"])
    async with _shards(tmp_path, grants_file=grants) as (services, clients):
        made = await services[0].call(
            "POST",
            "/v1/databases",
            json_body={"name": "orders"},
            headers={"authorization": "Bearer me"},
        )
        assert made.status == 201
        for client in clients:
            await _signed_in(client, "me")
            assert (await _asked(client, makes=True)).error_code is ErrorCode.none

        codes = {await _produced(client, b"x") for client in clients}

        assert codes == {ErrorCode.none, ErrorCode.unknown_topic_or_partition}


@pytest.mark.parametrize("has_database", [False, True])
async def test_a_new_subject_of_any_shard_makes_one_table(
    tmp_path: Path, has_database: bool
) -> None:
    async with _shards(tmp_path) as (services, _):
        if has_database:
            await _database(services[1])
        for one in services:
            assert (await register(one, f"{TOPIC}-value", ORDER))[0] == 200

        assert _tables(services[0]) + _tables(services[1]) == [DOTTED if has_database else FLAT]


@pytest.mark.parametrize(
    ("topic", "paths"),
    [
        ("t", ["default.t"]),
        ("default.t", ["default.t"]),
        ("db.t", ["db.t", "default.db_t"]),
        ("web-clicks", ["default.web_clicks"]),
        ("a.b.c", ["default.a_b_c"]),
        ("1.t", ["default._1_t"]),
        (f"{'d' * 100}.{'t' * 100}", [f"{'d' * 100}.{'t' * 100}"]),
    ],
)
def test_which_tables_a_topic_may_be(topic: str, paths: list[str]) -> None:
    assert [str(path) for path in table_paths_of(topic)] == paths
    for path in table_paths_of(topic):
        properties = {"kafka.topic": topic} if needs_property(topic, path) else {}
        assert is_same_topic(topic, path, properties)
        table = TopicTable(
            path=path, topic=topic_name_of(path, properties), created_at_us=1, table_id=1
        )
        if topic != "default.t":
            assert first_created(topic, [table]) == table


def test_what_can_be_no_topic_is_refused() -> None:
    for topic in ("", "a b", ".", "..", "t" * 129, f"a.{'t' * 129}"):
        with pytest.raises(InvalidNameError):
            table_paths_of(topic)


def test_of_two_tables_the_first_that_was_made_is_the_topic() -> None:
    flat, dotted = TablePath.parse(FLAT), TablePath.parse(DOTTED)
    old = TopicTable(path=flat, topic=TOPIC, created_at_us=1, table_id=2)
    new = TopicTable(path=dotted, topic=TOPIC, created_at_us=2, table_id=1)
    other = TopicTable(path=flat, topic="orders-created", created_at_us=0, table_id=0)

    assert first_created(TOPIC, [new, old]) == old
    assert first_created(TOPIC, [new, other]) == new
    assert first_created(TOPIC, [other]) is None
