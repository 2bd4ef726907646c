"""What happens around every route: token, errors, request ids, limits, stopping."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from streamhouse.core.errors import OverloadedError
from tests.support.asgi_call import AsgiCall
from tests.support.held_step import around
from tests.support.in_process_service import (
    EVENTS,
    append_body,
    event_rows,
    in_process_service,
)

TOKEN = "correct-horse"


async def test_only_health_and_a_word_of_readiness_are_answered_without_the_token(
    tmp_path: Path,
) -> None:
    async with in_process_service(tmp_path, token=TOKEN) as service:
        assert (await service.call("GET", "/health")).json() == {
            "status": "alive",
            "service_id": service.service.manager.service_id,
        }
        for host in ("localhost", "10.0.0.7:8765", "any.example"):
            ready = await service.call("GET", "/ready", headers={"host": host})
            assert (ready.status, ready.json()) == (200, {"status": "ready"})
        assert (await service.call("POST", "/ready")).status == 401
        wrong = await service.call("GET", "/ready", headers={"authorization": "Bearer x"})
        assert wrong.status == 401
        for path in ("/metrics", "/openapi.json", "/docs/nope", "/v1/tables", "/nope"):
            answer = await service.call("GET", path)
            assert answer.error() == (
                401,
                "unauthorized",
                "this service needs a bearer token: send 'Authorization: Bearer TOKEN', or set"
                " STREAMHOUSE_TOKEN; commands take --token-file",
            )
            assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    "given",
    [
        "Bearer wrong",
        "Bearer correct-hors",
        "Bearer correct-horse2",
        "Basic correct-horse",
        "correct-horse",
        "Bearer",
        "Bearer \u00e9",
    ],
)
async def test_a_wrong_token_is_refused(tmp_path: Path, given: str) -> None:
    async with in_process_service(tmp_path, token=TOKEN) as service:
        answer = await service.call("GET", "/v1/tables", headers={"authorization": given})
        assert answer.error() == (401, "unauthorized", "the bearer token is wrong")


async def test_the_right_token_is_accepted(tmp_path: Path) -> None:
    async with in_process_service(tmp_path, token=TOKEN) as service:
        for scheme in ("Bearer", "bearer"):
            answer = await service.call(
                "GET", "/ready", headers={"authorization": f"{scheme} {TOKEN}"}
            )
            assert answer.json()["status"] == "ready"


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("GET", "/nope", (404, "not_found", "there is no route /nope; /docs lists them")),
        ("GET", "/v1/tables/", (404, "not_found", "there is no route /v1/tables/; /docs lists")),
        (
            "PUT",
            "/v1/tables",
            (405, "method_not_allowed", "/v1/tables has no method PUT: use GET or POST"),
        ),
        (
            "GET",
            "/v1/tables/events/append",
            (405, "method_not_allowed", "/v1/tables/events/append has no method GET: use POST"),
        ),
        ("GET", "/v1/tables/a.b.c", (400, "invalid_name", "'a.b.c' is not a table path")),
        ("GET", "/v1/tables/..", (400, "invalid_name", "'..' is not a table path")),
        (
            "GET",
            "/v1/tables/none",
            (404, "table_not_found", "table 'default.none' does not exist"),
        ),
    ],
)
async def test_what_does_not_exist_is_an_error_like_any_other(
    tmp_path: Path, method: str, path: str, expected: tuple[int, str, str]
) -> None:
    async with in_process_service(tmp_path) as service:
        answer = await service.call(method, path)
        status, code, message = answer.error()
        assert (status, code) == expected[:2]
        assert message.startswith(expected[2])
        methods = message.rpartition(": use ")[2].replace(" or ", ", ")
        assert answer.headers.get("allow") == (methods if status == 405 else None)


async def test_a_bug_is_an_internal_error_that_tells_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise KeyError("inner secret")

    async with in_process_service(tmp_path) as service:
        await service.create_table()
        around(monkeypatch, "table-found", broken)
        for path in ("/v1/tables/events/state", "/v1/tables/events/buckets/0/fetch"):
            status, code, message = (await service.call("GET", path)).error()
            assert (status, code) == (500, "internal")
            assert "secret" not in message

    assert caplog.text.count("KeyError: 'inner secret'") >= 2


async def test_a_sane_request_id_is_kept_and_others_are_replaced(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:

        async def answered(given: str) -> str:
            answer = await service.call("GET", "/ready", headers={"x-request-id": given})
            return answer.headers["x-request-id"]

        assert await answered("my-id.7") == "my-id.7"
        assert await answered("a b") != "a b"
        assert await answered("x" * 65) != "x" * 65
        assert await answered("") != await answered("")


async def test_a_stopping_service_refuses_everything_but_health(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        await service.create_table()
        await service.service.drain()

        for method, path in (
            ("GET", "/ready"),
            ("GET", "/v1/tables"),
            ("POST", "/v1/tables/events/append"),
            ("GET", "/v1/tables/events/subscribe"),
        ):
            answer = await service.call(method, path)
            assert answer.error()[:2] == (503, "unavailable")
            assert answer.json()["error"]["retriable"] is True
            assert answer.headers["retry-after"] == "1"
        assert (await service.call("GET", "/health")).status == 200


async def test_a_stopping_service_is_not_ready_for_a_probe_without_a_token(tmp_path: Path) -> None:
    async with in_process_service(tmp_path, token=TOKEN) as service:
        await service.service.drain()

        ready = await service.call("GET", "/ready")

        assert (ready.status, ready.json()) == (503, {"status": "stopping"})


async def test_stopping_ends_waits_and_finishes_appends_before_it_returns(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        await service.create_table()
        _, poll = service.start(
            "GET",
            "/v1/tables/events/buckets/0/fetch",
            query={"offset": "0", "max_wait_ms": "60000"},
        )
        _, state = service.start(
            "GET",
            "/v1/tables/events/state",
            query={"after": '{"0": 0}', "max_wait_ms": "60000"},
        )
        subscription, following = service.start("GET", "/v1/tables/events/subscribe")
        await subscription.sent(0)
        append = asyncio.ensure_future(service.append([(0, 0, event_rows(0, 3))]))
        await asyncio.sleep(0)

        await service.service.drain()

        assert (await append).json()["buckets"] == {"0": [0, 3]}
        assert (await poll).status == 200
        assert (await state).status == 200
        assert (await following).is_complete
        assert service.service.open_requests == 0


async def test_a_stalled_subscriber_does_not_hold_up_the_stop(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        await service.create_table()
        call, following = service.start("GET", "/v1/tables/events/subscribe")
        await call.sent(0)
        call.takes_more.clear()
        await service.append([(0, 0, event_rows(0, 3))])
        drained = asyncio.ensure_future(service.service.drain())
        # The connection is cut, which ends a send that waits, as a real one's end would.
        while not call.is_aborted:
            await asyncio.sleep(0.01)
        call.takes_more.set()

        await asyncio.wait_for(drained, 60)

        assert not (await following).is_complete


async def test_too_many_requests_at_once_are_refused(tmp_path: Path) -> None:
    async with in_process_service(tmp_path, open_requests_max=2) as service:
        await service.create_table()
        waiting = [
            service.start(
                "GET",
                "/v1/tables/events/buckets/0/fetch",
                query={"offset": "0", "max_wait_ms": "60000"},
            )
            for _ in range(2)
        ]
        await asyncio.sleep(0)

        status, code, message = (await service.call("GET", "/v1/tables")).error()

        assert (status, code) == (503, "overloaded")
        assert message.startswith("2 requests are in progress (open_requests_max)")
        # Who looks after the service gets in.
        for path in ("/", "/health", "/ready", "/metrics", "/v1/status", "/v1/tiering"):
            assert (await service.call("GET", path)).status == 200
        assert (await service.call("POST", "/v1/admin/backup", json_body=7)).status == 400
        for call, _ in waiting:
            call.disconnect()
        await asyncio.gather(*(task for _, task in waiting))
        assert (await service.call("GET", "/v1/tables")).status == 200


async def test_one_caller_leaves_requests_for_the_others(tmp_path: Path) -> None:
    """Half a body or a long poll each: one caller had all requests, and nobody else got one."""

    async with in_process_service(tmp_path, open_requests_max=64) as running:
        service = running.service

        def open_all(share: str) -> int:
            for count in range(100):
                with contextlib.suppress(OverloadedError):
                    service.begin_request(share)
                    continue
                return count
            return 100

        opened = {share: open_all(share) for share in ("a", "b", "c")}
        assert opened == {"a": 56, "b": 7, "c": 1}
        with pytest.raises(OverloadedError, match=r"\(open_requests_max\)"):
            service.begin_request("a")
        for share, count in opened.items():
            for _ in range(count):
                service.end_request(share)
        assert service.open_requests == 0


@pytest.mark.parametrize("is_announced", [True, False])
async def test_a_body_over_the_limit_is_refused_as_soon_as_that_is_known(
    tmp_path: Path, is_announced: bool
) -> None:
    limits = {"body_bytes_max": 1_000, "batch_bytes_max": 1_000}
    async with in_process_service(tmp_path, **limits) as service:
        await service.create_table()
        # The client never sends the rest: only an early answer ends this request.
        call = AsgiCall(
            service.app,
            "POST",
            "/v1/tables/events/append",
            chunks=[None] if is_announced else [b"x" * 600, b"x" * 600, None],
            content_length=1_001 if is_announced else None,
        )

        status, code, message = (await asyncio.wait_for(call.run(), 60)).error()

        assert (status, code) == (413, "request_too_large")
        assert "larger than 1000 bytes (body_bytes_max)" in message
        assert service.service.body_memory.held == 0


async def test_control_routes_have_a_body_limit_of_their_own(tmp_path: Path) -> None:
    async with in_process_service(tmp_path, control_body_bytes_max=100) as service:
        call = AsgiCall(service.app, "POST", "/v1/databases", chunks=[None], content_length=101)

        status, code, message = (await call.run()).error()

        assert (status, code) == (413, "request_too_large")
        assert "larger than 100 bytes (control_body_bytes_max)" in message


async def test_a_body_that_does_not_arrive_in_time_is_refused(tmp_path: Path) -> None:
    async with in_process_service(tmp_path, body_read_timeout_ms=5) as service:
        await service.create_table()
        call = AsgiCall(service.app, "POST", "/v1/tables/events/append", chunks=[b"some", None])

        status, code, message = (await call.run()).error()

        assert (status, code) == (400, "invalid_request")
        assert "did not arrive within 5 ms (body_read_timeout_ms)" in message


async def test_bodies_that_are_announced_and_not_sent_keep_nobody_waiting(tmp_path: Path) -> None:
    """Twelve of them, each announced as large as a body may be."""

    sizes = {"body_bytes_max": 4_000, "batch_bytes_max": 4_000, "bodies_bytes_max": 5_000}
    async with in_process_service(tmp_path, **sizes) as service:
        await service.create_table()
        target = "/v1/tables/events/append"
        calls = [
            AsgiCall(service.app, "POST", target, chunks=[b"x", None], content_length=4_000)
            for _ in range(12)
        ]
        sending = [asyncio.ensure_future(call.run()) for call in calls]
        await asyncio.sleep(0)

        assert (await service.append([(0, 0, event_rows(0, 4))])).status == 200
        assert (await service.call("GET", "/v1/tables/events")).status == 200

        for call in calls:
            call.disconnect()
        await asyncio.gather(*sending)
        assert service.service.body_memory.held == 0


async def test_a_body_that_got_no_room_in_time_is_refused(tmp_path: Path) -> None:
    sizes = {"body_bytes_max": 1_000, "batch_bytes_max": 1_000, "bodies_bytes_max": 1_500}
    async with in_process_service(tmp_path, body_read_timeout_ms=50, **sizes) as service:
        await service.create_table()
        with service.service.body_memory.body() as used:
            await used.add(900)
            used.end()

            status, code, message = (
                await service.call("POST", "/v1/tables/events/append", body=b"x" * 700)
            ).error()

        assert (status, code) == (503, "overloaded")
        assert message.startswith("request bodies hold 900 of 1500 bytes (bodies_bytes_max)")
        assert service.service.body_memory.held == 0


@pytest.mark.parametrize(
    "given", ["application/x-www-form-urlencoded", "text/plain", "multipart/form-data", ""]
)
async def test_a_body_of_another_content_type_is_refused_on_every_route(
    tmp_path: Path, given: str
) -> None:
    """These are what a browser sends anywhere without asking first."""
    arrow = "application/vnd.apache.arrow.stream"
    texts = "application/json or application/x-ndjson"

    async with in_process_service(tmp_path) as service:
        await service.create_table(primary_key=["id"])
        for method, path, wanted in (
            ("POST", "/v1/databases", "application/json"),
            ("POST", "/v1/tables", "application/json"),
            ("PATCH", "/v1/tables/events/properties", "application/json"),
            ("PUT", "/v1/tables/events/lake/pins/me", "application/json"),
            ("POST", "/v1/tiering/claim", "application/json"),
            ("POST", "/v1/admin/backup", "application/json"),
            ("POST", "/iceberg/v1/namespaces", "application/json"),
            ("POST", "/v1/tables/events/upsert", f"{arrow}', or as text with {texts} or text/csv"),
            ("POST", "/v1/tables/events/delete", f"{arrow}', or as text with {texts} or text/csv"),
            ("POST", "/v1/tables/events/lookup", f"{arrow}', or as text with {texts}"),
        ):
            headers = {"content-type": given}
            answer = await service.call(method, path, body=b'{"name": "x"}', headers=headers)
            assert answer.status == 400, path
            assert f"send it with the header 'Content-Type: {wanted}" in answer.body.decode()
        listed = await service.call("GET", "/v1/databases")
        assert listed.json() == {"databases": ["default"]}

        named = {"content-type": "Application/JSON; charset=utf-8"}
        body = b'{"name": "x"}'
        assert (await service.call("POST", "/v1/databases", body=body, headers=named)).status == 201


async def test_nobody_without_a_token_has_a_body_read(tmp_path: Path) -> None:
    async with in_process_service(tmp_path, token="secret") as service:
        for path in ("/", "/health", "/v1/tables"):
            call = AsgiCall(service.app, "POST", path, chunks=[None], content_length=4_000_000)
            answer = await asyncio.wait_for(call.run(), 60)
            assert answer.is_complete


async def test_an_append_happens_although_its_client_goes_away(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        await service.create_table()
        call = AsgiCall(
            service.app,
            "POST",
            "/v1/tables/events/append",
            chunks=[append_body(EVENTS, [(0, 0, event_rows(0, 4))])],
        )
        call.disconnect()

        await call.run()

        state = (await service.call("GET", "/v1/tables/events/state")).json()
        assert state["positions"]["0"]["high_watermark"] == 4
