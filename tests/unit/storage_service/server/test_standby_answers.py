"""What a standby answers to lookups that name the least, and to fetches that take its rows."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pyarrow as pa
import pytest

from streamhouse.core.threads import Pool
from streamhouse.storage_service.config import ServiceConfig
from streamhouse.storage_service.ownership.roles.role import Role, Standing
from streamhouse.storage_service.server._front_app import FrontApp
from streamhouse.storage_service.server.doors import Doors
from streamhouse.storage_service.server.status.metrics import ServiceMetrics
from tests.support.asgi_call import AsgiAnswer, AsgiCall
from tests.support.followed_directory import TABLE, FollowedWorld
from tests.support.in_process_service import append_body, open_manager

ROW = "/v1/tables/keyed/rows/1"
PREFIX = "/v1/tables/keyed/prefix_lookup"
FETCH = "/v1/tables/keyed/buckets/0/fetch"


class _Standby(FollowedWorld):
    """A followed directory, and the application that answers from the followed rows."""

    def serve(self, pool: Pool, **config: str) -> None:
        self.standing = Standing("0")
        self.standing.role, self.standing.owner = Role.STANDBY, "http://other:8765"
        self.standing.tables, self.standing.logs = self.tables, self.logs
        self.app = FrontApp(
            ServiceConfig(data_dir=self.standby, **config),  # type: ignore[arg-type]
            standing=self.standing,
            metrics=ServiceMetrics(),
            executor=pool,
            doors=Doors(),
        )

    async def get(self, path: str = ROW, *, least: str | None = "{}", **query: str) -> AsgiAnswer:
        if least is not None:
            query["at_least"] = least
        return await AsgiCall(self.app, "GET", path, query={"table_id": "1", **query}).run()

    async def under(self, key: int, **query: str) -> AsgiAnswer:
        """Look up by prefix, with any least unless it is named or empty."""
        query = {"at_least": "{}", "table_id": "1", **query}
        query = {name: text for name, text in query.items() if text}
        keys = pa.record_batch([pa.array([key], pa.int64())], names=["id"])
        body = append_body(keys.schema, [(None, 0, keys)])
        headers = {"accept": "application/json"}
        return await AsgiCall(
            self.app, "POST", PREFIX, query=query, headers=headers, chunks=[body]
        ).run()

    async def fetch(self, path: str = FETCH, **query: str) -> AsgiAnswer:
        """Fetch as a client that takes the rows of any process; empty parameters are left out."""
        query = {"offset": "0", "table_id": "1", "read_from": "any", **query}
        query = {name: text for name, text in query.items() if text}
        headers = {"accept": "application/json"}
        return await AsgiCall(self.app, "GET", path, query=query, headers=headers).run()


@contextlib.asynccontextmanager
async def _standby(folder: Path, **config: str) -> AsyncIterator[_Standby]:
    with Pool("rows", 1) as pool:
        async with open_manager(folder / "owner") as manager:
            world = _Standby(folder, manager)
            await world.create()
            await world.write([1], "a")
            world.follow()
            world.serve(pool, **config)
            yield world
            world.close()


async def test_a_lookup_with_at_least_is_answered_and_says_what_it_includes(
    tmp_path: Path,
) -> None:
    async with _standby(tmp_path) as world:
        answer = await world.get(least='{"0": 1}')
        missing = await world.get("/v1/tables/keyed/rows/5", least='{"0": 1}')

        assert (answer.status, answer.json()) == (200, {"id": 1, "name": "a"})
        assert json.loads(answer.headers["x-included-offsets"]) == {"0": 1}
        assert answer.headers["x-role"] == "standby"
        assert missing.error()[:2] == (404, "row_not_found")
        assert missing.headers["x-role"] == "standby"


@pytest.mark.parametrize(
    ("path", "query"),
    [
        (ROW, {"least": None}),
        (ROW, {"least": '{"0": 2}'}),
        (ROW, {"least": '{"9": 0}'}),
        (ROW, {"least": "?"}),
        (ROW, {"schema_id": "7"}),
        (ROW, {"table_id": "2"}),
        ("/v1/tables/nothing/rows/1", {}),
        ("/v1/tables/keyed/rows/x", {}),
        ("/v1/tables/keyed/count", {}),
    ],
)
async def test_everything_else_is_the_owners(
    tmp_path: Path, path: str, query: dict[str, str]
) -> None:
    async with _standby(tmp_path) as world:
        answer = await world.get(path, **query)

        error = answer.json()["error"]
        assert (answer.status, error["code"]) == (421, "not_owner")
        assert error["owner"] == "http://other:8765"


async def test_a_lookup_by_prefix_is_answered_as_a_lookup(tmp_path: Path) -> None:
    async with _standby(tmp_path) as world:
        answer = await world.under(1, at_least='{"0": 1}')
        missing = await world.under(5)

        assert (answer.status, answer.json()) == (200, {"rows": [{"id": 1, "name": "a"}]})
        assert json.loads(answer.headers["x-included-offsets"]) == {"0": 1}
        assert answer.headers["x-role"] == missing.headers["x-role"] == "standby"
        assert (missing.status, missing.json()) == (200, {"rows": []})


@pytest.mark.parametrize(
    "query",
    [
        {"at_least": ""},
        {"at_least": '{"0": 2}'},
        {"table_id": "2"},
        {"schema_id": "7"},
        {"limit": "0"},
        {"limit": "1000000"},
        {"columns": "nothing"},
    ],
)
async def test_every_other_lookup_by_prefix_is_the_owners(
    tmp_path: Path, query: dict[str, str]
) -> None:
    async with _standby(tmp_path) as world:
        answer = await world.under(1, **query)

        assert (answer.status, answer.json()["error"]["code"]) == (421, "not_owner")


async def test_a_lookup_by_prefix_waits_for_changes(tmp_path: Path) -> None:
    async with _standby(tmp_path) as world:
        await world.write([1], "b")
        waiting = asyncio.ensure_future(world.under(1, at_least='{"0": 3}'))
        await world.standing.is_needed.wait()

        await asyncio.to_thread(world.follow)

        assert (await waiting).json()["rows"] == [{"id": 1, "name": "b"}]


@pytest.mark.parametrize("role", [Role.WAITING, Role.RESTORING, Role.OWNER])
async def test_no_other_role_answers_from_these_rows(tmp_path: Path, role: Role) -> None:
    async with _standby(tmp_path) as world:
        world.standing.role = role

        assert (await world.get()).status == 421


async def test_a_lookup_waits_for_changes_and_asks_for_them(tmp_path: Path) -> None:
    async with _standby(tmp_path) as world:
        await world.write([1], "b")
        waiting = asyncio.ensure_future(world.get(least='{"0": 3}'))
        await world.standing.is_needed.wait()

        await asyncio.to_thread(world.follow)

        assert (await waiting).json() == {"id": 1, "name": "b"}


async def test_a_waiting_lookup_is_refused_when_its_rows_are_followed_no_longer(
    tmp_path: Path,
) -> None:
    async with _standby(tmp_path) as world:
        waiting = asyncio.ensure_future(world.get(least='{"0": 9}'))
        await world.standing.is_needed.wait()

        await asyncio.to_thread(world.warm.end_lookups)

        assert (await waiting).status == 421


async def test_grants_hold_at_a_standby(tmp_path: Path) -> None:
    async with _standby(tmp_path, token="t") as world:
        refused = await world.get()
        admitted = await AsgiCall(
            world.app,
            "GET",
            ROW,
            query={"at_least": "{}", "table_id": "1"},
            headers={"authorization": "Bearer t"},
        ).run()

        assert (refused.status, admitted.status) == (401, 200)


async def test_a_fetch_waits_for_the_log_to_be_opened_and_then_has_its_rows(tmp_path: Path) -> None:
    async with _standby(tmp_path) as world:
        waiting = asyncio.ensure_future(world.fetch())
        await world.standing.is_needed.wait()
        await asyncio.to_thread(world.followed.open_asked)
        answer = await waiting

        assert answer.status == 200
        assert answer.headers["x-role"] == "standby"
        assert answer.json()["next_offset"] == 1
        assert [row["id"] for row in answer.json()["rows"]] == [1]
        assert world.logs.by_path[TABLE].read_rows == 1


@pytest.mark.parametrize(
    ("path", "query"),
    [
        (FETCH, {"read_from": ""}),
        (FETCH, {"read_from": "owner"}),
        (FETCH, {"read_from": "anybody"}),
        (FETCH, {"table_id": ""}),
        (FETCH, {"table_id": "2"}),
        (FETCH, {"offset": "1"}),
        (FETCH, {"offset": "1", "max_wait_ms": "5"}),
        (FETCH, {"offset": "2"}),
        (FETCH, {"schema_id": "7"}),
        (FETCH, {"fingerprint": "00"}),
        ("/v1/tables/keyed/buckets/9/fetch", {}),
        ("/v1/tables/nothing/buckets/0/fetch", {}),
        ("/v1/tables/keyed/subscribe", {}),
    ],
)
async def test_every_other_fetch_is_the_owners(
    tmp_path: Path, path: str, query: dict[str, str]
) -> None:
    async with _standby(tmp_path) as world:
        world.open_log()
        answer = await world.fetch(path, **query)

        assert (answer.status, answer.json()["error"]["code"]) == (421, "not_owner")


async def test_a_fetch_at_the_end_waits_for_changes(tmp_path: Path) -> None:
    async with _standby(tmp_path) as world:
        world.open_log()
        waiting = asyncio.ensure_future(world.fetch(offset="1", max_wait_ms="60000"))
        await world.standing.is_needed.wait()
        await world.write([2], "b")

        await asyncio.to_thread(world.follow)

        assert [row["id"] for row in (await waiting).json()["rows"]] == [2]


async def test_a_fetch_that_waits_is_refused_when_the_log_is_followed_no_longer(
    tmp_path: Path,
) -> None:
    async with _standby(tmp_path) as world:
        world.open_log()
        waiting = asyncio.ensure_future(world.fetch(offset="1", max_wait_ms="60000"))
        await world.standing.is_needed.wait()

        await asyncio.to_thread(world.followed.close)

        assert (await waiting).status == 421


@pytest.mark.parametrize(("ack", "has_fingerprint"), [("journal", False), ("disk", True)])
async def test_a_page_has_a_fingerprint_as_the_page_of_the_owner(
    tmp_path: Path, ack: str, has_fingerprint: bool
) -> None:
    async with _standby(tmp_path, journal_ack=ack) as world:
        world.open_log()

        assert ("fingerprint" in (await world.fetch()).json()) is has_fingerprint
