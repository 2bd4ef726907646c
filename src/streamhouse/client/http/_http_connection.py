"""One HTTP/1.1 connection to a service: a request goes out, its answer comes in.

The answer is parsed by `httptools`; `docs/decisions/0017-a-lean-connection-in-the-client.md` says
why there is no HTTP client library. A caller may rely on this:

- one request is under way at a time; after a broken exchange the connection must be closed
- no redirect is followed
- an answer is bounded: the head with all interim answers, and the bytes added to the body by chunks
  and a trailer; memory is taken only for received bytes
- every wait for a byte has an end, and the error names the wait

A connection belongs to one thread at a time.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, NoReturn

import httptools

__all__ = ["HEAD_BYTES_MAX", "Answer", "AnswerStream", "BrokenConnectionError", "Connection"]

HEAD_BYTES_MAX: Final = 64 << 10
"""The limit for an answer's head, together with its interim answers."""

_RECEIVED_BYTES: Final = 64 << 10
_JOINED_BODY_BYTES_MAX: Final = 64 << 10
# A body's memory is taken in steps of this size: an answer may claim any length.
_BODY_STEP_BYTES: Final = 16 << 20
# More than chunks of one byte each add.
_ADDED_PER_BYTE_MAX: Final = 16


class BrokenConnectionError(OSError):
    """An exchange broke; whether the request had an effect is unknown.

    `is_mute` says that the connection ended before the answer's first byte. `is_stale` says so of a
    kept connection: most likely the service closed it while the request was on its way.
    """

    def __init__(self, message: str, *, is_mute: bool = False, is_stale: bool = False) -> None:
        super().__init__(message)
        self.is_mute = is_mute
        self.is_stale = is_stale


class Answer(NamedTuple):
    """A whole answer; names of headers are in lower case."""

    status: int
    headers: dict[bytes, bytes]
    data: bytes | bytearray


