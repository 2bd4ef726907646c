"""Which caller may use which route: every route is walked, also those added later."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from streamhouse.storage_service.config import ServiceConfig
from streamhouse.storage_service.server.access._grants import token_hash
from streamhouse.storage_service.server.access.access import AccessControl
from streamhouse.storage_service.server.routes import OPEN_PAGES, Answer
from tests.support.in_process_service import (
    EVENTS,
    ROUTE_TABLE,
    InProcessService,
    append_body,
    event_rows,
    in_process_service,
    table_descriptor,
    until,
)

OWNER_TOKEN = "owner-token"
# Pages have no data in them; they ask for it with a token. Readiness is one word without.
OPEN_PATHS = {"/health", "/ready", *OPEN_PAGES}
ROUTES_OF_SERVICE = sorted(
    (method, route.path.removesuffix("/..."))
    for route in ROUTE_TABLE.rows
    if route.answer in (Answer.PROCESS, Answer.DATA, Answer.CONTROL, Answer.PAGES)
    for method in route.method.split(", ")
)


def _bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


def _grants(path: Path, **tokens: list[str]) -> Path:
    entries = [
        f'[[token]]\nname = "{name}"\nsha256 = "{token_hash(name.encode())}"\ngrants = {grants}\n'
        for name, grants in tokens.items()
    ]
    path.write_text("".join(entries).replace("'", '"'))
    path.chmod(0o600)
    return path


@contextlib.asynccontextmanager
async def _service(
    tmp_path: Path,
    **tokens: list[str],
) -> AsyncIterator[InProcessService]:
    async with in_process_service(
        tmp_path / "data", token=OWNER_TOKEN, grants_file=_grants(tmp_path / "g", **tokens)
    ) as service:
        yield service


def _filled(path: str) -> str:
    """A path with something in place of its parameters."""
    return re.sub(r"\{\w+\}", "sales", path)


async def test_every_route_but_the_open_ones_refuses_callers_without_a_token(
    tmp_path: Path,
) -> None:
    async with _service(tmp_path) as service:
        for method, path in ROUTES_OF_SERVICE:
            answer = await service.call(method, _filled(path))
            is_open = path in OPEN_PATHS and (path != "/ready" or method in ("GET", "HEAD"))
            expected = 200 if is_open else 401
            assert answer.status == expected, (method, path)


async def test_a_token_without_grants_gets_nothing_of_any_table(tmp_path: Path) -> None:
    async with _service(tmp_path, nobody=[]) as service:
        for method, path in ROUTES_OF_SERVICE:
            if path in OPEN_PATHS or ROUTE_TABLE.find(method, _filled(path)).need().scope is None:
                continue
            answer = await service.call(method, _filled(path), headers=_bearer("nobody"))
            assert answer.error()[:2] == (403, "forbidden"), (method, path)
        # Where the processes are is about the service, too.
        shards = await service.call("GET", "/v1/shards", headers=_bearer("nobody"))
        assert shards.error()[:2] == (403, "forbidden")
        assert (await service.call("GET", "/v1/tables", headers=_bearer("nobody"))).json() == {
            "tables": []
        }
        assert (await service.call("GET", "/v1/databases", headers=_bearer("nobody"))).json() == {
            "databases": []
        }


async def _append(service: InProcessService, token: str, path: str) -> int:
    body = append_body(EVENTS, [(0, 0, event_rows(0, 3))])
    answer = await service.call(
        "POST", f"/v1/tables/{path}/append", headers=_bearer(token), body=body
    )
    return answer.status


async def _create(service: InProcessService, token: str, path: str) -> int:
    answer = await service.call(
        "POST",
        "/v1/tables",
        headers=_bearer(token),
        json_body=table_descriptor(path).to_json(),
    )
    return answer.status


async def test_levels_on_tables_and_databases(tmp_path: Path) -> None:
    async with _service(
        tmp_path,
        reader=["read:sales.orders"],
        writer=["write:sales.orders"],
        admin=["admin:sales.*"],
        watcher=["read:service"],
    ) as service:

        async def get(token: str, path: str) -> Any:
            return await service.call("GET", path, headers=_bearer(token))

        async def new_database(token: str, name: str) -> int:
            answer = await service.call(
                "POST", "/v1/databases", headers=_bearer(token), json_body={"name": name}
            )
            return answer.status

        assert await new_database("writer", "sales") == 403
        assert await new_database("admin", "stock") == 403
        assert await new_database("admin", "sales") == 201
        assert await _create(service, "writer", "sales.orders") == 403
        assert await _create(service, "admin", "sales.orders") == 201
        assert await _create(service, "admin", "default.orders") == 403
        assert await _create(service, OWNER_TOKEN, "default.orders") == 201
        assert await _append(service, "reader", "sales.orders") == 403
        assert await _append(service, "writer", "sales.orders") == 200
        assert await _append(service, "writer", "default.orders") == 403
        assert (await get("reader", "/v1/tables/sales.orders/state")).status == 200
        # Whether a table exists is nobody's business who may not read it.
        assert (await get("reader", "/v1/tables/default.orders/state")).status == 403
        assert (await get("reader", "/v1/tables/default.nope/state")).status == 403
        assert (await get("reader", "/v1/tables")).json() == {"tables": ["sales.orders"]}
        assert (await get("reader", "/v1/databases")).json() == {"databases": ["sales"]}
        assert (await get("reader", "/metrics")).status == 403
        assert (await get("watcher", "/metrics")).status == 200
        assert (await get("watcher", "/v1/tiering")).status == 200
        drop = ("DELETE", "/v1/tables/sales.orders")
        assert (await service.call(*drop, headers=_bearer("writer"))).status == 403
        assert (await service.call(*drop, headers=_bearer("admin"))).status == 204


async def test_a_refused_call_leaves_an_audit_line_and_no_token(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with _service(tmp_path, reader=["read:a.b"]) as service:
        await service.call("GET", "/v1/tables", headers=_bearer("wr0ng-secret"))
        await service.call("DELETE", "/v1/tables/a.b", headers=_bearer("reader"))

    lines = [r.getMessage() for r in caplog.records if r.name == "streamhouse.audit"]
    assert lines == [
        "event=refused code=unauthorized client=test token_name=- method=GET path='/v1/tables'",
        "event=refused code=forbidden client=test token_name=reader method=DELETE"
        " path='/v1/tables/a.b'",
    ]
    assert "wr0ng-secret" not in caplog.text
    assert OWNER_TOKEN not in caplog.text


async def test_a_fetch_that_waits_gets_no_rows_once_its_token_is_revoked(tmp_path: Path) -> None:
    grants = _grants(tmp_path / "g", reader=["read:default.events"])
    async with in_process_service(
        tmp_path / "data", token=OWNER_TOKEN, grants_file=grants, grants_check_interval_ms=1
    ) as service:
        assert await _create(service, OWNER_TOKEN, "default.events") == 201
        _, answering = service.start(
            "GET",
            "/v1/tables/events/buckets/0/fetch",
            query={"offset": "0", "max_wait_ms": "20000"},
            headers=_bearer("reader"),
        )
        await until(lambda: service.service.manager.waiter_limit.count == 1)
        grants.write_text("")
        body = append_body(EVENTS, [(0, 0, event_rows(0, 5))])
        headers = _bearer(OWNER_TOKEN)
        await service.call("POST", "/v1/tables/events/append", headers=headers, body=body)

        assert (await answering).status == 401


async def test_a_subscription_ends_when_its_token_is_revoked(tmp_path: Path) -> None:
    grants = _grants(tmp_path / "g", reader=["read:default.events"])
    async with in_process_service(
        tmp_path / "data",
        token=OWNER_TOKEN,
        grants_file=grants,
        grants_check_interval_ms=1,
        subscription_heartbeat_ms=5,
    ) as service:
        assert await _create(service, OWNER_TOKEN, "default.events") == 201
        call, answering = service.start(
            "GET", "/v1/tables/events/subscribe", headers=_bearer("reader")
        )
        await call.sent(0)
        grants.write_text("")
        answer = await asyncio.wait_for(answering, 60)
        assert answer.status == 200
        assert answer.is_complete


def test_a_process_beside_another_looks_at_the_file_before_the_first_request(
    tmp_path: Path,
) -> None:
    """The other process looks while it has requests, so its grants may be hours old."""
    grants = _grants(tmp_path / "g", reader=["read:*"])
    config = ServiceConfig(
        data_dir=tmp_path, grants_file=grants, grants_check_interval_ms=3_600_000
    )
    owner = AccessControl(config)
    grants.write_text("")

    beside = AccessControl(config, last_grants=owner.last_grants)

    assert beside.caller_of(b"reader") is None
