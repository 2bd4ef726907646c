"""Moving a table from this shard to another, step by step; `table_arrivals.py` is the other side.

The durable steps let exactly one shard serve the table, whatever crashes (decision 0021):

1. source: the table stays open, and passes of immutable files are stored; the destination marks the
   table as `arriving` and writes the files
2. source: the table is frozen, which leaves only reads; the table becomes `leaving` in
   `service.json`, and the last pass is stored
3. destination: the last files are written, the table is opened, and becomes `is_ready`
4. source: reads end; the deciding version of the table's name is made, in favour of the destination
   or of the source
5. source: the table is `dropped` and its files are deleted; destination: the table is served

Before step 4 a restarted source keeps the table. After step 4 both shards complete the move at
their starts: an object that is made only once decides. The source asks for step 3, and never
decides for a destination that is not ready. Event loop only.
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
    """A table that may leave; `is_frozen`: reads are allowed at most."""

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
        """Whether a table is on its way: a copy of all tables' files would lack the table."""
        moves = self._registry.moves
        return bool(moves.leaving or moves.arriving)

    async def clear(self) -> None:
        """Delete leftovers of earlier moves, in the store and on this shard."""
        await self._run(self._manager.directory.filesystem.remove_tree, self._staged)
        try:
            await self._run(clear_moves, self._store, self._names.shard)
        except ObjectStoreError as error:
            _logger.warning("event=moves_not_cleared why='%s'", error)

    async def close(self) -> None:
        """End the present moves; the next start continues them."""
        await self.arrivals.close()
        for going in tuple(self._going.values()):
            await self._close(going)

    async def look(self) -> None:
        """Complete or end moves that were decided without a message to this shard."""
        await self.arrivals.look()
        for table_id, ticket in self._registry.moves.leaving.items():
            if table_id not in self._going:
                await self.end(ticket)

    # -- the source, in this order ---------------------------------------------------------------

    def moves_first(self, path: TablePath) -> TablePath | None:
        """Return the table of rejected rows that moves before a table, if served by this shard.

        Raises if the table is in use, before any step.
        """
        companion = companion_of(path)
        if companion is None or companion not in {t.path for t in self._manager.open_tables()}:
            return None
        _check_movable(self._manager, self._manager.table(path))
        return companion

    def check_moves_alone(self, path: TablePath) -> None:
        """Raise for a table of rejected rows, which moves only with the other table."""
        table = table_of(path)
        if table is not None and table in {t.path for t in self._manager.open_tables()}:
            raise InvalidRequestError(
                f"table '{path}' has the rejected rows of '{table}', and moves with it: move that"
            )

    async def begin(self, path: TablePath, target: str) -> MoveTicket:
        """Return the facts that later steps need; the last call is always `end` or `settle`.

        Raises if the table is in use.
        """
        manager, moves = self._manager, self._registry.moves
        table = manager.table(path)
        table_id = table.info.table_id
        going = self._going.get(table_id)
        ticket = moves.leaving.get(table_id) if going is None else going.ticket
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
        """Store a pass of immutable files of an open table; return the number of bytes."""
        going = self._going[ticket.table_id]
        self._manager.check_open(going.table)
        rows: dict[str, Path] = {}
        filesystem, staged = self._manager.directory.filesystem, self._staged / ticket.move_id
        try:
            if going.sent.passes == 0:
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
        """Forbid changes of the table, and store the last pass.

        Raises `UnavailableError` for a table in use, which stays unchanged.
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
        """Whether at most reads of the table are allowed."""
        return self._going[ticket.table_id].is_frozen

    def passes(self, ticket: MoveTicket) -> int:
        """Return the number of passes in the store."""
        return self._going[ticket.table_id].sent.passes

    async def decide(self, ticket: MoveTicket) -> bool:
        """Give a table to the ready destination; return whether the destination owns the table now.

        Then call `settle`; after an error only `end` knows the owner.
        """
        # Who reads here after this moment could miss what is written there.
        self._manager.end_reads(self._going[ticket.table_id].table)
        shard = await self._run(self._names.decide_move, ticket)
        return bool(shard == ticket.target)

    async def end(self, ticket: MoveTicket) -> bool:
        """Serve an undecided table again; return whether the destination owns the table.

        Asks the store until the store answers: no shard may serve the table before.
        """
        shard: str = await insist(functools.partial(self._run, self._names.end_move, ticket))
        is_moved = shard == ticket.target
        await self.settle(ticket, is_moved=is_moved)
        return is_moved

    async def settle(self, ticket: MoveTicket, *, is_moved: bool) -> None:
        """Carry out a decided move on this shard."""
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
        """Close a frozen table."""
        if going.is_frozen and not going.is_closed:
            going.is_closed = True
            self._manager.end_reads(going.table)
            await self._manager.give_up(going.table)

    @property
    def _staged(self) -> Path:
        return self._manager.directory.path / _STAGED_ROWS


def _check_movable(manager: TabletManager, table: OpenTable) -> None:
    """Raise if a user of the table would lose the table by the move."""
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
