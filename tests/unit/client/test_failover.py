"""A service of several processes: who is the owner is found out, and nothing is done twice."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
from pathlib import Path
from typing import Any, Final

import pytest

from streamhouse.client import StorageClient
from streamhouse.client.http._transport import HttpTransport
from streamhouse.core.backoff import Backoff
from streamhouse.core.errors import (
    NotFoundError,
    UnavailableError,
    UnknownOutcomeError,
)
from tests.support.certificates import make_certificates
from tests.support.free_ports import free_port
from tests.support.in_process_service import table_descriptor
from tests.support.scripted_server import Act, ScriptedServer, read_request

SHORT: Final = Backoff(first_s=0.001, most_s=0.01)
TABLE: Final = "/v1/tables/db.t/state"


def _answer(value: Any = "ok", *, status: str = "200 OK") -> bytes:
    body = json.dumps(value).encode()
    return b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n%s" % (status.encode(), len(body), body)


def _refusal(code: str, status: str, **members: Any) -> bytes:
    return _answer({"error": {"code": code, "message": "no", **members}}, status=status)


def _not_owner(owner: str | None) -> bytes:
    return _refusal("not_owner", "421 Misdirected", owner=owner)


OK: Final = _answer()


def _paths(server: ScriptedServer) -> list[str]:
    return [request.split(b" ")[1].decode() for request in server.requests]


def _transport(*servers: ScriptedServer | str, timeout_s: float = 10) -> HttpTransport:
    urls = [server if isinstance(server, str) else server.endpoint for server in servers]
    return HttpTransport(",".join(urls), token="s3cret", timeout_s=timeout_s, backoff=SHORT)


def _nobody() -> str:
    """A URL at which nobody listens."""
    return f"http://127.0.0.1:{free_port()}"


def _get(transport: HttpTransport, path: str = "/v1/databases") -> Any:
    return transport.request_json("GET", path)


def test_the_owner_that_is_named_is_asked_from_then_on() -> None:
    with ScriptedServer([OK, OK, OK]) as owner, ScriptedServer([_not_owner(owner.endpoint)]) as by:
        transport = _transport(by, owner)

        assert [_get(transport), _get(transport, TABLE), _get(transport)] == ["ok"] * 3
        transport.close()

    assert (len(by.requests), len(owner.requests)) == (1, 3)
    assert b"Authorization: Bearer s3cret\r\n" in owner.requests[0]


def test_an_owner_that_is_not_listed_is_followed() -> None:
    with ScriptedServer([OK, OK]) as owner, ScriptedServer([_not_owner(owner.endpoint)]) as by:
        transport = _transport(by)

        assert [_get(transport), _get(transport)] == ["ok"] * 2
        transport.close()

    assert (len(by.requests), len(owner.requests)) == (1, 2)


def test_who_was_not_given_says_of_which_service_it_is_before_it_is_shown_a_token() -> None:
    with ScriptedServer([OK, OK]) as owner, ScriptedServer([_not_owner(owner.endpoint)]) as by:
        transport = _transport(by)
        assert [_get(transport), _get(transport)] == ["ok"] * 2
        transport.close()

    # Once a connection, and the given endpoint once.
    assert (len(by.health_requests), len(owner.health_requests)) == (1, 1)
    assert b"s3cret" not in owner.health_requests[0] + by.health_requests[0]
    assert b"Authorization: Bearer s3cret" in owner.requests[0]


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("stranger", ["other service", "says nothing", "no service", "is silent"])
def test_a_stranger_at_a_learnt_address_gets_no_token_and_gives_no_rows(
    method: str, stranger: str
) -> None:
    """An owner that is gone leaves its port to whoever comes."""
    seen: list[bytes] = []

    def answered(opened: socket.socket) -> None:
        seen.append(read_request(opened))
        if stranger != "is silent":
            opened.sendall(_answer({"status": "alive"} if stranger == "says nothing" else "rows"))
            seen.append(read_request(opened))

    script = [OK] if stranger == "other service" else [answered]
    with (
        ScriptedServer(script, service_id="another") as other,
        ScriptedServer([OK, OK], [OK, OK]) as given,
    ):
        transport = _transport(given)
        _get(transport)
        transport.routes.learn("db.t", other.endpoint)
        assert transport.request_json(method, TABLE) == "ok"
        assert transport.routes.of(TABLE) == given.endpoint, "it is forgotten"
        transport.close()

    assert other.requests == []
    assert b"s3cret" not in b"".join([*seen, *other.health_requests])
    assert len(given.requests) == 2


def test_who_cannot_be_checked_is_not_used() -> None:
    with ScriptedServer([OK]) as other:
        transport = _transport(_nobody(), _nobody(), timeout_s=0.2)
        transport.routes.first_contact_s = 0.05
        transport.routes.learn("db.t", other.endpoint)
        with pytest.raises(UnavailableError, match="nobody answers at"):
            _get(transport, TABLE)
        transport.close()

    assert other.requests == other.health_requests == []


def test_each_table_is_asked_for_at_its_own_process() -> None:
    """As of a service of several shards: any endpoint says where a table is."""
    with (
        ScriptedServer([OK] * 9) as one,
        ScriptedServer([_not_owner(one.endpoint), OK, OK]) as two,
    ):
        transport = _transport(two)
        for _ in range(3):
            _get(transport, "/v1/tables/db.a/state")
        # All else stays with the endpoint that was given.
        _get(transport)
        _get(transport, "/v1/tables/db.b/state")
        _get(transport, "/v1/tables/db.a/count")
        transport.close()

    assert _paths(one) == ["/v1/tables/db.a/state"] * 3 + ["/v1/tables/db.a/count"]
    assert _paths(two) == ["/v1/tables/db.a/state", "/v1/databases", "/v1/tables/db.b/state"]


def test_a_tables_description_says_where_its_requests_go() -> None:
    def table(node: str) -> dict[str, Any]:
        descriptor = table_descriptor("db.t", bucket_count=2)
        more = {"table_id": 1, "schema_id": 0, "created_at_us": 0, "adopted_from": {}}
        return descriptor.to_json() | more | {"nodes": {"0": node, "1": node}}

    with ScriptedServer([_answer({"count": 7})] * 2) as node:
        script = [
            _answer(table(node.endpoint)),
            _answer(table("ftp://x")),
            _answer({"count": 8}),
        ]
        with ScriptedServer(script) as first, StorageClient(first.endpoint) as client:
            client.describe_table("db.t")
            assert client.count("db.t") == 7
            client.transport.routes.forget("db.t")
            client.describe_table("db.t")
            assert client.count("db.t") == 8

    assert _paths(node) == ["/v1/tables/db.t/count"]


def test_a_command_is_told_soon_that_nobody_is_there() -> None:
    transport = _transport(_nobody(), _nobody())
    transport.routes.first_contact_s = 0.05

    with pytest.raises(UnavailableError, match="nobody answers at http"):
        _get(transport)


def test_a_command_waits_for_a_takeover_of_which_somebody_tells() -> None:
    with ScriptedServer([*[_not_owner(None)] * 20, OK]) as standby:
        transport = _transport(_nobody(), standby)
        transport.routes.first_contact_s = 0.0

        assert _get(transport) == "ok"
        transport.close()


def test_a_table_that_moved_back_is_found_again() -> None:
    with ScriptedServer([OK] * 3) as first:
        with ScriptedServer([OK, _not_owner(first.endpoint)]) as other:
            transport = _transport(first)
            transport.routes.learn("db.t", other.endpoint)
            answers = [_get(transport, TABLE) for _ in range(3)]
        transport.close()

    assert answers == ["ok"] * 3
    assert (len(other.requests), len(first.requests)) == (2, 2)


def test_a_table_whose_process_died_is_asked_for_at_the_endpoints_that_were_given() -> None:
    dead = _nobody()
    with ScriptedServer([OK] * 4) as first:
        transport = _transport(first)
        _get(transport)
        for table in ("db.t", "db.u"):
            transport.routes.learn(table, dead)
        assert _get(transport, TABLE) == "ok"
        # What else it served is not asked for there, either.
        assert transport.routes.of("/v1/tables/db.u/state") == first.endpoint
        transport.close()


def test_no_more_tables_are_remembered_than_some() -> None:
    known = _transport("http://a", "http://b").routes
    for number in range(10_500):
        known.learn(f"db.t{number}", "http://b")

    assert known.of("/v1/tables/db.t499/state") == "http://a"
    assert known.of("/v1/tables/db.t500/state") == "http://b"
    known.forget_process("http://b")
    assert known.of("/v1/tables/db.t10499/state") == "http://a"


FAULTS: Final[dict[str, list[bytes | Act]]] = {
    "reset after the request": [Act.LISTEN, Act.RESET],
    "reset in the middle of the answer": [OK[: len(OK) // 2], Act.RESET],
    "not the owner": [_not_owner(None)],
    "points to nobody": [_not_owner("http://127.0.0.1:1")],
}


def test_a_dead_endpoint_is_passed_over_at_once() -> None:
    with ScriptedServer([OK, OK]) as alive:
        transport = _transport(_nobody(), alive)
        # Nothing was sent to the first: any request may go on.
        assert transport.request_json("POST", "/v1/databases", body={"name": "x"}) == "ok"
        assert _get(transport) == "ok"
        transport.close()

    assert len(alive.requests) == 2


@pytest.mark.parametrize("fault", ["not the owner", "points to nobody"])
def test_what_was_not_done_is_sent_again_whatever_it_is(fault: str) -> None:
    with ScriptedServer(FAULTS[fault]) as by, ScriptedServer([OK]) as owner:
        transport = _transport(by, owner)
        assert transport.request_json("POST", "/v1/databases", body={"name": "x"}) == "ok"
        transport.close()


@pytest.mark.parametrize("fault", ["reset after the request", "reset in the middle of the answer"])
def test_what_may_have_been_done_is_not_sent_again_unless_that_is_safe(fault: str) -> None:
    with ScriptedServer(FAULTS[fault]) as first, ScriptedServer([OK]) as second:
        transport = _transport(first, second)
        with pytest.raises(UnknownOutcomeError):
            transport.request_json("POST", "/v1/databases", body={"name": "x"})
        transport.close()

    assert not second.requests


def test_a_repeat_is_told_of_only_if_the_one_before_may_still_arrive() -> None:
    told: list[int] = []
    with (
        ScriptedServer([_not_owner(None)], [Act.LISTEN, Act.RESET]) as first,
        ScriptedServer([OK], [OK]) as second,
    ):
        transport = _transport(first, second)
        for _ in range(2):
            transport.request(
                "POST", "/v1/x", is_repeatable=True, on_repeat=lambda _: told.append(1)
            )
            transport.routes.current = first.endpoint
        transport.close()

    assert told == [1]


def test_processes_that_name_each_other_are_asked_in_measure() -> None:
    with ScriptedServer() as one, ScriptedServer() as two:
        one.play([_not_owner(two.endpoint)] * 1_000)
        two.play([_not_owner(one.endpoint)] * 1_000)
        transport = _transport(f"{one.endpoint}#failover_s=0.2")
        with pytest.raises(UnavailableError, match=r"as the owner for 0\.2 s"):
            transport.request_json("POST", "/v1/databases", is_repeatable=False)
        transport.close()

    # 0.2 s of waits of 0.5 ms and more: at most so many rounds of two.
    assert len(one.requests) <= 400


def test_a_chain_of_owners_without_an_end_is_bounded() -> None:
    """Each names one that was never heard of, as a hostile service might."""

    servers: list[ScriptedServer] = []
    port = 0
    for number in range(30):
        server = ScriptedServer(host=f"127.0.0.{number + 1}", port=port)
        port = int(server.endpoint.rpartition(":")[2])
        server.play([_not_owner(f"http://127.0.0.{number + 2}:{port}")])
        servers.append(server)
    with contextlib.ExitStack() as stack:
        for server in servers:
            stack.enter_context(server)
        transport = _transport(f"{servers[0].endpoint}#failover_s=0")
        with pytest.raises(UnavailableError, match="as the owner for 0 s"):
            _get(transport)
        transport.close()

    assert sum(len(server.requests) for server in servers) <= 10


def test_an_error_of_the_owner_is_the_callers() -> None:
    with (
        ScriptedServer([_refusal("table_not_found", "404 None")]) as owner,
        ScriptedServer([_not_owner(owner.endpoint)]) as by,
    ):
        transport = _transport(by, owner)
        with pytest.raises(NotFoundError):
            _get(transport, TABLE)
        transport.close()


def test_when_nobody_becomes_the_owner_the_endpoints_are_named() -> None:
    with ScriptedServer([_not_owner(None)] * 1_000) as standby:
        transport = _transport(f"{_nobody()}#failover_s=0.05", standby)
        with pytest.raises(UnavailableError) as error:
            _get(transport)
        transport.close()

    assert error.value.message.startswith(f"none of {', '.join(transport.routes.endpoints.urls)}")
    assert not isinstance(error.value, UnknownOutcomeError)


def test_a_write_that_may_have_been_done_is_never_said_to_be_refused() -> None:
    """The first attempt broke after it was sent, all others met nobody."""
    with ScriptedServer([Act.LISTEN, Act.RESET], [_not_owner(None)] * 1_000) as first:
        transport = _transport(f"{first.endpoint}#failover_s=0.05", _nobody())
        with pytest.raises(UnknownOutcomeError, match="as the owner for"):
            transport.request_json("POST", TABLE, is_repeatable=True)
        transport.close()


def test_a_new_client_finds_a_service_whose_first_endpoint_is_gone() -> None:
    """A task that starts in the middle of a takeover has never met the service."""

    with ScriptedServer([_not_owner(None)] * 3 + [OK]) as standby:
        transport = _transport(_nobody(), standby)
        assert _get(transport) == "ok"
        transport.close()


def test_one_endpoint_that_was_never_reached_is_said_at_once() -> None:
    transport = _transport(_nobody(), timeout_s=30)
    with pytest.raises(UnavailableError, match="cannot reach the Streamhouse service"):
        _get(transport)


def test_no_token_goes_from_tls_to_where_there_is_none(tmp_path: Path) -> None:
    made = make_certificates(tmp_path, host="IP:127.0.0.1")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(made.certificate, made.key)
    with (
        ScriptedServer([OK]) as plain,
        ScriptedServer([_not_owner(plain.endpoint), OK], tls=context) as safe,
    ):
        transport = HttpTransport(f"{safe.endpoint}#ca={made.ca}", token="t", timeout_s=10)
        assert _get(transport, TABLE) == "ok"
        transport.close()

    assert not plain.connections
