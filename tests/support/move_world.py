"""Two shards over one store, between which a table moves, and machines that die or stand still.

Every request to the store and every durable change of a data directory is a step of its machine. At
a chosen step the machine dies, or stands still while another takes its shard over and then goes on:
its requests to the store arrive as if nothing had happened, its own directory is out of its reach,
as the journal fences it.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from streamhouse.core.errors import StreamhouseError
from streamhouse.core.model.table import TablePath
from streamhouse.storage_service.config import ServiceConfig
from streamhouse.storage_service.directory.data_directory import DataDirectory
from streamhouse.storage_service.directory.runtime import Runtime, clock_us
from streamhouse.storage_service.engine.manager import TabletManager
from streamhouse.storage_service.engine.table_arrivals import Asked
from streamhouse.storage_service.engine.table_moves import TableMoves
from streamhouse.storage_service.log.filesystem import Buffer, LocalFilesystem
from streamhouse.storage_service.ownership.journal.store.object_store import (
    ObjectEntry,
    ObjectStore,
)
from streamhouse.storage_service.ownership.shards.chain import DirectoryObjects
from streamhouse.storage_service.ownership.shards.directory import ShardDirectory
from streamhouse.storage_service.ownership.shards.tickets import MoveTicket
from streamhouse.storage_service.server.status.metrics import ServiceMetrics

__all__ = ["Died", "Machine", "MoveWorld"]


class Died(BaseException):
    """The machine is gone."""


class Machine:
    """One process of a shard, on a directory of its own."""

    def __init__(self, world: MoveWorld, shard: str, path: Path) -> None:
        self.world = world
        self.shard = shard
        self.path = path
        self.steps = 0
        self.stop_at = 0
        """The step that is not done; 0: none."""
        self.is_stall = False
        self.is_dead = False
        self.on_death: Callable[[], None] = lambda: None
        """Called when it has died, or stands still."""
        self.has_stopped = threading.Event()
        self.goes_on = threading.Event()
        self.executor = ThreadPoolExecutor(6)
        # Held while the directory changes, so that what a death leaves is what there was once.
        self._lock = threading.RLock()
        self.directory: DataDirectory
        self.manager: TabletManager
        self.moves: TableMoves

    async def open(self) -> Machine:
        """Serve the shard, as the server's start does."""
        self.directory = directory = DataDirectory.open(self.path)
        directory.filesystem = _Disk(self)
        store = _Store(self)
        names = ShardDirectory(DirectoryObjects(store), shard=self.shard, sleep=lambda _: None)
        self.manager = await TabletManager.open(
            ServiceConfig(data_dir=self.path),
            runtime=Runtime(
                executor=self.executor,
                observer=ServiceMetrics(),
                clock_us=lambda: clock_us() + round(self.world.ahead_s * 1e6),
                monotonic_s=lambda: time.monotonic() + self.world.ahead_s,
            ),
            directory=directory,
            names=names,
        )
        self.moves = TableMoves(self.manager, names, store)
        await self.moves.clear()
        self.world.machines[self.shard] = self
        return self

    def step(self, *, is_store: bool) -> None:
        """Count a step, and die or stand still if it is the one."""
        self.world.check()
        if self.is_dead and not (is_store and self.is_stall):
            raise Died
        with self._lock:
            self.steps += 1
            if self.steps != self.stop_at:
                return
            self.end()
        if not (self.is_stall and is_store):
            self.is_stall = False
            raise Died
        self.goes_on.wait(60)

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Count a step that changes the directory within this."""
        with self._lock:
            self.step(is_store=False)
            yield

    def end(self) -> None:
        """Die, whatever is being done: of this moment is the directory that another one gets."""
        with self._lock:
            if self.is_dead:
                return
            self.is_dead = True
            self.after = self.path.with_name(f"{self.path.name}x")
            shutil.copytree(self.path, self.after, ignore=shutil.ignore_patterns("kv*", "LOCK"))
        self.on_death()
        self.has_stopped.set()

    async def follow(self, *, stop_at: int = 0) -> Machine:
        """Return who serves the shard after this one; one that dies while it starts is followed."""
        follower = Machine(self.world, self.shard, self.after)
        follower.stop_at = stop_at
        try:
            return await follower.open()
        except Died:
            follower.directory.close()
            await asyncio.to_thread(follower.executor.shutdown)
            return await follower.follow()

    def serves(self, path: TablePath) -> bool:
        """Whether the table is served here, by who may."""
        return not self.is_dead and any(t.path == path for t in self.manager.open_tables())

    async def close(self) -> None:
        """End the process; one that died changes nothing any more."""
        self.goes_on.set()
        for closing in (self.moves.close, self.manager.close):
            try:
                await closing()
            except (Died, StreamhouseError):
                continue
        self.manager.directory.close()
        await asyncio.to_thread(self.executor.shutdown)


class _Disk(LocalFilesystem):
    """What changes the directory of a machine, as far as a journal has it."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._machine = machine

    def rename(self, source: Path, target: Path) -> None:
        with self._machine.changing():
            super().rename(source, target)

    def remove(self, path: Path) -> None:
        with self._machine.changing():
            super().remove(path)

    def make_directory(self, directory: Path) -> None:
        with self._machine.changing():
            super().make_directory(directory)

    def move_directory(self, source: Path, target: Path) -> None:
        with self._machine.changing():
            super().move_directory(source, target)

    def remove_tree(self, directory: Path) -> None:
        with self._machine.changing():
            super().remove_tree(directory)


