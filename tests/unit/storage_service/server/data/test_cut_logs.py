"""A log that lost rows with its machine, and has others at their offsets: readers are told."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pytest

from streamhouse.client import StorageClient, reads
from streamhouse.client.http._transport import HttpTransport
from streamhouse.client.positions._reached_offsets import ReachedOffsets
from streamhouse.core.errors import LogCutError
from streamhouse.core.wire.arrow_body import decode_fetch_body
from streamhouse.storage_service.log.replica import Replication
from tests.support.in_process_service import InProcessService, event_rows, in_process_service
from tests.support.late_journal import LateJournal
from tests.support.scripted_server import ScriptedServer

FETCH = "/v1/tables/events/buckets/0/fetch"
AHEAD = Replication(replica=LateJournal(), is_waited_for=False)


async def _reached(service: InProcessService, offset: int) -> Mapping[int, tuple[int, str]]:
    """Read the batch at `offset`; return what the answer says was reached."""
    query = {"offset": str(offset), "table_id": "1", "max_bytes": "1"}
    body = decode_fetch_body(pa.py_buffer((await service.call("GET", FETCH, query=query)).body))
    assert body is not None
    return body.reached


async def _worlds(path: Path) -> tuple[Path, str, str]:
    """Read up to offsets 10 and 20; return a directory that lost what is from 10 on."""
    async with in_process_service(path / "first", replication=AHEAD) as service:
        await service.create_table()
        await service.append([(0, 0, event_rows(0, 10))])
    shutil.copytree(path / "first", path / "second")
    async with in_process_service(path / "first", replication=AHEAD) as service:
        await service.append([(0, 0, event_rows(10, 20))])
        (_, ten), (_, twenty) = (await _reached(service, 0))[0], (await _reached(service, 10))[0]
    return path / "second", ten, twenty


async def test_a_fetch_beyond_what_was_lost_is_told_and_others_go_on(tmp_path: Path) -> None:
    second, ten, twenty = await _worlds(tmp_path)
    async with in_process_service(second, replication=AHEAD) as service:
        beyond = {"offset": "20", "table_id": "1", "fingerprint": twenty}
        answer = await service.call("GET", FETCH, query=beyond)
        assert (answer.status, answer.json()["error"]["code"]) == (409, "log_cut")
        assert (
            "bucket 0: the log has fewer rows, up to offset 10,"
            in answer.json()["error"]["message"]
        )
        await service.append([(0, 0, event_rows(500, 515))])

        answer = await service.call("GET", FETCH, query=beyond)
        assert (answer.status, answer.json()["error"]["code"]) == (409, "log_cut")
        assert "bucket 0: below offset 20 there are other rows" in answer.json()["error"]["message"]
        query = {"offset": "10", "table_id": "1", "fingerprint": ten}
        assert (await service.call("GET", FETCH, query=query)).status == 200


async def test_a_subscription_beyond_what_was_lost_is_told(tmp_path: Path) -> None:
    second, ten, twenty = await _worlds(tmp_path)
    async with in_process_service(second, replication=AHEAD) as service:
        await service.append([(0, 0, event_rows(500, 515))])
        for start, said, status in ((20, twenty, 409), (10, twenty, 409), (10, "x", 409)):
            query = {"start": json.dumps({"0": start}), "fingerprints": json.dumps({"0": said})}
            query["table_id"] = "1"
            answer = await service.call("GET", "/v1/tables/events/subscribe", query=query)
            assert answer.status == status
        query = {"start": '{"0": 10}', "fingerprints": json.dumps({"0": ten}), "table_id": "1"}
        call, following = service.start("GET", "/v1/tables/events/subscribe", query=query)
        await call.sent(0)
        following.cancel()


@pytest.mark.parametrize("text", ["[]", "{", '{"1": "ab"}', '{"0": 5}', '{"a": "b"}'])
async def test_bad_fingerprints_are_refused(tmp_path: Path, text: str) -> None:
    async with in_process_service(tmp_path) as service:
        await service.create_table()
        query = {"start": '{"0": 0}', "fingerprints": text}
        answer = await service.call("GET", "/v1/tables/events/subscribe", query=query)
        assert (answer.status, answer.json()["error"]["code"]) == (400, "invalid_request")


async def test_a_service_that_loses_nothing_says_nothing(tmp_path: Path) -> None:
    for replication in (None, Replication(replica=LateJournal())):
        async with in_process_service(tmp_path, replication=replication) as service:
            if replication is None:
                await service.create_table()
                await service.append([(0, 0, event_rows(0, 10))])
            assert await _reached(service, 0) == {}


async def test_a_client_says_what_it_has_read(tmp_path: Path) -> None:
    async with in_process_service(tmp_path, replication=AHEAD) as service:
        await service.create_table()
        await service.append([(0, 0, event_rows(0, 10))])
        page = (await service.call("GET", FETCH, query={"offset": "0"})).body
        reached = (await _reached(service, 0))[0][1]
    head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(page)}\r\n\r\n".encode()
    error = json.dumps({"error": {"code": "log_cut", "message": "it was cut"}}).encode()
    cut = f"HTTP/1.1 409 Conflict\r\ncontent-length: {len(error)}\r\n\r\n".encode()
    known = ReachedOffsets()
    with ScriptedServer([head + page, cut + error]) as server:
        transport = HttpTransport(server.endpoint, token=None, timeout_s=10)
        for offset in (0, 10):
            try:
                reads.fetch(
                    transport,
                    "default.events",
                    0,
                    offset,
                    columns=None,
                    max_bytes=1,
                    max_wait_ms=0,
                    end_offset=None,
                    table_id=1,
                    reached=known,
                )
            except LogCutError:
                assert offset == 10
        transport.close()

    first, second = (request.partition(b"\r\n")[0] for request in server.requests)
    assert b"fingerprint" not in first
    assert f"fingerprint={reached}".encode() in second


async def test_who_begins_at_the_newest_row_goes_on_from_nothing(tmp_path: Path) -> None:
    """Who has read rows that were lost begins anew where the log ends, be it at the same offset."""
    async with in_process_service(tmp_path, replication=AHEAD) as service:
        await service.create_table()
        await service.append([(0, 0, event_rows(0, 10))])
        table = "/v1/tables/events"
        bodies = [
            (await service.call("GET", path, query=query)).body
            for path, query in ((FETCH, {"offset": "0"}), (table, {}), (f"{table}/state", {}))
        ]
    answers = [
        f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body for body in bodies
    ]
    error = json.dumps({"error": {"code": "log_cut", "message": "it was cut"}}).encode()
    cut = f"HTTP/1.1 409 Conflict\r\ncontent-length: {len(error)}\r\n\r\n".encode() + error
    with ScriptedServer([*answers, cut], [cut]) as server, StorageClient(server.endpoint) as client:
        client.fetch("events", 0, 0)
        with pytest.raises(LogCutError):
            next(client.subscribe("events"))

    assert b"/subscribe?start=%7B%220%22%3A+10%7D" in server.requests[-1]
    assert b"fingerprint" not in server.requests[-1]
