"""Moving a table from this shard to another, step by step; `table_arrivals.py` is the other side.

What is durable when, so that exactly one shard serves the table whatever crashes (decision 0021):

1. source: rounds of what never changes are stored, the table is open; the destination has it
   `arriving`, and writes its files
2. source: the table is frozen: it is only read. Then it is `leaving` in `service.json`, and the
   last round is stored
3. destination: the last files are written; the table is opened; then it `is_ready`
4. source: reads end; the version of its name that decides is made, for the destination, or to keep
   it
5. source: the table is `dropped`, then its files are deleted; destination: it is a table

Before 4 a start of the source keeps the table, after it both starts complete the move: what decides
is one object that is made once. The source asks for 3; it never decides for who is not ready.
Event loop only.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from streamhouse.core.errors import (
    InvalidRequestError,
    StorageFailedError,
    StreamhouseError,
    UnavailableError,
)
from streamhouse.core.model.table import TablePath
from streamhouse.core.rows.companion import companion_of, table_of
from streamhouse.storage_service.engine.keys._key_copies import copy_keys
from streamhouse.storage_service.engine.manager import TabletManager
from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.engine.table_arrivals import TableArrivals, insist, moving
from streamhouse.storage_service.ownership.journal.store.object_store import (
    ObjectStore,
    ObjectStoreError,
)
from streamhouse.storage_service.ownership.shards.directory import ShardDirectory
from streamhouse.storage_service.ownership.shards.move_set import MoveSet, SentFiles, clear_moves
from streamhouse.storage_service.ownership.shards.tickets import MoveTicket

__all__ = ["TableMoves"]

_logger = logging.getLogger(__name__)

_STAGED_ROWS: Final = "moves.staged"


@dataclass(slots=True)
class _Going:
    """A table that may leave; `is_frozen`: it is only read, or not even that."""

    ticket: MoveTicket
    table: OpenTable
    sent: SentFiles
    is_frozen: bool = False
    is_closed: bool = False


class TableMoves:
    """See the module."""

    def __init__(self, manager: TabletManager, names: ShardDirectory, store: ObjectStore) -> None:
        self._manager = manager
        self._registry = manager.registry
        self._names = names
        self._store = store
        self._run = manager.runtime.run
        self._going: dict[int, _Going] = {}
        self.arrivals: Final = TableArrivals(manager, names, store)
        """The other side: tables that come to this shard."""

    @property
    def is_any_under_way(self) -> bool:
        """Whether a table is on its way: what has the files of all tables now lacks it."""
        moves = self._registry.moves
        return bool(moves.leaving or moves.arriving)

    async def clear(self) -> None:
        """Delete what moves before this start have left in the store and here."""
        await self._run(self._manager.directory.filesystem.remove_tree, self._staged)
        try:
            await self._run(clear_moves, self._store, self._names.shard)
        except ObjectStoreError as error:
            _logger.warning("event=moves_not_cleared why='%s'", error)

    async def close(self) -> None:
        """End what is under way; the next start goes on."""
        await self.arrivals.close()
        for going in tuple(self._going.values()):
            await self._close(going)

    async def look(self) -> None:
        """Complete or give up what has been decided and nobody has told this shard of."""
        await self.arrivals.look()
        for table_id, ticket in self._registry.moves.leaving.items():
            if table_id not in self._going:
                await self.end(ticket)

    # -- the source, in this order ---------------------------------------------------------------

    def moves_first(self, path: TablePath) -> TablePath | None:
        """Return what moves before a table: that of its rejected rows, if it is here.

        Raises if the table is in use, before anything has moved.
        """
        companion = companion_of(path)
        if companion is None or companion not in {t.path for t in self._manager.open_tables()}:
            return None
        _check_movable(self._manager, self._manager.table(path))
        return companion

    def check_moves_alone(self, path: TablePath) -> None:
        """Raise if a table moves only with another one, whose rejected rows it has."""
        table = table_of(path)
        if table is not None and table in {t.path for t in self._manager.open_tables()}:
            raise InvalidRequestError(
                f"table '{path}' has the rejected rows of '{table}', and moves with it: move that"
            )

    async def begin(self, path: TablePath, target: str) -> MoveTicket:
        """Return what all that follows takes; whatever comes of it, `end` or `settle` is last.

        Raises if the table is in use.
        """
        manager, moves = self._manager, self._registry.moves
        table = manager.table(path)
        table_id = table.info.table_id
        known = self._going.get(table_id)
        ticket = moves.leaving.get(table_id) if known is None else known.ticket
        if ticket is not None:
            raise moving(ticket)
        if table_id in manager.directory.former:
            raise InvalidRequestError(f"restart the service before table '{path}' is moved")
        _check_movable(manager, table)
        begin = functools.partial(self._names.begin_move, path, table_id, target=target)
        ticket = await self._run(begin)
        sent = SentFiles(MoveSet(self._store, ticket), manager.directory.path, table_id)
        self._going[table_id] = _Going(ticket, table, sent)
        _logger.info("event=move_begun table=%s target=%s", path, target)
        return ticket

    async def copy(self, ticket: MoveTicket) -> int:
        """Store a round of what never changes of a table that is open; return how many bytes."""
        going = self._going[ticket.table_id]
        self._manager.check_open(going.table)
        rows: dict[str, Path] = {}
        filesystem, staged = self._manager.directory.filesystem, self._staged / ticket.move_id
        try:
            if going.sent.rounds == 0:
                await self._run(filesystem.make_directory, staged)
                copies = await copy_keys([going.table], staged, {})
                rows = {copy.bucket: copy.directory for copy in copies if copy.directory}
            logs = [file for tablet in going.table.tablets for file in tablet.durable_files()]
            return await self._run(going.sent.send_stable, logs, rows)
        except OSError as error:
            raise _not_read(ticket, error) from error
        finally:
            await self._run(filesystem.remove_tree, staged)

    async def freeze(self, ticket: MoveTicket) -> None:
        """Let nothing change the table any more, and store the last round.

        Raises `UnavailableError` while it is in use, and then it is as it was.
        """
        manager, moves, going = self._manager, self._registry.moves, self._going[ticket.table_id]
        async with manager.runtime.changing_files:
            manager.check_open(going.table)
            await _freeze(manager, going, moving(ticket))
            await self._run(moves.begin_leaving, ticket)
        try:
            await self._run(going.sent.send_rest)
        except OSError as error:
            raise _not_read(ticket, error) from error

    def is_frozen(self, ticket: MoveTicket) -> bool:
        """Whether the table can only be read, if that."""
        return self._going[ticket.table_id].is_frozen

    def rounds(self, ticket: MoveTicket) -> int:
        """Return how many rounds the store has."""
        return self._going[ticket.table_id].sent.rounds

    async def decide(self, ticket: MoveTicket) -> bool:
        """Give a table that the destination has ready to it; return whether it has it now.

        `settle` it then; after an error only `end` tells.
        """
        # Who reads here after this moment could miss what is written there.
        self._manager.end_reads(self._going[ticket.table_id].table)
        shard = await self._run(self._names.decide_move, ticket)
        return bool(shard == ticket.target)

    async def end(self, ticket: MoveTicket) -> bool:
        """Serve the table on, unless it was decided; return whether the destination has it.

        Asks the store until it answers: until then nobody may serve the table.
        """
        shard: str = await insist(functools.partial(self._run, self._names.end_move, ticket))
        is_moved = shard == ticket.target
        await self.settle(ticket, is_moved=is_moved)
        return is_moved

    async def settle(self, ticket: MoveTicket, *, is_moved: bool) -> None:
        """Do here what was decided."""
        manager, moves, table_id = self._manager, self._registry.moves, ticket.table_id
        going = self._going.get(table_id)
        _logger.info("event=move_decided table=%s is_moved=%s", ticket.path, is_moved)
        async with manager.runtime.changing_files:
            if going is not None:
                await self._close(going)
            if is_moved:
                await insist(functools.partial(self._run, moves.leave, ticket))
                manager.away.pop(ticket.path, None)
                await self._run(self._registry.purge, table_id)
            elif table_id in moves.leaving or (going is not None and going.is_frozen):
                await insist(functools.partial(self._run, moves.stay, table_id))
                await manager.put_back(self._registry.table(ticket.path))
        self._going.pop(table_id, None)
        with contextlib.suppress(ObjectStoreError):
            await self._run(MoveSet(self._store, ticket).delete)

    async def _close(self, going: _Going) -> None:
        """Close a table that is frozen."""
        if going.is_frozen and not going.is_closed:
            going.is_closed = True
            self._manager.end_reads(going.table)
            await self._manager.give_up(going.table)

    @property
    def _staged(self) -> Path:
        return self._manager.directory.path / _STAGED_ROWS


def _check_movable(manager: TabletManager, table: OpenTable) -> None:
    """Raise if somebody works with a table who would not find it again."""
    manager.check_open(table)
    why = ""
    if manager.transactions.of(table).open_count:
        why = "transactions are open: commit or abort them"
    elif manager.tiering.is_under_way(table):
        why = "it is being tiered: try again when the round has ended"
    if why:
        raise UnavailableError(f"table '{table.path}' cannot be moved while {why}")


async def _freeze(manager: TabletManager, going: _Going, why: UnavailableError) -> None:
    """Let nothing change the files of a table; unless it `is_frozen` nothing has changed."""
    table = going.table
    async with manager.tiering.round_of(table).lock, table.gate.alone():
        await table.settle()
        _check_movable(manager, table)
        manager.hide(table, why)
        going.is_frozen = True
        table.gate.refuse(why)
        table.gate.stop(why)
    with contextlib.suppress(StreamhouseError):
        await table.consumers.save(is_last=True)
    await table.end_saves(why)
    await manager.mending.leave(table)
    await manager.transactions.forget(table)


def _not_read(ticket: MoveTicket, error: OSError) -> StorageFailedError:
    return StorageFailedError(f"table '{ticket.path}' cannot be moved: {error}")
