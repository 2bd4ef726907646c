"""GET of one key over 32 kept connections, as wrk does it; the service and the client share cores.

wrk itself does it where it is installed, else a client of the same shape in this process.

Keys are random among a million, in a table that fits in memory. The second figure is taken while
another client upserts and a worker tiers what it writes, the third while the service's own thread
(`--tiering embedded`) does: that one shares Python's lock with the answers. The limit is what the
same client gets from a Python server that reads nothing and answers always the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import uvloop

from benchmarks.harness import SCHEMA, make_rows, percentile, report
from streamhouse.storage_service.client import StorageClient
from tests.support.service_process import ServiceProcess

KEYS = 1_000_000
CONNECTIONS = 32
SECONDS = 5.0
BUCKETS = 4
UPSERT_ROWS = 5_000
UPSERT_PAUSE_S = 0.2
PATH = "bench_get_key"
_STREAMHOUSE = (sys.executable, "-c", "from streamhouse.cli import main; main()")
_LENGTH = b"content-length: "
_WRK_SCRIPT = f"""
request = function()
  return wrk.format("GET", "/v1/tables/{PATH}/rows/" .. math.random(0, {KEYS - 1}))
end
done = function(summary, latency, requests)
  local wrong = summary.errors.status + summary.errors.timeout
  io.write(string.format("\\nDONE %d %d %d\\n", summary.requests, latency:percentile(99), wrong))
end
"""


_CONSTANT_SERVER = """
import asyncio, uvloop
BODY = b"x" * 150
ANSWER = b"HTTP/1.1 200 OK\\r\\ncontent-length: %d\\r\\n\\r\\n" % len(BODY) + BODY
class Constant(asyncio.Protocol):
    def connection_made(self, transport):
        self.transport = transport
    def data_received(self, data):
        self.transport.write(ANSWER)
