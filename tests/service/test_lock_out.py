"""Connections that do nothing and bodies that do not arrive lock nobody out; a real process."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path
from urllib.parse import urlsplit

import pyarrow as pa
import pytest

from streamhouse.client import StorageClient
from tests.support.service_process import ServiceProcess

pytestmark = pytest.mark.slow

SCHEMA = pa.schema([pa.field("id", pa.int64())])
CONNECTIONS_MAX = 200
_HEADS = (
    b"",
    b"GET /v1/tab",
    b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n",
    b"POST /v1/tables/t/append HTTP/1.1\r\nhost: localhost\r\n",
)
_SLOW_BODY = (
    b"POST /v1/tables/t/append HTTP/1.1\r\nhost: localhost\r\ncontent-length: 60000000\r\n"
    b"content-type: application/vnd.apache.arrow.stream\r\n\r\n" + bytes(1_000)
)


def test_idle_connections_and_bodies_that_do_not_arrive_lock_nobody_out(tmp_path: Path) -> None:
    """Five times as many idle connections as there may be, and bodies of six times the memory
    there is: reads, writes and who looks after the service get in."""
    arguments = ("--connections-max", str(CONNECTIONS_MAX), "--bodies-bytes-max", "128mb")
    with ServiceProcess(tmp_path, *arguments) as service, contextlib.ExitStack() as stack:
        parts = urlsplit(service.endpoint)

        def connect(data: bytes) -> socket.socket:
            connection = socket.create_connection((parts.hostname, parts.port or 0), 60)
            stack.enter_context(connection)
            connection.sendall(data)
            return connection

        def new_client() -> StorageClient:
            return stack.enter_context(StorageClient(service.endpoint))

        new_client().create_table("t", SCHEMA)
        for _ in range(12):
            connect(_SLOW_BODY)
        for number in range(5 * CONNECTIONS_MAX):
            connect(_HEADS[number % len(_HEADS)])
            if number % CONNECTIONS_MAX == 0:
                health = connect(_HEADS[2])
                assert health.recv(65_536).startswith(b"HTTP/1.1 200")
                new_client().append("t", pa.table({"id": [number]}, schema=SCHEMA))
                new_client().create_table(f"t{number}", SCHEMA)
        assert new_client().positions("t")[0].high_watermark == 5
