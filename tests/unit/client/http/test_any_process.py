"""Reads that any process may answer: whose turn it is, and what an answer must include."""

from __future__ import annotations

import json
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import pytest

from streamhouse.client.http._any_process import AnyProcess
from streamhouse.client.http._transport import HttpTransport
from streamhouse.client.http.endpoint import parse_endpoints, with_ca_file, with_read_from
from streamhouse.core.backoff import Backoff
from streamhouse.core.errors import InvalidRequestError, LogCutError, NotFoundError
from streamhouse.core.model.offsets import Offset
from streamhouse.core.model.table import TableInfo
from tests.support.free_ports import free_port
from tests.support.in_process_service import table_descriptor
from tests.support.scripted_server import ScriptedServer

ROW: Final = "/v1/tables/db.t/rows/1"
FETCH: Final = "/v1/tables/db.t/buckets/0/fetch"
TABLE: Final = TableInfo(
    descriptor=table_descriptor("db.t", bucket_count=4, primary_key=("id",)),
    table_id=7,
    created_at_us=0,
)


def _answer(status: str = "200 OK", *, headers: str = "", value: Any = "ok") -> bytes:
    body = json.dumps(value).encode()
    head = f"HTTP/1.1 {status}\r\n{headers}content-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _refusal(code: str, status: str, **members: Any) -> bytes:
    return _answer(status, value={"error": {"code": code, "message": "no", **members}})


def _transport(*servers: ScriptedServer | str, read_from: str = "any") -> HttpTransport:
    urls = [server if isinstance(server, str) else server.endpoint for server in servers]
    short = Backoff(first_s=0.001, most_s=0.01)
    endpoint = with_read_from(",".join(urls), read_from)
    return HttpTransport(endpoint, token=None, timeout_s=10, backoff=short)


def _least(server: ScriptedServer) -> list[dict[str, int] | None]:
    """Return what the answer to each request had to include."""
    queries = [parse_qs(urlsplit(r.split(b" ")[1].decode()).query) for r in server.requests]
    return [json.loads(q["at_least"][0]) if "at_least" in q else None for q in queries]


def test_reads_go_to_all_processes_in_turn() -> None:
    with ScriptedServer([_answer()] * 3) as one, ScriptedServer([_answer()] * 3) as two:
        transport = _transport(one, two)
        for _ in range(6):
            transport.read("GET", ROW, table=TABLE)
        transport.close()

    assert (len(one.requests), len(two.requests)) == (3, 3)


@pytest.mark.parametrize("read_from", ["owner", None])
def test_other_clients_read_from_the_owner_as_before(read_from: str | None) -> None:
    with ScriptedServer([_answer()] * 3) as owner, ScriptedServer([]) as other:
        transport = _transport(owner, other, read_from=read_from or "any")
        for _ in range(3):
            transport.read("GET", ROW, table=TABLE if read_from else None)
        transport.close()

    assert _least(owner) == [None] * 3
    assert not other.requests


def test_an_answer_must_include_what_was_written_and_read() -> None:
    included = 'x-included-offsets: {"2": 40}\r\n'
    with ScriptedServer([_answer(headers=included), _answer()]) as one:
        transport = _transport(one, _nobody())
        transport.any_process.leave_alone(transport.routes.endpoints.urls[1], "db.t")
        any_process = transport.any_process
        any_process.note_written({1: (Offset(3, 7), Offset(9, 7)), 0: (Offset(1, 7), Offset(1, 7))})
        any_process.note_written({1: (Offset(1, 7), Offset(4, 7))})
        any_process.note_written({3: (Offset(0, 8), Offset(9, 8))})
        transport.read("GET", ROW, table=TABLE)
        transport.read("GET", ROW, table=TABLE)
        transport.close()

    assert _least(one) == [{"0": 1, "1": 9}, {"0": 1, "1": 9, "2": 40}]


