"""uvicorn's HTTP connection with additional bounds: count, idle time, and size of a request head.

Most of the code handles peers that misbehave: too many peers, silent peers, endless request lines,
other protocols, and peers that send requests without reading answers. A connection reads on only
when all its earlier requests are answered.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
import os
import re
import urllib.parse
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
from streamhouse.storage_service.server.http._own_task import continued
from streamhouse.storage_service.server.http.http_exchange import (
    BODY_KEY,
    CONNECTION_KEY,
    Headers,
    error_to_json,
)
from streamhouse.storage_service.server.http.open_connections import OpenConnections

__all__ = ["HEAD_BYTES_MAX", "BoundedHttpProtocol", "bounded_protocol"]

HEAD_BYTES_MAX: Final = 64 << 10
# The bytes parsed at a time. This bounds the request objects of a connection: 230 of the shortest.
# A body is parsed whole.
_PARSED_BYTES: Final = 4 << 10
_GET: Final = b"GET "
_HEAD_END: Final = b"\r\n\r\n"
# A request line that means the same to every parser: a path without a query.
_PLAIN_LINE: Final = re.compile(rb"GET (/[A-Za-z0-9._~$%:/-]*) HTTP/1\.1")
# A GET with one of these headers may have a body, or wants more than an answer.
_NOT_PLAIN: Final = frozenset((b"content-length", b"transfer-encoding", b"expect", b"upgrade"))
# Far less than what makes a connection pause its writers.
_TOGETHER_BYTES_MAX: Final = 16 << 10
# Bytes that no head may have, besides the line ends.
_CONTROL: Final = bytes([*range(9), *range(10, 32), 127])


def bounded_protocol(
    connections: OpenConnections,
    *,
    timeout_ms: int,
    base: type[BoundedHttpProtocol] | None = None,
) -> type[BoundedHttpProtocol]:
    """Return a connection class with these limits; uvicorn makes an object for each connection.

    `timeout_ms` limits the time to receive a head, and the idle time between requests.
    """
    members = {
        "open_connections": connections,
        "timeout_s": timeout_ms / 1000,
        "together": _Together(),
    }
    return type("HttpProtocol", (base or BoundedHttpProtocol,), members)


class _Together:
    """Small answers of all connections, sent together at the end of the loop's iteration.

    Sending an answer may wake the client. Clients woken between answers send their next requests
    separately: measured with 32 connections, this costs the service a fifth of its processor time.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[asyncio.Transport, bytes]] = []

    def write(self, transport: asyncio.Transport, data: bytes) -> None:
        """Send `data` at the end of the loop's iteration."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self.flush)
        self._waiting.append((transport, data))

    def flush(self) -> None:
        """Send all waiting answers now, before another write or the end of a connection."""
        waiting, self._waiting = self._waiting, []
        for transport, data in waiting:
            if not transport.is_closing():
                transport.write(data)


class _Reading(FlowControl):
    """uvicorn's flow control of a connection, with `may_read_on` as a further condition."""

    def __init__(self, transport: asyncio.Transport, may_read_on: Callable[[], bool]) -> None:
        super().__init__(transport)
        self._may_read_on = may_read_on

    def resume_reading(self) -> None:
        if self._may_read_on():
            super().resume_reading()


async def _raise(error: BaseException) -> None:
    raise error


