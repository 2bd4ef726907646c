"""Shards that create and drop tables over a store that delays, loses answers and lists stale.

Every operation of a process runs on a thread that stops before each request to the store and before
each write of its `service.json`. Who drives the world says which process goes on, and what becomes
of the request. A shard's `service.json` is fenced, as the journal fences it: after a takeover the
process before can save nothing.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from streamhouse.core.errors import (
    StreamhouseError,
    TableExistsError,
    UnavailableError,
    UnknownOutcomeError,
)
from streamhouse.core.model.table import TablePath
from streamhouse.storage_service.ownership.shards.directory import ShardDirectory

__all__ = ["DirectoryWorld", "Fate", "MemoryStore", "Process"]


class Fate(enum.Enum):
    """What becomes of a request to the store."""

    DONE = "done"
    REFUSED = "not done, and an error"
    LOST = "done, and an error"
    LATE = "an error, and done later"
    STALE = "done; a listing misses what is newest"
    CRASH = "the process dies before it"


class _Crashed(BaseException):
    """The process is gone."""


class MemoryStore:
    """A store without faults."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    def create(self, key: str, data: bytes) -> bool:
        """See `DirectoryObjects.create`."""
        return self.objects.setdefault(key, data) is data

    def replace(self, key: str, data: bytes) -> None:
        """See `DirectoryObjects.replace`."""
        self.objects[key] = data

    def get(self, key: str) -> bytes | None:
        """See `DirectoryObjects.get`."""
        return self.objects.get(key)

    def list(self, prefix: str) -> Iterable[str]:
        """See `DirectoryObjects.list`."""
        assert prefix.endswith("/"), prefix
        return [key for key in self.objects if key.startswith(prefix)]


@dataclass
class _State:
    """A shard's `service.json`."""

    tables: dict[TablePath, int] = field(default_factory=dict)
    next_table_id: int = 1
    ids_end: int = 1

    def copy(self) -> _State:
        return _State(dict(self.tables), self.next_table_id, self.ids_end)


class Process:
    """One process of a shard: an owner, or one that was and does not know it."""

    def __init__(self, world: DirectoryWorld, shard: str) -> None:
        self.shard = shard
        self.world = world
        self.directory = ShardDirectory(_GatedStore(self), shard=shard, sleep=lambda _: None)
        self._mine = threading.Semaphore(0)
        self._theirs = threading.Semaphore(0)
        self._fate = Fate.DONE
        self.is_running = False
        self.is_dead = False
        self.state = world.durable[shard].copy()

    # -- driven ----------------------------------------------------------------------------------

    def begin(self, operation: Callable[[], None]) -> None:
        """Start an operation; it stops before its first request."""
        self.is_running = True

        def run() -> None:
            self._mine.acquire()
            try:
                operation()
            except _Crashed:
                self.is_dead = True
            except StreamhouseError:
                pass
            except Exception as error:  # noqa: BLE001 - whoever drives the world reports it
                self.is_dead = True
                self.world.bugs.append(error)
            self.is_running = False
            self._theirs.release()

        threading.Thread(target=run, daemon=True).start()
        self.step(Fate.DONE)

    def step(self, fate: Fate) -> None:
        """Let the operation do its next request, and stop before the one after it."""
        self._fate = fate
        self._mine.release()
        self._theirs.acquire()

    def finish(self) -> None:
        """Let the operation end without faults."""
        while self.is_running:
            self.step(Fate.DONE)

    def gate(self) -> Fate:
        """Stop until the world says what becomes of the request. On the operation's thread."""
        self._theirs.release()
        self._mine.acquire()
        if self._fate is Fate.CRASH:
            raise _Crashed
        return self._fate

    # -- what a service does ---------------------------------------------------------------------

    def start(self) -> None:
        """What is done after the epoch is taken and the directory restored."""
        _, block = self.directory.join("s", next_table_id=self.state.next_table_id)
        if block is not None and self.state.ids_end <= self.state.next_table_id:
            self._save(lambda state: _set_ids(state, *block))
        taken = self.directory.clear(self.state.tables, confirm=lambda: self._save(lambda _: None))
        assert not taken, taken

    def create(self, path: TablePath) -> None:
        """Create a table."""
        if path in self.state.tables:
            return
        if self.state.next_table_id >= self.state.ids_end:
            block = self.directory.claim_ids(above=self.state.next_table_id - 1)
            self._save(lambda state: _set_ids(state, *block))
        table_id = self.state.next_table_id
        self._save(lambda state: _set_ids(state, table_id + 1, state.ids_end))
        try:
            self.directory.hold(path, table_id)
        except TableExistsError:
            return
        except StreamhouseError:
            self.directory.release(path, table_id)
            raise
        self._save(lambda state: state.tables.__setitem__(path, table_id))
        self.world.added(self.shard, path, table_id)

    def drop(self, path: TablePath) -> None:
        """Drop a table."""
        table_id = self.state.tables.get(path)
        if table_id is None:
            return
        self._save(lambda state: state.tables.__delitem__(path))
        self.directory.release(path, table_id)

    def _save(self, change: Callable[[_State], Any]) -> None:
        self.gate()
        if self.world.owner[self.shard] is not self:
            raise _Crashed
        change(self.state)
        self.world.durable[self.shard] = self.state.copy()
        self.world.check()


