"""A connection at a reader: every byte is either answered here, or goes to the owner."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from streamhouse.storage_service.config import ServiceConfig
from streamhouse.storage_service.server.http._http_server import HttpServer, http_config
from streamhouse.storage_service.server.http._own_task import own_task
from streamhouse.storage_service.server.http.http_exchange import (
    CONNECTION_KEY,
    Receive,
    Scope,
    Send,
)
from streamhouse.storage_service.server.http.open_connections import OpenConnections
from streamhouse.storage_service.server.readers._reader_connection import reader_connection

GET = b"GET /here/%d HTTP/1.1\r\nHost: x\r\n\r\n"
ELSEWHERE = b"GET /elsewhere HTTP/1.1\r\nHost: x\r\n\r\n"


class _World:
    """A server of connections that answers paths below /here, and what went back."""

    def __init__(self, directory: Path) -> None:
        connections = OpenConnections(connections_max=10, address_connections_max=10)
        settings = http_config(
            ServiceConfig(data_dir=directory),
            self._answer,
            connections,
            protocol=reader_connection(self._take_back, large_requests_bytes_max=1 << 20),
        )
        self.server = HttpServer(settings, connections, None)
        self.connections = connections
        self.back: asyncio.Queue[tuple[socket.socket, bytes, int]] = asyncio.Queue()
        self.begun = asyncio.Event()
        self.go_on = asyncio.Event()

    def _take_back(self, descriptor: int, data: bytes, moves: int) -> None:
        self.back.put_nowait((socket.socket(fileno=descriptor), data, moves))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"].startswith("/slow"):
            await own_task()
            self.begun.set()
            await self.go_on.wait()
        if not scope["path"].startswith("/here"):
            scope[CONNECTION_KEY].give_back()
            return
        message = await receive()
        body = scope["path"].encode() + message["body"]
        headers = [(b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def connect(self) -> socket.socket:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            client = socket.create_connection(listening.getsockname())
            accepted, _ = listening.accept()
        client.setblocking(False)
        await self.server.adopt(accepted, b"", moves=2, stays_s=0)
        return client


@contextlib.asynccontextmanager
async def _world(directory: Path) -> AsyncIterator[_World]:
    world = _World(directory)
    serving = asyncio.ensure_future(world.server.serve(sockets=[]))
    await world.server.is_listening.wait()
    yield world
    world.server.should_exit = True
    await serving


async def _answers(client: socket.socket, *bodies: bytes) -> None:
    received, loop = b"", asyncio.get_running_loop()
    while received.count(b"\r\n\r\n") < len(bodies) or not received.endswith(bodies[-1]):
        more = await loop.sock_recv(client, 1 << 16)
        assert more, received
        received += more
    for body in bodies:
        head, _, received = received.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        assert received.startswith(body)
        received = received[len(body) :]


async def _goes_back(world: _World, client: socket.socket, data: bytes) -> None:
    """The connection is the owner's, with exactly `data`, and what follows arrives there."""
    loop = asyncio.get_running_loop()
    served, received, moves = await world.back.get()
    served.setblocking(False)
    assert received == data
    assert moves == 3
    await loop.sock_sendall(client, b"more")
    assert await loop.sock_recv(served, 100) == b"more"
    await loop.sock_sendall(served, b"answer")
    assert await loop.sock_recv(client, 100) == b"answer"
    assert not world.connections
    served.close()
    client.close()


async def test_requests_one_after_the_other_are_answered(tmp_path: Path) -> None:
    async with _world(tmp_path) as world:
        client, loop = await world.connect(), asyncio.get_running_loop()
        for number in range(3):
            await loop.sock_sendall(client, GET % number)
            await _answers(client, b"/here/%d" % number)
        body = b"POST /here/b HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nabcd"
        await loop.sock_sendall(client, body)
        await _answers(client, b"/here/babcd")
        client.close()


async def test_a_request_in_pieces_is_answered(tmp_path: Path) -> None:
    async with _world(tmp_path) as world:
        client, loop = await world.connect(), asyncio.get_running_loop()
        request = b"POST /here/p HTTP/1.1\r\ncontent-length:  10 \r\nHost: x\r\n\r\n0123456789"
        for position in range(len(request)):
            await loop.sock_sendall(client, request[position : position + 1])
            await asyncio.sleep(0)
        await _answers(client, b"/here/p0123456789")
        client.close()


async def test_requests_sent_together_are_answered_in_order(tmp_path: Path) -> None:
    async with _world(tmp_path) as world:
        client, loop = await world.connect(), asyncio.get_running_loop()
        await loop.sock_sendall(client, b"".join(GET % number for number in range(5)))
        await _answers(client, *(b"/here/%d" % number for number in range(5)))
        client.close()


