"""The async client against a real service, and the web application that is its example."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
import threading
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pytest

from streamhouse.api.async_client import CALLS_MAX, AsyncStreamhouseClient
from streamhouse.core.errors import (
    InvalidRequestError,
    SchemaMismatchError,
    TableNotFoundError,
)
from tests.support.asgi_call import AsgiAnswer, AsgiCall
from tests.support.moved_service import MovedService
from tests.support.service_process import ServiceProcess

pytestmark = pytest.mark.slow

EXAMPLE: Final = Path(__file__).parents[2] / "examples" / "web_app.py"
SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string())])


def _rows(start: int, end: int) -> pa.Table:
    ids = range(start, end)
    return pa.table({"id": ids, "name": [f"n{i}" for i in ids]}, schema=SCHEMA)


async def test_a_thousand_lookups_at_once_are_answered_by_a_bounded_number_of_threads(
    tmp_path: Path,
) -> None:
    with ServiceProcess(tmp_path) as service:
        async with AsyncStreamhouseClient(service.endpoint) as client:
            await client.create_table("t", SCHEMA, primary_key=["id"])
            await client.upsert("t", _rows(0, 1_000))

            found = await asyncio.gather(*(client.lookup_one("t", id=i) for i in range(1_000)))

            assert [row["name"] for row in found if row] == [f"n{i}" for i in range(1_000)]
            threads = [t for t in threading.enumerate() if "streamhouse-async" in t.name]
            assert 0 < len(threads) <= CALLS_MAX
            await client.delete("t", pa.table({"id": pa.array([5], pa.int64())}))
            assert await client.lookup_one("t", id=5) is None
            assert await client.count("t") == 999
            with pytest.raises(TableNotFoundError, match=r"'default\.u'"):
                await client.append("u", _rows(0, 1))
            with pytest.raises(SchemaMismatchError):
                await client.lookup_one("t", name="x")
        with pytest.raises(InvalidRequestError, match="is closed; make another"):
            await client.count("t")


async def test_rows_are_scanned_and_transactions_commit_or_abort(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path) as service:
        async with AsyncStreamhouseClient(service.endpoint) as client:
            await client.create_table("t", SCHEMA)
            async with await client.begin_transaction("t") as transaction:
                parts = [await transaction.stage(_rows(0, 10)) for _ in range(2)]
                result = await transaction.commit(parts)
            assert result.row_count == 20
            async with await client.begin_transaction("t") as transaction:
                await transaction.stage(_rows(10, 20))

            async with await client.scan("t", columns=["id"], where="id < 5") as scan:
                ids = [i async for batch in scan for i in batch.column("id").to_pylist()]
            assert sorted(ids) == sorted([0, 1, 2, 3, 4] * 2)


async def test_a_subscription_goes_on_over_a_kill_and_ends_with_its_client(tmp_path: Path) -> None:
    with MovedService(tmp_path) as service:
        client = AsyncStreamhouseClient(service.endpoint)
        for table in ("default.a", "default.b"):
            await client.create_table(table, SCHEMA)
        batches = await client.subscribe(
            ["default.a", "default.b"], start="committed", consumer="copy"
        )
        ids: dict[str, list[int]] = {"default.a": [], "default.b": []}
        all_there = asyncio.Event()

        async def follow() -> None:
            async for batch in batches:
                ids[batch.table] += batch.data.column("id").to_pylist()
                if sum(map(len, ids.values())) == 40:
                    await batches.commit()
                    all_there.set()

        follower = asyncio.create_task(follow())
        for start in (0, 10):
            for table in ids:
                await client.append(table, _rows(start, start + 10))
            if not start:
                await asyncio.to_thread(service.move)
        await asyncio.wait_for(all_there.wait(), 60)
        assert all(found == list(range(20)) for found in ids.values())
        assert await client.committed("default.a", "copy") == {0: 20}

        await client.aclose()
        await asyncio.wait_for(follower, 60)


async def test_the_example_of_a_web_application_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ServiceProcess(tmp_path) as service:
        monkeypatch.setenv("STREAMHOUSE_ENDPOINT", service.endpoint)
        spec = importlib.util.spec_from_file_location("web_app", EXAMPLE)
        assert spec is not None
        assert spec.loader is not None
        example = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "web_app", example)
        spec.loader.exec_module(example)
        app = example.app
        orders = [{"id": i, "city": f"c{i}", "price": i / 2} for i in range(3)]

        async def get(path: str) -> AsgiAnswer:
            return await AsgiCall(app, "GET", path).run()

        async with app.router.lifespan_context(app):
            put: Any = AsgiCall(app, "PUT", "/orders", chunks=[json.dumps(orders).encode()])
            assert (await put.run()).json() == {"stored": 3}
            assert (await get("/orders/1")).json() == orders[1]
            missing = await get("/orders/7")
            assert (missing.status, missing.json()) == (404, {"detail": "there is no order 7"})
            lines = (await get("/orders")).body.decode().splitlines()
            assert sorted(map(json.loads, lines), key=lambda row: row["id"]) == orders

            changes = AsgiCall(app, "GET", "/changes")
            following = asyncio.create_task(changes.run())
            while changes.answer.body.count(b"\n\n") < 3:
                await asyncio.wait_for(changes.sent(len(changes.answer.body)), 60)
            events = changes.answer.body.decode().split("\n\n")[:3]
            found = [json.loads(event.removeprefix("data: ")) for event in events]
            assert [row["city"] for row in found] == ["c0", "c1", "c2"]
            changes.disconnect()
            await asyncio.wait_for(following, 60)
