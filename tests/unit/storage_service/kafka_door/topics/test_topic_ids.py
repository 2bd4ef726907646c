"""Topics by the ids that Metadata tells: asked for, and dropped."""

from __future__ import annotations

import contextlib
import uuid
from pathlib import Path
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from streamhouse.storage_service.server.access._grants import token_hash
from tests.support.kafka_world import KafkaClient, kafka_door, kafka_world
from tests.support.memory_store import MemoryStore
from tests.support.shard_world import ShardWorld

METADATA, HANDSHAKE, CREATE, DELETE, AUTHENTICATE = 3, 17, 19, 20, 36
UNKNOWN = uuid.UUID(int=7)


async def _made(client: KafkaClient, *names: str) -> dict[str, uuid.UUID]:
    new: Any = [{"name": name, "num_partitions": 1, "replication_factor": 1} for name in names]
    answer = await client.call(CREATE, 7, topics=new)
    assert {topic.error_code for topic in answer.topics} == {ErrorCode.none}
    return {topic.name: topic.topic_id for topic in answer.topics}


async def _asked(client: KafkaClient, *ids: uuid.UUID, version: int = 12) -> list[Any]:
    asked = [{"name": None, "topic_id": number} for number in ids]
    return list((await client.call(METADATA, version, topics=asked)).topics)


async def _dropped(client: KafkaClient, *ids: uuid.UUID) -> list[Any]:
    asked = [{"name": None, "topic_id": number} for number in ids]
    answer = await client.call(DELETE, 6, topics=asked)
    return [(t.name, t.topic_id, t.error_code.name) for t in answer.responses]


@pytest.mark.parametrize("version", range(10, 13))
async def test_a_topic_is_asked_for_by_its_id(tmp_path: Path, version: int) -> None:
    async with kafka_world(tmp_path) as world:
        client = await world.client()
        ids = await _made(client, "web-clicks")

        found, unknown = await _asked(client, ids["web-clicks"], UNKNOWN, version=version)

        assert (found.name, found.topic_id) == ("web-clicks", ids["web-clicks"])
        assert (found.error_code, len(found.partitions)) == (ErrorCode.none, 1)
        assert unknown.error_code is ErrorCode.unknown_topic_id
        assert unknown.topic_id == UNKNOWN


async def test_a_topic_is_dropped_by_its_id(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        client = await world.client()
        ids = await _made(client, "x", "y")

        assert await _dropped(client, ids["x"], UNKNOWN) == [
            ("x", ids["x"], "none"),
            (None, UNKNOWN, "unknown_topic_id"),
        ]
        assert await _dropped(client, ids["x"]) == [(None, ids["x"], "unknown_topic_id")]
        assert [str(path) for path in world.service.manager.list_tables(None)] == ["default.y"]


async def test_who_may_not_see_a_topic_does_not_find_it_by_its_id(tmp_path: Path) -> None:
    grants = tmp_path / "grants.toml"
    wanted = {"keeper": ["admin:*"], "reader": ["read:default.seen"]}
    grants.write_text(
        "\n".join(
            f'[[token]]\nname = "{name}"\nsha256 = "{token_hash(name.encode())}"\ngrants = {of}\n'
            for name, of in wanted.items()
        )
    )
    grants.chmod(0o600)
    async with kafka_world(tmp_path / "data", grants_file=grants) as world:
        clients = {}
        for name in wanted:
            clients[name] = client = await world.client()
            await client.call(HANDSHAKE, 1, mechanism="PLAIN")
            await client.call(AUTHENTICATE, 2, auth_bytes=f"\0me\0{name}".encode())
        ids = await _made(clients["keeper"], "seen", "hidden")

        found = await _asked(clients["reader"], ids["seen"], ids["hidden"])
        dropped = await _dropped(clients["reader"], ids["seen"], ids["hidden"])

        assert [t.error_code.name for t in found] == ["none", "unknown_topic_id"]
        assert dropped == [
            ("seen", ids["seen"], "topic_authorization_failed"),
            (None, ids["hidden"], "unknown_topic_id"),
        ]


async def test_a_topic_of_another_shard_is_found_by_its_id(tmp_path: Path) -> None:
    world = ShardWorld(tmp_path, MemoryStore())
    async with contextlib.AsyncExitStack() as stack:
        clients = []
        for shard in "ab":
            service = await stack.enter_async_context(world.shard(shard))
            clients.append(await (await stack.enter_async_context(kafka_door(service))).client())
        ids = await _made(clients[0], "t0", "t1")

        for client in clients:
            found = await _asked(client, *ids.values())
            assert {topic.name: topic.topic_id for topic in found} == ids
        assert {code for *_, code in await _dropped(clients[1], *ids.values())} == {"none"}
