"""Moving a table from this shard to another, or from another to this one, step by step.

What is durable when, so that exactly one shard serves the table whatever crashes (decision 0021):

1. source: the table is `leaving` in `service.json`; then it is closed, and its files are stored
2. destination: the table is `arriving`; its files are written; it is opened; then it `is_ready`
3. source: the version of its name that decides is made, for the destination, or to keep it
4. source: the table is `dropped`, then its files are deleted; destination: it is a table

Before 3 a start of the source keeps the table, after it both starts complete the move: what decides
is one object that is made once. The source asks for 2; it never decides for who is not ready.
Event loop only.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

from streamhouse.storage_service.backoff import Backoff
from streamhouse.storage_service.engine.directory.service_state import KnownTable
from streamhouse.storage_service.engine.directory.table_files import load_table
from streamhouse.storage_service.engine.manager import TabletManager
from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.errors import (
    InvalidRequestError,
    StorageFailedError,
    StreamhouseError,
    UnavailableError,
)
from streamhouse.storage_service.journal.store.object_store import ObjectStore, ObjectStoreError
from streamhouse.storage_service.model.table import TableInfo, TablePath
from streamhouse.storage_service.shards.directory import ShardDirectory
from streamhouse.storage_service.shards.move_set import MoveSet, clear_moves
from streamhouse.storage_service.shards.tickets import MoveTicket

__all__ = ["TableMoves"]

_logger = logging.getLogger(__name__)

_BACKOFF: Final = Backoff(first_s=0.05, most_s=5.0)


@dataclass(slots=True)
class _Coming:
    """A table that is being fetched, or was: `table` is open once the task is done."""

    ticket: MoveTicket
    task: asyncio.Task[OpenTable]


class TableMoves:
    """See the module."""

    def __init__(
        self,
        manager: TabletManager,
        names: ShardDirectory,
        store: ObjectStore,
    ) -> None:
        self._manager = manager
        registry = self._registry = manager.registry
        self._names = names
        self._store = store
        self._run = manager.runtime.run
        self._coming: dict[int, _Coming] = {}
        self._deciding: set[int] = set()
        for arrival in registry.moves.arriving.values():
            self._set_away(arrival.ticket)

    @property
    def is_any_under_way(self) -> bool:
        """Whether a table is on its way: what has the files of all tables now lacks it."""
        moves = self._registry.moves
        return bool(moves.leaving or moves.arriving)

    async def clear(self) -> None:
        """Delete from the store what moves before this start have left there."""
        try:
            await self._run(clear_moves, self._store, self._names.shard)
        except ObjectStoreError as error:
            _logger.warning("event=moves_not_cleared why='%s'", error)

    async def close(self) -> None:
        """End what is under way; the next start goes on."""
        for coming in tuple(self._coming.values()):
            coming.task.cancel()
            await asyncio.wait([coming.task])
            if not coming.task.cancelled() and coming.task.exception() is None:
                await self._manager.give_up(coming.task.result())

    # -- the source --------------------------------------------------------------------------------

    async def begin(self, path: TablePath, target: str) -> MoveTicket:
        """Close a table that is to be moved; return what `upload`, `decide` and `end` take.

        Raises and serves the table on if it is in use.
        """
        manager, moves = self._manager, self._registry.moves
        async with manager.runtime.changing_files:
            table = manager.table(path)
            table_id = table.info.table_id
            if table_id in moves.leaving:
                raise _moving(moves.leaving[table_id])
            if table_id in manager.directory.former:
                raise InvalidRequestError(f"restart the service before table '{path}' is moved")
            begin = functools.partial(self._names.begin_move, path, table_id, target=target)
            ticket = await self._run(begin)
            self._deciding.add(table_id)
            try:
                await self._run(moves.begin_leaving, ticket)
                await manager.take_out(table, _moving(ticket))
            except BaseException as error:
                self._deciding.discard(table_id)
                if table_id in moves.leaving and isinstance(error, StreamhouseError):
                    # Nobody was asked to decide.
                    await self._run(moves.stay, table_id)
                    await manager.put_back(table.info)
                raise
        _logger.info("event=move_begun table=%s target=%s", path, target)
        return ticket

    async def upload(self, ticket: MoveTicket) -> None:
        """Store the files of a table that was closed."""
        try:
            await self._run(MoveSet(self._store, ticket).upload, self._manager.directory.path)
        except OSError as error:
            raise StorageFailedError(
                f"table '{ticket.path}' cannot be moved: {error.strerror}"
            ) from error

    async def decide(self, ticket: MoveTicket) -> bool:
        """Give a table that the destination has ready to it; return whether it has it now.

        After an error only `end` tells.
        """
        shard = await self._run(self._names.decide_move, ticket)
        await self._settle(ticket, shard)
        return shard == ticket.target

    async def end(self, ticket: MoveTicket) -> bool:
        """Serve the table on, unless it was decided; return whether the destination has it.

        Asks the store until it answers: until then nobody may serve the table.
        """
        shard: str = await _insist(functools.partial(self._run, self._names.end_move, ticket))
        await self._settle(ticket, shard)
        return shard == ticket.target

    async def _settle(self, ticket: MoveTicket, shard: str) -> None:
        manager, moves, table_id = self._manager, self._registry.moves, ticket.table_id
        if table_id not in moves.leaving:
            return
        _logger.info("event=move_decided table=%s shard=%s", ticket.path, shard)
        async with manager.runtime.changing_files:
            if shard == ticket.source:
                await _insist(functools.partial(self._run, moves.stay, table_id))
                await manager.put_back(self._registry.table(ticket.path))
            else:
                await _insist(functools.partial(self._run, moves.leave, ticket))
                manager.away.pop(ticket.path, None)
                await self._run(self._registry.purge, table_id)
        self._deciding.discard(table_id)
        with contextlib.suppress(ObjectStoreError):
            await self._run(MoveSet(self._store, ticket).delete)

    # -- the destination ---------------------------------------------------------------------------

    async def receive(self, ticket: MoveTicket, *, wait_s: float) -> bool:
        """Fetch a table, or serve it if that was decided; return whether that is done.

        May be repeated, and is by the source until it is done. Raises if the table cannot come, and
        then nothing of it is here.
        """
        if ticket.target != self._names.shard:
            raise InvalidRequestError(
                f"table '{ticket.path}' is to be moved to shard '{ticket.target}', and this is"
                f" '{self._names.shard}'"
            )
        moves = self._registry.moves
        arrival = moves.arriving.get(ticket.table_id)
        if arrival is not None and arrival.ticket != ticket:
            # What was decided of it can be told now, or this one is late.
            if not await self._look_at(arrival.ticket):
                raise _moving(arrival.ticket)
            arrival = None
        if not moves.has(ticket) and await self._run(self._names.decided, ticket) is not None:
            await self._look_at(ticket)
            if not moves.has(ticket):
                raise InvalidRequestError(f"the move of table '{ticket.path}' was given up")
        if moves.has(ticket):
            return True
        coming = self._coming.get(ticket.table_id)
        if coming is None and arrival is not None and arrival.is_ready:
            # Of a process before this one.
            return True
        return await self._fetched(ticket, coming, wait_s)

    async def _fetched(self, ticket: MoveTicket, coming: _Coming | None, wait_s: float) -> bool:
        if coming is not None and coming.ticket != ticket:
            if not coming.task.done():
                raise _moving(coming.ticket)
            coming = None
        if coming is None:
            task = asyncio.ensure_future(self._fetch(ticket))
            coming = self._coming[ticket.table_id] = _Coming(ticket, task)
        await asyncio.wait([coming.task], timeout=wait_s)
        if not coming.task.done():
            return False
        if coming.task.exception() is not None and self._coming.get(ticket.table_id) is coming:
            del self._coming[ticket.table_id]
        coming.task.result()
        return True

    async def _fetch(self, ticket: MoveTicket) -> OpenTable:
        manager, moves, table_id = self._manager, self._registry.moves, ticket.table_id
        directory = manager.directory
        table = None
        async with manager.runtime.changing_files:
            if moves.is_remains(table_id):
                await self._run(self._registry.purge, table_id)
            if moves.is_remains(table_id) or directory.table(table_id).exists():
                raise StorageFailedError(
                    f"table '{ticket.path}' cannot come: {directory.table(table_id)} is in the way"
                )
            await self._run(self._names.expect_move, ticket)
            await self._run(moves.begin_arriving, ticket)
            self._set_away(ticket)
        try:
            move_set = MoveSet(self._store, ticket)
            try:
                await self._run(move_set.download, directory.path, directory.filesystem)
            except OSError as error:
                raise StorageFailedError(
                    f"table '{ticket.path}' cannot come: {error.strerror}"
                ) from error
            known = KnownTable(ticket.path)
            info, _ = await self._run(load_table, directory, table_id, known)
            async with manager.runtime.changing_files:
                await self._run(self._registry.check_arrival, info)
                table = await manager.open_arrived(info)
                # Here, too: who creates or drops a table meanwhile writes service.json as well.
                await self._run(moves.set_ready, table_id)
        except StreamhouseError:
            if table is not None:
                await manager.give_up(table)
            async with manager.runtime.changing_files:
                await self._refuse(ticket)
            raise
        _logger.info("event=move_ready table=%s source=%s", ticket.path, ticket.source)
        return table

    async def look(self) -> None:
        """Complete or give up what has been decided and nobody has told this shard of."""
        for arrival in self._registry.moves.arriving.values():
            with contextlib.suppress(StreamhouseError):
                await self._look_at(arrival.ticket)
        for table_id, ticket in self._registry.moves.leaving.items():
            if table_id not in self._deciding:
                await self.end(ticket)

    async def _look_at(self, ticket: MoveTicket) -> bool:
        """Do what was decided of a table that may come; return whether anything was."""
        moves, table_id = self._registry.moves, ticket.table_id
        shard = await self._run(self._names.decided, ticket)
        if shard is None:
            return False
        coming = self._coming.get(table_id)
        if coming is not None and not coming.task.done():
            # It was given up while this shard was fetching: that ends by itself.
            await asyncio.wait([coming.task])
        async with self._manager.runtime.changing_files:
            arrival = moves.arriving.get(table_id)
            if arrival is None or arrival.ticket != ticket:
                return True
            coming = self._coming.pop(table_id, None)
            table = None
            if coming is not None and coming.task.exception() is None:
                table = coming.task.result()
            if shard == ticket.target:
                await self._arrive(ticket, table)
                return True
            if table is not None:
                await self._manager.give_up(table)
            await self._refuse(ticket)
        return True

    async def _arrive(self, ticket: MoveTicket, table: OpenTable | None) -> None:
        info = table.info if table is not None else await self._info(ticket)
        await _insist(functools.partial(self._run, self._registry.moves.arrive, info))
        await self._manager.show(table, info)
        _logger.info("event=move_arrived table=%s source=%s", ticket.path, ticket.source)

    async def _info(self, ticket: MoveTicket) -> TableInfo:
        known, directory = KnownTable(ticket.path), self._manager.directory
        info, _ = await self._run(load_table, directory, ticket.table_id, known)
        return info

    async def _refuse(self, ticket: MoveTicket) -> None:
        moves = self._registry.moves
        if ticket.table_id in moves.arriving:
            await _insist(functools.partial(self._run, moves.refuse, ticket.table_id))
        self._manager.away.pop(ticket.path, None)
        await self._run(self._registry.purge, ticket.table_id)

    def _set_away(self, ticket: MoveTicket) -> None:
        self._manager.away[ticket.path] = _moving(ticket)


async def _insist(do: Callable[[], Awaitable[Any]]) -> Any:
    """Do it until it is done: before that nobody may serve the table."""
    for attempt in itertools.count(1):
        try:
            return await do()
        except StreamhouseError as error:
            _logger.warning("event=move_waits why=%r", error.message)
            await asyncio.sleep(_BACKOFF.after(attempt))
    raise AssertionError


def _moving(ticket: MoveTicket) -> UnavailableError:
    return UnavailableError(
        f"table '{ticket.path}' is being moved from shard '{ticket.source}' to '{ticket.target}';"
        " try again"
    )
