"""The entries of `service.json` for tables that move between shards.

Invariants (decision 0021):
- a leaving table is in `leaving` before it is closed, with the version of its name in which the
  move is decided; until the decision is read the table stays in `tables`, and no shard serves it
- an arriving table is in `arriving` before its first file is written, and `is_ready` after the last
  file; the source decides for the move only then
- a table changes from `leaving` to `dropped`, and from `arriving` to `tables` or `dropped`, in one
  save, after the directory was read
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from streamhouse.core.errors import StorageFailedError
from streamhouse.core.model.table import TableInfo, TablePath
from streamhouse.storage_service.directory.service_state import ServiceState, TableEntry
from streamhouse.storage_service.ownership.shards.directory import ShardDirectory
from streamhouse.storage_service.ownership.shards.tickets import Arrival, MoveTicket

__all__ = ["MovedTables", "settle_moves"]

_logger = logging.getLogger(__name__)


def settle_moves(state: ServiceState, names: ShardDirectory) -> bool:
    """Complete or undo unfinished moves at a start; return whether `state` has changed.

    Every move from this shard is decided now. A move to this shard may stay open.
    """
    is_changed = False
    for table_id, ticket in tuple(state.leaving.items()):
        shard = names.end_move(ticket)
        _logger.info("event=move_settled table=%s shard=%s", ticket.path, shard)
        del state.leaving[table_id]
        if shard != ticket.source:
            del state.tables[table_id]
            state.dropped.add(table_id)
        is_changed = True
    for table_id, arrival in tuple(state.arriving.items()):
        shard_or_open = names.decided(arrival.ticket)
        if arrival.is_ready and shard_or_open is None:
            continue
        del state.arriving[table_id]
        if shard_or_open == arrival.ticket.target:
            state.tables[table_id] = TableEntry(arrival.ticket.path)
        else:
            state.dropped.add(table_id)
        is_changed = True
    return is_changed


class MovedTables:
    """The changes to moving tables. Each is durable on return, or did not happen. Blocking."""

    def __init__(
        self,
        state: ServiceState,
        tables: dict[TablePath, TableInfo],
        save: Callable[[], None],
    ) -> None:
        self._state = state
        self._tables = tables
        self._save_state = save

    @property
    def leaving(self) -> dict[int, MoveTicket]:
        """Tables of this shard, soon perhaps another shard's, by id."""
        return dict(self._state.leaving)

    @property
    def arriving(self) -> dict[int, Arrival]:
        """Tables of other shards, soon perhaps this shard's, by id."""
        return dict(self._state.arriving)

    def has(self, ticket: MoveTicket) -> bool:
        """Return whether the table of a move belongs to this shard."""
        entry = self._state.tables.get(ticket.table_id)
        return entry is not None and entry.path == ticket.path

    def is_dropped(self, table_id: int) -> bool:
        """Return whether files of this id wait for their deletion."""
        return table_id in self._state.dropped

    def begin_leaving(self, ticket: MoveTicket) -> None:
        """Record that a table may leave."""

        def change() -> None:
            self._state.leaving[ticket.table_id] = ticket

        self._save(change)

    def stay(self, table_id: int) -> None:
        """Record that a table does not leave."""

        def change() -> None:
            self._state.leaving.pop(table_id, None)

        self._save(change)

    def leave(self, ticket: MoveTicket) -> None:
        """Record that a table belongs to another shard; its files here wait for `purge`."""

        def change() -> None:
            self._state.leaving.pop(ticket.table_id, None)
            self._state.tables.pop(ticket.table_id, None)
            self._state.dropped.add(ticket.table_id)

        self._save(change)
        self._tables.pop(ticket.path, None)

    def begin_arriving(self, ticket: MoveTicket) -> None:
        """Record that a table may arrive."""

        def change() -> None:
            self._state.arriving[ticket.table_id] = Arrival(ticket)

        self._save(change)

    def set_ready(self, table_id: int) -> None:
        """Record that all files of an arriving table are here."""

        def change() -> None:
            arrival = self._state.arriving[table_id]
            self._state.arriving[table_id] = replace(arrival, is_ready=True)

        self._save(change)

    def refuse(self, table_id: int) -> None:
        """Record that a table does not arrive; its files here wait for `purge`."""

        def change() -> None:
            self._state.arriving.pop(table_id, None)
            self._state.dropped.add(table_id)

        self._save(change)

    def arrive(self, info: TableInfo) -> None:
        """Record that a table belongs to this shard."""

        def change() -> None:
            self._state.arriving.pop(info.table_id, None)
            self._state.tables[info.table_id] = TableEntry(info.path)
            self._state.databases.add(info.path.database)

        self._save(change)
        self._tables[info.path] = info

    def _save(self, change: Callable[[], None]) -> None:
        """Make and save a change; after an `UnknownOutcomeError` the change counts as made."""
        state = self._state
        previous = (
            dict(state.leaving),
            dict(state.arriving),
            dict(state.tables),
            set(state.dropped),
        )
        change()
        try:
            self._save_state()
        except StorageFailedError:
            state.leaving, state.arriving, state.tables, state.dropped = previous
            raise
