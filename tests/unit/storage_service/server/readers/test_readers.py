"""The owner's side of readers: which readers get connections, and which are replaced."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from streamhouse.storage_service.server.readers._messages import (
    Channel,
    Figures,
    Hold,
    Holds,
    Lost,
    Moved,
)
from streamhouse.storage_service.server.readers._readers import Readers
from tests.support.held_step import around
from tests.support.in_process_service import InProcessService, in_process_service, until
from tests.support.jumping_loop import JumpingLoop

_NOTHING = Figures(0, 0, 0, None)


class _Process:
    """A reader that does what a test says."""

    pids = itertools.count(1)
    returncode = -9

    def __init__(self, descriptor: int) -> None:
        self.pid = next(self.pids)
        self.killed_s: float | None = None
        self.messages: list[Any] = []
        self.connections: list[socket.socket] = []
        self.channel = Channel(
            socket.socket(fileno=os.dup(descriptor)), on_message=self._take, on_end=lambda: None
        )

    def _take(self, message: Any, connection: socket.socket | None) -> None:
        self.messages.append(message)
        if connection is not None:
            self.connections.append(connection)

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.messages if isinstance(message, kind)]

    def kill(self) -> None:
        self.killed_s = asyncio.get_running_loop().time()
        self.channel.close()


class _World:
    """A service with readers that a test plays."""

    def __init__(self, service: InProcessService, processes: list[_Process], count: int) -> None:
        self.service = service.service
        self.processes = processes
        self.clients: list[socket.socket] = []
        server: Any = SimpleNamespace()
        self.readers = Readers(service.service, server, count=count)
        self.readers.start()

    async def holding(self, *processes: _Process) -> None:
        """Have readers hold the table."""
        self.ask()
        await until(lambda: all(process.of(Hold)[1:] for process in processes))
        for process in processes:
            process.channel.send(Holds(process.of(Hold)[-1].generation, by_key=True))

    def ask(self) -> None:
        """Answer a lookup that makes its connection move."""
        ours, theirs = socket.socketpair()

        def take_socket() -> int:
            return theirs.detach()

        self.clients += [ours, theirs]
        connection = SimpleNamespace(reads=100, moves=0, stays_until_s=0.0, take_socket=take_socket)
        exchange: Any = SimpleNamespace(
            connection=connection, route="row", status=200, path="/v1/tables/keyed/rows/1"
        )
        self.readers.answered(exchange)

    async def moved(self, *, to: _Process) -> None:
        """A connection moves, and this reader gets it."""
        count = len(to.connections)
        self.ask()
        await until(lambda: len(to.connections) == count + 1)
        assert isinstance(to.messages[-1], Moved)

    async def close(self) -> None:
        await self.readers.close()
        for process in self.processes:
            process.channel.close()
            for connection in process.connections:
                connection.close()
        for client in self.clients:
            client.close()


def _run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    test: Callable[[_World], Awaitable[None]],
    *,
    count: int,
) -> None:
    processes: list[_Process] = []

    def start(_: object, module: str, inherited: tuple[int, ...], **__: object) -> _Process:
        assert module.endswith("_reader_process")
        processes.append(_Process(inherited[0]))
        return processes[-1]

    around(monkeypatch, "reader-starting", start)
    around(monkeypatch, "reader-ending", lambda *_, **__: None)

    async def run() -> None:
        async with in_process_service(tmp_path / "data") as service:
            await service.create_table("keyed", primary_key=("id",), bucket_count=2)
            world = _World(service, processes, count)
            try:
                await until(lambda: len(processes) == count)
                loop = asyncio.get_running_loop()
                assert isinstance(loop, JumpingLoop)
                loop.jump()
                await test(world)
            finally:
                await world.close()

    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        runner.run(run())


async def _killed_s(world: _World) -> float:
    """Return when the only process was killed, which is replaced then."""
    (process,) = world.processes
    while len(world.processes) == 1:
        await asyncio.sleep(1)
    assert process.killed_s is not None
    return process.killed_s


def test_a_silent_reader_is_replaced_after_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silent(world: _World) -> None:
        (process,) = world.processes
        await asyncio.sleep(15)
        process.channel.send(_NOTHING)
        heard_s = asyncio.get_running_loop().time()
        assert await _killed_s(world) - heard_s == pytest.approx(20, abs=1.5)

    _run(tmp_path, monkeypatch, silent, count=1)


def test_a_reader_has_more_time_for_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine readers were killed before they had started, again and again."""

    async def starting(world: _World) -> None:
        started_s = asyncio.get_running_loop().time()
        assert await _killed_s(world) - started_s == pytest.approx(120, abs=1.5)

    _run(tmp_path, monkeypatch, starting, count=1)


def test_a_silent_reader_gets_no_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silent(world: _World) -> None:
        first, second = world.processes
        await world.holding(first, second)
        first.channel.send(Figures(10, 0, 0, None))
        second.channel.send(Figures(5, 0, 0, None))
        await asyncio.sleep(0.1)
        await world.moved(to=second)

        # The second reader has fewer connections, and says nothing.
        await asyncio.sleep(4)
        first.channel.send(Figures(10, 0, 0, None))
        await asyncio.sleep(0.1)
        await world.moved(to=first)

        second.channel.send(Figures(5, 0, 0, None))
        await asyncio.sleep(0.1)
        await world.moved(to=second)

    _run(tmp_path, monkeypatch, silent, count=2)


def test_a_load_that_succeeded_ends_the_row_of_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lose(world: _World) -> None:
        loop = asyncio.get_running_loop()
        (process,) = world.processes
        await world.holding(process)

        async def offered_again_after() -> float:
            count, lost_s = len(process.of(Hold)), loop.time()
            process.channel.send(Lost(process.of(Hold)[-1].generation, by_key=True, why="no room"))
            while len(process.of(Hold)) == count:
                await asyncio.sleep(1)
                process.channel.send(_NOTHING)
            return loop.time() - lost_s

        assert await offered_again_after() == pytest.approx(30, abs=3)
        assert await offered_again_after() == pytest.approx(60, abs=3)
        process.channel.send(Holds(process.of(Hold)[-1].generation, by_key=True))
        assert await offered_again_after() == pytest.approx(30, abs=3)

    _run(tmp_path, monkeypatch, lose, count=1)


def test_counters_stay_as_they_were_told_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = ("streamhouse_requests", "streamhouse_requests_total", (("route", "row"),))

    async def count(world: _World) -> None:
        (process,) = world.processes

        async def counted(connections: int, samples: dict[Any, float] | None) -> dict[Any, float]:
            process.channel.send(Figures(connections, 0, 0, samples))
            await until(lambda: world.service.reader_figures().connections == connections)
            return dict(world.service.metrics.add_counts())

        assert await counted(1, {name: 3.0}) == {name: 3.0}
        assert await counted(2, None) == {name: 3.0}
        assert await counted(3, {name: 8.0}) == {name: 8.0}
        assert await counted(4, None) == {name: 8.0}

    _run(tmp_path, monkeypatch, count, count=1)
