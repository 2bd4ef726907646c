"""Requests over many kept connections, as wrk sends them: GETs of random keys, and writes.

wrk itself sends GETs where it is installed, else a client of the same shape in this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import uvloop

from benchmarks.harness import percentile

__all__ = ["Answers", "constant_server", "get_rows", "post_rows"]

_LENGTH = b"content-length: "
_WRK_SCRIPT = """
request = function()
  return wrk.format("GET", "%s" .. math.random(0, %d))
end
done = function(summary, latency, requests)
  local wrong = summary.errors.status + summary.errors.timeout
  io.write(string.format("\\nDONE %%d %%d %%d\\n", summary.requests, latency:percentile(99), wrong))
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """How many requests were answered in how many seconds, and the time of the slowest 1 %."""

    count: int
    p99_ms: float
    seconds: float

    @property
    def rate(self) -> float:
        """Answers a second."""
        return self.count / self.seconds


class _Connection(asyncio.Protocol):
    """One connection: sends the next request as soon as an answer is complete."""

    def __init__(self, requests: Iterator[bytes], times: list[float], end: float) -> None:
        self._requests = requests
        self._times = times
        self._end = end
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
        self._transport.write(next(self._requests))

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


def get_rows(endpoint: str, prefix: str, *, keys: int, connections: int, seconds: float) -> Answers:
    """Send `GET {prefix}{key}` for `seconds`, keys random below `keys`."""
    if wrk := shutil.which("wrk"):
        return _run_wrk(wrk, endpoint, prefix, keys, connections, seconds)
    rng = np.random.default_rng(1)
    host = endpoint.removeprefix("http://")
    requests = [
        [
            f"GET {prefix}{key} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()
            for key in rng.integers(0, keys, 500).tolist()
        ]
        for _ in range(connections)
    ]
    times = uvloop.run(_send(endpoint, list(map(itertools.cycle, requests)), seconds))
    return Answers(count=len(times), p99_ms=percentile(times, 0.99) * 1e3, seconds=seconds)


def post_rows(
    endpoint: str,
    paths: Sequence[Iterator[str]],
    bodies: Sequence[Iterator[bytes]],
    *,
    seconds: float,
) -> list[float]:
    """Send Arrow streams for `seconds` and return the seconds of each call.

    Each connection has a place in `paths` and `bodies`, with the next call's path and body.
    """
    host = endpoint.removeprefix("http://")

    def requests(path: Iterator[str], body: Iterator[bytes]) -> Iterator[bytes]:
        for target, rows in zip(path, body, strict=True):
            yield (
                f"POST {target} HTTP/1.1\r\nHost: {host}\r\n"
                f"Content-Type: application/vnd.apache.arrow.stream\r\n"
                f"Content-Length: {len(rows)}\r\n\r\n"
            ).encode() + rows

    return uvloop.run(_send(endpoint, list(map(requests, paths, bodies)), seconds))


@contextlib.contextmanager
def constant_server() -> Iterator[str]:
    """Run a server that reads nothing and answers always the same; yield its endpoint."""
    command = (sys.executable, "-c", _CONSTANT_SERVER)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        finally:
            server.terminate()


def _run_wrk(
    wrk: str, endpoint: str, prefix: str, keys: int, connections: int, seconds: float
) -> Answers:
    whole_s = max(1, round(seconds))
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        script.write(_WRK_SCRIPT % (prefix, keys - 1))
        script.flush()
        command = [wrk, "-t1", f"-c{connections}", f"-d{whole_s}s", "-s", script.name, endpoint]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    count, p99_us, wrong = output.rpartition("DONE ")[2].split()
    assert wrong == "0", output
    return Answers(count=int(count), p99_ms=int(p99_us) / 1e3, seconds=whole_s)


async def _send(endpoint: str, requests: Sequence[Iterator[bytes]], seconds: float) -> list[float]:
    host, port = endpoint.removeprefix("http://").split(":")
    loop = asyncio.get_running_loop()
    times: list[float] = []
    end = time.perf_counter() + seconds
    connections = []
    for own in requests:
        connection = _Connection(own, times, end)
        await loop.create_connection(lambda connection=connection: connection, host, int(port))
        connections.append(connection)
    await asyncio.gather(*(connection.done for connection in connections))
    return times
