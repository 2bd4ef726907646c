"""The primary key tables of a followed directory, to look keys up in while the rows are changed.

`WarmRows` changes the tables on the thread that follows the journal; any thread looks keys up.

Promises:
- the rows below `WarmTable.ends` are rows that the owner shows, or shows in a moment and for ever
- an answer that ends at or below `ends` has no row of a transaction in pieces
- rows are closed once no lookup uses them; afterwards every lookup raises `UnavailableError`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import pyarrow as pa

from streamhouse.core.errors import UnavailableError
from streamhouse.core.model.table import TableInfo, TablePath
from streamhouse.storage_service.engine.keys._lending import Lending, TablesByPath
from streamhouse.storage_service.engine.keys.key_lookup import KeyLookup, LookupTable
from streamhouse.storage_service.kv.kv_tablet import KvTablet
from streamhouse.storage_service.kv.lookup import FoundRows, FoundValues
from streamhouse.storage_service.kv.table_rules import TableRules

__all__ = ["WarmTable", "WarmTables"]


class _LentRows:
    """The rows of one bucket, open while a lookup uses the rows."""

    def __init__(self, rows: KvTablet) -> None:
        self._rows = rows
        self._lending = Lending("the rows are")

    @property
    def rows(self) -> _LentRows:
        """The rows, as of a bucket to look keys up in."""
        return self

    @property
    def rules(self) -> TableRules:
        """The facts about the table; `schema_id` is the version of the rows."""
        return self._rows.rules

    @property
    def is_loaded(self) -> bool:
        """Whether all rows are in memory."""
        return self._rows.is_loaded

    def check_usable(self) -> None:
        """Raise `UnavailableError` for closed rows."""
        self._lending.check()

    def find(self, keys: pa.Array, *, bytes_max: int) -> FoundValues:
        """See `KvTablet.find`."""
        with self._lending.use():
            return self._rows.find(keys, bytes_max=bytes_max)

    def find_few(
        self,
        keys: Sequence[bytes],
        hashes: Sequence[tuple[int, int]],
        *,
        bytes_max: int,
        reads_files: bool,
    ) -> FoundValues | None:
        """See `KvTablet.find_few`."""
        with self._lending.use():
            return self._rows.find_few(keys, hashes, bytes_max=bytes_max, reads_files=reads_files)

    def prefix_lookup(self, prefix: pa.RecordBatch, *, rows_max: int, bytes_max: int) -> FoundRows:
        """See `KvTablet.prefix_lookup`."""
        with self._lending.use():
            return self._rows.prefix_lookup(prefix, rows_max=rows_max, bytes_max=bytes_max)

    def close(self) -> None:
        """Refuse further lookups; return when the last lookup has ended."""
        self._lending.end()


class WarmTable(LookupTable):
    """One table. The following thread sets `ends`, and calls `follow` and `close`."""

    def __init__(self, info: TableInfo, rows: Sequence[KvTablet]) -> None:
        self._rows: Final = [_LentRows(bucket) for bucket in rows]
        self.lookup = KeyLookup(info, self._rows)
        self.ends: Sequence[int] = ()
        """The visible end of each bucket; empty while no end is known for certain."""

    @property
    def path(self) -> TablePath:
        """The table's path."""
        return self.lookup.info.path

    def shows(self, ends: Mapping[int, int]) -> bool:
        """Whether all changes below these ends are visible."""
        visible = self.ends
        return bool(visible) and all(end <= visible[bucket] for bucket, end in ends.items())

    def count_rows(self) -> int:
        """Raise `UnavailableError`: rows are counted ahead of the visible ends."""
        raise UnavailableError(f"the owner counts the rows of table '{self.path}'")

    def follow(self, info: TableInfo) -> None:
        """Look up in the schema of `info`, which the rows have already."""
        if info is not self.lookup.info:
            self.lookup = KeyLookup(info, self._rows)

    def close(self) -> None:
        """Refuse further lookups; return when the last lookup has ended."""
        for rows in self._rows:
            rows.close()


class WarmTables(TablesByPath[WarmTable]):
    """See the module."""

    def remove(self, table: WarmTable) -> None:
        """Show a table no longer, and return when the last lookup has ended."""
        self.forget(table)
        table.close()
