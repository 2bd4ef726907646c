"""Several shards in one process: who has a table, who is told so, what all of them show."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from streamhouse.storage_service.ownership.journal.store._file_store import FileObjectStore
from streamhouse.storage_service.ownership.shards.chain import DirectoryObjects
from streamhouse.storage_service.ownership.shards.directory import ShardDirectory, ShardRecord
from streamhouse.storage_service.ownership.shards.owners import Owner
from streamhouse.storage_service.server.shards.other_shards import Shards
from tests.support.in_process_service import (
    InProcessService,
    event_rows,
    in_process_service,
    table_descriptor,
)
from tests.support.shard_world import ShardWorld


@pytest.fixture
def world(tmp_path: Path) -> ShardWorld:
    return ShardWorld(tmp_path, FileObjectStore(tmp_path / "store"))


async def _create(service: InProcessService, path: str) -> Any:
    return await service.call("POST", "/v1/tables", json_body=table_descriptor(path).to_json())


def _owner(answer: Any) -> str | None:
    assert answer.status == 421, answer.body
    owner: str | None = answer.json()["error"]["owner"]
    return owner


async def test_tables_are_spread_and_each_is_created_once(world: ShardWorld) -> None:
    async with world.shard("a") as a, world.shard("b") as b:
        shards = {"http://a:1": a, "http://b:1": b}
        for number in range(4):
            answer = await _create(a, f"t{number}")
            if answer.status == 421:
                # Whoever is named makes it, and sends nobody further.
                answer = await _create(shards[str(_owner(answer))], f"t{number}")
            assert answer.status == 201, answer.body
            again = await _create(b, f"t{number}")
            assert again.status in (409, 421)
            assert again.status == 409 or (await _create(a, f"t{number}")).status == 409
        assert len(list(a.service.manager.open_tables())) == 2
        assert len(list(b.service.manager.open_tables())) == 2
        for service in (a, b):
            tables = (await service.call("GET", "/v1/tables")).json()["tables"]
            assert tables == [f"default.t{number}" for number in range(4)]


async def test_whoever_asks_the_wrong_shard_is_told_the_right_one(world: ShardWorld) -> None:
    async with world.shard("a") as a:
        await _create(a, "events")
        async with world.shard("b") as b:
            for method, path in (
                ("GET", "/v1/tables/events"),
                ("GET", "/v1/tables/events/state"),
                ("GET", "/v1/tables/events/buckets/0/fetch"),
                ("DELETE", "/v1/tables/events"),
            ):
                assert _owner(await b.call(method, path)) == "http://a:1"
            assert _owner(await b.append([(0, 0, event_rows(0, 3))])) == "http://a:1"
            body = {"table": "default.events", "table_id": 1, "epoch": 1}
            answer = await b.call("POST", "/v1/tiering/heartbeat", json_body=body)
            assert _owner(answer) == "http://a:1"
            assert (await b.call("GET", "/v1/tables/nothing")).status == 404
            assert (await a.append([(0, 0, event_rows(0, 3))])).status == 200


async def test_a_table_in_a_database_that_was_made_elsewhere_is_found(world: ShardWorld) -> None:
    async with world.shard("a") as a, world.shard("b") as b:
        assert (await a.call("POST", "/v1/databases", json_body={"name": "sales"})).status == 201
        again = await b.call("POST", "/v1/databases", json_body={"name": "sales"})
        assert again.status == 409
        assert (await b.call("GET", "/v1/databases")).json()["databases"] == ["default", "sales"]
        for service in (a, b):
            answer = await _create(service, "sales.orders")
            if answer.status == 201:
                break
        for service in (a, b):
            tables = await service.call("GET", "/v1/tables", query={"database": "sales"})
            assert tables.json()["tables"] == ["sales.orders"]
            found = await service.call("GET", "/v1/tables/sales.orders")
            assert found.status in (200, 421)
            assert (await service.call("DELETE", "/v1/databases/sales")).status == 409


async def test_no_table_goes_to_a_shard_whose_owner_is_gone(world: ShardWorld) -> None:
    async with world.shard("a") as a:
        async with world.shard("b"):
            pass
        world.away.add("b")
        for number in range(3):
            assert (await _create(a, f"t{number}")).status == 201
        states = (await a.call("GET", "/v1/shards")).json()["shards"]
        assert [(s["shard"], s["is_live"], s["table_count"]) for s in states] == [
            ("a", True, 3),
            ("b", False, 0),
        ]


async def test_prometheus_is_told_the_address_of_every_owner(world: ShardWorld) -> None:
    async with world.shard("a") as a, world.shard("b"):
        world.away.add("b")
        answer = await a.call("GET", "/v1/shards/targets")
        labels = {"shard": "a", "__scheme__": "http"}
        assert answer.json() == [{"targets": ["a:1"], "labels": labels}]


async def test_a_staged_backup_says_of_which_shard_it_is(world: ShardWorld, tmp_path: Path) -> None:
    async with world.shard("a") as a, world.shard("b") as b:
        for name, service in (("a", a), ("b", b)):
            answer = await service.call("POST", "/v1/admin/backup", json_body={})
            assert answer.status == 201, answer.body
            assert answer.json()["shard"] == name
    async with in_process_service(tmp_path / "alone") as alone:
        answer = await alone.call("POST", "/v1/admin/backup", json_body={})
        assert answer.json()["shard"] is None


async def test_shards_show_how_the_journal_of_each_is(world: ShardWorld) -> None:
    async with world.shard("a") as a, world.shard("b") as b:
        for name, service in (("a", a), ("b", b)):
            assert service.service.shards is not None
            service.service.shards.figures = lambda name=name: {"lag_ms": ord(name)}
        for service in (a, b):
            states = (await service.call("GET", "/v1/shards")).json()["shards"]
            assert [(s["shard"], s["journal"]) for s in states] == [
                ("a", {"lag_ms": 97}),
                ("b", {"lag_ms": 98}),
            ]
        del world.services["http://b:1"]
        states = (await a.call("GET", "/v1/shards")).json()["shards"]
        assert [s["journal"] for s in states] == [{"lag_ms": 97}, None]
        world.services["http://b:1"] = b


async def test_leases_are_read_side_by_side(tmp_path: Path) -> None:
    store = DirectoryObjects(FileObjectStore(tmp_path))
    for number in range(8):
        shard = f"s{number}"
        ShardDirectory(store, shard=shard).record(ShardRecord(shard=shard))
    together = threading.Barrier(8)

    class _Waiting:
        def of(self, shard: str) -> Owner | None:
            together.wait(timeout=60)
            return Owner(endpoint=f"http://{shard}:1", epoch=1, is_live=True)

    with ThreadPoolExecutor(8) as reads:
        directory = ShardDirectory(store, shard="s0", each=reads.map)
        # Nothing is asked of its tables, nor of the others.
        nothing: Any = None
        shards = Shards(directory, _Waiting(), nothing, nothing, each=reads.map)
        states = await shards.states()
        shards.close()
    assert [state.shard for state in states] == [f"s{number}" for number in range(8)]


async def test_a_name_given_to_a_shard_that_is_gone_goes_to_another(world: ShardWorld) -> None:
    async with world.shard("a") as a:
        await _create(a, "first")
        async with world.shard("b"):
            assert _owner(await _create(a, "second")) == "http://b:1"
        world.away.add("b")
        assert (await _create(a, "second")).status == 201
        async with world.shard("b") as b:
            assert (await _create(b, "second")).status == 409


async def test_a_service_without_shards_has_none(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        assert (await service.call("GET", "/v1/shards")).json() == {"shards": []}


async def test_one_status_shows_the_tables_of_all_shards(world: ShardWorld) -> None:
    async with world.shard("a") as a:
        await _create(a, "events")
        async with world.shard("b") as b:
            await _create(b, "orders")
            for service in (a, b):
                status = (await service.call("GET", "/v1/status")).json()
                assert [(t["table"], t["shard"]) for t in status["tables"]] == [
                    ("default.events", "a"),
                    ("default.orders", "b"),
                ]
                assert status["table_count"] == 2
                assert [s["answers"] for s in status["shards"]] == [True, True]
        status = (await a.call("GET", "/v1/status")).json()
        assert [s["answers"] for s in status["shards"]] == [True, False]
        assert [t["table"] for t in status["tables"]] == ["default.events"]


async def test_a_brief_status_has_the_readers_and_figures_of_all_shards(world: ShardWorld) -> None:
    async with world.shard("a") as a:
        ids = [(await _create(a, "events")).json()["table_id"]]
        async with world.shard("b") as b:
            ids.append((await _create(b, "orders")).json()["table_id"])
            for service, table, table_id in zip((a, b), ("events", "orders"), ids, strict=True):
                await service.append([(0, 0, event_rows(0, 3))], path=table)
                body = {"table_id": table_id, "offsets": {"0": 1}}
                await service.call("PUT", f"/v1/tables/{table}/consumers/r", json_body=body)

            status = (await a.call("GET", "/v1/status", query={"detail": "brief"})).json()
            alone = (await a.call("GET", "/v1/status", query={"table": "orders"})).json()

            assert status["consumers"]["count"] == 2
            told = {(c["table"], c["shard"]) for c in status["consumers"]["worst"]}
            assert told == {("default.events", "a"), ("default.orders", "b")}
            assert [s["service"]["role"] for s in status["shards"]] == ["owner", "owner"]
            assert [s["service"]["shard"] for s in status["shards"]] == ["a", "b"]
            assert "buckets" not in status["tables"][1]
            (table,) = alone["tables"]
            assert (table["table"], table["shard"]) == ("default.orders", "b")
            assert len(table["buckets"]) == 1


async def test_the_catalog_of_any_shard_has_the_lake_tables_of_all(world: ShardWorld) -> None:
    async with world.shard("a") as a:
        await _create(a, "events")
        async with world.shard("b") as b:
            body = {
                "name": "events",
                "schema": {"type": "struct", "schema-id": 0, "fields": []},
            }
            tables = "/iceberg/v1/namespaces/default/tables"
            await b.call("POST", "/iceberg/v1/namespaces", json_body={"namespace": ["default"]})
            # Shard a has the table of this name, and says so.
            answer = await b.call("POST", tables, json_body=body)
            assert answer.status == 409, answer.body
            assert "belongs to the streamhouse table" in str(answer.body)
            assert (await b.call("POST", tables, json_body=body | {"name": "own"})).status == 200
            for service in (a, b):
                listed = (await service.call("GET", tables)).json()["identifiers"]
                assert [found["name"] for found in listed] == ["own"]
                loaded = await service.call("GET", f"{tables}/own")
                assert loaded.status == 200
                assert (await service.call("GET", f"{tables}/events")).status == 404
        # Whose process is gone cannot be asked, and nobody else may answer for it.
        async with world.shard("c") as c:
            del world.services["http://a:1"]
            assert (await c.call("POST", tables, json_body=body)).status == 503
            world.services["http://a:1"] = a


async def test_who_says_handed_on_is_judged_by_the_tables_shard_all_the_same(
    world: ShardWorld,
) -> None:
    async with world.shard("a") as a:
        await _create(a, "events")
        async with world.shard("b") as b:
            body = {
                "name": "events",
                "schema": {"type": "struct", "schema-id": 0, "fields": []},
            }
            tables = "/iceberg/v1/namespaces/default/tables"
            await b.call("POST", "/iceberg/v1/namespaces", json_body={"namespace": ["default"]})
            said = {"x-streamhouse-handed-on": "1"}
            answer = await b.call("POST", tables, json_body=body, headers=said)
            assert answer.status == 503, answer.body
            assert (await b.call("GET", tables)).json()["identifiers"] == []


async def test_one_damaged_name_keeps_no_others_from_being_made(
    world: ShardWorld, tmp_path: Path
) -> None:
    async with world.shard("a") as a:
        await _create(a, "events")
        name = next((tmp_path / "store" / "directory/tables/default/events").glob("*2"))
        name.write_bytes(name.read_bytes()[:-9])
        async with world.shard("b") as b:
            assert (await _create(b, "orders")).status == 201
            for path in ("/v1/shards", "/v1/status", "/v1/databases", "/v1/tables"):
                assert (await b.call("GET", path)).status == 200
            # It is not taken for a free one, and nobody guesses whose lake tables are its own.
            for answer in (
                await _create(b, "events"),
                await b.call("GET", "/v1/tables/events"),
                await b.call("DELETE", "/iceberg/v1/namespaces/default/tables/any"),
            ):
                assert answer.status == 500
                assert "default/events/00000002" in str(answer.body)
            assert (await a.call("GET", "/v1/tables/events")).status == 200


async def test_no_token_is_sent_to_the_address_of_an_owner_that_is_gone(world: ShardWorld) -> None:
    async with world.shard("a") as a:
        await _create(a, "events")
        async with world.shard("b") as b:
            world.away.add("a")
            # Whoever has the address now would answer, and have the caller's token.
            status = (await b.call("GET", "/v1/status")).json()
            assert [s["answers"] for s in status["shards"]] == [False, True]
            assert _owner(await b.call("GET", "/v1/tables/events")) is None
            world.away.clear()
            assert _owner(await b.call("GET", "/v1/tables/events")) == "http://a:1"


async def test_a_claim_says_which_other_shards_there_are(world: ShardWorld) -> None:
    async with world.shard("a") as a, world.shard("b"):
        answer = await a.call("POST", "/v1/tiering/claim", json_body={"worker_id": "w"})
        assert answer.json()["shards"] == ["http://a:1", "http://b:1"]