class _Incoming:
    """An answer on its way in: the callbacks of `httptools`, and the parts received so far."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.pieces: list[bytes] = []
        """The parts of the body that no reader has taken yet."""
        self.piece_bytes = 0
        self.is_headed = False
        self.is_whole = False
        self.may_keep = False
        self.received_bytes = 0
        self._body_bytes = 0
        self._refusal: str | None = None
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> None:
        """Parse received bytes; raises `BrokenConnectionError` for bytes that are no answer."""
        parser = self._parser
        if parser is None:
            raise BrokenConnectionError("the answer was closed")
        self.received_bytes += len(data)
        handled = sys.exception()
        try:
            parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if self._refusal is None and isinstance(error, httptools.HttpParserCallbackError):
                # A signal's handler raised inside the parser, as for Ctrl-C. Its exception is lost
                # if the caller is handling another exception.
                raised = error.__context__
                raise (error if raised is None or raised is handled else raised) from None
            if not self.is_whole:
                reason = self._refusal or error
                raise BrokenConnectionError(f"the answer is no HTTP: {reason}") from None
            # Bytes follow the answer. The answer is whole, but the connection is not trustworthy.
            self.may_keep = False
        if self.received_bytes - self._body_bytes > (
            HEAD_BYTES_MAX + _RECEIVED_BYTES + _ADDED_PER_BYTE_MAX * self._body_bytes
        ) or (not self.is_headed and self.received_bytes > HEAD_BYTES_MAX):
            raise BrokenConnectionError(
                f"the answer's headers have more than {HEAD_BYTES_MAX} bytes"
            )

    def take_body(self) -> bytes:
        """Return the part of the body received since the last call."""
        pieces, self.pieces, self.piece_bytes = self.pieces, [], 0
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def end(self) -> None:
        """Release the parser: the parser and this object refer to each other."""
        self._parser = None

    @property
    def body_length(self) -> int | None:
        """The length of the body, if the head states it."""
        text = self.headers.get(b"content-length")
        return None if text is None else int(text)

    @property
    def ends_with_connection(self) -> bool:
        """Whether only the end of the connection marks the end of the body."""
        return not {b"content-length", b"transfer-encoding"} & self.headers.keys()

    # -- called by the parser ------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self.is_whole:
            self._refuse("another answer follows")

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.is_headed:
            self.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        if self._parser is None:
            self._refuse("it was closed")
        self.status = self._parser.get_status_code()
        if self.status < 100 or not self._parser.get_http_version().startswith("1."):
            self._refuse("its version or its status is none of HTTP/1")
        if self.status < 200:
            return
        self.is_headed = True
        self.may_keep = self._parser.should_keep_alive()
        if self.headers.get(b"content-encoding", b"identity").lower() != b"identity":
            self._refuse("it has a content encoding, which was not asked for")
        if self.headers.get(b"transfer-encoding", b"chunked").lower() != b"chunked":
            self._refuse("it has a transfer encoding that is not chunked")

    def on_body(self, data: bytes) -> None:
        self.pieces.append(data)
        self.piece_bytes += len(data)
        self._body_bytes += len(data)

    def on_message_complete(self) -> None:
        if self.is_headed:
            self.is_whole = True
        else:
            # An interim answer, such as 100: the real answer follows.
            self.headers.clear()

    def _refuse(self, reason: str) -> NoReturn:
        self._refusal = reason
        raise ValueError(reason)


class Connection:
    """One open connection; close it after a broken exchange."""

    def __init__(self, opened: socket.socket) -> None:
        self.is_kept = False
        """Whether an earlier exchange on the connection had an answer."""
        self._socket = opened
        self._timeout_s = opened.gettimeout()
        # TLS sockets cannot gather, and Windows cannot.
        self._can_gather = hasattr(opened, "sendmsg") and not isinstance(opened, ssl.SSLSocket)
        self._is_readable = _readable_check(opened)

    def close(self) -> None:
        """Close the connection; a second call is harmless."""
        self._socket.close()

    def interrupt(self) -> None:
        """End the wait of the connection's user, from any thread; the user then closes it."""
        with contextlib.suppress(OSError):
            # Not TLS's own shutdown, which takes the session from the thread that reads it.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def is_usable(self) -> bool:
        """Return whether the connection is open, without unexpected bytes."""
        return not self._is_readable()

    def exchange(self, head: bytes, body: Any, *, timeout_s: float) -> tuple[Answer, bool]:
        """Send a request; return the whole answer, and whether to keep the connection.

        Raises `BrokenConnectionError`, or `ssl.SSLError` for an error of TLS itself.
        """
        incoming = _Incoming()
        try:
            is_sent = self._begin(incoming, head, body, timeout_s)
            data = self._body(incoming)
        finally:
            incoming.end()
        return Answer(incoming.status, incoming.headers, data), is_sent and incoming.may_keep

    def open_stream(self, head: bytes, *, timeout_s: float) -> tuple[int, AnswerStream]:
        """Send a request; return the answer's status, and a stream of its body."""
        incoming = _Incoming()
        try:
            self._begin(incoming, head, None, timeout_s)
        except BaseException:
            incoming.end()
            raise
        return incoming.status, AnswerStream(self, incoming)

    def _begin(self, incoming: _Incoming, head: bytes, body: Any, timeout_s: float) -> bool:
        """Send a request and read the head of the answer; return whether all of the request was
        sent.
        """
        if self._timeout_s != timeout_s:
            self._socket.settimeout(timeout_s)
            self._timeout_s = timeout_s
        is_sent = self._send(head, body)
        while not incoming.is_headed:
            self.feed(incoming)
        self.is_kept = True
        return is_sent

    def _send(self, head: bytes, body: Any) -> bool:
        """Send a request; False if the service stopped receiving, but may have answered."""
        try:
            if body is None:
                self._socket.sendall(head)
                return True
            view = memoryview(body).cast("B")
            if len(view) <= _JOINED_BODY_BYTES_MAX:
                self._socket.sendall(b"".join((head, view)))
                return True
            if self._can_gather:
                sent = self._socket.sendmsg((head, view)) - len(head)
                if sent < 0:
                    self._socket.sendall(head[sent:])
                    sent = 0
                self._socket.sendall(view[sent:])
            else:
                self._socket.sendall(head)
                self._socket.sendall(view)
        except (ConnectionError, ssl.SSLEOFError, ssl.SSLZeroReturnError):
            return False
        except TimeoutError as error:
            if error.errno is not None:
                raise BrokenConnectionError(f"the connection broke: {error}") from error
            raise BrokenConnectionError(
                f"it did not take the request in {self._timeout_s} s"
            ) from error
        except ssl.SSLError:
            raise
        except OSError as error:
            raise BrokenConnectionError(f"the connection broke: {error}") from error
        return True

    def feed(self, incoming: _Incoming) -> None:
        """Read a part of the answer; raises `BrokenConnectionError` at a premature end."""
        try:
            data = self._socket.recv(_RECEIVED_BYTES)
        except OSError as error:
            raise self._broken(error, incoming) from error
        if data:
            incoming.feed(data)
        elif incoming.is_headed and incoming.ends_with_connection:
            incoming.is_whole = True
        else:
            raise self._broken(None, incoming)

    def _broken(self, error: OSError | None, incoming: _Incoming) -> OSError:
        """Return the error of a failed read; without an error, the error of a premature end."""
        ended = (ConnectionError, ssl.SSLEOFError, ssl.SSLZeroReturnError)
        if isinstance(error, TimeoutError):
            # A timeout of the system has a number: the machine at the other end is silent.
            if error.errno is not None:
                return BrokenConnectionError(f"the connection broke: {error}")
            return BrokenConnectionError(f"not a byte came for {self._timeout_s} s")
        if isinstance(error, ssl.SSLError) and not isinstance(error, ended):
            return error
        where = "in the middle of the answer" if incoming.received_bytes else "without an answer"
        is_mute = not incoming.received_bytes and (error is None or isinstance(error, ended))
        return BrokenConnectionError(
            f"the connection ended {where}{'' if error is None else f': {error}'}",
            is_mute=is_mute,
            is_stale=self.is_kept and is_mute,
        )

    def _body(self, incoming: _Incoming) -> bytes | bytearray:
        """Read the remaining answer and return its body."""
        length = incoming.body_length
        if incoming.is_whole or length is None:
            while not incoming.is_whole:
                self.feed(incoming)
            return incoming.take_body()
        # Received straight into the final buffer: a parser would copy the bytes.
        first = incoming.take_body()
        data = bytearray(min(_BODY_STEP_BYTES, length))
        data[: len(first)] = first
        filled = len(first)
        while True:
            with memoryview(data) as view:
                while filled < len(data):
                    filled += self._receive_into(view[filled:], incoming)
            if filled == length:
                return data
            data += bytes(min(_BODY_STEP_BYTES, length - filled))

    def _receive_into(self, view: memoryview, incoming: _Incoming) -> int:
        try:
            count = self._socket.recv_into(view)
        except OSError as error:
            raise self._broken(error, incoming) from error
        if not count:
            raise self._broken(None, incoming)
        return count


