"""Tables that move between two shards of one process: who serves them, and what moves with them."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from streamhouse.core.errors import StorageFailedError, UnavailableError
from streamhouse.core.model.table import TablePath
from streamhouse.storage_service.kv.plan.write_plan import KeyWrite
from tests.support.held_step import around
from tests.support.in_process_service import (
    EVENTS,
    InProcessService,
    event_rows,
    ids_of,
    table_descriptor,
)
from tests.support.memory_store import MemoryStore
from tests.support.shard_world import ShardWorld, frozen_move

_EVENTS = TablePath("default", "events")
_REJECTED = TablePath("default", "events__rejected")


@pytest.fixture
def world(tmp_path: Path) -> ShardWorld:
    return ShardWorld(tmp_path, MemoryStore())


def _left_of_moves(world: ShardWorld) -> list[str]:
    return [entry.key for entry in world.store.list_objects("moves/")]


async def _move(service: InProcessService, to: str, path: str = "events") -> Any:
    return await service.call("POST", f"/v1/tables/{path}/move", json_body={"to": to})


async def _positions(service: InProcessService, path: str = "events") -> Any:
    answer = await service.call("GET", f"/v1/tables/{path}/state")
    assert answer.status == 200, answer.body
    return answer.json()


async def test_a_log_table_moves_there_and_back_with_its_writers(world: ShardWorld) -> None:
    async with world.shard("a") as a, world.shard("b") as b:
        await a.create_table(bucket_count=2)
        written = await a.append([(0, 1, event_rows(0, 5))], writer_id="7")
        assert written.status == 200, written.body
        before = await _positions(a)
        for source, target, name, sequence in ((a, b, "b", 2), (b, a, "a", 3)):
            moved = await _move(source, name)
            assert (moved.status, moved.json()) == (200, {"is_done": True}), moved.body
            # Asked again of whoever: it is there.
            assert (await _move(target, name)).json() == {"is_done": True}
            refused = await source.append([(0, sequence, event_rows(0, 1))], writer_id="7")
            assert refused.status == 421, refused.body
            assert refused.json()["error"]["owner"] == f"http://{name}:1"
            if sequence == 2:
                assert await _positions(target) == before
            # What was written before the move is not written again, what follows is.
            again = await target.append([(0, 1, event_rows(0, 5))], writer_id="7")
            assert again.status == 200, again.body
            end = (await _positions(target))["positions"]["0"]["high_watermark"]
            went_on = await target.append([(0, sequence, event_rows(9, 10))], writer_id="7")
            assert went_on.status == 200, went_on.body
            assert (await _positions(target))["positions"]["0"]["high_watermark"] == end + 1
        assert (await _positions(a))["positions"]["0"]["high_watermark"] == 7
        assert _left_of_moves(world) == []
    async with world.shard("b") as b:
        assert list(b.service.manager.open_tables()) == []
        async with world.shard("a") as a:
            assert (await _positions(a))["positions"]["0"]["high_watermark"] == 7


async def _reject(service: InProcessService, first: int) -> Any:
    rows = [{"id": first, "name": "n"}, {"name": "no id"}]
    query = {"on_error": "reject"}
    return await service.call("POST", "/v1/tables/events/append", query=query, json_body=rows)


async def test_rejected_rows_move_with_their_table(world: ShardWorld) -> None:
    async with world.shard("a") as a, world.shard("b") as b:
        await a.create_table()
        assert (await _reject(a, 0)).status == 200
        alone = await _move(a, "b", "events__rejected")
        assert "moves with it" in alone.json()["error"]["message"]
        for source, target, name in ((a, b, "b"), (b, a, "a")):
            moved = await _move(source, name)
            assert (moved.status, moved.json()) == (200, {"is_done": True}), moved.body
            assert list(source.service.manager.open_tables()) == []
            written = await _reject(target, 1)
            assert written.json()["rejected_count"] == 1, written.body
        for path in ("events", "events__rejected"):
            state = await _positions(a, path)
            assert state["positions"]["0"]["high_watermark"] == 3
        assert _left_of_moves(world) == []


async def test_rejected_rows_that_are_elsewhere_are_asked_for_again(world: ShardWorld) -> None:
    """As when a process ends between the two moves, and the table is not free then."""
    async with world.shard("a") as a, world.shard("b") as b:
        await a.create_table()
        assert (await _reject(a, 0)).status == 200
        desk, ticket = await frozen_move(a, _REJECTED, "b")
        await desk._finish_step(ticket, [], is_whole=True)
        await desk.moves.settle(ticket, is_moved=await desk.moves.decide(ticket))
        await desk._tell(ticket, [])

        refused = await _reject(a, 1)
        assert refused.status == 503, refused.body
        assert "try again, or bring them" in refused.json()["error"]["message"]
        assert (await _positions(a))["positions"]["0"]["high_watermark"] == 1

        assert (await _move(a, "b")).json() == {"is_done": True}
        assert (await _reject(b, 1)).json()["rejected_count"] == 1


async def test_rows_are_rejected_later_while_those_of_before_leave(world: ShardWorld) -> None:
    async with world.shard("a") as a, world.shard("b"):
        await a.create_table()
        assert (await _reject(a, 0)).status == 200
        desk, ticket = await frozen_move(a, _REJECTED, "b")

        refused = await _reject(a, 1)

        assert refused.status == 503, refused.body
        assert "is being moved" in refused.json()["error"]["message"]
        assert not await desk.moves.end(ticket)
        assert (await _reject(a, 1)).json()["rejected_count"] == 1


async def test_who_found_a_table_before_its_move_was_given_up_is_to_try_again(
    world: ShardWorld,
) -> None:
    async with world.shard("a") as a, world.shard("b"):
        await a.create_table()
        manager = a.service.manager
        found = manager.table(_EVENTS)
        desk, ticket = await frozen_move(a, _EVENTS, "b")

        with pytest.raises(UnavailableError, match="is being moved"):
            a.service.transactions_of(found)
        assert not await desk.moves.end(ticket)

        with pytest.raises(UnavailableError, match="try again"):
            a.service.transactions_of(found)
        with pytest.raises(UnavailableError, match="try again"):
            manager.check_open(found)
        a.service.transactions_of(manager.table(_EVENTS))


async def test_where_readers_stand_moves_with_their_table(world: ShardWorld) -> None:
    consumers = "/v1/tables/events/consumers"
    async with world.shard("a") as a, world.shard("b") as b:
        table_id = (await a.create_table())["table_id"]
        await a.append([(0, 0, event_rows(0, 10))])
        for offset in (4, 7):
            body = {"table_id": table_id, "offsets": {"0": offset}}
            assert (await a.call("PUT", f"{consumers}/billing", json_body=body)).status == 200
        assert (await _move(a, "b")).json() == {"is_done": True}

        [found] = (await b.call("GET", consumers)).json()["consumers"]
        assert (found["name"], found["offsets"], found["lag_rows"]) == ("billing", {"0": 7}, 3)
        body = {"table_id": table_id, "offsets": {"0": 8}}
        assert (await a.call("PUT", f"{consumers}/billing", json_body=body)).status == 421
        # Its offsets are those they were.
        assert (await b.call("PUT", f"{consumers}/billing", json_body=body)).status == 200


async def test_rows_by_key_move_with_their_table(
    world: ShardWorld, caplog: pytest.LogCaptureFixture
) -> None:
    async with world.shard("a") as a, world.shard("b") as b:
        await a.create_table(primary_key=("id",))
        for row in ({"id": 1, "name": "x"}, {"id": 2, "name": "y"}, {"id": 1, "name": "z"}):
            manager = a.service.manager
            table = manager.table(_EVENTS)
            await _upsert(manager, table, row)
        assert (await _move(a, "b")).json() == {"is_done": True}
        table = b.service.manager.table(_EVENTS)
        assert ids_of(table) == [1, 2]
        assert "event=restored" not in caplog.text, "rows that have come are made again"
        await _upsert(b.service.manager, table, {"id": 3, "name": "n"})
        assert ids_of(table) == [1, 2, 3]


async def _upsert(manager: Any, table: Any, row: dict[str, Any]) -> None:
    rows = pa.RecordBatch.from_pylist([row], schema=EVENTS)
    await manager.write_keys(table, [KeyWrite(0, rows)], columns=None, writer_id=0)


async def test_a_table_in_use_stays(world: ShardWorld) -> None:
    async with world.shard("a") as a, world.shard("b"):
        await a.create_table()
        begun = await a.call(
            "POST", "/v1/tables/events/transactions", json_body={"operation": "append"}
        )
        assert begun.status in (200, 201), begun.body
        moved = await _move(a, "b")
        assert moved.status == 503, moved.body
        assert "transactions are open" in moved.json()["error"]["message"]
        assert (await a.append([(0, 0, event_rows(0, 5))])).status == 200


async def test_a_table_that_is_being_tiered_stays(world: ShardWorld) -> None:
    async with world.shard("a") as a, world.shard("b"):
        await a.create_table(properties={"table.datalake.enabled": "true"})
        await a.append([(0, 0, event_rows(0, 5))])
        claim = await a.call(
            "POST", "/v1/tiering/claim", json_body={"worker_id": "w", "force": True}
        )
        assert claim.json()["assignment"] is not None, claim.body
        moved = await _move(a, "b")
        assert moved.status == 503, moved.body
        assert "being tiered" in moved.json()["error"]["message"]


async def test_what_cannot_be_is_said_and_the_table_stays(world: ShardWorld) -> None:
    world.away.add("gone")
    async with world.shard("a") as a, world.shard("c", lake="other"):
        await a.create_table()
        for to, status, why in (
            ("gone", 503, "no owner that is alive"),
            ("c", 400, "different lake catalogs"),
        ):
            moved = await _move(a, to)
            assert (moved.status, why in moved.json()["error"]["message"]) == (status, True)
        assert (await a.append([(0, 0, event_rows(0, 5))])).status == 200
        assert _left_of_moves(world) == []


async def test_a_table_is_open_while_it_is_copied_and_read_until_it_is_decided(
    world: ShardWorld,
) -> None:
    async with world.shard("a") as a, world.shard("b") as b:
        await a.create_table()
        await a.append([(0, 1, event_rows(0, 5))], writer_id="7")
        world.go_on.clear()
        moving = asyncio.ensure_future(_move(a, "b"))
        await world.is_asked.wait()
        # It is written and read as ever.
        written = await a.append([(0, 2, event_rows(5, 10))], writer_id="7")
        assert written.status == 200, written.body
        assert (await b.append([(0, 0, event_rows(0, 5))])).status == 421
        world.go_on_whole.clear()
        world.go_on.set()
        while _EVENTS not in a.service.manager.away:
            await asyncio.sleep(0)
        assert (await _positions(a))["positions"]["0"]["high_watermark"] == 10
        read = await a.call("GET", "/v1/tables/events/buckets/0/fetch", query={"offset": "0"})
        assert read.status == 200, read.body
        pin = {"snapshot_id": "1", "ttl_ms": 1000}
        for answer in (
            await a.append([(0, 0, event_rows(0, 5))]),
            await a.call("DELETE", "/v1/tables/events"),
            await a.call("PATCH", "/v1/tables/events/properties", json_body={"set": {"x": "1"}}),
            await a.call("PUT", "/v1/tables/events/lake/pins/me", json_body=pin),
            await a.call(
                "POST", "/v1/tables/events/transactions", json_body={"operation": "append"}
            ),
            await b.append([(0, 0, event_rows(0, 5))]),
            await b.call("GET", "/v1/tables/events/state"),
        ):
            assert answer.status in (503, 421), answer.body
            assert answer.json()["error"]["retriable"] is True
        while not a.service.manager.registry.moves.leaving:
            await asyncio.sleep(0)
        backup = await a.call("POST", "/v1/admin/backup", json_body={"with_lake": False})
        assert backup.status == 503, backup.body
        world.go_on_whole.set()
        assert (await moving).json() == {"is_done": True}
        # Repeated, what was written before is not written again.
        again = await b.append([(0, 2, event_rows(5, 10))], writer_id="7")
        assert again.status == 200, again.body
        assert (await _positions(b))["positions"]["0"]["high_watermark"] == 10
        assert (await a.call("GET", "/v1/tables/events/state")).status == 421


async def test_a_table_may_be_dropped_and_made_again_while_it_is_copied(world: ShardWorld) -> None:
    async with world.shard("a") as a, world.shard("b") as b:
        await a.create_table()
        await a.append([(0, 0, event_rows(0, 5))])
        world.go_on.clear()
        moving = asyncio.ensure_future(_move(a, "b"))
        await world.is_asked.wait()
        assert (await a.call("DELETE", "/v1/tables/events")).status == 204
        await a.create_table()
        world.go_on.set()
        assert (await moving).status in (400, 404)
        assert (await _positions(a))["positions"]["0"]["high_watermark"] == 0
        assert (await _move(a, "b")).json() == {"is_done": True}
        assert (await _positions(b))["positions"]["0"]["high_watermark"] == 0
        await b.service.manager.upkeep.stop()
        assert not b.service.manager.registry.moves.arriving
        assert _left_of_moves(world) == []


async def test_a_table_of_which_only_a_part_has_come_is_asked_for_at_its_source(
    world: ShardWorld,
) -> None:
    """Its source may die then, and forget the move: nothing of it was decided."""
    async with world.shard("b") as b:
        async with world.shard("a") as a:
            await a.create_table()
            await a.append([(0, 0, event_rows(0, 5))])
            world.go_on_whole.clear()
            moving = asyncio.ensure_future(_move(a, "b"))
            while not b.service.manager.registry.moves.arriving:
                await asyncio.sleep(0)
            assert (await b.call("GET", "/v1/tables/events/state")).status == 421
            moving.cancel()
        assert (await b.call("GET", "/v1/tables/events/state")).status == 421


async def test_a_table_that_has_come_is_away_until_it_is_open(
    world: ShardWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its shard was restarted between being ready and the decision: it opens the table then."""
    async with world.shard("a") as a:
        manager = a.service.manager
        table = await manager.create_table(table_descriptor())
        manager.hide(table, UnavailableError("on its way"))
        manager.end_reads(table)
        await manager.give_up(table)

        async def ask(real: Any, *arguments: Any) -> Any:
            with pytest.raises(UnavailableError, match="on its way"):
                manager.table(table.path)
            return await real(*arguments)

        around(monkeypatch, "table-opening", ask)
        await manager.show(None, table.info)

        assert manager.table(table.path).info == table.info


async def test_a_table_that_cannot_be_opened_again_now_is_not_one_that_is_not_there(
    world: ShardWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world.shard("a") as a:
        manager = a.service.manager
        table = await manager.create_table(table_descriptor())
        manager.hide(table, UnavailableError("on its way"))
        manager.end_reads(table)
        await manager.give_up(table)

        async def refuse(*_: Any) -> Any:
            raise StorageFailedError(f"no table: {os.strerror(errno.ENOSPC)}")

        around(monkeypatch, "table-opening", refuse)
        with pytest.raises(StorageFailedError):
            await manager.put_back(table.info)

        with pytest.raises(UnavailableError, match="is not open now"):
            manager.table(table.path)