class _Store:
    """The world's store, as a machine reaches it."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.url = "memory://"

    @property
    def _store(self) -> ObjectStore:
        return self._machine.world.store

    def create(self, key: str, buffers: Sequence[Buffer]) -> None:
        self._machine.step(is_store=True)
        self._store.create(key, buffers)

    def replace(self, key: str, data: Buffer) -> None:
        self._machine.step(is_store=True)
        self._store.replace(key, data)

    def get(self, key: str, *, bytes_max: int) -> memoryview:
        self._machine.step(is_store=True)
        return self._store.get(key, bytes_max=bytes_max)

    def get_range(self, key: str, *, start: int, length: int) -> memoryview:
        self._machine.step(is_store=True)
        return self._store.get_range(key, start=start, length=length)

    def list_objects(
        self, folder: str, *, start_after: str = "", count_max: int = 1_000
    ) -> list[ObjectEntry]:
        self._machine.step(is_store=True)
        return self._store.list_objects(folder, start_after=start_after, count_max=count_max)

    def delete(self, keys: Sequence[str]) -> None:
        self._machine.step(is_store=True)
        self._store.delete(keys)


async def _nothing() -> None:
    """Nobody does anything."""


class MoveWorld:
    """The shards `a` and `b`, and every machine that there was."""

    def __init__(self, tmp_path: Path, store: ObjectStore, table: TablePath) -> None:
        self._path = tmp_path
        self.store = store
        self.table = table
        self.machines: dict[str, Machine] = {}
        self.bugs: list[str] = []
        self.why = ""
        self.ahead_s = 0.0
        """How far all clocks are ahead of those of this machine."""

    async def start(self) -> tuple[Machine, Machine]:
        """Serve both shards."""
        a = await Machine(self, "a", self._path / "a").open()
        return a, await Machine(self, "b", self._path / "b").open()

    def check(self) -> None:
        """The table is served by one shard at most."""
        serving = [m.shard for m in tuple(self.machines.values()) if m.serves(self.table)]
        if len(serving) > 1:
            self.bugs.append(f"served by {serving}")

    async def move(
        self,
        source: Machine,
        target: Machine,
        *,
        during: Callable[[], Awaitable[None]] = _nothing,
    ) -> bool:
        """Do what a move does, as far as nobody dies; `during` it others go on."""
        ticket = await source.moves.begin(self.table, target.shard)
        try:
            for _ in range(2):
                await source.moves.copy(ticket)
                await self._fetch(target, source, ticket)
                await during()
            await source.moves.freeze(ticket)
            await during()
            await self._fetch(target, source, ticket, is_whole=True)
            is_moved = await source.moves.decide(ticket)
            await source.moves.settle(ticket, is_moved=is_moved)
        except (StreamhouseError, Died) as error:
            # Of the other one, unless it is this one's own.
            self.why = "".join(traceback.format_exception(error))
            is_moved = await source.moves.end(ticket)
        if is_moved:
            asked = Asked(ticket=ticket, passes=1, is_whole=True)
            await target.moves.arrivals.receive(asked, wait_s=5)
        return is_moved

    async def _fetch(
        self, target: Machine, source: Machine, ticket: MoveTicket, *, is_whole: bool = False
    ) -> None:
        asked = Asked(ticket=ticket, passes=source.moves.passes(ticket), is_whole=is_whole)
        while not await target.moves.arrivals.receive(asked, wait_s=5):
            continue

    async def settle(self, *, then: Callable[[], Any] = lambda: None) -> Machine:
        """Let both shards look, and return the one that serves the table."""
        then()
        for _ in range(2):
            for machine in tuple(self.machines.values()):
                await machine.moves.look()
        serving = [m for m in self.machines.values() if m.serves(self.table)]
        assert len(serving) == 1, [m.manager.away for m in self.machines.values()]
        assert not self.bugs, self.bugs
        return serving[0]
