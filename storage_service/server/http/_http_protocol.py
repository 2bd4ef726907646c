"""uvicorn's HTTP connection with bounds it does not have: how many, how long and how large a head.

Most of this is about peers that are no well-behaved client: too many of them, silent ones, ones
that send a request line for ever, ones that do not speak HTTP, ones that send requests without
reading an answer. A connection reads on only when the requests that it has read are answered.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
from collections.abc import Callable, Coroutine
from typing import Any, Final

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from streamhouse.core.errors import (
    InvalidRequestError,
    OverloadedError,
    StreamhouseError,
)
from streamhouse.storage_service.server.http._own_task import go_on
from streamhouse.storage_service.server.http.http_exchange import (
    BODY_KEY,
    CONNECTION_KEY,
    Headers,
    error_to_json,
)
from streamhouse.storage_service.server.http.open_connections import OpenConnections

__all__ = ["bounded_protocol"]

HEAD_BYTES_MAX: Final = 64 << 10
# What is parsed at a time: the requests in it, 230 of the shortest, are the most that a connection
# has in memory as objects. A body is parsed whole.
_PARSED_BYTES: Final = 4 << 10
# Far less than what makes a connection pause its writers.
_TOGETHER_BYTES_MAX: Final = 16 << 10
# What no head may have, besides the ends of its lines.
_CONTROL: Final = bytes([*range(9), *range(10, 32), 127])


def bounded_protocol(connections: OpenConnections, *, timeout_ms: int) -> type[asyncio.Protocol]:
    """Return a connection class with these limits; uvicorn makes one object a connection.

    `timeout_ms` is how long a head may take, and how long the next one may be awaited.
    """

    class BoundedHttpProtocol(_BoundedHttpProtocol):
        open_connections = connections
        timeout_s = timeout_ms / 1000
        together = _Together()

    return BoundedHttpProtocol


class _Together:
    """Small answers that leave at the end of this turn of the loop, all connections' together.

    Each one that is sent may wake its client. Clients that are woken one by one, between answers,
    send one by one: measured with 32 connections, that costs the service a fifth of its processor.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[asyncio.Transport, bytes]] = []

    def write(self, transport: asyncio.Transport, data: bytes) -> None:
        """Send `data` soon."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self.flush)
        self._waiting.append((transport, data))

    def flush(self) -> None:
        """Send all of it now: something else is to be written, or a connection to be closed."""
        waiting, self._waiting = self._waiting, []
        for transport, data in waiting:
            if not transport.is_closing():
                transport.write(data)


class _Reading(FlowControl):
    """uvicorn's flow control of a connection, which asks `may_read_on` before it reads on."""

    def __init__(self, transport: asyncio.Transport, may_read_on: Callable[[], bool]) -> None:
        super().__init__(transport)
        self._may_read_on = may_read_on

    def resume_reading(self) -> None:
        if self._may_read_on():
            super().resume_reading()


async def _raise(error: BaseException) -> None:
    raise error


