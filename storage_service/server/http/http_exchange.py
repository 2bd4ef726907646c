"""One HTTP request and the answer on bare ASGI: parameters, bounded bodies, errors as JSON.

FastAPI serves the control routes. The data routes and the code around all routes use this module,
because a request costs a third of a FastAPI request.
"""

from __future__ import annotations

import asyncio
import enum
import functools
import json
from collections.abc import (
    Awaitable,
    Callable,
    Collection,
    Container,
    Coroutine,
    Iterable,
    MutableMapping,
    Sequence,
)
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias
from urllib.parse import parse_qsl

from fastapi import Request
from uvicorn.protocols.http.flow_control import FlowControl

from streamhouse.core.errors import (
    InvalidRequestError,
    NotOwnerError,
    RequestTooLargeError,
    StreamhouseError,
    UnauthorizedError,
)
from streamhouse.core.traces.stages import stage_ended
from streamhouse.storage_service.config import ServiceConfig
from streamhouse.storage_service.server.caller import EVERYTHING, UNKNOWN, Level, Need
from streamhouse.storage_service.server.http._own_task import own_task
from streamhouse.storage_service.server.http.answer_memory import AnswerHold
from streamhouse.storage_service.server.http.body_memory import HeldBody

if TYPE_CHECKING:
    from streamhouse.core.traces.spans import FollowedCall

__all__ = [
    "ARROW_STREAM",
    "App",
    "Body",
    "ClientGone",
    "Connection",
    "HttpExchange",
    "Message",
    "Receive",
    "Scope",
    "Send",
    "Tenure",
    "error_to_json",
    "exchange_of",
    "unknown_parameter",
]

Message: TypeAlias = MutableMapping[str, Any]
Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Coroutine[Any, Any, None]]
Piece: TypeAlias = bytes | memoryview
Headers: TypeAlias = Sequence[tuple[bytes, bytes]]

ARROW_STREAM: Final = b"application/vnd.apache.arrow.stream"
BODY_KEY: Final = "streamhouse.body"
"""The whole body, if the body came with the head."""
CONNECTION_KEY: Final = "streamhouse.connection"
EXCHANGE_KEY: Final = "streamhouse.exchange"
MESSAGE_CHARACTERS_MAX: Final = 2_000
_JOIN_BYTES_MAX: Final = 128 << 10
# A client must read so much of an answer in `answer_stall_timeout_ms`: by default 1 KB a second.
_PROGRESS_BYTES_MIN: Final = 64 << 10


def _parameters(query: bytes) -> Sequence[tuple[str, str]]:
    return tuple(parse_qsl(query.decode("latin-1"), keep_blank_values=True))


# All requests of a writer have the same query.
_SHORT_QUERY_BYTES: Final = 256
_known_parameters = functools.lru_cache(maxsize=1_024)(_parameters)


