"""Schemas of several shards: any of them answers, and they move with their table."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from streamhouse.storage_service.ownership.journal.store.object_store import (
    LIST_COUNT_MAX,
    ObjectEntry,
)
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


class _ListedStore(MemoryStore):
    """A store that counts how often the names of all tables were listed."""

    count = 0

    def list_objects(
        self, folder: str, *, start_after: str = "", count_max: int = LIST_COUNT_MAX
    ) -> list[ObjectEntry]:
        self.count += folder.endswith("/tables/")
        return super().list_objects(folder, start_after=start_after, count_max=count_max)


async def test_ids_of_no_table_here_are_looked_for_together(tmp_path: Path) -> None:
    store = _ListedStore()
    world = ShardWorld(tmp_path, store)
    async with world.shard("a") as a, world.shard("b") as b:
        _, made = await register(a, "t-value", ORDER)
        has = {str(t.path) for t in a.service.manager.open_tables()}
        other = b if has else a
        assert other.service.shards is not None
        assert (await ask(other, "GET", f"/schemas/ids/{made['id']}"))[0] == 200

        before = store.count
        for _ in range(3):
            assert (await ask(other, "GET", f"/schemas/ids/{made['id']}"))[0] == 200
        assert store.count == before

        # The second reads for all behind it: the first one began before they asked.
        wanted = [other.service.shards.path_elsewhere(900 + number) for number in range(10)]
        assert await asyncio.gather(*wanted) == [None] * 10
        assert store.count == before + 2

        # A table that is new is found at once.
        _, newer = await register(a, "u-value", ORDER)
        _, newest = await register(a, "v-value", ORDER)
        for one in (newer, newest):
            for service in (a, b):
                assert (await ask(service, "GET", f"/schemas/ids/{one['id']}"))[0] == 200
