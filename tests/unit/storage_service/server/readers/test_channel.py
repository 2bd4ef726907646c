"""The channel between owner and reader: whole messages in order, with their connections."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from typing import Any

import pytest

from streamhouse.storage_service.server.readers._messages import Channel, Lost, Moved
from tests.support.in_process_service import until


class _End:
    def __init__(self, end: socket.socket) -> None:
        self.messages: list[tuple[Any, socket.socket | None]] = []
        self.has_ended = False
        self.channel = Channel(end, on_message=self._take, on_end=self._end)

    def _take(self, message: Any, connection: socket.socket | None) -> None:
        self.messages.append((message, connection))

    def _end(self) -> None:
        self.has_ended = True


async def test_connections_arrive_with_their_messages() -> None:
    ours, theirs = map(_End, socket.socketpair())
    clients = []
    for number in range(40):
        client, served = socket.socketpair()
        clients.append(client)
        ours.channel.send(Lost(number, by_key=True, why="x" * 10_000))
        ours.channel.send(Moved(bytes([number]) * 30_000, number), served.detach())

    # Far more than the buffers of the sockets have room for.
    await until(lambda: len(theirs.messages) == 80)

    for number, client in enumerate(clients):
        lost, nothing = theirs.messages[2 * number]
        assert (lost, nothing) == (Lost(number, by_key=True, why="x" * 10_000), None)
        moved, served = theirs.messages[2 * number + 1]
        assert moved == Moved(bytes([number]) * 30_000, number)
        served.sendall(bytes([number]))
        served.close()
        assert client.recv(10) == bytes([number])
        client.close()
    ours.channel.close()
    theirs.channel.close()


async def test_the_end_of_a_process_ends_the_channel_and_its_connections() -> None:
    ours, theirs = map(_End, socket.socketpair())
    theirs.channel.close()
    await until(lambda: ours.has_ended)
    client, served = socket.socketpair()

    ours.channel.send(Moved(b"", 0), served.detach())

    assert await asyncio.to_thread(client.recv, 1) == b""
    client.close()
    ours.channel.close()


async def test_what_is_on_the_way_is_closed_with_the_channel() -> None:
    first, second = socket.socketpair()
    ours = _End(first)
    client, served = socket.socketpair()
    ours.channel.send(Lost(1, by_key=True, why="x" * (4 << 20)))
    ours.channel.send(Moved(b"", 0), served.detach())

    ours.channel.close()

    assert await asyncio.to_thread(client.recv, 1) == b""
    client.close()
    second.close()


async def test_a_connection_without_room_takes_no_other_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    receive = socket.recv_fds

    def without_room(end: socket.socket, size: int, most: int) -> tuple[bytes, list[int], int, Any]:
        """As the kernel does for a process with too many open files."""
        data, descriptors, flags, address = receive(end, size, most)
        if not dropped and descriptors:
            dropped.extend(descriptors)
            return data, [], flags | socket.MSG_CTRUNC, address
        return data, descriptors, flags, address

    dropped: list[int] = []
    monkeypatch.setattr(socket, "recv_fds", without_room)
    ours, theirs = map(_End, socket.socketpair())
    pairs = [socket.socketpair() for _ in range(2)]
    # In several pieces, the first with the descriptor.
    for number, (_, served) in enumerate(pairs):
        ours.channel.send(Moved(bytes([number]) * 600_000, number), served.detach())
    ours.channel.send(Lost(7, by_key=True, why=""))

    await until(lambda: len(theirs.messages) == 2)

    assert theirs.messages[1] == (Lost(7, by_key=True, why=""), None)
    moved, carried = theirs.messages[0]
    assert moved == Moved(b"\x01" * 600_000, 1)
    carried.sendall(b"second")
    assert pairs[1][0].recv(10) == b"second"
    carried.close()
    for descriptor in dropped:
        os.close(descriptor)
    assert pairs[0][0].recv(10) == b""
    for client, _ in pairs:
        client.close()
    ours.channel.close()
    theirs.channel.close()


@pytest.mark.parametrize("code", [errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS])
async def test_what_the_kernel_has_no_room_for_is_sent_later(
    monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    send, refused = socket.send_fds, asyncio.Event()

    def refuse_once(*arguments: Any) -> int:
        if refused.is_set():
            return send(*arguments)
        refused.set()
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(socket, "send_fds", refuse_once)
    ours, theirs = map(_End, socket.socketpair())
    client, served = socket.socketpair()
    ours.channel.send(Moved(b"first", 0), served.detach())
    ours.channel.send(Lost(2, by_key=True, why=""))

    await until(lambda: len(theirs.messages) == 2)

    assert refused.is_set()
    moved, carried = theirs.messages[0]
    assert moved == Moved(b"first", 0)
    carried.sendall(b"here")
    assert client.recv(10) == b"here"
    for end in (client, carried):
        end.close()
    ours.channel.close()
    theirs.channel.close()
