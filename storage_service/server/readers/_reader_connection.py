"""A connection at a reader: one whole request at a time, whose bytes are kept until its answer.

So the connection can go back to the owner at any moment before an answer, as if it had never left.
What is no whole request in a simple form goes back before a parser sees it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any, Final

from streamhouse.storage_service.server.http._http_protocol import (
    HEAD_BYTES_MAX,
    BoundedHttpProtocol,
)

__all__ = ["ReaderConnection", "reader_connection"]

_REQUEST_BYTES_MAX: Final = 1 << 20
_HEAD_END: Final = b"\r\n\r\n"
_GET: Final = b"GET "
_POST: Final = b"POST "
_LENGTH: Final = re.compile(rb"\r\ncontent-length:[ \t]*(\d{1,7})[ \t]*(?=\r\n)", re.IGNORECASE)
# A body without a length, an answer before the body, another protocol.
_NOT_SIMPLE: Final = re.compile(rb"\r\n(?:transfer-encoding|expect|upgrade)[ \t]*:", re.IGNORECASE)
_ANY_LENGTH: Final = re.compile(rb"\r\ncontent-length", re.IGNORECASE)
_UNSENT_LOOK_S: Final = 0.01
_UNSENT_LOOKS_MAX: Final = 3_000
_ANSWERS_FORGIVEN: Final = 1_000

SendSocket = Callable[[int, bytes, int], None]
"""Sends the owner a descriptor, the bytes that nobody has answered, and the number of moves."""


class _LargeRequests:
    """The announced bytes of all large requests of a process; each has its place until the answer.

    So the bytes that wait here for the rest of a body are bounded, as they are at the owner.
    """

    def __init__(self, bytes_max: int) -> None:
        self._free_bytes = bytes_max

    def enter(self, size: int) -> bool:
        """Take room for a request; whether there is any."""
        if size > self._free_bytes:
            return False
        self._free_bytes -= size
        return True

    def leave(self, size: int) -> None:
        """Free the room of a request."""
        self._free_bytes += size


class ReaderConnection(BoundedHttpProtocol):
    """See the module."""

    send_socket: SendSocket
    large_requests: _LargeRequests
    _large_bytes = 0
    """The room that this connection's present request has in `large_requests`."""
    _request = b""
    """The request that is being answered."""
    _received = b""
    """What arrived behind the request, or part of a request."""
    _answer_count = 0
    _unsent_looks = 0

    def data_received(self, data: bytes) -> None:
        """Begin the request once it is whole; later requests wait for the answer."""
        self._received += data
        if not self._request:
            self._begin_next()
        elif len(self._received) > HEAD_BYTES_MAX:
            self.flow.pause_reading()

    def _begin_next(self) -> None:
        received = self._received
        line = self._repeated_get(received)
        if line is not None:
            self._request, self._received = received, b""
            self._begin_repeated(line)
            return
        size = _request_bytes(received)
        if size is None or not self._has_room(size):
            self.give_back()
        elif 0 < size <= len(received):
            self._request, self._received = received[:size], received[size:]
            self._parse(self._request)

    def _has_room(self, size: int) -> bool:
        """Whether a request of `size` bytes may be received here."""
        if size > HEAD_BYTES_MAX and not self._large_bytes:
            if not self.large_requests.enter(size):
                return False
            self._large_bytes = size
        return True

    def _free_room(self) -> None:
        if self._large_bytes:
            self.large_requests.leave(self._large_bytes)
            self._large_bytes = 0

    def connection_lost(self, exc: Exception | None) -> None:
        """Free what the connection has taken."""
        self._free_room()
        super().connection_lost(exc)

    def go_on_with(self, data: bytes) -> None:
        """See `BoundedHttpProtocol.go_on_with`."""
        self._received = data

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin the request that came with the connection."""
        super().connection_made(transport)
        if self._received:
            self.loop.call_soon(self._go_on)

    def on_response_complete(self) -> None:
        """Begin the next request."""
        super().on_response_complete()
        self._request = b""
        self._answer_count += 1
        self._free_room()
        if self._received and not self.transport.is_closing():
            # In a separate iteration of the loop: the other connections have their turn first.
            self.loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        if not (self._request or self.is_given_back or self.transport.is_closing()):
            self.flow.resume_reading()
            self._begin_next()

    def give_back(self) -> None:
        """Hand the connection to the owner, with the request in progress and what is behind it."""
        if self._answered is not None:
            # The application answers nothing here any more.
            self._answered.disconnected = True
        self.is_given_back = True
        self.flow.pause_reading()
        self._send_back()

    def _send_back(self) -> None:
        if self.transport.is_closing():
            return
        descriptor = self._socket_taken()
        if descriptor is None:
            # An earlier answer is on its way, or the client does not read it.
            self._unsent_looks += 1
            if self._unsent_looks > _UNSENT_LOOKS_MAX:
                self.transport.abort()
            else:
                self.loop.call_later(_UNSENT_LOOK_S, self._send_back)
            return
        data = self._request + self._received
        self._request = self._received = b""
        # A connection that a reader has served for long is not kept away from readers.
        moves = self.moves if self._answer_count < _ANSWERS_FORGIVEN else 0
        self.send_socket(descriptor, data, moves + 1)


def reader_connection(
    send_socket: SendSocket, *, large_requests_bytes_max: int
) -> type[ReaderConnection]:
    """Return the class of connections that go back by `send_socket`."""
    members: dict[str, Any] = {
        "send_socket": staticmethod(send_socket),
        "large_requests": _LargeRequests(large_requests_bytes_max),
    }
    return type("HandedConnection", (ReaderConnection,), members)


def _request_bytes(received: bytes) -> int | None:
    """Return the bytes of the first request, 0 if unknown yet; None if it is for the owner."""
    head = received.find(_HEAD_END)
    text = received if head < 0 else received[: head + 2]
    # The owner refuses at once what can be no request; here it would wait for its end.
    is_request = text.startswith((_GET, _POST)) or _GET.startswith(text) or _POST.startswith(text)
    if not is_request or text.count(b"\n") != text.count(b"\r\n") or _NOT_SIMPLE.search(text):
        return None
    if head < 0:
        return None if len(received) > HEAD_BYTES_MAX else 0
    size = head + len(_HEAD_END)
    if any_length := _ANY_LENGTH.findall(text):
        length = _LENGTH.search(text)
        if length is None or len(any_length) > 1:
            return None
        size += int(length[1])
    return None if size > _REQUEST_BYTES_MAX else size
