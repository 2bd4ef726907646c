"""One HTTP request and its answer on bare ASGI: parameters, bounded bodies, errors as JSON.

FastAPI serves the control routes; the data routes and everything around both use this, because
it costs a third per request.
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
    Iterable,
    MutableMapping,
    Sequence,
)
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias
from urllib.parse import parse_qsl

from fastapi import Request

from streamhouse.core.errors import (
    InvalidRequestError,
    NotOwnerError,
    RequestTooLargeError,
    StreamhouseError,
    UnauthorizedError,
)
from streamhouse.storage_service.server.caller import EVERYTHING, UNKNOWN, Level, Need
from streamhouse.storage_service.server.http._own_task import own_task
from streamhouse.storage_service.server.http.answer_memory import AnswerHold
from streamhouse.storage_service.server.http.body_memory import HeldBody

if TYPE_CHECKING:
    from streamhouse.core.traces.spans import FollowedCall

__all__ = [
    "ARROW_STREAM",
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
]

Message: TypeAlias = MutableMapping[str, Any]
Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
Piece: TypeAlias = bytes | memoryview
Headers: TypeAlias = Sequence[tuple[bytes, bytes]]

ARROW_STREAM: Final = b"application/vnd.apache.arrow.stream"
BODY_KEY: Final = "streamhouse.body"
"""The whole body, where it came with the head."""
CONNECTION_KEY: Final = "streamhouse.connection"
EXCHANGE_KEY: Final = "streamhouse.exchange"
MESSAGE_CHARACTERS_MAX: Final = 2_000
_JOIN_BYTES_MAX: Final = 128 << 10
# What a client must take of an answer in `answer_stall_timeout_ms`: by default a kilobyte a second.
_PROGRESS_BYTES_MIN: Final = 64 << 10


def _parameters(query: bytes) -> Sequence[tuple[str, str]]:
    return tuple(parse_qsl(query.decode("latin-1"), keep_blank_values=True))


# A writer's requests all have the same.
_SHORT_QUERY_BYTES: Final = 256
_known_parameters = functools.lru_cache(maxsize=1_024)(_parameters)


class Connection(Protocol):
    """What an answer needs of its connection besides ASGI's messages."""

    @property
    def write_paused(self) -> bool:
        """Whether so many bytes have not left that no more should be given."""

    async def drain(self) -> None:
        """Return when few are left, or the connection is lost."""

    def unsent_bytes(self) -> int:
        """How many have not left."""

    def write_whole(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a whole answer."""

    def abort(self) -> None:
        """Cut the connection."""


class Tenure(Protocol):
    """How long this process owns the data that it answers about."""

    def check(self) -> None:
        """Raise `NotOwnerError` unless nobody else can have changed anything until now."""

    def check_write(self) -> None:
        """Raise `NotOwnerError` if rows that are stored here now may never be the owner's."""


class ClientGone(Exception):
    """The client closed the connection before its request was complete."""


class Body(enum.Enum):
    """What a request's body is: its content type, and the limit of its bytes."""

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
    # A request that nobody has found the route of is closed rather than open.
    return Need(Level.ADMIN, EVERYTHING)


class HttpExchange:
    """One request being answered. `route` names it in metrics, `status` is 0 until answered."""

    # What most requests never change is kept once for all of them.
    route = "unknown"
    body = Body.JSON
    text_bodies: Collection[bytes] = ()
    """The content types that are taken beside that of `body`, for who sends another one."""
    need: Callable[[], Need] = staticmethod(_everything)
    """What the request asks of its caller; raises if its path can be no table's."""
    caller = UNKNOWN
    share = ""
    """Whose share of what is shared the request uses; see `AccessControl`."""
    status = 0
    error_headers: Headers = ()
    """What an answer that is an error says besides."""
    hold: AnswerHold | None = None
    """What the answer holds of the memory for answers."""
    tenure: Tenure | None = None
    """Asked before an answer leaves, and so after its data was read; not for what was stored."""
    followed: FollowedCall | None = None
    """Its span, if it is part of a trace."""
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
        stall_timeout_ms: int,
    ) -> None:
        self.scope = scope
        self.receive = receive
        self._send = send
        self.request_id = request_id
        self._stall_timeout_s = stall_timeout_ms / 1000
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self._connection: Connection = scope[CONNECTION_KEY]

    @property
    def client_address(self) -> str:
        """The address that the request came from."""
        client = self.scope.get("client") or ("unknown",)
        return str(client[0])

    def header(self, name: bytes) -> bytes | None:
        """Return the first header called `name` (lower case)."""
        for key, value in self.scope["headers"]:
            if key == name:
                return bytes(value)
        return None

    def accepted(self, known: Container[bytes]) -> bytes | None:
        """Return the first of these content types that the client asks for; None if it does not."""
        text = self.header(b"accept")
        if text is None or text == b"*/*":
            return None
        for named in text.split(b","):
            content_type = named.partition(b";")[0].strip().lower()
            if content_type in known:
                return content_type
        return None

    def query(self, known: Iterable[str]) -> dict[str, str]:
        """Return the query parameters; raises for one that is not `known` or given twice."""
        query: bytes = self.scope["query_string"]
        if not query:
            return {}
        pairs = (_known_parameters if len(query) <= _SHORT_QUERY_BYTES else _parameters)(query)
        found = dict(pairs)
        allowed = set(known)
        for name in found:
            if name not in allowed:
                raise InvalidRequestError(
                    f"{self.path}: unknown parameter '{name[:100]}'"
                    f" (known: {', '.join(sorted(allowed))})"
                )
        if len(found) < len(pairs):
            raise InvalidRequestError(f"{self.path}: a parameter is given twice")
        return found

    @property
    def raw_path(self) -> str:
        """The path as it was sent, percent-encoded."""
        return str(self.scope["raw_path"], "latin-1")

    @property
    def is_changing(self) -> bool:
        """Whether the request may change something: an answer to it tells of what was done."""
        return self.method not in ("GET", "HEAD")

    def content_length(self) -> int | None:
        """Return the announced length of the body, or None for a chunked one."""
        text = self.header(b"content-length")
        if text is None:
            return None
        if not text.isdigit():
            raise InvalidRequestError(f"{self.path}: content-length is not a number")
        return int(text)

    async def read_body(
        self,
        held: HeldBody,
        *,
        bytes_max: int,
        timeout_ms: int,
    ) -> bytes:
        """Return the whole body, whose memory is `held`.

        Raises `InvalidRequestError` for a body of another content type, or one that takes too long;
        `RequestTooLargeError` as soon as the limit is known to be passed, `OverloadedError` when
        there is no room for it, `ClientGone` when it never ends.
        """
        whole: bytearray | None = self.scope.get(BODY_KEY)
        length = self.content_length() if whole is None else len(whole)
        if length is not None and length > bytes_max:
            raise self._too_large(bytes_max)
        if whole is not None and held.adds_at_once(len(whole)):
            held.end()
            if whole:
                self._check_content_type(self.body.content_type)
            body = bytes(whole)
            # The connection keeps it until its next request.
            whole.clear()
            return body
        await own_task()
        try:
            async with asyncio.timeout(timeout_ms / 1000) as limit:
                held.begin(lambda: None if limit.expired() else limit.reschedule(0))
                chunks = await self._chunks(held, bytes_max)
        except TimeoutError:
            if held.is_refused:
                raise held.refusal() from None
            raise InvalidRequestError(
                f"{self.path}: the request body did not arrive within {timeout_ms} ms"
                " (body_read_timeout_ms)"
            ) from None
        held.end()
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    async def _chunks(self, held: HeldBody, bytes_max: int) -> list[bytes]:
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
                await held.add(len(chunk))
                chunks.append(chunk)
            if not message.get("more_body", False):
                return chunks

    def _check_content_type(self, wanted: bytes) -> None:
        """Refuse what a web page may send anywhere without asking: forms, text, untyped bytes."""
        given = self.header(b"content-type")
        if given == wanted:
            return
        given = given or b""
        if given.partition(b";")[0].strip().lower() != wanted:
            raise InvalidRequestError(
                f"{self.path[:200]}: the body's content type is '{given.decode('latin-1')[:200]}';"
                f" send it with the header 'Content-Type: {wanted.decode()}'{self._or_as_text()}"
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
        """Await `waiter`; raises `ClientGone` if the client goes away meanwhile.

        Only after the body was read: until `close` this is the only reader of the connection.
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
        """Return when the answer has left, or the connection is given up; then hold nothing."""
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None
        try:
            if self._connection.write_paused:
                await self._drained()
        except ClientGone:
            pass
        finally:
            self.release()

    def release(self) -> None:
        """Hold no memory for an answer any more."""
        if self.hold is not None:
            self.hold.release()
            self.hold = None

    async def _drained(self) -> None:
        """Wait until what was sent has left; cuts the connection of a client that reads nothing."""
        await own_task()
        unsent = self._connection.unsent_bytes()
        while self._connection.write_paused:
            try:
                async with asyncio.timeout(self._stall_timeout_s):
                    await self._connection.drain()
            except TimeoutError:
                left = self._connection.unsent_bytes()
                if left > unsent - _PROGRESS_BYTES_MIN:
                    self.abort()
                    raise ClientGone from None
                unsent = left

    async def start(self, status: int, headers: Headers) -> None:
        """Send the status line and headers; without a length among them the body is chunked."""
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
        """Send a whole answer made of `pieces`; large ones are not copied."""
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
        if self._connection.write_paused:
            await self._drained()
        if self.tenure is not None:
            self.tenure.check()
        self._connection.write_whole(
            status, [*headers, (b"x-request-id", self.request_id.encode())], body
        )
        self.status = status

    async def push(self, pieces: Sequence[Piece]) -> None:
        """Send the next part of a chunked answer; returns once the connection takes more.

        Raises `ClientGone` if it is closed; cuts it if the data may be another process's by now.
        """
        if self._is_gone:
            raise ClientGone
        if self.tenure is not None:
            try:
                self.tenure.check()
            except StreamhouseError:
                # The status is long sent: the client asks anew, and is told then.
                self.abort()
                raise ClientGone from None
        if sum(len(piece) for piece in pieces) <= _JOIN_BYTES_MAX:
            pieces = [b"".join(pieces)]
        for piece in pieces:
            await self._send_piece(piece)
        if self._connection.write_paused:
            await self._drained()

    async def finish(self) -> None:
        """End a chunked answer cleanly."""
        await self._send_piece(b"", is_last=True)

    async def _send_piece(self, piece: Piece, *, is_last: bool = False) -> None:
        if self._connection.write_paused:
            await self._drained()
        # Given to a connection that takes more, it never waits.
        await self._send({"type": "http.response.body", "body": piece, "more_body": not is_last})

    def abort(self) -> None:
        """Cut the connection; whoever answers this request meets `ClientGone`."""
        self._is_gone = True
        self._connection.abort()

    async def answer_json(self, value: Any, *, status: int = 200) -> None:
        """Send a JSON answer."""
        await self.answer(status, b"application/json", [json.dumps(value).encode()])

    async def answer_error(
        self, error: StreamhouseError, *, form: tuple[int, dict[str, Any]] | None = None
    ) -> None:
        """Send `error` as every route does, or with the status and JSON of another protocol."""
        own = error.http_status, error_to_json(error, request_id=self.request_id)
        status, value = form or own
        headers = [*self.error_headers]
        if isinstance(error, UnauthorizedError):
            headers.append((b"www-authenticate", b"Bearer"))
        if error.retriable:
            headers.append((b"retry-after", b"1"))
        body = json.dumps(value).encode()
        await self.answer(status, b"application/json", [body], headers=headers)


def exchange_of(request: Request) -> HttpExchange:
    """Return the exchange that FastAPI answers as `request`."""
    exchange: HttpExchange = request.scope[EXCHANGE_KEY]
    return exchange


def error_to_json(error: StreamhouseError, *, request_id: str) -> dict[str, Any]:
    """Return the JSON form of an error, the same on every route.

    What it quotes of a request is cut off: a message is a sentence, not an echo.
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
    """Return `message` as it can be sent: the first part of a long one."""
    # Half a surrogate pair, quoted from a request, cannot be sent.
    message = message.encode("utf-8", "backslashreplace").decode()
    if len(message) <= MESSAGE_CHARACTERS_MAX:
        return message
    return f"{message[:MESSAGE_CHARACTERS_MAX]}... ({len(message)} characters)"
