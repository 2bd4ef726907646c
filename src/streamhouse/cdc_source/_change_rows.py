"""The changes of a table between two commits, in order, handed out as Arrow tables.

Invariants:
- `complete` changes belong to finished transactions of the source; only complete changes are handed
  out. Changes of an unfinished transaction wait separately
- a truncation drops all waiting changes before it, once its transaction is complete
- a value left unchanged by an update is the value of the row's latest version: a waiting change, or
  the stored row
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from streamhouse.cdc_source._source_types import WireType, to_array
from streamhouse.core.errors import SchemaMismatchError
from streamhouse.core.model.records.unavailable_value import UnavailableValue
from streamhouse.core.model.schema import CHANGE_TYPE_COLUMN

__all__ = ["ChangeBuffer", "RowShape"]

# As many rows wait as Python objects; more of them as Arrow, and past the bytes on disk.
_CHUNK_ROWS: Final = 20_000
_MEMORY_BYTES_MAX: Final = 128 << 20
# PostgreSQL moves values out of a row, and later leaves them out, only where rows have 2 KB.
_WIDE_ROW_CHARS: Final = 1_000

Row = Mapping[str, Any]
Key = tuple[Any, ...]
Lookup = Callable[[list[Key]], pa.Table]


@dataclass(frozen=True, slots=True)
class RowShape:
    """The target's columns and key columns, with the encoding of each in events."""

    table: str
    schema: pa.Schema
    key: tuple[str, ...]
    wires: Mapping[str, WireType]

    def array(self, name: str, values: Sequence[Any]) -> pa.Array:
        """Return values in an event's encoding as a column of the target."""
        where = f"table '{self.table}', column '{name}'"
        data_type, wire = self.schema.field(name).type, self.wires.get(name)
        return to_array(values, data_type, wire, where=where, is_key=name in self.key)

    def conform(self, chunk: pa.Table) -> pa.Table:
        """Return a chunk of an earlier schema with the target's columns."""
        for column in self.schema:
            if column.name not in chunk.column_names:
                chunk = chunk.append_column(column, pa.nulls(chunk.num_rows, column.type))
            elif chunk.schema.field(column.name).type != column.type:
                place = chunk.column_names.index(column.name)
                cast = chunk.column(place).cast(column.type)
                chunk = chunk.set_column(place, column, cast)
        return chunk


@dataclass(slots=True)
class _Change:
    op: str
    row: Row
    # Columns whose values are those of the stored row with the key `base`.
    unchanged: tuple[str, ...] = ()
    base: Key = ()


@dataclass(slots=True)
class _Waiting:
    """Changes in order: first the chunks, then the rows."""

    chunks: list[pa.Table | Path] = field(default_factory=list)
    rows: list[_Change] = field(default_factory=list)
    is_replaced: bool = False

    def __len__(self) -> int:
        return len(self.chunks) + len(self.rows)