def test_an_answer_must_include_what_was_fetched() -> None:
    included = 'x-included-offsets: {"2": 40}\r\n'
    with ScriptedServer([_answer(headers=included), _answer()]) as owner:
        transport = _transport(owner, _nobody())
        transport.any_process.leave_alone(transport.routes.endpoints.urls[1], "db.t")
        transport.any_process.note_fetched(1, Offset(9, 7))
        transport.any_process.note_fetched(1, Offset(5, 7))
        transport.any_process.note_fetched(1, 11)
        transport.read("GET", ROW, table=TABLE)
        transport.read("GET", ROW, table=TABLE)
        transport.close()

    assert _least(owner) == [{"1": 9}, {"1": 9, "2": 40}]


def test_an_answer_must_include_the_positions_that_the_client_was_told() -> None:
    with ScriptedServer([_answer()]) as owner:
        transport = _transport(owner, _nobody())
        transport.any_process.leave_alone(transport.routes.endpoints.urls[1], "db.t")
        transport.any_process.note_shown(7, {1: 9, 2: 0})
        transport.any_process.note_shown(7, {1: 5})
        transport.any_process.note_shown(8, {3: 5})
        transport.read("GET", ROW, table=TABLE)
        transport.close()

    assert _least(owner) == [{"1": 9}]


def test_a_later_answer_has_the_columns_of_an_earlier_one() -> None:
    newer = "x-table-version: 7.3\r\n"
    unknown = _refusal("invalid_request", "400 Bad Request")
    with ScriptedServer([_answer(headers=newer), _answer(), unknown, _answer()]) as owner:
        transport = _transport(owner, _nobody())
        transport.any_process.leave_alone(transport.routes.endpoints.urls[1], "db.t")
        for _ in range(2):
            transport.read("GET", ROW, table=TABLE)
        with pytest.raises(InvalidRequestError):
            transport.read("GET", ROW, table=TABLE)
        transport.read("GET", ROW, table=TABLE)
        transport.close()

    queries = [parse_qs(urlsplit(r.split(b" ")[1].decode()).query) for r in owner.requests]
    assert [query["schema_id"] for query in queries] == [["0"], ["3"], ["3"], ["0"]]


def _nobody() -> str:
    return f"http://127.0.0.1:{free_port()}"


def test_a_process_that_does_not_answer_is_left_alone_and_the_owner_is_asked() -> None:
    with ScriptedServer([_answer()] * 8) as owner:
        refusal = _refusal("not_owner", "421 Misdirected", owner=owner.endpoint)
        with ScriptedServer([refusal] * 8) as behind:
            transport = _transport(owner, behind, _nobody())
            for _ in range(8):
                assert json.loads(transport.read("GET", ROW, table=TABLE).data) == "ok"
            transport.close()

        assert (len(owner.requests), len(behind.requests)) == (8, 1)


def test_a_process_that_hangs_is_left_alone_ten_times_as_long_for_all_tables() -> None:
    now_s = [100.0]
    endpoints = parse_endpoints("http://a:1,http://b:1#read_from=any")
    any_process = AnyProcess(endpoints, clock=lambda: now_s[0])
    any_process.leave_alone("http://a:1", "db.t")
    any_process.leave_alone("http://b:1", waited_s=5.0)

    def next_urls(table: str) -> set[str | None]:
        return {any_process.next_url(table) for _ in range(4)}

    assert next_urls("db.t") == {None}
    assert next_urls("db.other") == {"http://a:1"}
    now_s[0] += 49.0
    assert next_urls("db.t") == {"http://a:1"}
    now_s[0] += 2.0
    assert next_urls("db.t") == {"http://a:1", "http://b:1"}
    any_process.leave_alone("http://b:1", waited_s=5.0)
    any_process.answered("http://b:1", "db.t")
    assert next_urls("db.t") == {"http://a:1", "http://b:1"}


