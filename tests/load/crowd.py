"""Many clients of every kind at once on one service: what each is told, and what it costs.

One-row appends over many connections, idle long polls, a reader that does not read beside one that
does, bodies of the largest size that is taken and one beyond it.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import pyarrow as pa

from streamhouse.api.client import StreamhouseClient
from streamhouse.core.wire.arrow_body import encode_append_body
from tests.support.service_process import ServiceProcess

__all__ = ["Crowd", "run_crowd"]

SCHEMA: Final = pa.schema([pa.field("id", pa.int64(), nullable=False)])
WIDE: Final = pa.schema([pa.field("blob", pa.binary())])
BUCKETS: Final = 8
BODY_BYTES: Final = 64 << 20


@dataclass(frozen=True)
class Crowd:
    """How many of each; then what was seen."""

    appends: int
    connections: int
    polls: int
    bodies: int


@dataclass
class Outcome:
    """What a run cost."""

    seconds: float = 0.0
    resident_bytes_max: int = 0
    probe_s_max: float = 0.0


def run_crowd(directory: Path, crowd: Crowd) -> Outcome:
    """Let them all in; raises AssertionError if any is not served as it should be."""
    with ServiceProcess(directory) as service, StreamhouseClient(service.endpoint) as client:
        for name, buckets in (("t", BUCKETS), ("idle", 1), ("probe", 1)):
            client.create_table(name, SCHEMA, bucket_count=buckets)
        client.create_table("big", WIDE)
        with _watched(service) as outcome:
            started_s = time.monotonic()
            asyncio.run(_scenario(service, client, crowd))
            outcome.seconds = time.monotonic() - started_s
        ends = client.positions("t").values()
        assert sum(p.high_watermark for p in ends) == crowd.appends
        ids = client.read("t")["id"].to_pylist()
        assert sorted(ids) == list(range(crowd.appends))
        assert client.positions("big")[0].high_watermark == 2 * crowd.bodies
        assert service.terminate() == 0
        return outcome


async def _scenario(service: ServiceProcess, client: StreamhouseClient, crowd: Crowd) -> None:
    polls = [await _poll(service.endpoint) for _ in range(crowd.polls)]
    with ThreadPoolExecutor(3 + crowd.bodies) as pool:
        loop = asyncio.get_running_loop()
        # It takes one batch, and no more until everything is written.
        slow = client.subscribe("t", start="earliest")
        fast = loop.run_in_executor(pool, _count_rows, service.endpoint, crowd.appends)
        bodies = [
            loop.run_in_executor(pool, _append_large, service.endpoint) for _ in range(crowd.bodies)
        ]
        share = crowd.appends // crowd.connections
        writers = [
            asyncio.ensure_future(_append_rows(service.endpoint, n * share, share))
            for n in range(crowd.connections)
        ]
        first = await loop.run_in_executor(pool, next, slow)
        try:
            await asyncio.gather(*writers, *bodies)
        except BaseException:
            # Who waits for the rows that are missing would wait for ever.
            service.kill()
            raise
        await fast
        rest = await loop.run_in_executor(pool, _drain, slow, crowd.appends - first.data.num_rows)
        assert rest == crowd.appends - first.data.num_rows
    await asyncio.to_thread(client.append, "idle", pa.table({"id": [1]}, schema=SCHEMA))
    lines = await asyncio.gather(*(reader.readline() for reader, _ in polls))
    assert set(lines) <= {b"HTTP/1.1 200 OK\r\n"}
    for _, writer in polls:
        writer.close()


async def _poll(endpoint: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await _connect(endpoint)
    path = "/v1/tables/idle/buckets/0/fetch?offset=0&max_wait_ms=600000"
    writer.write(f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
    return reader, writer


async def _connect(endpoint: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    address = urlsplit(endpoint)
    return await asyncio.open_connection(address.hostname, address.port)


async def _append_rows(endpoint: str, first: int, count: int) -> None:
    """Append rows one by one, each after the answer to the one before, over one connection."""
    reader, writer = await _connect(endpoint)
    for number in range(first, first + count):
        row = pa.record_batch({"id": [number]}, schema=SCHEMA)
        body = bytes(encode_append_body(SCHEMA, [(number % BUCKETS, 0, row)]))
        # Large bodies may take all the room there is: then small ones are refused too, and wait.
        while (status := await _post_small(reader, writer, body)) == 503:
            await asyncio.sleep(0.05)
        assert status == 200
    writer.close()


async def _post_small(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes
) -> int:
    head = (
        f"POST /v1/tables/t/append HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
        "content-type: application/vnd.apache.arrow.stream\r\n\r\n"
    )
    writer.write(head.encode() + body)
    answer = await reader.readuntil(b"\r\n\r\n")
    size = next(
        int(line.split(b":")[1])
        for line in answer.lower().split(b"\r\n")
        if line.startswith(b"content-length")
    )
    await reader.readexactly(size)
    return int(answer.split(b" ", 2)[1])


def _append_large(endpoint: str) -> None:
    """Append two rows that fill the largest body that is taken; a larger one is refused."""
    row = pa.record_batch({"blob": [bytes((BODY_BYTES >> 1) - 4_096)]}, schema=WIDE)
    body = encode_append_body(WIDE, [(0, 0, row), (0, 0, row)])
    assert BODY_BYTES * 0.99 < len(body) <= BODY_BYTES
    for data, expected in ((bytes(body), 200), (bytes(BODY_BYTES + 1), 413)):
        # The first may find that as many bodies as may be are on their way.
        while (status := _post(endpoint, data)) == 503:
            continue
        assert status == expected


def _post(endpoint: str, data: bytes) -> int:
    address = urlsplit(endpoint)
    assert address.hostname is not None
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=120)
    with contextlib.closing(connection):
        # Asked for before the body is sent: a refusal is heard in any case.
        connection.putrequest("POST", "/v1/tables/big/append")
        connection.putheader("content-length", str(len(data)))
        connection.putheader("content-type", "application/vnd.apache.arrow.stream")
        connection.endheaders()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.send(data)
        return connection.getresponse().status


def _count_rows(endpoint: str, count: int) -> None:
    with StreamhouseClient(endpoint) as client:
        assert _drain(client.subscribe("t", start="earliest"), count) == count


def _drain(batches: Iterator[object], count: int) -> int:
    found = 0
    while found < count:
        found += next(batches).data.num_rows  # type: ignore[attr-defined]
    return found


@contextlib.contextmanager
def _watched(service: ServiceProcess) -> Iterator[Outcome]:
    """Measure the service's memory and how long others wait for a call, all the time."""
    outcome, is_over = Outcome(), threading.Event()

    def watch() -> None:
        row = pa.table({"id": [1]}, schema=SCHEMA)
        with StreamhouseClient(service.endpoint, timeout_s=30) as client:
            while not is_over.wait(0.1):
                started_s = time.monotonic()
                client.append("probe", row)
                outcome.probe_s_max = max(outcome.probe_s_max, time.monotonic() - started_s)
                resident = service.anonymous_bytes
                outcome.resident_bytes_max = max(outcome.resident_bytes_max, resident)

    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(watch)
        try:
            yield outcome
        finally:
            is_over.set()
        watching.result()
