"""Tables that arrive from another shard, pass by pass; see `table_moves.py`.

Before a durable `is_ready` this shard may abandon a table by itself: the source decides only in
favour of a ready shard. Afterwards this shard waits for the decision. Event loop only.
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

from streamhouse.core.backoff import Backoff
from streamhouse.core.errors import (
    InvalidRequestError,
    StorageFailedError,
    StreamhouseError,
    UnavailableError,
)
from streamhouse.core.model.table import TableInfo
from streamhouse.storage_service.directory.service_state import TableEntry
from streamhouse.storage_service.directory.table_files import load_table
from streamhouse.storage_service.engine.manager import TabletManager
from streamhouse.storage_service.engine.open_table import Away, OpenTable
from streamhouse.storage_service.ownership.journal.store.object_store import ObjectStore
from streamhouse.storage_service.ownership.shards.directory import ShardDirectory
from streamhouse.storage_service.ownership.shards.move_set import MoveSet
from streamhouse.storage_service.ownership.shards.tickets import MoveTicket

__all__ = ["Asked", "TableArrivals", "insist", "moving"]

_logger = logging.getLogger(__name__)

_BACKOFF: Final = Backoff(first_s=0.05, most_s=5.0)
# The source asks several times a minute; one that was killed begins anew, with another ticket.
_SILENCE_S_MAX: Final = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The source's request: all passes so far, and with `is_whole` readiness."""

    ticket: MoveTicket
    passes: int
    is_whole: bool


