"""Schemas of several shards: any of them answers, and they move with their table."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.memory_store import MemoryStore
from tests.support.registry_world import ORDER, ask, register, with_field
from tests.support.shard_world import ShardWorld


async def test_every_shard_answers_for_all(tmp_path: Path) -> None:
    world = ShardWorld(tmp_path, MemoryStore())
    async with world.shard("a") as a, world.shard("b") as b:
        ids = set()
        for number in range(4):
            status, made = await register(a, f"t{number}-value", ORDER)
            assert status == 200, made
            ids.add(made["id"])
        assert len(ids) == 4
        tables = [len(list(s.service.manager.open_tables())) for s in (a, b)]
        assert tables == [2, 2]

        for service in (a, b):
            wanted = [f"t{number}-value" for number in range(4)]
            assert await ask(service, "GET", "/subjects") == (200, wanted)
            for number in ids:
                status, found = await ask(service, "GET", f"/schemas/ids/{number}")
                assert (status, json.loads(found["schema"])) == (200, ORDER)
            for number in range(4):
                assert (await register(service, f"t{number}-value", ORDER))[0] == 200
                path = f"/subjects/t{number}-value/versions/2"
                status, found = await ask(service, "GET", path)
                assert (status, found["error_code"]) == (404, 40402)


async def test_schemas_move_with_their_table(tmp_path: Path) -> None:
    world = ShardWorld(tmp_path, MemoryStore())
    async with world.shard("a") as a, world.shard("b") as b:
        assert (await register(a, "first-value", ORDER))[0] == 200
        path, made = "first", (await register(a, "first-value", ORDER))[1]
        tables = [str(t.path) for t in a.service.manager.open_tables()]
        source, target, name = (a, b, "b") if tables else (b, a, "a")
        moved = await source.call("POST", f"/v1/tables/{path}/move", json_body={"to": name})
        assert moved.json() == {"is_done": True}

        assert [t.info.table_id for t in target.service.manager.open_tables()] == [
            made["id"] // 1000
        ]
        for service in (a, b):
            assert (await ask(service, "GET", f"/schemas/ids/{made['id']}"))[0] == 200
        _, second = await register(source, "first-value", with_field("at", ["null", "double"]))
        assert second["id"] == made["id"] + 1
