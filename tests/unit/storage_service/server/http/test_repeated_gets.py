"""GETs with the headers of an earlier GET skip the parser: nobody can tell, whatever is sent."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from uvicorn.server import ServerState

from streamhouse.storage_service.config import ServiceConfig
from streamhouse.storage_service.server.http._http_protocol import BoundedHttpProtocol
from streamhouse.storage_service.server.http._http_server import http_config
from streamhouse.storage_service.server.http._own_task import own_task
from streamhouse.storage_service.server.http.http_exchange import (
    CONNECTION_KEY,
    Receive,
    Scope,
    Send,
)
from streamhouse.storage_service.server.http.open_connections import OpenConnections
from tests.support.in_process_service import until
from tests.support.memory_transport import MemoryTransport

_SEEN = ("method", "path", "raw_path", "query_string", "headers", "http_version", "type", "scheme")


class _Parsing(BoundedHttpProtocol):
    """A connection whose requests all go through the parser."""

    def _repeated_get(self, data: bytes) -> re.Match[bytes] | None:
        return None


class _Counting(BoundedHttpProtocol):
    """A connection that counts the requests that skip the parser."""

    skipped = 0

    def _begin_repeated(self, line: re.Match[bytes]) -> None:
        self.skipped += 1
        super()._begin_repeated(line)


class _Side:
    """One connection, the requests that its application saw, and what it answered."""

    def __init__(self, base: type[BoundedHttpProtocol]) -> None:
        connections = OpenConnections(connections_max=10, address_connections_max=10)
        settings_ = ServiceConfig(data_dir=Path("unused"))
        config = http_config(settings_, self._answer, connections, protocol=base)
        config.load()
        protocol: Any = config.http_protocol_class
        self.protocol = protocol(config=config, server_state=ServerState(), app_state={})
        self.transport = MemoryTransport()
        self.protocol.connection_made(self.transport)
        self.seen: list[tuple[Any, ...]] = []

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.seen.append(tuple(scope[name] for name in _SEEN))
        if scope["path"].startswith("/slow"):
            await own_task()
            await asyncio.sleep(0)
        body = b"%d %s" % (len(self.seen), scope["path"].encode())
        headers = [(b"content-length", b"%d" % len(body))]
        scope[CONNECTION_KEY].write_whole(200, headers, body)

    async def receive(self, piece: bytes) -> None:
        """Receive a piece as from the event loop: outside of any task."""
        looked_at = asyncio.get_running_loop().create_future()

        def receive() -> None:
            if not self.transport.is_closing():
                self.protocol.data_received(piece)
            looked_at.set_result(None)

        asyncio.get_running_loop().call_soon(receive)
        await looked_at

    async def settled(self) -> bytes:
        """Return all that was sent, once no request is in progress."""
        await until(lambda: not (self.protocol.tasks or self.protocol.pipeline))
        await asyncio.sleep(0)
        self.protocol.together.flush()
        return self.transport.sent


_LINES = (
    b"GET /rows/1 HTTP/1.1",
    b"GET /rows/2 HTTP/1.1",
    b"GET /rows/a%20b%2Fc HTTP/1.1",
    b"GET /rows/%zz HTTP/1.1",
    b"GET //rows/1 HTTP/1.1",
    b"GET /slow/1 HTTP/1.1",
    b"GET /rows/1?x=%31 HTTP/1.1",
    b"GET /rows/1 HTTP/1.0",
    b"GET /rows/1#part HTTP/1.1",
    b"GET http://x/rows/1 HTTP/1.1",
    b"GET /rows/\xff HTTP/1.1",
    b"GET  /rows/1 HTTP/1.1",
    b"GET /rows/1 HTTP/1.1 ",
    b"GET /rows/1\tHTTP/1.1",
    b"GET /rows/1",
    b"get /rows/1 HTTP/1.1",
    b"POST /rows/1 HTTP/1.1",
    b"HEAD /rows/1 HTTP/1.1",
)
_HEADERS = (
    b"\r\nHost: x\r\n\r\n",
    b"\r\nHost: x\r\nAuthorization: Bearer one\r\n\r\n",
    b"\r\nHost: x\r\nAuthorization: Bearer two\r\n\r\n",
    b"\r\nHost: x\r\nConnection: keep-alive\r\n\r\n",
    b"\r\nHost: x\r\nConnection: close\r\n\r\n",
    b"\r\nHost: x\r\nContent-Length: 0\r\n\r\n",
    b"\r\nHost: x\r\nContent-Length: 22\r\n\r\n",
    b"\r\nHost: x\r\nContent-Length: 22\r\n\r\nGET /in HTTP/1.1\r\n\r\n  ",
    b"\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n",
    b"\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"\r\nHost: x\r\nExpect: 100-continue\r\n\r\n",
    b"\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n",
    b"\r\nHost: x\n\n",
    b"\r\nHost: x\n\nGET /in HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\r\nHost: x\r\nA: b\rc\r\n\r\n",
    b"\r\nHost: x\r\n folded: y\r\n\r\n",
    b"\r\nHost : x\r\n\r\n",
    b"\r\n\r\n",
)
# Mostly GETs that repeat, because a wrong request ends its connection.
_USUAL = st.tuples(st.sampled_from(_LINES[:7]), st.sampled_from(_HEADERS[:3])).map(b"".join)
_ANY = st.tuples(st.sampled_from(_LINES), st.sampled_from(_HEADERS)).map(b"".join)
_REQUESTS = st.lists(st.one_of(_USUAL, _USUAL, _USUAL, _ANY), min_size=1, max_size=12)


async def _compared(pieces: list[bytes]) -> int:
    """Receive the pieces with and without the parser; return how many requests skipped it."""
    quick, slow = _Side(_Counting), _Side(_Parsing)
    for piece in pieces:
        await quick.receive(piece)
        await slow.receive(piece)
    assert await quick.settled() == await slow.settled()
    assert quick.seen == slow.seen
    assert quick.transport.is_closing() == slow.transport.is_closing()
    skipped: int = quick.protocol.skipped
    return skipped


@settings(max_examples=400, deadline=None)
@given(requests=_REQUESTS, data=st.data())
def test_any_requests_are_answered_as_through_the_parser(
    requests: list[bytes], data: st.DataObject
) -> None:
    """Requests arrive whole, in pieces or several at once."""
    pieces: list[bytes] = []
    waiting = b""
    for request in requests:
        waiting += request
        cut = data.draw(st.integers(0, 3))
        if cut == 0:
            continue
        if cut == 3:
            place = data.draw(st.integers(0, len(waiting)))
            pieces += [waiting[:place], waiting[place:]]
        else:
            pieces.append(waiting)
        waiting = b""
    pieces = [piece for piece in (*pieces, waiting) if piece]
    asyncio.run(_compared(pieces))


def test_only_a_repeated_get_skips_the_parser() -> None:
    get = b"GET /rows/%d HTTP/1.1\r\nHost: x\r\n\r\n"
    other = b"GET /rows/9 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer t\r\n\r\n"
    with_body = b"GET /rows/1 HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"

    # The first is new, the second is kept, all later ones skip the parser.
    assert asyncio.run(_compared([get % number for number in range(6)])) == 4
    # Other headers in between are a new beginning.
    assert asyncio.run(_compared([get % 1, get % 2, get % 3, other, get % 4, get % 5])) == 1
    assert asyncio.run(_compared([with_body] * 6)) == 0
    assert asyncio.run(_compared([(get % 1) * 2] * 6)) == 0


_GET = b"GET /rows/1 HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize("place", range(1, len(_GET)))
def test_a_repeated_get_in_two_pieces_is_answered_once(place: int) -> None:
    get = _GET
    asyncio.run(_compared([get, get, get, get[:place], get[place:], get, get]))