@dataclass(slots=True)
class _Coming:
    """A table being fetched; `table` once the table is open and ready."""

    ticket: MoveTicket
    asked_s: float
    passes: int = 0
    table: OpenTable | None = None
    task: asyncio.Task[None] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether something is being done for it."""
        return self.task is not None and not self.task.done()

    def has(self, asked: Asked) -> bool:
        """Whether all is done that was asked for."""
        return self.passes >= asked.passes and (self.table is not None or not asked.is_whole)


class TableArrivals:
    """See the module."""

    def __init__(self, manager: TabletManager, names: ShardDirectory, store: ObjectStore) -> None:
        self._manager = manager
        self._registry = manager.registry
        self._names = names
        self._store = store
        self._run = manager.runtime.run
        self._coming: dict[int, _Coming] = {}
        for arrival in self._registry.moves.arriving.values():
            # What is not ready is not decided: its source serves it, and is named to who asks here.
            if arrival.is_ready:
                self._set_away(arrival.ticket, None)

    async def close(self) -> None:
        """End the present fetches; the next start continues them."""
        for coming in tuple(self._coming.values()):
            if coming.task is not None:
                coming.task.cancel()
                await asyncio.wait([coming.task])
            if coming.table is not None:
                await self._manager.give_up(coming.table)

    async def receive(self, asked: Asked, *, wait_s: float) -> bool:
        """Fetch a table, or serve a table given to this shard; return whether the work is done.

        The source repeats the call until the work is done. Raises if the table cannot arrive; then
        no file of the table is left.
        """
        ticket, moves = asked.ticket, self._registry.moves
        if ticket.target != self._names.shard:
            raise InvalidRequestError(
                f"table '{ticket.path}' is to be moved to shard '{ticket.target}', and this is"
                f" '{self._names.shard}'"
            )
        arrival = moves.arriving.get(ticket.table_id)
        if arrival is not None and arrival.ticket != ticket:
            # What was decided of it can be told now, or this one is late.
            if not await self._look_at(arrival.ticket) and not await self._replace(arrival.ticket):
                raise moving(arrival.ticket)
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
        return await self._fetched(asked, coming, wait_s)

    async def _replace(self, ticket: MoveTicket) -> bool:
        """Abandon an unready table in favour of another move; return whether that was possible."""
        arrival = self._registry.moves.arriving[ticket.table_id]
        coming = self._coming.get(ticket.table_id)
        if arrival.is_ready or (coming is not None and coming.is_busy):
            return False
        async with self._manager.runtime.changing_files:
            await self._refuse(ticket)
        return True

    async def _fetched(self, asked: Asked, coming: _Coming | None, wait_s: float) -> bool:
        ticket, now_s = asked.ticket, self._manager.runtime.monotonic_s()
        if coming is not None and coming.ticket != ticket:
            raise moving(coming.ticket)
        if coming is None:
            coming = self._coming[ticket.table_id] = _Coming(ticket, now_s)
        coming.asked_s = now_s
        if not coming.is_busy:
            if coming.has(asked):
                return True
            coming.task = asyncio.ensure_future(self._fetch(asked, coming))
        assert coming.task is not None
        await asyncio.wait([coming.task], timeout=wait_s)
        if not coming.task.done():
            return False
        coming.task.result()
        return coming.has(asked)

    async def _fetch(self, asked: Asked, coming: _Coming) -> None:
        ticket = asked.ticket
        try:
            if coming.passes == 0:
                await self._begin(ticket)
            is_whole = False
            while coming.passes < asked.passes:
                is_whole = await self._download(ticket, coming.passes)
                coming.passes += 1
            if asked.is_whole and not is_whole:
                raise InvalidRequestError(f"the move of table '{ticket.path}' has no last pass")
            if is_whole:
                await self._open(ticket, coming)
        except StreamhouseError:
            async with self._manager.runtime.changing_files:
                await self._refuse(ticket)
            raise

    async def _begin(self, ticket: MoveTicket) -> None:
        manager, moves, table_id = self._manager, self._registry.moves, ticket.table_id
        directory = manager.directory
        async with manager.runtime.changing_files:
            if moves.is_dropped(table_id):
                await self._run(self._registry.purge, table_id)
            if moves.is_dropped(table_id) or directory.table(table_id).exists():
                raise StorageFailedError(
                    f"table '{ticket.path}' cannot come: {directory.table(table_id)} is in the way"
                )
            await self._run(self._names.expect_move, ticket)
            await self._run(moves.begin_arriving, ticket)

    async def _download(self, ticket: MoveTicket, number: int) -> bool:
        directory, move_set = self._manager.directory, MoveSet(self._store, ticket)
        try:
            is_whole: bool = await self._run(
                move_set.download, number, directory.path, directory.filesystem
            )
        except OSError as error:
            raise StorageFailedError(
                f"table '{ticket.path}' cannot come: {error.strerror}"
            ) from error
        return is_whole

    async def _open(self, ticket: MoveTicket, coming: _Coming) -> None:
        manager, info = self._manager, await self._info(ticket)
        async with manager.runtime.changing_files:
            await self._run(self._registry.check_arrival, info)
            coming.table = await manager.open_arrived(info)
            self._set_away(ticket, info)
            # Here, too: who creates or drops a table meanwhile writes service.json as well.
            await self._run(self._registry.moves.set_ready, ticket.table_id)
        _logger.info("event=move_ready table=%s source=%s", ticket.path, ticket.source)

    async def look(self) -> None:
        """Carry out decisions without a message to this shard; abandon tables without a request."""
        for arrival in self._registry.moves.arriving.values():
            with contextlib.suppress(StreamhouseError):
                if not await self._look_at(arrival.ticket) and self._is_forgotten(arrival.ticket):
                    await self._replace(arrival.ticket)

    def _is_forgotten(self, ticket: MoveTicket) -> bool:
        coming = self._coming.get(ticket.table_id)
        now_s = self._manager.runtime.monotonic_s()
        return coming is not None and now_s - coming.asked_s > _SILENCE_S_MAX

    async def _look_at(self, ticket: MoveTicket) -> bool:
        """Carry out the decision about an arriving table; return whether there was a decision."""
        moves, table_id = self._registry.moves, ticket.table_id
        shard = await self._run(self._names.decided, ticket)
        if shard is None:
            return False
        coming = self._coming.get(table_id)
        if coming is not None and coming.task is not None and coming.is_busy:
            # It was given up while this shard was fetching: that ends by itself.
            await asyncio.wait([coming.task])
        async with self._manager.runtime.changing_files:
            arrival = moves.arriving.get(table_id)
            if arrival is None or arrival.ticket != ticket:
                return True
            if shard == ticket.target:
                await self._arrive(ticket)
            else:
                await self._refuse(ticket)
        return True

    async def _arrive(self, ticket: MoveTicket) -> None:
        coming = self._coming.pop(ticket.table_id, None)
        table = None if coming is None else coming.table
        info = table.info if table is not None else await self._info(ticket)
        await insist(functools.partial(self._run, self._registry.moves.arrive, info))
        await self._manager.show(table, info)
        _logger.info("event=move_arrived table=%s source=%s", ticket.path, ticket.source)

    async def _info(self, ticket: MoveTicket) -> TableInfo:
        known, directory = TableEntry(ticket.path), self._manager.directory
        info, _ = await self._run(load_table, directory, ticket.table_id, known)
        return info

    async def _refuse(self, ticket: MoveTicket) -> None:
        moves, coming = self._registry.moves, self._coming.pop(ticket.table_id, None)
        if coming is not None and coming.table is not None:
            await self._manager.give_up(coming.table)
        arrival = moves.arriving.get(ticket.table_id)
        if arrival is not None and arrival.ticket == ticket:
            await insist(functools.partial(self._run, moves.refuse, ticket.table_id))
            self._manager.away.pop(ticket.path, None)
            await self._run(self._registry.purge, ticket.table_id)

    def _set_away(self, ticket: MoveTicket, info: TableInfo | None) -> None:
        self._manager.away[ticket.path] = Away(moving(ticket), info)


async def insist(do: Callable[[], Awaitable[Any]]) -> Any:
    """Do it until it is done: before that nobody may serve the table."""
    for attempt in itertools.count(1):
        try:
            return await do()
        except StreamhouseError as error:
            _logger.warning("event=move_waits why=%r", error.message)
            await asyncio.sleep(_BACKOFF.after(attempt))
    raise AssertionError


def moving(ticket: MoveTicket) -> UnavailableError:
    """Return what is answered to who wants a table that is on its way."""
    return UnavailableError(
        f"table '{ticket.path}' is being moved from shard '{ticket.source}' to '{ticket.target}';"
        " try again"
    )
