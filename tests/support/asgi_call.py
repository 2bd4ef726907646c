"""One HTTP request to an ASGI application without a socket, piece by piece if need be."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

from streamhouse.storage_service.server.http.http_exchange import (
    CONNECTION_KEY,
    Headers,
    Message,
    Scope,
)

__all__ = ["AsgiAnswer", "AsgiCall"]


@dataclass
class AsgiAnswer:
    """What the application sent."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    is_complete: bool = False

    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)

    def error(self) -> tuple[int, str, str]:
        """Status, code and message of an error answer, which has exactly the one form."""
        error = self.json()["error"]
        assert set(error) == {"code", "message", "retriable", "request_id"}
        assert error["request_id"] == self.headers["x-request-id"]
        return self.status, error["code"], error["message"]


_ARROW_ROUTES = ("append", "upsert", "delete", "stage", "lookup", "prefix_lookup")


def _content_type(path: str) -> str:
    """The content type of the route's bodies."""
    is_arrow = path.rpartition("/")[2] in _ARROW_ROUTES
    return "application/vnd.apache.arrow.stream" if is_arrow else "application/json"


class AsgiCall:
    """A request under way: `answer` grows as the application sends; `disconnect` hangs up.

    `chunks` is the body; None as the last chunk means that the client stalls there.
    """

    is_given_back = False

    def __init__(
        self,
        app: Any,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        chunks: Iterable[bytes | None] = (b"",),
        content_length: int | None = None,
    ) -> None:
        pairs = {"content-type": _content_type(path)}
        pairs |= {} if content_length is None else {"content-length": str(content_length)}
        pairs |= headers or {}
        self._app = app
        self._scope: Scope = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "scheme": "http",
            "http_version": "1.1",
            "query_string": urlencode(query or {}).encode(),
            "headers": [(k.lower().encode(), v.encode()) for k, v in pairs.items()],
            "server": ("in-process", 80),
            "client": ("test", 1),
            "state": {},
            CONNECTION_KEY: self,
        }
        self.is_aborted = False
        self._chunks = list(chunks)
        self._disconnected = asyncio.Event()
        self._sent = asyncio.Event()
        self.answer = AsgiAnswer()
        # Cleared by a test, it makes the connection take nothing more.
        self.takes_more = asyncio.Event()
        self.takes_more.set()

    def disconnect(self) -> None:
        """Close the connection from the client's side."""
        self._disconnected.set()

    @property
    def flow(self) -> AsgiCall:
        """The call itself."""
        return self

    @property
    def write_paused(self) -> bool:
        """Whether the connection takes nothing more."""
        return not self.takes_more.is_set()

    async def drain(self) -> None:
        """Return when the connection takes more, or is cut."""
        await self.takes_more.wait()

    def unsent_bytes(self) -> int:
        """Return the same each time: nothing of it leaves."""
        return int(self.write_paused)

    def abort(self) -> None:
        """Cut the connection."""
        self.is_aborted = True
        self._disconnected.set()

    async def run(self) -> AsgiAnswer:
        """Let the application answer; return when it is done."""
        await self._app(self._scope, self._receive, self._send)
        return self.answer

    async def sent(self, byte_count: int) -> None:
        """Wait until the answer's body has more than `byte_count` bytes."""
        while len(self.answer.body) <= byte_count:
            self._sent.clear()
            await self._sent.wait()

    async def _receive(self) -> Message:
        if self._chunks and self._chunks[0] is not None:
            chunk = self._chunks.pop(0)
            return {"type": "http.request", "body": chunk, "more_body": bool(self._chunks)}
        await self._disconnected.wait()
        return {"type": "http.disconnect"}

    def write_whole(self, status: int, headers: Headers, body: bytes) -> None:
        """Take a whole answer."""
        if not self.is_aborted:
            self._start(status, headers)
            self.answer.body, self.answer.is_complete = body, True
            self._sent.set()

    def _start(self, status: int, headers: Headers) -> None:
        assert self.answer.status == 0, "a second status line"
        self.answer.status = status
        self.answer.headers = {bytes(k).decode(): bytes(v).decode() for k, v in headers}

    async def _send(self, message: Message) -> None:
        await self.takes_more.wait()
        if self.is_aborted:
            return
        if message["type"] == "http.response.start":
            self._start(message["status"], message["headers"])
            return
        assert self.answer.status, "a body before the status line"
        assert not self.answer.is_complete, "more after the end"
        self.answer.body += message.get("body", b"")
        self.answer.is_complete = not message.get("more_body", False)
        self._sent.set()