def _set_ids(state: _State, first: int, end: int) -> None:
    state.next_table_id, state.ids_end = first, end


class _GatedStore:
    def __init__(self, process: Process) -> None:
        self._process = process

    def create(self, key: str, data: bytes) -> bool:
        world = self._process.world
        match self._process.gate():
            case Fate.REFUSED:
                raise UnavailableError("refused")
            case Fate.LATE:
                world.late.append((key, data))
                raise UnknownOutcomeError("no answer")
            case Fate.LOST:
                world.store.create(key, data)
                raise UnknownOutcomeError("no answer")
        return world.store.create(key, data)

    def replace(self, key: str, data: bytes) -> None:
        self._process.gate()
        self._process.world.store.replace(key, data)

    def get(self, key: str) -> bytes | None:
        if self._process.gate() in (Fate.REFUSED, Fate.LATE, Fate.LOST):
            raise UnavailableError("no answer")
        return self._process.world.store.get(key)

    def list(self, prefix: str) -> Iterable[str]:
        fate = self._process.gate()
        if fate in (Fate.REFUSED, Fate.LATE, Fate.LOST):
            raise UnavailableError("no answer")
        keys = list(self._process.world.store.list(prefix))
        return keys[: len(keys) // 2] if fate is Fate.STALE else keys


class DirectoryWorld:
    """Some shards, each with one owner, and processes that were owners."""

    def __init__(self, shards: Iterable[str]) -> None:
        self.store = MemoryStore()
        self.late: list[tuple[str, bytes]] = []
        self.bugs: list[BaseException] = []
        self.durable = {shard: _State() for shard in shards}
        self.owner: dict[str, Process] = {}
        self.processes: list[Process] = []
        self._used: dict[int, tuple[str, TablePath]] = {}
        for shard in self.durable:
            self.take_over(shard)

    def take_over(self, shard: str) -> Process:
        """Let another process own a shard; the one before goes on until it meets its fence."""
        process = Process(self, shard)
        self.owner[shard] = process
        self.processes.append(process)
        process.begin(process.start)
        return process

    def arrive(self, number: int) -> None:
        """Let a request that was sent long ago arrive at the store."""
        self.store.create(*self.late.pop(number))

    def added(self, shard: str, path: TablePath, table_id: int) -> None:
        """A table exists from now on."""
        assert table_id not in self._used, (table_id, shard, path, self._used[table_id])
        self._used[table_id] = (shard, path)

    def check(self) -> None:
        """A name is of one shard's table at most."""
        names = [path for state in self.durable.values() for path in state.tables]
        assert len(names) == len(set(names)), self.durable

    def settle(self) -> None:
        """Restart every shard without faults, after all that is under way has ended or crashed."""
        for process in self.processes:
            if process.is_running:
                process.step(Fate.CRASH)
        while self.late:
            self.arrive(0)
        for shard in self.durable:
            self.take_over(shard).finish()
        assert not self.bugs, self.bugs
