"""What `service.json` says of tables that move between shards.

Invariants (decision 0021):
- a table that leaves is named in `leaving` before it is closed, with the version of its name that
  decides; until that is read it stays in `tables`, and nobody serves it
- a table that arrives is named in `arriving` before its first file is written, and `is_ready` after
  its last one; the source decides for it only after that
- it changes from `leaving` to `dropped`, and from `arriving` to `tables` or `dropped`, in one save,
  after the directory was read
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from streamhouse.core.errors import StorageFailedError
from streamhouse.core.model.table import TableInfo, TablePath
from streamhouse.storage_service.directory.service_state import KnownTable, ServiceState
from streamhouse.storage_service.ownership.shards.directory import ShardDirectory
from streamhouse.storage_service.ownership.shards.tickets import Arrival, MoveTicket

__all__ = ["MovedTables", "settle_moves"]

_logger = logging.getLogger(__name__)


def settle_moves(state: ServiceState, names: ShardDirectory) -> bool:
    """Complete or undo, at a start, what was under way; return whether `state` has changed.

    What this shard sent is decided now. What was coming may still be open: it goes on to wait.
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
            state.tables[table_id] = KnownTable(arrival.ticket.path)
        else:
            state.dropped.add(table_id)
        is_changed = True
    return is_changed


class MovedTables:
    """See the module. Each change is durable on return, or was not made. Blocking."""

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
        """Tables that are in this shard, and that another one may have soon, by id."""
        return dict(self._state.leaving)

    @property
    def arriving(self) -> dict[int, Arrival]:
        """Tables that are in another shard, and that this one may have soon, by id."""
        return dict(self._state.arriving)

    def has(self, ticket: MoveTicket) -> bool:
        """Whether the table of a move is one of this shard."""
        known = self._state.tables.get(ticket.table_id)
        return known is not None and known.path == ticket.path

    def is_remains(self, table_id: int) -> bool:
        """Whether files of this id are waiting for their deletion."""
        return table_id in self._state.dropped

    def begin_leaving(self, ticket: MoveTicket) -> None:
        """Note that a table may leave."""

        def change() -> None:
            self._state.leaving[ticket.table_id] = ticket

        self._save(change)

    def stay(self, table_id: int) -> None:
        """Note that a table does not leave."""

        def change() -> None:
            self._state.leaving.pop(table_id, None)

        self._save(change)

    def leave(self, ticket: MoveTicket) -> None:
        """Note that a table is another shard's; its files here wait for `purge`."""

        def change() -> None:
            self._state.leaving.pop(ticket.table_id, None)
            self._state.tables.pop(ticket.table_id, None)
            self._state.dropped.add(ticket.table_id)

        self._save(change)
        self._tables.pop(ticket.path, None)

    def begin_arriving(self, ticket: MoveTicket) -> None:
        """Note that a table may come."""

        def change() -> None:
            self._state.arriving[ticket.table_id] = Arrival(ticket)

        self._save(change)

    def set_ready(self, table_id: int) -> None:
        """Note that all files of a table that may come are here."""

        def change() -> None:
            arrival = self._state.arriving[table_id]
            self._state.arriving[table_id] = replace(arrival, is_ready=True)

        self._save(change)

    def refuse(self, table_id: int) -> None:
        """Note that a table does not come; its files here wait for `purge`."""

        def change() -> None:
            self._state.arriving.pop(table_id, None)
            self._state.dropped.add(table_id)

        self._save(change)

    def arrive(self, info: TableInfo) -> None:
        """Note that a table is this shard's."""

        def change() -> None:
            self._state.arriving.pop(info.table_id, None)
            self._state.tables[info.table_id] = KnownTable(info.path)
            self._state.databases.add(info.path.database)

        self._save(change)
        self._tables[info.path] = info

    def _save(self, change: Callable[[], None]) -> None:
        """Make a change; after an `UnknownOutcomeError` it is made, as far as anybody sees."""
        state = self._state
        before = (dict(state.leaving), dict(state.arriving), dict(state.tables), set(state.dropped))
        change()
        try:
            self._save_state()
        except StorageFailedError:
            state.leaving, state.arriving, state.tables, state.dropped = before
            raise
