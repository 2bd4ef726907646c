"""Requests that are answered where they arrive: the same answers as by a task, in one turn."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import logging
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
from uvicorn.server import ServerState

from streamhouse.core.model.bucketing import buckets_for_rows
from streamhouse.storage_service.server.http._http_server import http_config
from streamhouse.storage_service.server.http.open_connections import OpenConnections
from tests.support.in_process_service import (
    EVENTS,
    InProcessService,
    append_body,
    event_rows,
    in_process_service,
    until,
)
from tests.support.memory_transport import MemoryTransport

KEYS = "/v1/tables/keyed"
DATE = (b"date", b"Sun, 22 Nov 2026 20:00:00 GMT")


class _Connection:
    """One connection to a service. Bytes are received as by the event loop: outside of any task."""

    def __init__(self, world: InProcessService) -> None:
        config = http_config(
            world.service.config,
            world.app,
            OpenConnections(connections_max=10, address_connections_max=10),
        )
        config.load()
        state = ServerState()
        state.default_headers = [DATE]
        protocol: Any = config.http_protocol_class
        self.protocol = protocol(config=config, server_state=state, app_state={})
        self.transport = MemoryTransport()
        self.protocol.connection_made(self.transport)

    async def receive(self, data: bytes) -> bytes:
        """Return what is answered by the time that all of `data` is looked at."""
        looked_at = asyncio.get_running_loop().create_future()

        def receive() -> None:
            self.protocol.data_received(data)
            self.protocol.together.flush()
            looked_at.set_result(self.take())

        asyncio.get_running_loop().call_soon(receive)
        answered: bytes = await looked_at
        return answered

    async def answers(self, data: bytes) -> bytes:
        """Return all that is answered to `data`."""
        answered = await self.receive(data)
        await until(lambda: not self.protocol.tasks)
        return answered + self.take()

    def take(self) -> bytes:
        sent, self.transport.sent = self.transport.sent, b""
        return sent


@contextlib.asynccontextmanager
async def _world(tmp_path: Path, **config: Any) -> AsyncIterator[InProcessService]:
    async with in_process_service(tmp_path / "data", **config) as world:
        await world.create_table("keyed", primary_key=("id",), bucket_count=2)
        await world.create_table("events")
        body = append_body(EVENTS, [(None, 0, event_rows(0, 50))])
        assert (await world.call("POST", f"{KEYS}/upsert", body=body)).status == 200
        yield world


def _request(
    method: str, target: str, *headers: str, body: bytes = b"", version: str = "1.1"
) -> bytes:
    lines = [f"{method} {target} HTTP/{version}", "host: localhost", "x-request-id: mine"]
    if body:
        lines.append(f"content-length: {len(body)}")
    return "\r\n".join([*lines, *headers, "", ""]).encode() + body


def _get(target: str, *headers: str, version: str = "1.1") -> bytes:
    return _request("GET", target, *headers, version=version)


def _keys(*ids: int) -> bytes:
    keys = pa.record_batch([pa.array(ids, pa.int64())], ["id"])
    return append_body(keys.schema, [(None, 0, keys)])


ARROW = "content-type: application/vnd.apache.arrow.stream"
HEALTH = _get("/health")
CHUNKED = b"%x\r\n%s\r\n0\r\n\r\n" % (len(_keys(1)), _keys(1))

AT_ONCE = {
    "row": _get(f"{KEYS}/rows/7"),
    "no row": _get(f"{KEYS}/rows/77"),
    "no key": _get(f"{KEYS}/rows/x"),
    "no query": _get(f"{KEYS}/rows/7?a=1"),
    "no table": _get("/v1/tables/nobody/rows/7"),
    "no name": _get("/v1/tables/a.b.c/rows/7"),
    "no key table": _get("/v1/tables/events/rows/7"),
    "escaped": _get("/v1/tables/key%65d/rows/%37"),
    "foreign page": _get(f"{KEYS}/rows/7", "origin: http://evil.example"),
    "foreign host": _get(f"{KEYS}/rows/7", "host: evil.example"),
    "close": _get(f"{KEYS}/rows/7", "connection: close"),
    "old": _get(f"{KEYS}/rows/7", version="1.0"),
    "old kept": _get(f"{KEYS}/rows/7", "connection: keep-alive", version="1.0"),
    "absolute": _get(f"http://localhost{KEYS}/rows/7"),
    "upgrade": _get(f"{KEYS}/rows/7", "connection: upgrade", "upgrade: h2c"),
    "count": _get(f"{KEYS}/count"),
    "fetch": _get("/v1/tables/events/buckets/0/fetch?offset=0"),
    "fetch too far": _get("/v1/tables/events/buckets/0/fetch?offset=9"),
    "lookup": _request("POST", f"{KEYS}/lookup", ARROW, body=_keys(3, 99, 4)),
    "lookup columns": _request("POST", f"{KEYS}/lookup?columns=name", ARROW, body=_keys(3)),
    "lookup of nothing": _request("POST", f"{KEYS}/lookup", ARROW),
    "lookup chunked": _request("POST", f"{KEYS}/lookup", ARROW, "transfer-encoding: chunked")
    + CHUNKED,
    "lookup of rubbish": _request("POST", f"{KEYS}/lookup", ARROW, body=b"rubbish"),
    "lookup too large": _request("POST", f"{KEYS}/lookup", ARROW, body=b"x" * 40_000),
    "lookup untyped": _request("POST", f"{KEYS}/lookup", body=_keys(3)),
    "health": HEALTH,
}
BY_TASK = {
    "head": _request("HEAD", f"{KEYS}/rows/7"),
    "control": _get(KEYS),
    "nothing there": _get("/nothing"),
    "catalog": _get("/iceberg/v1/config"),
    "prefixes": _request("POST", f"{KEYS}/prefix_lookup", ARROW, body=_keys(3)),
    "upsert": _request(
        "POST",
        f"{KEYS}/upsert",
        "content-type: text/plain",
        body=append_body(EVENTS, [(None, 0, event_rows(0, 2))]),
    ),
}


@pytest.mark.parametrize("name", [*AT_ONCE, *BY_TASK])
async def test_both_ways_give_the_same_bytes_and_count_once(tmp_path: Path, name: str) -> None:
    request = AT_ONCE.get(name) or BY_TASK[name]
    async with _world(tmp_path, body_bytes_max=32_768, batch_bytes_max=32_768) as world:
        counted = world.service.metrics.registry

        def answered() -> float:
            samples = [s for m in counted.collect() for s in m.samples]
            return sum(s.value for s in samples if s.name == "streamhouse_requests_total")

        alone, second, before = _Connection(world), _Connection(world), answered()

        first_turn = await alone.receive(request)
        assert bool(first_turn) == (name in AT_ONCE)
        at_once = first_turn + await alone.answers(b"")
        assert answered() == before + 1

        # Of one packet only the first request is answered where it arrives.
        health = await _Connection(world).answers(HEALTH)
        both = await second.answers(HEALTH + request)
        assert both == health + at_once
        assert alone.transport.is_closed == second.transport.is_closed
        assert world.service.open_requests == 0
        assert world.service.body_memory.held == 0


async def test_requests_of_one_packet_are_answered_in_their_order(tmp_path: Path) -> None:
    async with _world(tmp_path) as world:
        connection = _Connection(world)
        requests = [_get(f"{KEYS}/rows/{number}") for number in range(5)]

        at_once = await connection.receive(b"".join(requests))
        rest = await connection.answers(b"")

        assert at_once.count(b'"id"') == 1
        places = [(at_once + rest).index(b'{"id": %d,' % number) for number in range(5)]
        assert places == sorted(places)


async def test_a_connection_reads_on_when_all_that_it_has_read_is_answered(tmp_path: Path) -> None:
    async with _world(tmp_path) as world:
        connection = _Connection(world)
        packet = HEALTH * 2_000
        connection.protocol.pause_writing()
        gc.collect()

        assert await connection.receive(packet) == b""
        for _ in range(100):
            await asyncio.sleep(0)

        # Of the others, those of one piece are parsed.
        cycles = [o for o in gc.get_objects() if isinstance(o, RequestResponseCycle)]
        assert len(cycles) <= 4_096 // len(HEALTH) + 1
        assert not connection.transport.reads
        connection.protocol.resume_writing()
        answers = b""
        while not connection.transport.reads:
            answers += await connection.answers(b"")
        assert answers.count(b"HTTP/1.1 200 OK\r\n") == 2_000
        assert await connection.receive(AT_ONCE["row"]) != b""


@given(
    names=st.lists(st.sampled_from(["row", "no row", "lookup", "lookup chunked", "big", "health"])),
    cuts=st.lists(st.floats(0, 1), max_size=8),
)
@settings(max_examples=8)
def test_packets_of_any_size_have_the_answers_of_their_requests(
    names: list[str], cuts: list[float]
) -> None:
    big = _request("POST", f"{KEYS}/lookup", ARROW, body=_keys(*range(2_000)))
    requests = [big if name == "big" else AT_ONCE[name] for name in names]
    stream = b"".join(requests)
    places = sorted(int(cut * len(stream)) for cut in cuts)

    async def answer() -> None:
        with tempfile.TemporaryDirectory() as folder:
            async with _world(Path(folder)) as world:
                alone = {request: await _Connection(world).answers(request) for request in requests}
                connection, answers = _Connection(world), b""
                for start, end in itertools.pairwise([0, *places, len(stream)]):
                    answers += await connection.receive(stream[start:end])
                while connection.protocol.tasks or not connection.transport.reads:
                    answers += await connection.answers(b"")

                assert answers == b"".join(alone[request] for request in requests)

    asyncio.run(answer())


async def test_a_request_in_pieces_is_answered_once_it_is_whole(tmp_path: Path) -> None:
    async with _world(tmp_path) as world:
        request = AT_ONCE["lookup"]
        whole = await _Connection(world).answers(request)

        for cut in range(20, len(request), 37):
            connection = _Connection(world)
            assert await connection.receive(request[:cut]) == b""
            assert await connection.answers(request[cut:]) == whole


async def test_what_waits_goes_on_in_a_task(tmp_path: Path) -> None:
    async with _world(tmp_path) as world:
        connection, gone = _Connection(world), _Connection(world)
        request = _get("/v1/tables/events/buckets/0/fetch?offset=0&max_wait_ms=60000")

        assert await connection.receive(request) == b""
        assert await gone.receive(request) == b""
        await until(lambda: world.service.open_requests == 2)
        gone.protocol.connection_lost(None)
        await until(lambda: world.service.open_requests == 1)
        await world.append([(0, 0, event_rows(0, 3))])

        assert (await connection.answers(b"")).startswith(b"HTTP/1.1 200 OK\r\n")
        assert await connection.receive(AT_ONCE["row"]) != b""


async def test_who_reads_nothing_is_answered_by_a_task(tmp_path: Path) -> None:
    async with _world(tmp_path) as world:
        connection = _Connection(world)
        connection.protocol.pause_writing()

        assert await connection.receive(AT_ONCE["row"]) == b""
        connection.protocol.resume_writing()

        assert b'{"id": 7,' in await connection.answers(b"")


@pytest.mark.parametrize("name", ["row", "no row", "lookup", "fetch"])
async def test_what_was_answered_is_freed_without_a_search(tmp_path: Path, name: str) -> None:
    async with _world(tmp_path) as world:
        connection = _Connection(world)
        await connection.receive(AT_ONCE[name])
        gc.collect()
        gc.disable()
        try:
            for _ in range(20):
                await connection.receive(AT_ONCE[name])
            cycles = [o for o in gc.get_objects() if isinstance(o, RequestResponseCycle)]
        finally:
            gc.enable()

        # The last one is kept by its connection.
        assert len(cycles) <= 2


@pytest.mark.parametrize("end", ["rubbish", "shutdown", "drop"])
async def test_an_answer_leaves_before_its_connection_is_closed(tmp_path: Path, end: str) -> None:
    async with _world(tmp_path) as world:
        connection = _Connection(world)

        connection.protocol.data_received(AT_ONCE["row"])
        assert not connection.transport.sent
        if end == "rubbish":
            connection.protocol.data_received(b"rubbish\r\n\r\n")
        else:
            getattr(connection.protocol, end)()

        assert connection.transport.is_closed
        assert connection.take().startswith(b"HTTP/1.1 200 OK\r\n")


async def test_what_waits_behind_an_answered_request_is_not_idle(tmp_path: Path) -> None:
    async with _world(tmp_path) as world:
        connection = _Connection(world)
        waiting = _get("/v1/tables/events/buckets/0/fetch?offset=0&max_wait_ms=60000")

        assert b'"id"' in await connection.receive(AT_ONCE["row"] + waiting)
        await until(lambda: world.service.open_requests == 1)

        # Else it would be closed in the middle of it.
        assert connection.protocol.closes_at is None
        await world.append([(0, 0, event_rows(0, 3))])
        await until(lambda: not connection.protocol.tasks)
        assert connection.take().startswith(b"HTTP/1.1 200 OK\r\n")
        assert connection.protocol.closes_at is not None


async def test_nothing_begins_after_the_last_answer_of_a_connection(tmp_path: Path) -> None:
    async with _world(tmp_path) as world:
        connection = _Connection(world)
        body = append_body(EVENTS, [(0, 0, event_rows(0, 3))])
        append = _request("POST", "/v1/tables/events/append", ARROW, body=body)

        assert b'"id"' in await connection.receive(AT_ONCE["old kept"] + append)

        assert connection.transport.is_closed
        assert not connection.protocol.tasks


async def test_a_bug_where_no_task_is_there_is_not_the_clients(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def full(_: logging.LogRecord) -> bool:
        raise OSError("no log can be written")

    reports = logging.getLogger("streamhouse.storage_service.server._request_service")
    async with _world(tmp_path) as world:
        connection = _Connection(world)
        with caplog.at_level(logging.DEBUG, reports.name):
            reports.addFilter(full)
            try:
                answered = await connection.answers(AT_ONCE["no row"])
            finally:
                reports.removeFilter(full)

        assert answered.startswith(b"HTTP/1.1 500 Internal Server Error\r\n")
        assert connection.transport.is_closed
        assert world.service.open_requests == 0


@pytest.mark.parametrize("name", ["lookup", "lookup too large", "lookup untyped", "upsert"])
async def test_the_body_of_an_answered_request_is_not_kept(tmp_path: Path, name: str) -> None:
    async with _world(tmp_path, body_bytes_max=32_768, batch_bytes_max=32_768) as world:
        connection = _Connection(world)

        await connection.answers(AT_ONCE.get(name) or BY_TASK[name])

        assert not connection.protocol.cycle.body


async def test_each_request_of_a_lost_connection_is_told(tmp_path: Path) -> None:
    async with _world(tmp_path) as world:
        connection = _Connection(world)
        waiting = _get("/v1/tables/events/buckets/0/fetch?offset=0&max_wait_ms=60000")
        await connection.receive(waiting + AT_ONCE["row"])
        await until(lambda: world.service.open_requests == 1)

        connection.protocol.connection_lost(None)

        await until(lambda: world.service.open_requests == 0)


async def test_a_request_may_be_cancelled_before_its_task_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with _world(tmp_path) as world:
        connection = _Connection(world)
        unseen: list[object] = []
        monkeypatch.setattr(sys, "unraisablehook", unseen.append)

        def cancel() -> None:
            connection.protocol.data_received(_get("/v1/tables/events/subscribe"))
            for task in connection.protocol.tasks:
                task.cancel()

        asyncio.get_running_loop().call_soon(cancel)
        await until(lambda: connection.protocol.cycle is not None)
        await until(lambda: not connection.protocol.tasks)

        assert world.service.open_requests == 0
        assert unseen == []


async def test_a_head_does_not_count_what_came_before_it(tmp_path: Path) -> None:
    async with _world(tmp_path) as world:
        connection = _Connection(world)
        whole = _request("POST", f"{KEYS}/lookup", ARROW, body=_keys(*range(10_000)))
        next_head, rest = AT_ONCE["row"][:20], AT_ONCE["row"][20:]

        answered = await connection.answers(whole + next_head)

        assert answered.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b'{"id": 7,' in await connection.answers(rest)
        refused = await connection.answers(b"GET /" + b"x" * (65 << 10))
        assert refused.startswith(b"HTTP/1.1 400 Refused\r\n")


async def test_rubbish_is_refused_once(tmp_path: Path) -> None:
    async with _world(tmp_path) as world:
        connection = _Connection(world)

        refused = await connection.receive(b"x y\r\n" + b"x" * (65 << 10))

        assert refused.count(b"HTTP/1.1 400 Refused\r\n") == 1
        assert refused.endswith(b"}")


class _Walk:
    """Counts how often each product file is entered, on the threads of one request."""

    def __init__(self) -> None:
        self.is_on = False
        self.entered: Counter[str] = Counter()
        self._last: dict[int, str] = {}

    def __call__(self, frame: Any, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if (
            self.is_on
            and event == "call"
            and "/streamhouse/" in file
            and "/streamhouse/tests/" not in file
        ):
            thread = threading.get_ident()
            if self._last.get(thread) != file:
                self.entered[file.rpartition("/streamhouse/")[2]] += 1
            self._last[thread] = file


def _write(table: str, verb: str, bucket: int, sequence: int) -> bytes:
    rows = pa.record_batch([pa.array([7]), pa.array([f"name {sequence}"])], schema=EVENTS)
    body = append_body(EVENTS, [(bucket, sequence, rows)])
    return _request("POST", f"/v1/tables/{table}/{verb}?writer_id=a", ARROW, body=body)


WALKS: dict[str, Callable[[int, int], bytes]] = {
    "upsert of a row": lambda bucket, number: _write("keyed", "upsert", bucket, number),
    "append of a row": lambda _, number: _write("events", "append", 0, number),
    "lookup of a key": lambda *_: AT_ONCE["row"],
    "fetch": lambda *_: AT_ONCE["fetch"],
}


@pytest.mark.parametrize("name", WALKS)
async def test_a_request_enters_no_file_more_than_five_times(tmp_path: Path, name: str) -> None:
    walk, before = _Walk(), sys.getprofile()
    threading.setprofile(walk)
    try:
        async with _world(tmp_path) as world:
            bucket = int(buckets_for_rows(event_rows(7, 8), ("id",), 2)[0])
            connection = _Connection(world)
            for number in range(1, 4):
                await connection.answers(WALKS[name](bucket, number))
            sys.setprofile(walk)
            walk.is_on = True
            answer = await connection.answers(WALKS[name](bucket, 4))
            walk.is_on = False
    finally:
        sys.setprofile(before)
        threading.setprofile(None)  # type: ignore[arg-type]

    assert b" 200 OK" in answer
    assert len(walk.entered) > 10
    assert [file for file, count in walk.entered.items() if count > 5] == []
