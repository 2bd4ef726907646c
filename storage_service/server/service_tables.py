"""The service's tables, as the checks of lake commits and the REST catalog ask for them."""

from __future__ import annotations

from collections.abc import Mapping

from streamhouse.core.errors import ForbiddenError, StreamhouseError
from streamhouse.core.model.table import TablePath
from streamhouse.lake.guards.served_tables import ServedTable
from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.server.service import Service

__all__ = ["ServiceTables", "served_table"]


class ServiceTables:
    """The service's tables for one request. Made on the event loop, used on other threads.

    Other threads only read single values that the event loop replaces as a whole.
    """

    def __init__(
        self, service: Service, *, elsewhere: Mapping[int, TablePath] | None = None
    ) -> None:
        self.service_id = service.manager.service_id
        self._elsewhere = elsewhere or {}
        self._by_id: Mapping[int, OpenTable] = {
            table.info.table_id: table for table in service.manager.open_tables()
        }
        self._damaged = {table.table_id: table for table in service.manager.damaged_tables()}

    def with_id(self, table_id: int) -> ServedTable | None:
        """See `ServedTables.with_id`.

        Raises `TableDamagedError` for a damaged table, which still owns its lake tables, and
        `ForbiddenError` for a table of another shard.
        """
        if table_id in self._elsewhere:
            raise ForbiddenError(
                f"this lake table is of table '{self._elsewhere[table_id]}', which another shard"
                " has: ask that one"
            )
        if table_id in self._damaged:
            raise self._damaged[table_id].error()
        table = self._by_id.get(table_id)
        return None if table is None or table.is_dropped else served_table(table)

    def named(self, path: str) -> ServedTable | None:
        """See `ServedTables.named`."""
        try:
            table_path = TablePath.parse(path)
        except StreamhouseError:
            return None
        for damaged in self._damaged.values():
            if damaged.path == table_path:
                raise damaged.error()
        for table in self._by_id.values():
            if table.path == table_path and not table.is_dropped:
                return served_table(table)
        return None


def served_table(table: OpenTable) -> ServedTable:
    """Return the state of a table that the checks of lake commits need. Event loop only."""
    return ServedTable(
        info=table.info,
        lake=table.lake,
        positions=table.positions(),
        pinned=frozenset(pin.snapshot_id for pin in table.lake_pins.current()),
    )
