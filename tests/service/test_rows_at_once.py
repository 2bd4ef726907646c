"""GET of one row by its short cut: what it answers, and what it leaves to the ordinary way."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path
from urllib.parse import urlsplit

import pyarrow as pa
import pytest

from streamhouse.client import StorageClient
from tests.support.service_process import ServiceProcess

pytestmark = pytest.mark.slow

SCHEMA = pa.schema([pa.field("id", pa.string(), nullable=False), pa.field("v", pa.int64())])
TOKEN = "a-token"


class _Connection:
    """One connection that sends bytes as given and reads answer after answer."""

    def __init__(self, endpoint: str) -> None:
        parts = urlsplit(endpoint)
        assert parts.hostname is not None
        self._socket = socket.create_connection((parts.hostname, parts.port or 0), timeout=60)
        self._file = self._socket.makefile("rb")

    def send(self, *requests: bytes) -> None:
        self._socket.sendall(b"".join(requests))

    def read(self) -> tuple[int, dict[str, str], bytes]:
        status = int(self._file.readline().split()[1])
        headers = {}
        while (line := self._file.readline()) != b"\r\n":
            name, _, value = line.decode().partition(":")
            headers[name.lower()] = value.strip()
        return status, headers, self._file.read(int(headers["content-length"]))

    def is_at_end(self) -> bool:
        return self._file.read(1) == b""

    def close(self) -> None:
        self._file.close()
        self._socket.close()


def _get(target: str, *headers: str, token: str = TOKEN, version: str = "1.1") -> bytes:
    lines = [f"GET {target} HTTP/{version}", "host: localhost", f"authorization: Bearer {token}"]
    return "\r\n".join([*lines, *headers, "", ""]).encode()


def _row(key: str, *headers: str, token: str = TOKEN, version: str = "1.1") -> bytes:
    return _get(f"/v1/tables/t/rows/{key}", *headers, token=token, version=version)


def test_rows_in_any_order_of_requests(tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_text(TOKEN)
    token_file.chmod(0o600)
    with (
        ServiceProcess(tmp_path / "data", "--token-file", str(token_file)) as service,
        StorageClient(service.endpoint, token=TOKEN) as client,
    ):
        client.create_table("t", SCHEMA, primary_key=["id"])
        client.upsert("t", pa.table({"id": ["a", "b/c", "é"], "v": [1, 2, 3]}, schema=SCHEMA))
        connection = _Connection(service.endpoint)

        connection.send(_row("a", "x-request-id: mine"))
        status, headers, body = connection.read()
        assert (status, json.loads(body)) == (200, {"id": "a", "v": 1})
        assert headers["x-request-id"] == "mine"
        assert headers["content-type"] == "application/json"

        # Everything at once: answered one by one, in order, the ordinary ones among them too.
        connection.send(
            _row("b%2Fc"),
            _row("%C3%A9"),
            _row("nobody"),
            _row("a", token="wrong"),
            _get("/v1/tables/t/count"),
            _row("a?x=1"),
            _row("a", "content-length: 2") + b"{}",
            _get("/v1/tables/default%2Et/rows/a"),
            _row("a"),
            _row("a", "origin: http://evil.example"),
            _row("a", "host: evil.example"),
            _row("a", "sec-fetch-site: cross-site"),
        )
        answers = [connection.read() for _ in range(12)]
        assert [status for status, _, _ in answers] == (
            [200, 200, 404, 401, 200, 400, 200, 200, 200, 403, 403, 403]
        )
        bodies = [json.loads(body) for _, _, body in answers]
        assert bodies[:2] == [{"id": "b/c", "v": 2}, {"id": "é", "v": 3}]
        assert bodies[2]["error"]["code"] == "row_not_found"
        assert bodies[4] == {"count": 3}
        assert bodies[6] == bodies[7] == bodies[8] == {"id": "a", "v": 1}

        # Read your writes, and one request in pieces.
        client.upsert("t", pa.table({"id": ["a"], "v": [9]}, schema=SCHEMA))
        request = _row("a")
        connection.send(request[:20])
        connection.send(request[20:])
        assert json.loads(connection.read()[2]) == {"id": "a", "v": 9}

        connection.send(_row("a", "connection: close"))
        assert connection.read()[0] == 200
        assert connection.is_at_end()
        connection.close()

        connection = _Connection(service.endpoint)
        connection.send(_get("/metrics"))
        counted = re.search(
            r'requests_total\{route="row",status="200"\} (\d+)', connection.read()[2].decode()
        )
        connection.close()
        assert counted is not None
        assert int(counted[1]) == 8