def test_a_standby_that_answers_is_not_taken_for_the_owner() -> None:
    """The owner does not answer: the search for it comes upon a standby."""
    at_standby = _answer(headers="x-role: standby\r\n")
    with ScriptedServer([at_standby] * 2) as standby:
        gone = _nobody()
        transport = _transport(gone, standby)
        for url in transport.routes.endpoints.urls:
            transport.any_process.leave_alone(url, "db.t")
        transport.read("GET", ROW, table=TABLE)
        assert transport.routes.of(ROW) == gone
        transport.close()


def test_what_the_owner_says_is_said() -> None:
    missing = _refusal("table_not_found", "404 Not Found")
    with ScriptedServer([missing]) as owner:
        transport = _transport(owner, _nobody())
        transport.any_process.leave_alone(transport.routes.endpoints.urls[1], "db.t")
        with pytest.raises(NotFoundError):
            transport.read("GET", ROW, table=TABLE)
        transport.close()


def test_lost_writes_are_said_once() -> None:
    lost = _refusal("log_cut", "409 Conflict")
    with ScriptedServer([lost, _answer()]) as owner:
        transport = _transport(owner, _nobody())
        transport.any_process.leave_alone(transport.routes.endpoints.urls[1], "db.t")
        transport.any_process.note_written({1: (Offset(3, 7), Offset(9, 7))})
        with pytest.raises(LogCutError):
            transport.read("GET", ROW, table=TABLE)
        transport.read("GET", ROW, table=TABLE)
        transport.close()

    assert _least(owner) == [{"1": 9}, {}]


def _any_fetches(server: ScriptedServer) -> list[bool]:
    """Return for each fetch of one process whether it takes the rows of any process."""
    return [b"read_from=any" in request for request in server.requests]


def test_fetches_of_rows_that_exist_go_to_all_processes_in_turn() -> None:
    with ScriptedServer([_answer()] * 2) as one, ScriptedServer([_answer()] * 2) as two:
        transport = _transport(one, two)
        for _ in range(4):
            assert transport.fetch_from_any(FETCH, {"offset": "3"}) is not None
        transport.close()

    assert (_any_fetches(one), _any_fetches(two)) == ([True] * 2, [True] * 2)


def test_the_owner_is_asked_for_rows_that_another_process_lacks() -> None:
    refusal = _refusal("not_owner", "421 Misdirected Request")
    with ScriptedServer([_answer()] * 2) as one, ScriptedServer([refusal]) as two:
        transport = _transport(one, two)
        answers = [transport.fetch_from_any(FETCH, {"offset": "3"}) for _ in range(3)]
        transport.close()

    assert [answer is None for answer in answers] == [True, False, False], "it is left alone"


def test_a_client_that_reads_from_the_owner_fetches_from_the_owner() -> None:
    with ScriptedServer([]) as one, ScriptedServer([]) as two:
        transport = _transport(one, two, read_from="owner")
        assert transport.fetch_from_any(FETCH, {"offset": "3"}) is None
        transport.close()

    assert not one.requests
    assert not two.requests


def test_read_from_is_part_of_an_endpoint() -> None:
    text = "https://a:1#ca=/x&read_from=owner,https://b:1#failover_s=7"
    assert with_read_from(text, "any") == (
        "https://a:1#ca=/x,https://b:1#failover_s=7&read_from=any"
    )
    assert parse_endpoints(with_read_from("http://a:1,http://b:1", "any")).read_from == "any"
    assert parse_endpoints("http://a:1,http://b:1").read_from == "owner"
    assert with_read_from("http://a:1,http://b:1#read_from=any", "owner") == "http://a:1,http://b:1"
    kept = with_ca_file("https://a:1,https://b:1#failover_s=7&read_from=any", "/y")
    assert parse_endpoints(kept).read_from == "any"
    for wrong in (
        "http://a:1#read_from=all",
        "http://a:1#read_from=any,http://b:1#read_from=owner",
    ):
        with pytest.raises(InvalidRequestError):
            parse_endpoints(wrong)
