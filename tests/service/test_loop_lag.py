"""Requests of hostile sizes on every route, from many connections: nobody else waits for them.

Routes and their bodies come from the service's own OpenAPI and its table of routes, so that a new
route is covered by itself, or fails the test.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple
from urllib.parse import quote

import pyarrow as pa
import pytest
import urllib3

from streamhouse.client import StorageClient
from streamhouse.storage_service.server.routes import Answer
from tests.support.in_process_service import ROUTE_TABLE, append_body
from tests.support.service_process import ServiceProcess

# Judged by the clock, which a busy machine does not bear.
pytestmark = [pytest.mark.slow, pytest.mark.long]

WIDE = pa.schema([pa.field("id", pa.int64(), nullable=False)]
                 + [pa.field(f"{'column' * 30}{i}", pa.int32()) for i in range(1_500)])  # fmt: skip
_JSON_BYTES = 3_900_000
_TABLES = 20
# What a loop that does work for all of a request's bytes or names took: 14 s.
_TOO_LONG_S = 2.5


class Request(NamedTuple):
    method: str
    target: str
    body: bytes
    content_type: str


def _large_values(schema: dict[str, Any]) -> Iterator[Any]:
    """Yield the largest values of a property, right and wrong ones."""
    kinds = {schema.get("type"), *(one.get("type") for one in schema.get("anyOf", ()))}
    names = [f"t{i % _TABLES}" for i in range(_JSON_BYTES // 8)]
    if "array" in kinds:
        yield names
        yield names[:10_000]
        yield [{"add": f"c{i}", "type": "int"} for i in range(1_000)]
    if "object" in kinds:
        yield {str(i): 1 for i in range(45_000)}
        yield {"x" * _JSON_BYTES: "y"}
    if "string" in kinds or not kinds - {None}:
        yield "x" * _JSON_BYTES


def _json_requests(openapi: dict[str, Any]) -> Iterator[Request]:
    """Yield requests to every control route: each property in turn has its largest values."""
    for path, methods in openapi["paths"].items():
        target = path.replace("{path}", "wide").replace("{", "").replace("}", "")
        for method, operation in methods.items():
            for parameter in operation.get("parameters", ()):
                if parameter["in"] == "query":
                    text = quote("[" + ",".join(["1"] * 15_000) + "]", safe="")[:60_000]
                    yield Request(method.upper(), f"{target}?{parameter['name']}={text}", b"", "")
            if "requestBody" not in operation:
                if method != "delete":
                    yield Request(method.upper(), target, b"", "application/json")
                continue
            content = operation["requestBody"]["content"]["application/json"]["schema"]
            name = content.get("$ref", "").rpartition("/")[2]
            model = openapi["components"]["schemas"].get(name, {"properties": {}})
            right = dict.fromkeys(model.get("required", ()), "t0") | {"epoch": 1}
            right |= {"path": "big"} if path == "/v1/tables" else {}
            bodies: list[Any] = [
                {field: value} for field, schema in model["properties"].items()
                for value in _large_values(schema)
            ]  # fmt: skip
            bodies += [{"schema": value, "properties": value} for value in (
                [{"name": f"c{i}", "type": "int"} for i in range(9_000)],
                {f"k{i}": "v" for i in range(40_000)},
            )]  # fmt: skip
            for body in bodies:
                data = json.dumps({**right, **body}).encode()
                yield Request(method.upper(), target, data, "application/json")


def _arrow_bodies() -> list[bytes]:
    rows = pa.RecordBatch.from_pylist([{"id": 1}], schema=pa.schema([WIDE.field("id")]))
    many = pa.schema([pa.field(f"n{i}", pa.int8()) for i in range(9_000)])
    wrong = pa.schema([WIDE.field("id"), pa.field("columx" * 30, pa.int32())])
    keys = pa.record_batch([pa.array(range(100_000), pa.int64())], schema=rows.schema)
    whole = pa.RecordBatch.from_arrays([pa.array([1], t) for t in WIDE.types], schema=WIDE)
    return [
        append_body(rows.schema, [(None, 0, rows)] * 4_000),
        append_body(many, []),
        append_body(wrong, []),
        append_body(rows.schema, [(None, 0, keys)]),
        append_body(WIDE, [(None, 0, whole)] * 3),
        append_body(rows.schema, []) [:-8] + b"\xff\xff\xff\xff\x00\x00\x00\x01" * 120_000,
        b"\xff\xff\xff\xff\x10\x00\x00\x00" + bytes(1_000_000),
    ]  # fmt: skip


def _data_requests() -> Iterator[Request]:
    """Yield requests to every data route; a route that is not known here fails the test."""
    arrow = "application/vnd.apache.arrow.stream"
    names = quote(json.dumps(list(WIDE.names)[:280]), safe="")
    numbers = quote(json.dumps({str(i): 0 for i in range(4_000)}), safe="")
    bodies = _arrow_bodies()
    for route in ROUTE_TABLE.rows:
        if route.answer is not Answer.DATA:
            continue
        method, name = route.method, route.name
        table = "wide" if name == "append" else "keyed"
        target = route.path.removesuffix("/...").format(path=table, bucket=0, transaction_id="x")
        if method == "POST":
            for body in bodies:
                yield Request(method, target, body, arrow)
        elif name in ("fetch", "subscribe"):
            offset = "offset=0&" if name == "fetch" else "start=never&"
            yield Request(method, f"{target}?{offset}columns={names}", b"", "")
            yield Request(method, f"{target}?offset=0&start={numbers}", b"", "")
        else:
            assert name in ("count", "row"), f"{name}: say what is hostile to it"
            yield Request(method, f"{target}/{'9' * 60_000}", b"", "")


def _catalog_requests() -> Iterator[Request]:
    names = {f"k{i}": "v" for i in range(40_000)}
    for target in ("namespaces", "namespaces/default/tables", "namespaces/default/properties"):
        for body in ({"namespace": ["x"] * 400_000}, {"updates": names, "properties": names}):
            yield Request(
                "POST", f"/iceberg/v1/{target}", json.dumps(body).encode(), "application/json"
            )


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with ServiceProcess(tmp_path_factory.mktemp("lag")) as started:
        with StorageClient(started.endpoint) as client:
            client.create_table("wide", WIDE)
            client.create_table("keyed", WIDE, primary_key=["id"])
            for number in range(_TABLES):
                client.create_table(f"t{number}", pa.schema([WIDE.field("id")]), bucket_count=4)
        yield started


class Watcher:
    """Asks for /health all the time; `longest_s` is the longest that an answer took."""

    def __init__(self, endpoint: str) -> None:
        self.longest_s = 0.0
        self.count = 0
        self._endpoint = endpoint
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        with urllib3.PoolManager() as pool:
            while not self._is_over.wait(0.02):
                started = time.perf_counter()
                assert pool.request("GET", f"{self._endpoint}/health").status == 200
                self.longest_s = max(self.longest_s, time.perf_counter() - started)
                self.count += 1


def _lag_counts(endpoint: str) -> tuple[float, float]:
    """Return how often the loop's lag was measured, and how often it was too long."""
    text = urllib3.request("GET", f"{endpoint}/metrics", timeout=60).data.decode()
    name = "streamhouse_event_loop_lag_seconds"
    buckets = dict(re.findall(rf'^{name}_bucket{{le="([^"]+)"}} (\S+)$', text, re.M))
    return float(buckets["+Inf"]), float(buckets["+Inf"]) - float(buckets[str(_TOO_LONG_S)])