class Connection(Protocol):
    """The operations of a connection beyond ASGI's messages."""

    @property
    def flow(self) -> FlowControl:
        """The buffer of unsent bytes."""

    async def drain(self) -> None:
        """Return when the buffer has space again, or the connection is lost."""

    def unsent_bytes(self) -> int:
        """Return the number of bytes in the buffer."""

    def write_whole(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a whole answer."""

    def abort(self) -> None:
        """Cut the connection."""

    reads: int
    """How many lookups in a row were the last requests of the connection."""
    moves: int
    """How often a reader gave the connection back."""
    stays_until_s: float
    """The time of the loop before which the connection is not handed to a reader."""
    is_given_back: bool
    """Whether the connection went to another process, with the request in progress."""

    def take_socket(self) -> int | None:
        """Return a descriptor of the idle connection, which is closed here; None if in use."""

    def take_asking_socket(self) -> int | None:
        """As `take_socket`, for another process to answer the request in progress."""

    def give_back(self) -> None:
        """Hand the connection to the owner, with the request in progress; readers only."""


class Tenure(Protocol):
    """The ownership of the data by this process, which can end at any moment."""

    @property
    def valid_until_s(self) -> float:
        """The time of the boot clock up to which the ownership holds, if nothing renews it."""

    def check(self) -> None:
        """Raise `NotOwnerError` if another process may have changed the data by now."""

    def check_write(self) -> None:
        """Raise `NotOwnerError` if rows stored by this process may be lost to the next owner."""


class ClientGone(Exception):
    """The client closed the connection before its request was complete."""


class Body(enum.Enum):
    """The kind of a request body: content type, and the option that limits the bytes."""

    JSON = (b"application/json", "control_body_bytes_max")
    SCHEMA = (b"application/vnd.schemaregistry.v1+json", "control_body_bytes_max")
    FORM = (b"application/x-www-form-urlencoded", "control_body_bytes_max")
    ROWS = (ARROW_STREAM, "body_bytes_max")
    NDJSON = (b"application/x-ndjson", "body_bytes_max")
    CSV = (b"text/csv", "body_bytes_max")

    def __init__(self, content_type: bytes, limit_name: str) -> None:
        self.content_type = content_type
        self.limit_name = limit_name


def _everything() -> Need:
    # A request without a route needs every grant.
    return Need(Level.ADMIN, EVERYTHING)


def unknown_parameter(path: str, name: str, known: Iterable[str]) -> InvalidRequestError:
    """Return the error for a query parameter that a route does not have."""
    names = f"known: {', '.join(sorted(known))}" if known else "the route takes none"
    return InvalidRequestError(f"{path}: unknown parameter '{name[:100]}' ({names})")


class HttpExchange:
    """One request and its answer.

    `route` is the name for metrics. `status` is 0 before the answer.
    """

    # Class attributes are defaults that most requests never change.
    route = "unknown"
    body = Body.JSON
    takes_password = False
    """Whether Basic authentication is accepted, with the token as the password."""
    text_bodies: Collection[bytes] = ()
    """Further accepted content types, beside the content type of `body`."""
    need: Callable[[], Need] = staticmethod(_everything)
    """Return the grant that the request needs; raises for an invalid table name in the path."""
    caller = UNKNOWN
    share = ""
    """The caller's key in `FairShares`; see `AccessControl`."""
    status = 0
    error_headers: Headers = ()
    """Additional headers of an error."""
    hold: AnswerHold | None = None
    """The memory of the answer."""
    tenure: Tenure | None = None
    """Checked after the read of the data and before the answer; None for answers of stored data."""
    followed: FollowedCall | None = None
    """The span of the request, if the request is part of a trace."""
    _watcher: asyncio.Task[None] | None = None
    _waiting: asyncio.Future[None] | None = None
    _is_gone = False

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        *,
        request_id: str,
        config: ServiceConfig,
    ) -> None:
        self.scope = scope
        self.receive = receive
        self._send = send
        self.request_id = request_id
        self._config = config
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self._connection: Connection = scope[CONNECTION_KEY]
        client = scope.get("client") or ("unknown",)
        self.client_address = str(client[0])

    @property
    def connection(self) -> Connection:
        """The connection of the request."""
        return self._connection

    def header(self, name: bytes) -> bytes | None:
        """Return the first header called `name` (lower case)."""
        for key, value in self.scope["headers"]:
            if key == name:
                return bytes(value)
        return None

    def accepted(self, content_types: Container[bytes]) -> bytes | None:
        """Return the first content type of the `Accept` header within `content_types`, or None."""
        text = self.header(b"accept")
        if text is None or text == b"*/*":
            return None
        for offer in text.split(b","):
            content_type = offer.partition(b";")[0].strip().lower()
            if content_type in content_types:
                return content_type
        return None

    def query(self, names: Iterable[str]) -> dict[str, str]:
        """Return the query parameters; raises for an unknown or repeated parameter."""
        query: bytes = self.scope["query_string"]
        if not query:
            return {}
        pairs = (_known_parameters if len(query) <= _SHORT_QUERY_BYTES else _parameters)(query)
        parameters = dict(pairs)
        allowed = set(names)
        for name in parameters:
            if name not in allowed:
                raise unknown_parameter(self.path, name, allowed)
        if len(parameters) < len(pairs):
            raise InvalidRequestError(f"{self.path}: a parameter is given twice")
        return parameters

    @property
    def raw_path(self) -> str:
        """The percent-encoded path, as sent by the client."""
        return str(self.scope["raw_path"], "latin-1")

    def request_bytes(self) -> bytes:
        """Return the bytes of a request without a body."""
        query: bytes = self.scope["query_string"]
        target = self.scope["raw_path"] + (b"?" + query if query else b"")
        headers = b"".join(b"%b: %b\r\n" % header for header in self.scope["headers"])
        return b"%b %b HTTP/1.1\r\n%b\r\n" % (self.method.encode(), target, headers)

    @property
    def is_changing(self) -> bool:
        """Whether the request may change data."""
        return self.method not in ("GET", "HEAD")

    def content_length(self) -> int | None:
        """Return the announced length of the body, or None for a chunked one."""
        text = self.header(b"content-length")
        if text is None:
            return None
        if not text.isdigit():
            raise InvalidRequestError(f"{self.path}: content-length is not a number")
        return int(text)

    async def read_body(self, memory: HeldBody) -> bytes:
        """Return the whole body; `memory` counts the body's memory.

        Raises `InvalidRequestError` for a wrong content type or a slow body, `RequestTooLargeError`
        as soon as the limit is passed, `OverloadedError` for lack of memory, and `ClientGone` if
        the connection ends before the body.
        """
        bytes_max: int = getattr(self._config, self.body.limit_name)
        timeout_ms = self._config.body_read_timeout_ms
        whole: bytearray | None = self.scope.get(BODY_KEY)
        length = self.content_length() if whole is None else len(whole)
        if length is not None and length > bytes_max:
            raise self._too_large(bytes_max)
        if whole:
            self._check_content_type(self.body.content_type)
        if whole is not None and memory.adds_at_once(len(whole)):
            memory.end()
            body = bytes(whole)
            # The connection refers to this buffer until its next request.
            whole.clear()
            stage_ended("body")
            return body
        await own_task()
        try:
            async with asyncio.timeout(timeout_ms / 1000) as limit:
                memory.begin(lambda: None if limit.expired() else limit.reschedule(0))
                chunks = await self._chunks(memory, bytes_max)
        except TimeoutError:
            if memory.is_refused:
                raise memory.refusal() from None
            raise InvalidRequestError(
                f"{self.path}: the request body did not arrive within {timeout_ms} ms"
                " (body_read_timeout_ms)"
            ) from None
        memory.end()
        stage_ended("body")
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    async def _chunks(self, memory: HeldBody, bytes_max: int) -> list[bytes]:
        chunks: list[bytes] = []
        received = 0
        while True:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            chunk = message.get("body", b"")
            if chunk:
                if not chunks:
                    self._check_content_type(self.body.content_type)
                received += len(chunk)
                if received > bytes_max:
                    raise self._too_large(bytes_max)
                await memory.add(len(chunk))
                chunks.append(chunk)
            if not message.get("more_body", False):
                return chunks

    def _check_content_type(self, required: bytes) -> None:
        """Refuse forms, text and untyped bytes: a web page may send these to any site."""
        content_type = self.header(b"content-type")
        if content_type == required:
            return
        content_type = content_type or b""
        if content_type.partition(b";")[0].strip().lower() != required:
            raise InvalidRequestError(
                f"{self.path[:200]}: the body's content type is"
                f" '{content_type.decode('latin-1')[:200]}';"
                f" send it with the header 'Content-Type: {required.decode()}'{self._or_as_text()}"
            )

    def _or_as_text(self) -> str:
        types = " or ".join(kind.decode() for kind in self.text_bodies)
        return f", or as text with {types}" if types else ""

    def _too_large(self, bytes_max: int) -> RequestTooLargeError:
        return RequestTooLargeError(
            f"{self.path}: the request body is larger than {bytes_max} bytes"
            f" ({self.body.limit_name});"
            " send less at once"
        )

    async def wait(self, waiter: asyncio.Future[None]) -> None:
        """Await `waiter`; raises `ClientGone` if the client disconnects meanwhile.

        Call `wait` only after the read of the body: from now on a task reads the connection.
        """
        await own_task()
        if self._watcher is None:
            self._watcher = asyncio.get_running_loop().create_task(self._watch())
        self._waiting = waiter
        try:
            await waiter
        finally:
            self._waiting = None
        if self._is_gone:
            raise ClientGone

    async def _watch(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass
        self._is_gone = True
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def end(self) -> None:
        """Wait until the answer is sent or the connection is given up; then release the memory."""
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None
        try:
            if self._connection.flow.write_paused:
                await self._drained()
        except ClientGone:
            pass
        finally:
            if self.hold is not None:
                self.release()

    def release(self) -> None:
        """Release the memory of the answer."""
        if self.hold is not None:
            self.hold.release()
            self.hold = None

    async def _drained(self) -> None:
        """Wait until the buffer has space; cut the connection of a client that reads too slowly."""
        await own_task()
        unsent = self._connection.unsent_bytes()
        while self._connection.flow.write_paused:
            try:
                async with asyncio.timeout(self._config.answer_stall_timeout_ms / 1000):
                    await self._connection.drain()
            except TimeoutError:
                unsent_now = self._connection.unsent_bytes()
                if unsent_now > unsent - _PROGRESS_BYTES_MIN:
                    self.abort()
                    raise ClientGone from None
                unsent = unsent_now

    async def start(self, status: int, headers: Headers) -> None:
        """Send the status line and headers; without a content length the body is chunked."""
        if self.tenure is not None:
            self.tenure.check()
        await own_task()
        self.status = status
        headers = [*headers, (b"x-request-id", self.request_id.encode())]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def answer(
        self,
        status: int,
        content_type: bytes,
        pieces: Sequence[Piece],
        *,
        headers: Headers = (),
    ) -> None:
        """Send a whole answer from `pieces`; large pieces are not copied."""
        total = sum(map(len, pieces))
        headers = [(b"content-type", content_type), *headers, (b"content-length", b"%d" % total)]
        if total <= _JOIN_BYTES_MAX:
            await self.send_whole(status, headers, b"".join(pieces))
            return
        await self.start(status, headers)
        for piece in pieces[:-1]:
            await self._send_piece(piece)
        await self._send_piece(pieces[-1], is_last=True)

    async def send_whole(self, status: int, headers: Headers, body: bytes) -> None:
        """Send an answer in one piece."""
        if self._connection.flow.write_paused:
            await self._drained()
        if self.tenure is not None:
            self.tenure.check()
        self._connection.write_whole(
            status, [*headers, (b"x-request-id", self.request_id.encode())], body
        )
        self.status = status

    async def push(self, pieces: Sequence[Piece]) -> None:
        """Send the next part of a chunked answer; returns once the buffer has space.

        Raises `ClientGone` if the connection is closed. If another process may own the data by now,
        the connection is cut.
        """
        if self._is_gone:
            raise ClientGone
        if self.tenure is not None:
            try:
                self.tenure.check()
            except StreamhouseError:
                # The status is already sent: the client repeats the request and gets the error.
                self.abort()
                raise ClientGone from None
        if sum(len(piece) for piece in pieces) <= _JOIN_BYTES_MAX:
            pieces = [b"".join(pieces)]
        for piece in pieces:
            await self._send_piece(piece)
        if self._connection.flow.write_paused:
            await self._drained()

    async def finish(self) -> None:
        """End a chunked answer cleanly."""
        await self._send_piece(b"", is_last=True)

    async def _send_piece(self, piece: Piece, *, is_last: bool = False) -> None:
        if self._connection.flow.write_paused:
            await self._drained()
        # The buffer has space, so this call never waits.
        await self._send({"type": "http.response.body", "body": piece, "more_body": not is_last})

    def abort(self) -> None:
        """Cut the connection; the next `push` or `wait` raises `ClientGone`."""
        self._is_gone = True
        self._connection.abort()

    async def answer_json(self, value: Any, *, status: int = 200) -> None:
        """Send a JSON answer."""
        await self.answer(status, b"application/json", [json.dumps(value).encode()])

    async def answer_error(
        self, error: StreamhouseError, *, form: tuple[int, dict[str, Any]] | None = None
    ) -> None:
        """Send `error` in the common form, or with the status and JSON of another protocol."""
        default_form = error.http_status, error_to_json(error, request_id=self.request_id)
        status, value = form or default_form
        headers = [*self.error_headers]
        if isinstance(error, UnauthorizedError):
            headers.append((b"www-authenticate", b"Bearer"))
        if error.retriable:
            headers.append((b"retry-after", b"1"))
        body = json.dumps(value).encode()
        await self.answer(status, b"application/json", [body], headers=headers)


def exchange_of(request: Request) -> HttpExchange:
    """Return the exchange of a FastAPI request."""
    exchange: HttpExchange = request.scope[EXCHANGE_KEY]
    return exchange


def error_to_json(error: StreamhouseError, *, request_id: str) -> dict[str, Any]:
    """Return the JSON form of an error, the same on every route.

    Long messages are cut off: a message may quote a whole request.
    """
    detail: dict[str, Any] = {
        "code": error.code,
        "message": short(error.message),
        "retriable": error.retriable,
        "request_id": request_id,
    }
    if isinstance(error, NotOwnerError):
        detail["owner"] = error.owner
    return {"error": detail}


def short(message: str) -> str:
    """Return `message` as valid UTF-8, cut off after `MESSAGE_CHARACTERS_MAX` characters."""
    # Half a surrogate pair, quoted from a request, cannot be sent.
    message = message.encode("utf-8", "backslashreplace").decode()
    if len(message) <= MESSAGE_CHARACTERS_MAX:
        return message
    return f"{message[:MESSAGE_CHARACTERS_MAX]}... ({len(message)} characters)"