class AnswerStream:
    """The body of an answer as a file, readable while it arrives. Close the stream after use."""

    def __init__(self, connection: Connection, incoming: _Incoming) -> None:
        self._connection = connection
        self._incoming = incoming
        self._data = b""
        self._position = 0
        self.closed = False

    def __enter__(self) -> AnswerStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, size: int = -1) -> bytes:
        """Return the next `size` bytes, fewer only at the end of the body; -1 means all bytes.

        Raises `BrokenConnectionError` when the body breaks off or nothing arrives in time.
        """
        if self.closed:
            raise BrokenConnectionError("the answer was closed")
        incoming = self._incoming
        unread = len(self._data) - self._position
        if unread < size or size < 0:
            while not incoming.is_whole and (size < 0 or unread + incoming.piece_bytes < size):
                self._connection.feed(incoming)
            self._data = b"".join((self._data[self._position :], incoming.take_body()))
            self._position = 0
        end = len(self._data) if size < 0 else self._position + size
        data = self._data[self._position : end]
        self._position += len(data)
        return data

    @property
    def headers(self) -> Mapping[bytes, bytes]:
        """The answer's headers, with names in lower case."""
        return self._incoming.headers

    def readable(self) -> bool:
        """Return whether the stream is open."""
        return not self.closed

    def close(self) -> None:
        """End the connection without waiting for more of the body; a second call is harmless."""
        self.closed = True
        self._incoming.end()
        self._connection.close()


def _readable_check(opened: socket.socket) -> Callable[[], bool]:
    """Return a check: would a read of the socket return at once, with bytes or at the end?"""
    if not hasattr(select, "poll"):
        return lambda: bool(select.select([opened], [], [], 0)[0])
    poll = select.poll()
    poll.register(opened, select.POLLIN)
    if isinstance(opened, ssl.SSLSocket):
        return lambda: bool(opened.pending() or poll.poll(0))
    return lambda: bool(poll.poll(0))
