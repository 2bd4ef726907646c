"""The tables that a client has described, cached.

A cached table may be stale: a call with a stale table is repeated with the table's present
description.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from typing import TypeVar

from streamhouse.client.http._transport import HttpTransport
from streamhouse.client.values.arguments import checked_calls
from streamhouse.core.errors import (
    ColumnDroppedError,
    InvalidRequestError,
    NotFoundError,
    SchemaMismatchError,
    UnknownColumnError,
)
from streamhouse.core.model.offsets import table_of_offsets
from streamhouse.core.model.table import TableInfo, TablePath

__all__ = ["CachedTables"]

_T = TypeVar("_T")


class CachedTables:
    """The cache of a client's tables. Thread-safe.

    Public calls of this class and its subclasses refuse arguments of wrong types in a sentence.
    """

    def __init_subclass__(cls) -> None:
        checked_calls(cls)

    def __init__(self, transport: HttpTransport) -> None:
        self._transport = transport
        self._tables: dict[TablePath, TableInfo] = {}
        self._tables_lock = threading.Lock()

    def describe_table(self, path: str) -> TableInfo:
        """Return the table's schema, bucketing, partitioning and properties."""
        answer = self._transport.request_json("GET", f"/v1/tables/{TablePath.parse(path)}")
        return self._remember(TableInfo.from_json(answer))

    def _with_table(self, path: str, call: Callable[[TableInfo], _T]) -> _T:
        """Call with the cached table, and again with a fresh one if the cache was stale."""
        cached_table = self._cached_table(path)
        try:
            return call(cached_table or self.describe_table(path))
        except ColumnDroppedError:
            # The name may mean another column now, which the caller has not meant.
            self._forget(TablePath.parse(path))
            raise
        except (NotFoundError, SchemaMismatchError, UnknownColumnError, InvalidRequestError):
            if cached_table is None or (fresh := self.describe_table(path)) == cached_table:
                raise
            return call(fresh)

    def _table_of(self, path: str, offsets: Collection[int], *, argument: str) -> int | None:
        """Return the id of the table that the offsets are of; None if all offsets are 0.

        Plain numbers are offsets of the table that is cached under the name.
        """
        table_id = table_of_offsets(offsets, what=argument)
        if table_id is None and any(offsets):
            table_id = (self._cached_table(path) or self.describe_table(path)).table_id
        return table_id

    def _cached_table(self, path: str) -> TableInfo | None:
        return self._tables.get(TablePath.parse(path))

    def _remember(self, table: TableInfo) -> TableInfo:
        with self._tables_lock:
            self._tables[table.path] = table
        # One process has all buckets of a table; an empty name means the process that answered.
        node = self._transport.routes.endpoints.resolve(table.nodes.get(0))
        if node is not None:
            self._transport.routes.learn(str(table.path), node)
        return table

    def _forget(self, path: TablePath) -> None:
        with self._tables_lock:
            self._tables.pop(path, None)