class BoundedHttpProtocol(HttpToolsProtocol):
    open_connections: OpenConnections
    timeout_s: float
    together: _Together
    reads = moves = 0
    stays_until_s = 0.0
    is_given_back = False
    _answered: RequestResponseCycle | None = None
    """The request that is being answered; later requests of the connection wait."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._timer: asyncio.TimerHandle | None = None
        self.closes_at: float | None = None
        """The deadline for the rest of a head, or for the next request; None without a deadline."""
        self._head_bytes: int | None = 0
        """The bytes received of an incomplete head; None outside a head."""
        # Whether the piece being parsed contains the end of another request.
        self._is_shared = False
        # Only one request of a piece begins at once: the other connections have their turn first.
        self._may_begin = False
        self._unbegun: RequestResponseCycle | None = None
        # Bytes that arrived behind unanswered requests, not parsed yet.
        self._unparsed = b""
        self._parses_soon = False
        # The bytes of the present body that are parsed.
        self._body_bytes = 0
        # All that followed the request line of the last GET, and its headers once they are kept.
        self._get_rest = b""
        self._get_headers: list[tuple[bytes, bytes]] | None = None
        self._keeps_headers = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Reading(transport, self._may_read_on)
        self.drain = self.flow.drain
        self.unsent_bytes = transport.get_write_buffer_size
        # A stalled answer ends with `abort`: `close` would wait for the peer.
        self.abort = transport.abort
        try:
            self.open_connections.opened(self, self.client[0] if self.client else None)
        except OverloadedError as error:
            self._refuse(error)
            return
        self._close_later()
        if self._unparsed:
            self._parses_soon = True
            self.loop.call_soon(self._parse_on)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._unparsed = b""
        self.open_connections.closed(self)
        super().connection_lost(exc)
        answered = self._answered
        if answered is not None and not answered.response_complete:
            # uvicorn marks only the last of several requests as disconnected.
            answered.disconnected = True
            answered.message_event.set()

    def shutdown(self) -> None:
        """Close once the request in progress is answered."""
        self.together.flush()
        super().shutdown()

    def drop(self) -> None:
        """Close at once, to make room for another connection."""
        self.together.flush()
        self.open_connections.closed(self)
        self.transport.abort()

    def take_socket(self) -> int | None:
        """Return a descriptor of the idle connection, which is closed here.

        None while a request is received or answered, and for a connection that is closing.
        """
        is_idle = (
            self._head_bytes is None
            and (self._answered is None or self._answered.response_complete)
            and not (self.pipeline or self._unparsed or self._unbegun)
        )
        return self._socket_taken() if is_idle else None

    def take_asking_socket(self) -> int | None:
        """Return a descriptor of the connection, and give up the connection and the request.

        None for a connection with further requests, and for a request that is more than its head:
        its body has been read here, and the next request would be taken for the body elsewhere.
        """
        answered = self._answered
        is_alone = self._head_bytes is None and not (self.pipeline or self._unparsed)
        if answered is None or answered.response_started or not is_alone or not _is_plain(answered):
            return None
        descriptor = self._socket_taken()
        if descriptor is not None:
            answered.disconnected = self.is_given_back = True
        return descriptor

    def _socket_taken(self) -> int | None:
        """Return a descriptor of the connection, which is closed here.

        None if that is too late, or for too many open files.
        """
        self.together.flush()
        if self.transport.is_closing() or self.unsent_bytes():
            return None
        try:
            descriptor = os.dup(self.transport.get_extra_info("socket").fileno())
        except OSError:
            return None
        self.open_connections.closed(self)
        # The peer notices nothing, because the socket has another descriptor.
        self.transport.abort()
        return descriptor

    def give_back(self) -> None:
        """Raise: the owner has nobody to give a connection to."""
        raise AssertionError

    def go_on_with(self, data: bytes) -> None:
        """Receive `data` before all that the connection receives; call before `connection_made`."""
        self._unparsed = data

    def data_received(self, data: bytes) -> None:
        if self.pipeline or self._unparsed:
            # After a pause, TLS still delivers the bytes that were decrypted before.
            self._unparsed += data
        elif (line := self._repeated_get(data)) is not None:
            self._begin_repeated(line)
        else:
            self._parse(data)

    def _repeated_get(self, data: bytes) -> re.Match[bytes] | None:
        """Return the request line if `data` is one GET with the headers of an earlier GET.

        A client sends the same headers again and again, byte for byte. Their meaning is kept when
        the headers come a second time, so a client with new headers each time pays for a comparison
        only. All other requests, and all requests behind an unfinished one, are for the parser.
        """
        if not data.startswith(_GET) or len(data) > _PARSED_BYTES:
            return None
        line_end = data.find(b"\r\n")
        rest = data[line_end:]
        if rest != self._get_rest:
            self._get_rest, self._get_headers = rest, None
            return None
        is_idle = (
            self._head_bytes is None
            and self.cycle.response_complete
            and not (self.cycle.more_body or self.flow.write_paused or self.transport.is_closing())
        )
        if not is_idle:
            return None
        if self._get_headers is None:
            self._keeps_headers = _is_one_head(data)
            return None
        return _PLAIN_LINE.fullmatch(data, 0, line_end)

    def _begin_repeated(self, line: re.Match[bytes]) -> None:
        """Begin a GET with the kept headers, as the parser's callbacks do."""
        assert self._get_headers is not None
        self.on_message_begin()
        self._end_head()
        scope: Any = self.scope
        self.headers = scope["headers"] = self._get_headers
        self.url = line[1]
        path = self.url.decode("ascii")
        scope["method"] = "GET"
        scope["path"] = urllib.parse.unquote(path) if "%" in path else path
        scope["raw_path"], scope["query_string"] = self.url, b""
        self._answered = self.cycle = RequestResponseCycle(
            scope=scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=self.access_log,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=False,
            keep_alive=True,
            on_response=self.on_response_complete,
        )
        self.cycle.more_body = False
        self.cycle.message_event.set()
        self._begin(self.cycle)

    def _keep_headers(self) -> None:
        """Keep the parsed headers of a GET that was the whole piece."""
        self._keeps_headers = False
        if self._head_bytes is None and self.cycle.keep_alive and _is_plain(self.cycle):
            self._get_headers = [*self.headers]

    def _parse(self, data: bytes) -> None:
        """Parse until a request has to wait for an earlier request; keep the remaining bytes."""
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
            # The request's body has not arrived yet.
            super()._start_asgi_task(self._unbegun, self.app)
            self._unbegun = None
        if self._keeps_headers:
            self._keep_headers()

    def _missing_bytes(self) -> int:
        """Return how many bytes are missing of a body with an announced length."""
        if self._head_bytes is not None or not self.cycle.more_body:
            return 0
        length = next((text for name, text in self.headers if name == b"content-length"), b"0")
        # The parser refuses a length that is no number.
        return int(length) - self._body_bytes if length.isdigit() else 0

    def _may_read_on(self) -> bool:
        """Whether all received bytes are parsed, and every request is answered or begun."""
        if self._unparsed and not self.pipeline and not self._parses_soon:
            # In a separate iteration of the loop: the other connections have their turn first.
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
        self._end_head()
        super().on_headers_complete()

    def _end_head(self) -> None:
        self._head_bytes = self.closes_at = None
        self._body_bytes = 0
        self.open_connections.in_use(self)

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if self.transport.is_closing():
            # The previous answer closed the connection; this request had arrived before.
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
        """Answer a complete request; the request gets a task when it waits, see `own_task`."""
        scope: Any = cycle.scope
        scope[BODY_KEY] = cycle.body
        app: Any = self.app
        answering: Coroutine[Any, None, None] = app(scope, cycle.receive, cycle.send)
        context = contextvars.copy_context()
        try:
            context.run(answering.send, None)
        except StopIteration:
            # A connection that is given back stays open until its earlier answers are sent.
            if not (cycle.response_complete or self.is_given_back):
                # The client is gone, or a bug ended the request after the start of the answer.
                self.together.flush()
                self.transport.close()
            return
        except BaseException as error:  # noqa: BLE001 - the parser would take it for a parse error
            answering = _raise(error)
        task = self.loop.create_task(cycle.run_asgi(continued(answering)), context=context)
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)

    def write_whole(self, status: int, headers: Headers, body: bytes) -> None:
        """Send the whole answer of the present request, as `RequestResponseCycle.send` does.

        Separate writes of head and body would make two packets. On a busy machine the first packet
        wakes the client, which then takes the processor from the service (measured: 0.3 to 0.5 ms).
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
        """Begin the next received request, or wait for a request."""
        if self._answered is not None:
            # An unread body would stay in memory until the next request.
            self._answered.body.clear()
        if not self.transport.is_closing():
            if self.pipeline:
                self._start_asgi_task(*self.pipeline.pop())
                return
            self.flow.resume_reading()
            self._close_later()
        self.open_connections.idle(self)

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are no HTTP request with the common form of an error."""
        self._refuse(InvalidRequestError(msg))

    def _close_later(self) -> None:
        """Close after `timeout_s`, unless `closes_at` is None by then."""
        if self.closes_at is None:
            self.closes_at = self.loop.time() + self.timeout_s
            # A new timer for each request would cost a twentieth of a small request.
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
        """Answer `error` without a parsed request, and close the connection."""
        self.together.flush()
        body = json.dumps(error_to_json(error, request_id="")).encode()
        self.transport.write(
            b"HTTP/1.1 %d Refused\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
            b"connection: close\r\n\r\n%s" % (error.http_status, len(body), body)
        )
        self.transport.close()


def _is_plain(cycle: RequestResponseCycle) -> bool:
    """Whether a request is a GET without a body, by a client that reads every form of answer."""
    scope: Any = cycle.scope
    return (
        scope["method"] == "GET"
        and scope["http_version"] == "1.1"
        and not any(name in _NOT_PLAIN for name, _ in scope["headers"])
    )


def _is_one_head(data: bytes) -> bool:
    """Whether `data` is the head of one request and nothing else, whichever parser reads it."""
    line_count = data.count(b"\r\n")
    return (
        data.find(_HEAD_END) == len(data) - len(_HEAD_END)
        and data.count(b"\n") == line_count
        and data.count(b"\r") == line_count
    )
