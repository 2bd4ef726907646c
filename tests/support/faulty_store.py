"""An object store that misbehaves: an HTTP proxy on loopback before a real one.

It delays, answers 503 or 409 without having done anything, or after it has done it, closes the
connection in place of an answer, does the request only after the caller was cut off, and is away
for a time. `FaultPlan` says how much of that. What it passes on it passes on whole: the store's own
signatures stay right.
"""

from __future__ import annotations

import contextlib
import http.client
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final, Literal

__all__ = ["CALM", "FaultPlan", "FaultyStore"]

Fault = Literal["delayed", "refused", "conflict", "done but 503", "answer lost", "done late"]

_TIMEOUT_S: Final = 60.0
_HOP_BY_HOP: Final = frozenset(("connection", "keep-alive", "transfer-encoding", "content-length"))
_FAULTS: Final[tuple[Fault, ...]] = (
    *("delayed", "refused", "conflict", "done but 503", "answer lost", "done late"),
)
_CONFLICT: Final = (
    b"<Error><Code>ConditionalRequestConflict</Code><Message>a conflicting operation</Message>"
    b"</Error>"
)
_BUSY: Final = b"<Error><Code>SlowDown</Code><Message>reduce your request rate</Message></Error>"


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan:
    """`share` of the requests meet one of `faults`; a delay is at most `delay_ms_max`."""

    share: float
    faults: tuple[Fault, ...] = _FAULTS
    delay_ms_max: int = 300

    def __post_init__(self) -> None:
        assert 0.0 <= self.share <= 1.0, self
        assert self.faults, self


CALM: Final = FaultPlan(share=0.0)


@dataclass
class _Request:
    method: str
    path: str
    headers: list[tuple[str, str]]
    body: bytes

    @property
    def is_conditional_put(self) -> bool:
        return self.method == "PUT" and any(n.lower() == "if-none-match" for n, _ in self.headers)


@dataclass
class FaultyStore:
    """Stands on a free port before the store on `port`; `plan` may be replaced at any time.

    The faults follow from `seed` and the order in which requests come. `met` counts them.
    """

    port: int
    seed: int = 0
    plan: FaultPlan = CALM
    met: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._random = random.Random(f"faulty store/{self.seed}")
        self._lock = threading.Lock()
        self._away_until_s = 0.0
        handler = type("Handler", (_Handler,), {"store": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True

    @property
    def endpoint(self) -> str:
        """The URL to give to those who use the store."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> FaultyStore:
        threading.Thread(
            target=self._server.serve_forever, args=(0.05,), name="faulty-store", daemon=True
        ).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def go_away(self, seconds: float) -> None:
        """Close every connection for so long, before anything is done."""
        with self._lock:
            self._away_until_s = time.monotonic() + seconds
            self.met["away"] += 1

    def come_back(self) -> None:
        """Be there again."""
        with self._lock:
            self._away_until_s = 0.0

    def calm(self) -> Counter[str]:
        """Be there again, without faults; return what was met since the last time."""
        self.plan = CALM
        self.come_back()
        with self._lock:
            met, self.met = self.met, Counter()
        return met

    @property
    def is_away(self) -> bool:
        """Whether it lets nobody through now."""
        return time.monotonic() < self._away_until_s

    def draw(self, request: _Request) -> tuple[Fault | None, float]:
        """Return what this request meets, and the seconds of a delay."""
        with self._lock:
            plan = self.plan
            if self._random.random() >= plan.share:
                return None, 0.0
            fault = self._random.choice(plan.faults)
            # Nothing but a conditional write is answered 409.
            if fault == "conflict" and not request.is_conditional_put:
                fault = "refused"
            self.met[fault] += 1
            return fault, self._random.uniform(0, plan.delay_ms_max) / 1_000

    def do_alone(self, request: _Request) -> None:
        """Do a request whose caller has long been cut off."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_TIMEOUT_S)
        # The store may have ended with the test.
        with contextlib.suppress(OSError, http.client.HTTPException):
            _do(connection, request)
        connection.close()


class _Handler(BaseHTTPRequestHandler):
    """One connection of a caller, with one of its own to the store."""

    store: FaultyStore
    protocol_version = "HTTP/1.1"
    # An answer leaves in two pieces; the second one would wait for the first one's receipt.
    disable_nagle_algorithm = True
    _upstream: http.client.HTTPConnection | None = None

    def handle(self) -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            super().handle()
        if self._upstream is not None:
            self._upstream.close()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Say nothing."""

    def _pass(self) -> None:
        if self.store.is_away:
            self.close_connection = True
            return
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        request = _Request(self.command, self.path, list(self.headers.items()), body)
        fault, delay_s = self.store.draw(request)
        self._answer(request, fault, delay_s)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass

    def _answer(self, request: _Request, fault: Fault | None, delay_s: float) -> None:
        if fault == "done late":
            self.close_connection = True
            threading.Timer(delay_s, self.store.do_alone, (request,)).start()
            return
        if fault == "refused":
            self._send(503, [], _BUSY)
            return
        if fault == "conflict":
            self._send(409, [], _CONFLICT)
            return
        if fault == "delayed":
            time.sleep(delay_s)  # sleep: being slow is what is asked of it
        status, headers, answer = self._do(request)
        if fault == "answer lost" or self.store.is_away:
            self.close_connection = True
        elif fault == "done but 503":
            self._send(503, [], _BUSY)
        else:
            self._send(status, headers, answer)

    def _do(self, request: _Request) -> tuple[int, list[tuple[str, str]], bytes]:
        if self._upstream is None:
            self._upstream = http.client.HTTPConnection(
                "127.0.0.1", self.store.port, timeout=_TIMEOUT_S
            )
        try:
            return _do(self._upstream, request)
        except BaseException:
            self._upstream.close()
            self._upstream = None
            raise

    def _send(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        self.send_response_only(status)
        length = str(len(body))
        for name, value in headers:
            if name.lower() == "content-length":
                length = value
            elif name.lower() not in _HOP_BY_HOP:
                self.send_header(name, value)
        if status != 204:
            # The answer to a HEAD names a length and has no body.
            self.send_header("Content-Length", length)
        self.end_headers()
        self.wfile.write(body)


def _do(
    connection: http.client.HTTPConnection, request: _Request
) -> tuple[int, list[tuple[str, str]], bytes]:
    connection.putrequest(request.method, request.path, skip_host=True, skip_accept_encoding=True)
    for name, value in request.headers:
        if name.lower() not in ("connection", "keep-alive"):
            connection.putheader(name, value)
    connection.endheaders(request.body)
    with connection.getresponse() as answer:
        return answer.status, answer.getheaders(), answer.read()