def test_no_request_on_any_route_holds_the_event_loop(service: ServiceProcess) -> None:
    openapi = json.loads(
        urllib3.request("GET", f"{service.endpoint}/openapi.json", timeout=60).data
    )
    requests = [*_json_requests(openapi), *_data_requests(), *_catalog_requests()]
    assert len({(request.method, request.target.partition("?")[0]) for request in requests}) > 35
    slow: list[str] = []
    with urllib3.PoolManager(maxsize=8, retries=False, timeout=120) as pool:

        def send(request: Request) -> None:
            headers = {"content-type": request.content_type} if request.content_type else {}
            url = service.endpoint + request.target
            answer = pool.request(request.method, url, body=request.body or None, headers=headers)
            if answer.status == 500:
                slow.append(f"{request.method} {request.target[:80]}: {answer.data[:300]!r}")

        with Watcher(service.endpoint) as watcher, ThreadPoolExecutor(4) as threads:
            list(threads.map(send, requests))

    assert slow == []
    measured, too_long = _lag_counts(service.endpoint)
    assert measured > 10
    assert too_long == 0
    assert watcher.count > 20
    assert watcher.longest_s < 2 * _TOO_LONG_S


def test_unread_fetches_of_many_connections_hold_nobody_up(service: ServiceProcess) -> None:
    """Three hundred at once, of a table of many small batches."""
    rows = pa.table({"id": range(64)}, schema=pa.schema([WIDE.field("id")]))
    with StorageClient(service.endpoint) as client:
        for _ in range(200):
            client.append("t0", rows)
    host, _, port = service.endpoint.removeprefix("http://").partition(":")
    target = b"/v1/tables/t0/buckets/%d/fetch?offset=0&columns=id"
    fetch = b"GET " + target + b" HTTP/1.1\r\nhost: localhost\r\n\r\n"

    async def flood() -> None:
        opened = [await asyncio.open_connection(host, int(port), limit=1) for _ in range(300)]
        for number, (_, writer) in enumerate(opened):
            writer.write(b"".join(itertools.repeat(fetch % (number % 4), 20)))
        await asyncio.gather(*(writer.drain() for _, writer in opened))
        await asyncio.sleep(0.5)  # sleep: nobody reads meanwhile
        for _, writer in opened:
            writer.close()

    with Watcher(service.endpoint) as watcher:
        asyncio.run(flood())

    assert _lag_counts(service.endpoint)[1] == 0
    assert watcher.longest_s < 2 * _TOO_LONG_S