class _BoundedHttpProtocol(HttpToolsProtocol):
    open_connections: OpenConnections
    timeout_s: float
    together: _Together
    _answered: RequestResponseCycle | None = None
    """Of the requests that have arrived, the one whose turn it is."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._timer: asyncio.TimerHandle | None = None
        self.closes_at: float | None = None
        """When it is closed unless a head, or the next request, has come by then."""
        self._head_bytes: int | None = 0
        """What has come of the head that has begun; None if none has."""
        # Whether the piece that is being read has the end of another request.
        self._is_shared = False
        # Of what came in one piece one request only begins at once: others have their turn.
        self._may_begin = False
        self._unbegun: RequestResponseCycle | None = None
        # Bytes that have arrived behind requests which are not answered, and are not parsed yet.
        self._unparsed = b""
        self._parses_soon = False
        # Of the body that is being parsed.
        self._body_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Reading(transport, self._may_read_on)
        self.drain = self.flow.drain
        self.unsent_bytes = transport.get_write_buffer_size
        # A stalled answer is given up by cutting the connection: closing would wait for the peer.
        self.abort = transport.abort
        try:
            self.open_connections.opened(self, self.client[0] if self.client else None)
        except OverloadedError as error:
            self._refuse(error)
            return
        self._close_later()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._unparsed = b""
        self.open_connections.closed(self)
        super().connection_lost(exc)
        answered = self._answered
        if answered is not None and not answered.response_complete:
            # Of several that have arrived, uvicorn tells the last one only.
            answered.disconnected = True
            answered.message_event.set()

    def shutdown(self) -> None:
        """Close once what is in progress is answered."""
        self.together.flush()
        super().shutdown()

    def drop(self) -> None:
        """Close at once and give the place to another connection."""
        self.together.flush()
        self.open_connections.closed(self)
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self.pipeline or self._unparsed:
            # TLS hands on what it had decrypted before it was told to pause.
            self._unparsed += data
        else:
            self._parse(data)

    def _parse(self, data: bytes) -> None:
        """Parse until a request has to wait for the one before it; keep the other bytes."""
        self._may_begin = not self.flow.write_paused
        if len(data) <= _PARSED_BYTES:
            self._parse_piece(data)
        else:
            pieces, parsed = memoryview(data), 0
            while parsed < len(data) and not self.pipeline:
                end = parsed + max(_PARSED_BYTES, self._missing_bytes())
                self._parse_piece(pieces[parsed:end])
                parsed = end
            self._unparsed = data[parsed:]
            if self._unparsed:
                self.flow.pause_reading()
        self._may_begin = False
        if self._unbegun is not None:
            # Its body has not arrived yet.
            super()._start_asgi_task(self._unbegun, self.app)
            self._unbegun = None

    def _missing_bytes(self) -> int:
        """Return how many bytes have to come of a body whose length is announced."""
        if self._head_bytes is not None or not self.cycle.more_body:
            return 0
        length = next((text for name, text in self.headers if name == b"content-length"), b"0")
        # A length that is no number is the parser's to refuse.
        return int(length) - self._body_bytes if length.isdigit() else 0

    def _may_read_on(self) -> bool:
        """Whether all that was read is parsed, and every request of it is answered or begun."""
        if self._unparsed and not self.pipeline and not self._parses_soon:
            # In a turn of its own: the other connections have theirs before.
            self._parses_soon = True
            self.loop.call_soon(self._parse_on)
        return not self.pipeline and not self._unparsed

    def _parse_on(self) -> None:
        self._parses_soon = False
        if self.pipeline or self.transport.is_closing():
            return
        data, self._unparsed = self._unparsed, b""
        self._parse(data)
        self.flow.resume_reading()

    def _parse_piece(self, data: bytes | memoryview) -> None:
        if self.transport.is_closing():
            return
        self._is_shared = False
        super().data_received(data)  # type: ignore[arg-type]
        if self._head_bytes is None or self.transport.is_closing():
            return
        self._close_later()
        if not self._is_shared:
            self._head_bytes += len(data)
        if self._head_bytes > HEAD_BYTES_MAX:
            self._refuse(
                InvalidRequestError(f"the request's headers have more than {HEAD_BYTES_MAX} bytes")
            )

    def on_message_begin(self) -> None:
        super().on_message_begin()
        scope: Any = self.scope
        scope[CONNECTION_KEY] = self
        self._head_bytes, self.closes_at = 0, None

    def on_headers_complete(self) -> None:
        self._head_bytes = self.closes_at = None
        self._body_bytes = 0
        self.open_connections.in_use(self)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if self.transport.is_closing():
            # The answer before was the last one, and this request came with it.
            return
        self._answered = cycle
        if self._may_begin:
            self._may_begin = False
            self._unbegun = cycle
        else:
            super()._start_asgi_task(cycle, app)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._is_shared = True
        cycle, self._unbegun = self._unbegun, None
        if cycle is not None:
            self._begin(cycle)

    def _begin(self, cycle: RequestResponseCycle) -> None:
        """Answer a request that is whole; it gets a task when it waits, see `own_task`."""
        scope: Any = cycle.scope
        scope[BODY_KEY] = cycle.body
        app: Any = self.app
        answering: Coroutine[Any, None, None] = app(scope, cycle.receive, cycle.send)
        context = contextvars.copy_context()
        try:
            context.run(answering.send, None)
        except StopIteration:
            if not cycle.response_complete:
                # Its client is gone, or it met a bug when nothing could be answered any more.
                self.together.flush()
                self.transport.close()
            return
        except BaseException as error:  # noqa: BLE001 - the parser would take it for its own
            answering = _raise(error)
        task = self.loop.create_task(cycle.run_asgi(lambda *_: go_on(answering)), context=context)
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)

    @property
    def write_paused(self) -> bool:
        """Whether the client has to take something before it is given more."""
        return self.flow.write_paused

    def write_whole(self, status: int, headers: Headers, body: bytes) -> None:
        """Do what `send` of the request whose turn it is does with an answer, in one piece.

        Head and body in two would be two packets: on a busy machine the client, woken by the first
        one, takes the processor before the second one is sent (measured: 0.3 to 0.5 ms).
        """
        cycle = self._answered
        assert cycle is not None
        if cycle.disconnected:
            return
        headers = [*cycle.default_headers, *headers]
        if not cycle.keep_alive:
            headers.append((b"connection", b"close"))
        lines = [b"%b: %b\r\n" % header for header in headers]
        head = b"".join([STATUS_LINE[status], *lines, b"\r\n"])
        if len(head.translate(None, _CONTROL)) != len(head) - 2 * (len(headers) + 2):
            raise RuntimeError("a header of the answer has a control character")
        if cycle.scope["method"] == "HEAD":
            body = b""
        if len(body) <= _TOGETHER_BYTES_MAX and cycle.keep_alive and not self.unsent_bytes():
            self.together.write(self.transport, head + body)
        else:
            self.together.flush()
            self.transport.writelines((head, body))
        cycle.response_started = cycle.response_complete = True
        cycle.waiting_for_100_continue = False
        cycle.message_event.set()
        if not cycle.keep_alive:
            self.transport.close()
        cycle.on_response()

    def on_response_complete(self) -> None:
        """Begin the next request that has come, or wait for one."""
        if self._answered is not None:
            # A body that nobody has read would be kept until the next request.
            self._answered.body.clear()
        if not self.transport.is_closing():
            if self.pipeline:
                self._start_asgi_task(*self.pipeline.pop())
                return
            self.flow.resume_reading()
            self._close_later()
        self.open_connections.idle(self)

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are no HTTP request like any other error."""
        self._refuse(InvalidRequestError(msg))

    def _close_later(self) -> None:
        """Close after a while, unless `closes_at` is None by then."""
        if self.closes_at is None:
            self.closes_at = self.loop.time() + self.timeout_s
            # Setting one and taking it back for each would cost a twentieth of a small request.
            self._timer = self._timer or self.loop.call_later(self.timeout_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self.closes_at is None or self.transport.is_closing():
            return
        if self.loop.time() < self.closes_at:
            self._timer = self.loop.call_at(self.closes_at, self._on_timer)
        else:
            self.transport.close()

    def _refuse(self, error: StreamhouseError) -> None:
        """Answer `error` without a request to answer to, and close the connection."""
        self.together.flush()
        body = json.dumps(error_to_json(error, request_id="")).encode()
        self.transport.write(
            b"HTTP/1.1 %d Refused\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
            b"connection: close\r\n\r\n%s" % (error.http_status, len(body), body)
        )
        self.transport.close()