async def test_a_request_for_the_owner_goes_back(tmp_path: Path) -> None:
    async with _world(tmp_path) as world:
        client, loop = await world.connect(), asyncio.get_running_loop()
        await loop.sock_sendall(client, GET % 1)
        await _answers(client, b"/here/1")
        await loop.sock_sendall(client, ELSEWHERE)
        await _goes_back(world, client, ELSEWHERE)


async def test_only_what_is_not_answered_goes_back(tmp_path: Path) -> None:
    async with _world(tmp_path) as world:
        client, loop = await world.connect(), asyncio.get_running_loop()
        rest = ELSEWHERE + GET % 2 + b"GET /he"
        await loop.sock_sendall(client, GET % 1 + rest)
        await _answers(client, b"/here/1")
        await _goes_back(world, client, rest)


async def test_a_request_goes_back_while_it_is_worked_on(tmp_path: Path) -> None:
    async with _world(tmp_path) as world:
        client, loop = await world.connect(), asyncio.get_running_loop()
        slow = b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n"
        await loop.sock_sendall(client, slow)
        await world.begun.wait()
        await loop.sock_sendall(client, GET % 1)
        await asyncio.sleep(0.05)
        world.go_on.set()
        await _goes_back(world, client, slow + GET % 1)


_HEAD = b"POST /here/1 HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize(
    "request_bytes",
    [
        _HEAD + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
        _HEAD + b"Expect: 100-continue\r\nContent-Length: 3\r\n\r\n",
        _HEAD + b"content-length: 3\r\nContent-Length: 4\r\n\r\nabc",
        _HEAD + b"Content-Length: +3\r\n\r\nabc",
        _HEAD + b"Content-Length: 3 \t3\r\n\r\nabc",
        _HEAD + b"Content-Length : 3\r\n\r\nabc",
        _HEAD + b"Content-Length: 99999999\r\n\r\nabc",
        b"GET /here/1 HTTP/1.1\r\nHost: x\r\nContent-Length: 3x\r\n\r\n",
        b"\r\n\r\nGET /here/1 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /here/1 HTTP/1.1\nHost: x\n\n",
        b"GET /here/1 HTTP/1.1\r\nHost: x\r\n\n",
        b"HEAD /here/1 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01",
        b"G\x16",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /here/1 HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n",
        b"GET /here/1 HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ],
)
async def test_requests_in_other_forms_go_back_unread(tmp_path: Path, request_bytes: bytes) -> None:
    async with _world(tmp_path) as world:
        client, loop = await world.connect(), asyncio.get_running_loop()
        await loop.sock_sendall(client, request_bytes)
        await _goes_back(world, client, request_bytes)


async def test_a_head_without_end_goes_back(tmp_path: Path) -> None:
    async with _world(tmp_path) as world:
        client, loop = await world.connect(), asyncio.get_running_loop()
        head = b"GET /here/1 HTTP/1.1\r\nx: " + b"y" * (65 << 10)
        sending = asyncio.ensure_future(loop.sock_sendall(client, head))
        served, received, _ = await world.back.get()
        served.setblocking(False)
        while len(received) < len(head):
            received += await loop.sock_recv(served, 1 << 20)
        await sending
        assert received == head
        served.close()
        client.close()


async def test_large_bodies_on_their_way_are_bounded(tmp_path: Path) -> None:
    async with _world(tmp_path) as world:
        loop = asyncio.get_running_loop()
        large = _HEAD + b"Content-Length: 700000\r\n\r\n"
        first, second = await world.connect(), await world.connect()
        await loop.sock_sendall(first, large)
        # The second connection is served once the room of the first is taken.
        await loop.sock_sendall(second, GET % 1)
        await _answers(second, b"/here/1")

        await loop.sock_sendall(second, large)
        served, received, _ = await world.back.get()
        assert received == large
        served.close()
        await loop.sock_sendall(first, b"x" * 700_000)
        await _answers(first, b"/here/1" + b"x" * 700_000)
        third = await world.connect()
        await loop.sock_sendall(third, large + b"x" * 700_000)
        await _answers(third, b"/here/1" + b"x" * 700_000)
        for client in (first, second, third):
            client.close()


async def test_a_connection_goes_back_once_there_is_room_for_its_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    duplicate, refused = os.dup, asyncio.Event()

    def refuse_once(descriptor: int) -> int:
        if refused.is_set():
            return duplicate(descriptor)
        refused.set()
        raise OSError(errno.EMFILE, "Too many open files")

    async with _world(tmp_path) as world:
        client, loop = await world.connect(), asyncio.get_running_loop()
        monkeypatch.setattr(os, "dup", refuse_once)
        await loop.sock_sendall(client, ELSEWHERE)
        await _goes_back(world, client, ELSEWHERE)
        assert refused.is_set()
