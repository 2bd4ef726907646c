"""Requests that try to get out, to expand, to fill memory or to hold on; a real process."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
from pathlib import Path
from urllib.parse import urlsplit

import pyarrow as pa
import pytest

from streamhouse.client import StorageClient
from tests.support.in_process_service import append_body
from tests.support.service_process import ServiceProcess

pytestmark = pytest.mark.slow

SCHEMA = pa.schema([pa.field("id", pa.int64())])
_MIB = 1 << 20


async def _exchange(endpoint: str, request: bytes) -> tuple[int, bytes]:
    """Send raw bytes; return status and body of the answer. Status 0: closed without one."""
    parts = urlsplit(endpoint)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        writer.write(request)
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
        length = re.search(rb"content-length: (\d+)", head)
        body = await reader.readexactly(int(length[1])) if length else b""
        return int(head.split(b" ", 2)[1]), body
    except asyncio.IncompleteReadError:
        return 0, b""
    finally:
        writer.close()


def _request(method: str, target: str, body: bytes = b"", *headers: str, length: int = -1) -> bytes:
    is_arrow = target.endswith(("/append", "/stage"))
    lines = [
        f"{method} {target} HTTP/1.1",
        "host: localhost",
        f"content-type: application/{'vnd.apache.arrow.stream' if is_arrow else 'json'}",
        f"content-length: {len(body) if length < 0 else length}",
        *headers,
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


_NAMES = (
    "..", "../../escaped", "..%2f..%2fescaped", "%2e%2e/escaped", "a/../../escaped", "/etc/passwd",
    "a%00b", "a\\..\\b", "default.%2e%2e", "~", "tables/1", "con\u0663",
)  # fmt: skip


def _attempts(name: str) -> list[bytes]:
    schema = {"schema": [{"name": "id", "type": "bigint"}]}
    in_default = json.dumps({"path": f"default.{name}", **schema}).encode()
    part = name.encode("ascii", "ignore").decode()
    table = "/v1/tables/default.t"
    return [
        _request("POST", "/v1/databases", json.dumps({"name": name}).encode()),
        _request("POST", "/v1/tables", json.dumps({"path": name, **schema}).encode()),
        _request("POST", "/v1/tables", in_default),
        _request("GET", f"/v1/tables/{part}"),
        _request("DELETE", f"/v1/tables/{part}"),
        _request("GET", f"/v1/tables/{part}/buckets/0/fetch?offset=0"),
        _request("GET", f"{table}/buckets/{part}/fetch?offset=0"),
        _request("PUT", f"{table}/lake/pins/{part}", b'{"snapshot_id": "1", "ttl_ms": 1}'),
        _request("POST", f"{table}/transactions/{part}/stage"),
        _request("DELETE", f"/v1/databases/{part}"),
        _request("GET", f"/iceberg/v1/namespaces/{part}/tables/{part}"),
    ]


async def test_no_name_leads_out_of_the_data_directory(tmp_path: Path) -> None:
    data = tmp_path / "outer" / "data"
    with ServiceProcess(data) as service:
        for request in [request for name in _NAMES for request in _attempts(name)]:
            status, body = await _exchange(service.endpoint, request)
            assert 400 <= status < 500 or status == 501, (request, body)
        with StorageClient(service.endpoint) as client:
            assert client.list_tables() == []
            assert client.list_databases() == ["default"]
    assert {path.name for path in tmp_path.iterdir()} == {"outer"}
    assert {path.name for path in data.parent.iterdir()} == {"data"}
    assert list((data / "tables").iterdir()) == []


async def test_a_body_is_never_decompressed(tmp_path: Path) -> None:
    """100 MB of zeros in 100 kB: taken as the bytes they are, which are no JSON and no Arrow."""
    bomb = gzip.compress(bytes(100 * _MIB), 9)
    with ServiceProcess(tmp_path) as service, StorageClient(service.endpoint) as client:
        client.create_table("t", SCHEMA)
        for target in ("/v1/databases", "/v1/tables/t/append"):
            for encoding in ("gzip", "deflate", "br", "zstd"):
                status, body = await _exchange(
                    service.endpoint,
                    _request("POST", target, bomb, f"content-encoding: {encoding}"),
                )
                assert status == 400
                assert json.loads(body)["error"]["code"] == "invalid_request"
        assert _peak_mib(service) < 400


def _peak_mib(service: ServiceProcess) -> float:
    """The most memory the process ever had."""
    text = Path(f"/proc/{service.pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", text)
    assert found is not None
    return int(found[1]) / 1024


async def test_large_bodies_are_taken_one_by_one_and_memory_stays_bounded(tmp_path: Path) -> None:
    """Thirty bodies of almost 64 MB at once, of which the service takes what it may hold."""
    ids = pa.array(range(7 * _MIB // 4), pa.int64())
    rows = pa.record_batch({"id": ids, "other": ids})
    whole = append_body(rows.schema, [(0, 0, rows), (0, 0, rows)])
    assert 55 * _MIB < len(whole) < 64 * _MIB

    async def one(endpoint: str) -> int:
        try:
            status, body = await _exchange(endpoint, _request("POST", "/v1/tables/t/append", whole))
        except (ConnectionError, asyncio.IncompleteReadError):
            return 0
        assert status == 200 or json.loads(body)["error"]["code"] == "overloaded"
        return status

    async def all_at_once(endpoint: str) -> list[int]:
        return list(await asyncio.gather(*(one(endpoint) for _ in range(12))))

    arguments = ("--bodies-bytes-max", "128mb")
    with ServiceProcess(tmp_path, *arguments) as service, StorageClient(service.endpoint) as client:
        client.create_table("t", rows.schema)
        before = _peak_mib(service)
        statuses = await all_at_once(service.endpoint)
        rows_there = client.positions("t")[0].high_watermark

        # Two bodies held, each with its decoded form, and what the allocator keeps.
        assert _peak_mib(service) - before < 600
        assert statuses.count(200) >= 1
        assert rows_there == statuses.count(200) * 2 * rows.num_rows
        status, body = await _exchange(
            service.endpoint, _request("POST", "/v1/tables/t/append", length=65 * _MIB)
        )
        assert (status, json.loads(body)["error"]["code"]) == (413, "request_too_large")


async def test_half_open_connections_are_ended_and_hold_nobody_up(tmp_path: Path) -> None:
    """Half a head, half a body, and silence: 300 of them beside a client that works."""

    async def half(endpoint: str, request: bytes) -> tuple[int, bytes]:
        return await _exchange(endpoint, request)

    async def many(endpoint: str) -> list[tuple[int, bytes]]:
        body = _request("POST", "/v1/tables/t/append", b"half", length=1_000)
        requests = [
            b"",
            b"GET /v1/tab",
            b"POST /v1/tables HTTP/1.1\r\nhost: localhost\r\n",
            body,
        ] * 75
        return list(await asyncio.gather(*(half(endpoint, request) for request in requests)))

    arguments = ("--body-read-timeout-ms", "500", "--keep-alive-timeout-ms", "5s")
    with ServiceProcess(tmp_path, *arguments) as service, StorageClient(service.endpoint) as client:
        client.create_table("t", SCHEMA)
        answers = await many(service.endpoint)
        client.append("t", pa.table({"id": [1]}, schema=SCHEMA))

    assert [status for status, _ in answers] == [0, 0, 0, 400] * 75
    assert b"did not arrive within 500 ms" in answers[3][1]