class ChangeBuffer:
    """Takes changes one by one; hands out those of complete transactions."""

    def __init__(
        self,
        *,
        unchanged: UnavailableValue,
        lookup: Lookup,
        folder: Path,
        chunk_rows: int = _CHUNK_ROWS,
        memory_bytes_max: int = _MEMORY_BYTES_MAX,
    ) -> None:
        self._chunk_rows = chunk_rows
        self._memory_bytes_max = memory_bytes_max
        self._unchanged = unchanged
        self._lookup = lookup
        self._folder = folder
        self._complete = _Waiting()
        self._open = _Waiting()
        # The latest rows, where they are wide: a later change may leave a value of them out.
        self._wide: dict[Key, _Change] = {}
        self._deleted: tuple[Key, _Change | None] = ((), None)
        self._bytes = 0

    @property
    def is_replaced(self) -> bool:
        """Whether the complete changes stand for the whole table: it was truncated."""
        return self._complete.is_replaced

    @property
    def has_complete(self) -> bool:
        """Whether there is anything to commit."""
        return bool(len(self._complete)) or self._complete.is_replaced

    @property
    def has_open(self) -> bool:
        """Whether an unfinished transaction has changed the table."""
        return bool(len(self._open)) or self._open.is_replaced

    def add(self, op: str, row: Row, text: str, shape: RowShape) -> None:
        """Take a change of the transaction at hand: `r`, `c` or `u` and the row after it, or `d`
        and at least the key; `text` is the event as it was written."""
        if not shape.key:
            self._open.rows.append(_Change(op, row))
        else:
            key = tuple(row.get(name) for name in shape.key)
            self._add_keyed(op, row, text, key, shape)
        if len(self._open.rows) >= self._chunk_rows:
            self._pack(self._open, shape)

    def _add_keyed(self, op: str, row: Row, text: str, key: Key, shape: RowShape) -> None:
        if None in key:
            raise SchemaMismatchError(
                f"table '{shape.table}': the source sent a change '{op}' without column"
                f" '{shape.key[key.index(None)]}' of the primary key, so it is not known of which"
                " row; set REPLICA IDENTITY DEFAULT, or FULL, for the table in the source, and"
                " start with --snapshot"
            )
        if op == "d":
            self._deleted = (key, self._wide.pop(key, None))
            self._open.rows.append(_Change("d", row))
            return
        change = _Change(op, row)
        missing = self._unchanged.columns_of(row, text)
        if missing:
            # A row that gets another key is deleted under the old one, and inserted just after.
            base, previous = self._deleted if op == "c" else (key, self._wide.get(key))
            change = _completed(change, missing, base, previous)
        if missing or len(text) >= _WIDE_ROW_CHARS:
            self._wide[key] = change
        else:
            self._wide.pop(key, None)
        self._open.rows.append(change)

    def truncate(self) -> None:
        """All rows are gone; what comes now comes into an empty table."""
        self._open = _Waiting(is_replaced=True)
        self._wide.clear()

    def end_transaction(self, shape: RowShape) -> None:
        """The transaction at hand is complete."""
        transaction, self._open = self._open, _Waiting()
        if transaction.is_replaced:
            self._complete = transaction
            return
        if transaction.chunks and self._complete.rows:
            self._pack(self._complete, shape)
        self._complete.chunks += transaction.chunks
        self._complete.rows += transaction.rows
        if len(self._complete.rows) >= self._chunk_rows:
            self._pack(self._complete, shape)

    def discard_complete(self) -> None:
        """Forget what is complete: the table has it already."""
        for chunk in self._complete.chunks:
            if isinstance(chunk, Path):
                chunk.unlink(missing_ok=True)
        self._complete = _Waiting()
        self._bytes = 0
        if not self.has_open:
            self._wide.clear()

    def complete_tables(self, shape: RowShape) -> list[pa.Table]:
        """Return the complete changes, in order, with `__change_type` where there is a key."""
        if self._complete.rows:
            self._pack(self._complete, shape)
        tables = []
        for chunk in self._complete.chunks:
            if isinstance(chunk, Path):
                with pa.memory_map(str(chunk)) as file:
                    chunk = pa.ipc.open_file(file).read_all()
            tables.append(shape.conform(chunk))
        return tables

    def _pack(self, waiting: _Waiting, shape: RowShape) -> None:
        rows, waiting.rows = waiting.rows, []
        chunk = self._table_of(rows, shape)
        self._bytes += chunk.nbytes
        is_much = self._bytes > self._memory_bytes_max
        waiting.chunks.append(self._on_disk(chunk) if is_much else chunk)

    def _on_disk(self, chunk: pa.Table) -> Path:
        with tempfile.NamedTemporaryFile(dir=self._folder, suffix=".arrow", delete=False) as file:
            with pa.ipc.new_file(file, chunk.schema) as writer:
                writer.write_table(chunk)
            return Path(file.name)

    def _table_of(self, changes: list[_Change], shape: RowShape) -> pa.Table:
        columns: dict[str, pa.Array] = {}
        stored, places = self._stored_rows(changes)
        for name in shape.schema.names:
            values = [
                None if name in change.unchanged else change.row.get(name) for change in changes
            ]
            column = shape.array(name, values)
            if stored is not None and any(name in change.unchanged for change in changes):
                both = pa.chunked_array([column, _plain(stored[name], column.type)])
                indices = [
                    len(changes) + places[at] if name in change.unchanged else at
                    for at, change in enumerate(changes)
                ]
                column = both.take(pa.array(indices, pa.int64())).combine_chunks()
            columns[name] = column
        table = pa.table(columns)
        if not shape.key:
            return table
        ops = pa.array(["d" if change.op == "d" else "u" for change in changes], pa.string())
        return table.append_column(CHANGE_TYPE_COLUMN, ops)

    def _stored_rows(self, changes: list[_Change]) -> tuple[pa.Table | None, dict[int, int]]:
        """Return the stored rows with the unchanged values of changes, and change -> row number."""
        places: dict[int, int] = {}
        keys: list[Key] = []
        for at, change in enumerate(changes):
            if change.unchanged:
                places[at] = len(keys)
                keys.append(change.base)
        return (self._lookup(keys) if keys else None), places


def _plain(column: pa.ChunkedArray, data_type: pa.DataType) -> pa.Array:
    combined = column.combine_chunks()
    return combined if combined.type == data_type else combined.cast(data_type)


def _completed(
    change: _Change, missing: tuple[str, ...], base: Key, before: _Change | None
) -> _Change:
    """Return a change with its unchanged values filled in, where available."""
    if before is None:
        return _Change(change.op, change.row, missing, base)
    filled = {name: before.row.get(name) for name in missing if name not in before.unchanged}
    still_missing = tuple(name for name in missing if name in before.unchanged)
    return _Change(
        change.op, {**change.row, **filled}, still_missing, before.base if still_missing else ()
    )