async def main():
    server = await asyncio.get_running_loop().create_server(Constant, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()
uvloop.run(main())
"""


class _Getter(asyncio.Protocol):
    """One connection: sends the next request as soon as an answer is complete."""

    def __init__(self, requests: list[bytes], times: list[float], end: float) -> None:
        self._requests = requests
        self._times = times
        self._end = end
        self._next = 0
        self._sent = 0.0
        self._received = b""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self._send()

    def _send(self) -> None:
        self._sent = time.perf_counter()
        if self._sent >= self._end:
            self._transport.close()
            return
        self._transport.write(self._requests[self._next])
        self._next = (self._next + 1) % len(self._requests)

    def data_received(self, data: bytes) -> None:
        data = self._received = self._received + data
        head = data.find(b"\r\n\r\n")
        if head < 0:
            return
        at = data.find(_LENGTH)
        length = int(data[at + len(_LENGTH) : data.index(b"\r", at)])
        if len(data) < head + 4 + length:
            return
        assert data.startswith(b"HTTP/1.1 200"), data
        self._received = b""
        self._times.append(time.perf_counter() - self._sent)
        self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)


def main() -> None:
    """Report requests/s and the time of the slowest hundredth, alone and while tiering runs."""
    base = make_rows(KEYS)
    limit = _constant_rate()
    with _service() as (service, client):
        _fill(client, base)
        _measure(service, "nothing else runs", limit)
        worker = subprocess.Popen(
            (*_STREAMHOUSE, "tier", "--endpoint", service.endpoint, "--threads", "1")
        )
        try:
            _measure_while_tiered(service, client, base, "while a worker tiers upserts", limit)
        finally:
            worker.terminate()
            worker.wait()
    with _service("--tiering", "embedded") as (service, client):
        _fill(client, base)
        _measure_while_tiered(service, client, base, "while its own thread tiers upserts", limit)


@contextlib.contextmanager
def _service(*arguments: str) -> Iterator[tuple[ServiceProcess, StorageClient]]:
    with (
        tempfile.TemporaryDirectory() as directory,
        ServiceProcess(Path(directory), *arguments) as service,
        StorageClient(service.endpoint) as client,
    ):
        yield service, client


def _fill(client: StorageClient, base: pa.RecordBatch) -> None:
    client.create_table(
        PATH,
        SCHEMA,
        primary_key=["id"],
        bucket_count=BUCKETS,
        properties={"table.datalake.freshness": "1s"},
    )
    client.upsert(PATH, pa.Table.from_batches([base]))


def _measure_while_tiered(
    service: ServiceProcess,
    client: StorageClient,
    base: pa.RecordBatch,
    what: str,
    limit: float,
) -> None:
    # The million rows themselves are not what is measured.
    while client.table_state(PATH).lake.snapshot_id is None:
        time.sleep(0.1)
    first = client.table_state(PATH).lake.snapshot_id
    stop = threading.Event()
    writer = threading.Thread(target=_upsert, args=(service.endpoint, base, stop))
    writer.start()
    _measure(service, what, limit)
    stop.set()
    writer.join()
    assert client.table_state(PATH).lake.snapshot_id != first, "nothing was tiered meanwhile"


def _constant_rate() -> float:
    """Return how many requests a second a server answers that does nothing for them."""
    with subprocess.Popen(
        (sys.executable, "-c", _CONSTANT_SERVER), stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        try:
            count, _ = _requests(f"http://127.0.0.1:{int(server.stdout.readline())}")
        finally:
            server.terminate()
    return count / SECONDS


def _requests(endpoint: str) -> tuple[int, float]:
    """Return how many requests were answered, and their p99 in milliseconds."""
    if wrk := shutil.which("wrk"):
        return _run_wrk(wrk, endpoint)
    host, port = endpoint.removeprefix("http://").split(":")
    times = uvloop.run(_get(host, int(port)))
    return len(times), percentile(times, 0.99) * 1e3


def _measure(service: ServiceProcess, what: str, limit: float) -> None:
    before_s = _cpu_seconds(service.pid)
    count, p99_ms = _requests(service.endpoint)
    cpu_us = (_cpu_seconds(service.pid) - before_s) / count * 1e6
    rate = count / SECONDS
    report(
        f"GET of one key of {KEYS:,}, {CONNECTIONS} connections, {what}",
        measured=f"{rate / 1e3:,.1f} k/s, p99 {p99_ms:.1f} ms, {cpu_us:.0f} us of the service's"
        " processor each",
        limit=f"a server that answers a constant: {limit / 1e3:,.1f} k/s",
        ratio=rate / limit,
        bar="at least 15 k/s, p99 under 10 ms",
        reached=rate >= 15_000 and p99_ms < 10,
    )


def _run_wrk(wrk: str, endpoint: str) -> tuple[int, float]:
    """Return how many requests wrk has sent, and its p99 in milliseconds."""
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        script.write(_WRK_SCRIPT)
        script.flush()
        command = [wrk, "-t1", f"-c{CONNECTIONS}", f"-d{SECONDS:.0f}s", "-s", script.name, endpoint]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    count, p99_us, wrong = output.rpartition("DONE ")[2].split()
    assert wrong == "0", output
    return int(count), int(p99_us) / 1e3


async def _get(host: str, port: int) -> list[float]:
    loop = asyncio.get_running_loop()
    rng = np.random.default_rng(1)
    times: list[float] = []
    end = time.perf_counter() + SECONDS
    getters = []
    for _ in range(CONNECTIONS):
        requests = [
            f"GET /v1/tables/{PATH}/rows/{key} HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode()
            for key in rng.integers(0, KEYS, 500).tolist()
        ]
        getter = _Getter(requests, times, end)
        await loop.create_connection(lambda getter=getter: getter, host, port)
        getters.append(getter)
    await asyncio.gather(*(getter.done for getter in getters))
    return times


def _upsert(endpoint: str, base: pa.RecordBatch, stop: threading.Event) -> None:
    rng = np.random.default_rng(2)
    with StorageClient(endpoint) as client:
        while not stop.wait(UPSERT_PAUSE_S):
            rows = base.take(pa.array(rng.choice(KEYS, UPSERT_ROWS, replace=False)))
            amounts = pa.array(rng.random(UPSERT_ROWS))
            place = rows.schema.get_field_index("amount")
            client.upsert(PATH, rows.set_column(place, SCHEMA.field("amount"), amounts))


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
