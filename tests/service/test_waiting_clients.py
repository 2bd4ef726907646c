"""Many clients that wait, slow ones, and stopping under them; raw sockets where it matters."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import socket
from pathlib import Path
from urllib.parse import urlsplit

import pyarrow as pa
import pytest

from streamhouse.client import StorageClient
from tests.support.service_process import ServiceProcess
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

SCHEMA = pa.schema([pa.field("id", pa.int64())])
ROWS = pa.table({"id": range(100)}, schema=SCHEMA)


def _request(path: str, extra: str = "") -> bytes:
    return f"GET {path} HTTP/1.1\r\nhost: localhost\r\n{extra}\r\n".encode()


def _address(endpoint: str) -> tuple[str, int]:
    parts = urlsplit(endpoint)
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port


def _poll(offset: int) -> bytes:
    return _request(f"/v1/tables/t/buckets/0/fetch?offset={offset}&max_wait_ms=60000")


async def _status_line(reader: asyncio.StreamReader) -> str:
    return (await asyncio.wait_for(reader.readline(), 60)).decode().strip()


def _gauge(endpoint: str, name: str) -> float:
    with socket.create_connection(_address(endpoint), 60) as connection:
        connection.sendall(_request("/metrics", "connection: close\r\n"))
        text = b"".join(iter(lambda: connection.recv(65_536), b"")).decode()
    found = re.search(rf"^{name} (\S+)$", text, re.MULTILINE)
    assert found is not None, text
    return float(found.group(1))


async def test_a_thousand_idle_long_polls_cost_nothing_and_all_wake(tmp_path: Path) -> None:
    async def scenario(endpoint: str, client: StorageClient) -> None:
        connections = []
        for _ in range(1_000):
            reader, writer = await asyncio.open_connection(*_address(endpoint))
            writer.write(_poll(0))
            connections.append((reader, writer))
        while await asyncio.to_thread(_gauge, endpoint, "streamhouse_waiting_requests") < 1_000:
            await asyncio.sleep(0.01)
        # Others are served as if nobody waited.
        assert await asyncio.to_thread(client.list_tables) == ["default.t"]

        await asyncio.to_thread(client.append, "t", ROWS)

        statuses = await asyncio.gather(*(_status_line(reader) for reader, _ in connections))
        assert set(statuses) == {"HTTP/1.1 200 OK"}
        for _, writer in connections:
            writer.close()

    with ServiceProcess(tmp_path) as service, StorageClient(service.endpoint) as client:
        client.create_table("t", SCHEMA)
        await scenario(service.endpoint, client)


def test_waiting_clients_that_go_away_leave_nothing_behind(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path) as service, StorageClient(service.endpoint) as client:
        client.create_table("t", SCHEMA)
        with contextlib.ExitStack() as stack:
            for path in (_poll(0), _request("/v1/tables/t/subscribe")) * 20:
                connection = socket.create_connection(_address(service.endpoint), 60)
                stack.enter_context(connection)
                connection.sendall(path)
            _until(service, "streamhouse_waiting_requests", 40)
            assert _gauge(service.endpoint, "streamhouse_subscriptions") == 20

        _until(service, "streamhouse_waiting_requests", 0)
        _until(service, "streamhouse_subscriptions", 0)
        # This very request is the one that is open.
        _until(service, "streamhouse_open_requests", 1)


def _until(service: ServiceProcess, gauge: str, value: float) -> None:
    wait_until(
        lambda: _gauge(service.endpoint, gauge) == value,
        lambda: f"{gauge} is {_gauge(service.endpoint, gauge)}, not {value}",
    )


async def test_stopping_answers_waiting_clients_and_ends_subscriptions_cleanly(
    tmp_path: Path,
) -> None:
    async def scenario(service: ServiceProcess) -> None:
        address = _address(service.endpoint)
        poll_reader, poll_writer = await asyncio.open_connection(*address)
        poll_writer.write(_poll(0))
        push_reader, push_writer = await asyncio.open_connection(*address)
        push_writer.write(_request("/v1/tables/t/subscribe"))
        assert await _status_line(push_reader) == "HTTP/1.1 200 OK"
        while _gauge(service.endpoint, "streamhouse_waiting_requests") < 2:
            await asyncio.sleep(0.01)

        service.send(signal.SIGTERM)

        assert await _status_line(poll_reader) == "HTTP/1.1 200 OK"
        pushed = await asyncio.wait_for(push_reader.read(), 60)
        assert pushed.endswith(b"0\r\n\r\n"), "the last chunk of a chunked answer"
        poll_writer.close()
        push_writer.close()
        assert service.wait() == 0

    with ServiceProcess(tmp_path) as service:
        with StorageClient(service.endpoint) as client:
            client.create_table("t", SCHEMA)
        await scenario(service)


def test_a_subscriber_that_never_reads_neither_grows_memory_nor_holds_up_the_stop(
    tmp_path: Path,
) -> None:
    wide = pa.table({"id": range(100_000)}, schema=SCHEMA)
    with ServiceProcess(tmp_path) as service, StorageClient(service.endpoint) as client:
        client.create_table("t", SCHEMA)
        with contextlib.ExitStack() as stack:
            for _ in range(20):
                connection = socket.create_connection(_address(service.endpoint), 60)
                stack.enter_context(connection)
                connection.sendall(_request("/v1/tables/t/subscribe?start=earliest"))
            for _ in range(20):
                client.append("t", wide)
            before = service.anonymous_bytes
            for _ in range(60):
                client.append("t", wide)
            # 48 MB more for each of the 20: queueing them would take a gigabyte.
            assert service.anonymous_bytes - before < 250 << 20

            assert service.terminate() == 0
            assert "stop_cut_short" not in service.log_text()


def _error_of(answer: bytes) -> tuple[str, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    error = json.loads(body)["error"]
    return head.split(b" ")[1].decode(), error["code"]


def _exchange(endpoint: str, data: bytes) -> bytes:
    """Send bytes and return all that comes until the service closes the connection."""
    with socket.create_connection(_address(endpoint), 60) as connection:
        connection.sendall(data)
        return b"".join(iter(lambda: connection.recv(65_536), b""))


def test_peers_that_are_no_clients_are_answered_or_closed(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path, "--keep-alive-timeout-ms", "300") as service:
        for bad in (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", b"GARBAGE\r\n\r\n", b"GET\r\n\r\n"):
            assert _error_of(_exchange(service.endpoint, bad)) == ("400", "invalid_request")
        endless = b"GET / HTTP/1.1\r\n" + b"x: " + b"y" * 70_000
        assert _error_of(_exchange(service.endpoint, endless)) == ("400", "invalid_request")
        for silent in (b"", b"GET / HT", b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: "):
            assert _exchange(service.endpoint, silent) == b""


def test_a_client_that_asks_before_it_sends_a_body_is_answered_first(tmp_path: Path) -> None:
    head = (
        b"POST /v1/tables/t/append HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n"
        b"content-type: application/vnd.apache.arrow.stream\r\nexpect: 100-continue\r\n\r\n"
    )
    with (
        ServiceProcess(tmp_path) as service,
        socket.create_connection(_address(service.endpoint), 60) as connection,
    ):
        with StorageClient(service.endpoint) as client:
            client.create_table("t", SCHEMA)

        connection.sendall(head % 5)
        assert connection.recv(65_536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(b"hello")
        assert _error_of(connection.recv(65_536)) == ("400", "invalid_request")

        connection.sendall(head % (1 << 40))
        assert _error_of(connection.recv(65_536)) == ("413", "request_too_large")


def test_idle_connections_make_room_and_those_in_use_do_not(tmp_path: Path) -> None:
    arguments = ("--connections-max", "4", "--drain-timeout-ms", "100")
    with ServiceProcess(tmp_path, *arguments) as service:
        with StorageClient(service.endpoint) as client:
            client.create_table("t", SCHEMA)
        with contextlib.ExitStack() as stack:

            def connection(request: bytes) -> socket.socket:
                made = stack.enter_context(socket.create_connection(_address(service.endpoint), 60))
                made.sendall(request)
                return made

            poll = _request("/v1/tables/t/buckets/0/fetch?offset=0&max_wait_ms=60000")
            for _ in range(3):
                connection(poll)
            idle = connection(_request("/health"))
            assert idle.recv(65_536).startswith(b"HTTP/1.1 200")
            # Two more requests at once than connections: the idle one gives its place up.
            late = connection(_request("/ready"))
            assert late.recv(65_536).startswith(b"HTTP/1.1 200")
            assert idle.recv(65_536) == b""

            status = _exchange(service.endpoint, _request("/metrics", "connection: close\r\n"))
            assert b"streamhouse_idle_connections_closed 2" in status
            # A fourth request that waits would leave no connection for anybody else.
            assert _error_of(connection(poll).recv(65_536)) == ("503", "overloaded")
            health = _exchange(service.endpoint, _request("/health", "connection: close\r\n"))
            assert health.startswith(b"HTTP/1.1 200")

        _until_connected(service)


def _until_connected(service: ServiceProcess) -> None:
    """The places of closed connections are free again."""
    ask = _request("/health", "connection: close\r\n")
    wait_until(
        lambda: _exchange(service.endpoint, ask).startswith(b"HTTP/1.1 200"),
        "the service takes new connections",
    )
