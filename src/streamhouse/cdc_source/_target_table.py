"""A target table that follows a source table: creation, schema changes, commits.

A commit is one transaction of the table, named by the stream and the position in the source's log
at which the last of the source's transactions in it ended. So changes that are read again are
recognised.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from streamhouse.cdc_source._change_rows import ChangeBuffer, Key, RowShape
from streamhouse.cdc_source._source_types import SourceColumn, WireType, is_known_type
from streamhouse.client import StorageClient, Transaction
from streamhouse.core.errors import (
    DatabaseNotFoundError,
    InvalidSchemaError,
    SchemaMismatchError,
    TableNotFoundError,
    UnavailableError,
)
from streamhouse.core.model.records.unavailable_value import UnavailableValue
from streamhouse.core.model.schema import type_name
from streamhouse.core.model.table import TableInfo, TablePath

__all__ = ["OP_COLUMN", "OldRows", "SourceTable", "TargetTable", "quoted"]

_logger = logging.getLogger("streamhouse.cdc")

OP_COLUMN: Final = "__op"
"""Of a table without a key: what happened, as `r` (snapshot), `c`, `u`, `d`."""
_SNAPSHOT_IDLE_S: Final = 86_400.0


def quoted(name: str) -> str:
    """Return a name as SQL has it."""
    return '"' + name.replace('"', '""') + '"'


@dataclass(frozen=True, slots=True)
class OldRows:
    """The parts of an old row of `table`, perhaps a partition, that the database sends.

    `identity` is its REPLICA IDENTITY in the catalog: `d`, `f`, `i` or `n`; `columns` are the
    columns of the index, for `i`. `is_logged`: changes of the table are in the database's log.
    """

    table: str
    identity: str = "d"
    columns: frozenset[str] = frozenset()
    is_logged: bool = True


@dataclass(frozen=True, slots=True)
class SourceTable:
    """A table of the database: columns in order, and the primary key, perhaps empty.

    `left_out` columns are not read: the database computes them, or the target has no form for their
    values. `oid` and `column_numbers` are the database's unique numbers of the table and its
    columns. The remaining fields are for the checks of `StreamOptions`.
    """

    schema: str
    name: str
    columns: tuple[SourceColumn, ...]
    primary_key: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    oid: int = 0
    column_numbers: Mapping[str, int] = field(default_factory=dict)
    old_rows: tuple[OldRows, ...] = ()
    has_heirs: bool = False
    has_deferrable_key: bool = False
    is_owned: bool = True
    hides_rows: bool = False

    @property
    def full_name(self) -> str:
        """`schema.table`."""
        return f"{self.schema}.{self.name}"

    def target_name(self) -> str:
        """Return the name of the target table; a schema other than `public` is part of the name."""
        return self.name if self.schema == "public" else f"{self.schema}_{self.name}"

    def arrow_schema(self) -> pa.Schema:
        """Return our table's columns: only those of the key are NOT NULL."""
        fields = [
            pa.field(column.name, column.arrow_type(), nullable=column.name not in self.primary_key)
            for column in self.columns
        ]
        if not self.primary_key:
            fields.append(pa.field(OP_COLUMN, pa.string()))
        return pa.schema(fields)


class TargetTable:
    """Takes the changes of a source table, and commits them by position."""

    def __init__(
        self,
        client: StorageClient,
        source: SourceTable,
        path: TablePath,
        *,
        app_id: str,
        unchanged: UnavailableValue,
        folder: Path,
    ) -> None:
        self.source = source
        self.path = path
        self._client = client
        self._app_id = app_id
        self._shape = RowShape(str(path), pa.schema([]), source.primary_key, {})
        # The version of the table's schema that the shape has.
        self._schema_id = 0
        self.changes = ChangeBuffer(unchanged=unchanged, lookup=self._lookup, folder=folder)
        self._snapshot: tuple[Transaction, list[str]] | None = None
        # Before the first commit that was not skipped, the table may have the changes already.
        self._is_caught_up = False

    def prepare(self, *, bucket_count: int) -> None:
        """Create the table, or check that the existing table can follow the source.

        Raises `SchemaMismatchError` if it has another key, or a column of another type.
        """
        try:
            table = self._client.describe_table(str(self.path))
        except (TableNotFoundError, DatabaseNotFoundError):
            table = self._create(bucket_count)
        if table.descriptor.primary_key != self.source.primary_key:
            raise SchemaMismatchError(
                f"table '{self.path}' has the primary key {table.descriptor.primary_key}, and"
                f" '{self.source.full_name}' has {self.source.primary_key}; drop the table, or"
                " choose another --database"
            )
        self._shape = self._shaped(table, self._shape.wires)
        self.follow_schema(self.source.columns)

    def _create(self, bucket_count: int) -> TableInfo:
        for column in self.source.columns:
            if not is_known_type(column):
                _logger.warning(
                    "event=type_is_text table=%s column=%s type=%r",
                    self.path,
                    column.name,
                    column.type_name,
                )
        return self._client.create_table(
            str(self.path),
            self.source.arrow_schema(),
            primary_key=self.source.primary_key,
            bucket_count=bucket_count,
        )

    def _shaped(self, table: TableInfo, wires: Mapping[str, WireType]) -> RowShape:
        schema = table.schema.to_arrow()
        self._schema_id = table.schema_id
        return RowShape(str(self.path), schema, self.source.primary_key, wires)

    def lacks_any(self, columns: Sequence[SourceColumn]) -> bool:
        """Whether any of these columns is new to the table."""
        return any(column.name not in self._shape.schema.names for column in columns)

    def follow_schema(self, columns: Sequence[SourceColumn]) -> None:
        """Bring the table to the columns of an event: add missing columns, widen types.

        Raises `SchemaMismatchError` for a change that the table cannot follow.
        """
        for column in columns:
            source_type = column.arrow_type()
            if column.name not in self._shape.schema.names:
                _logger.warning(
                    "event=column_added table=%s column=%s type=%r",
                    self.path,
                    column.name,
                    str(source_type),
                )
                table = self._client.add_column(str(self.path), column.name, source_type)
                self._shape = self._shaped(table, self._shape.wires)
                continue
            own_type = self._shape.schema.field(column.name).type
            if (
                source_type != own_type
                and is_known_type(column)
                and not _keeps(own_type, source_type)
            ):
                self._widen(column, own_type, source_type)
        wires = {column.name: column.wire for column in columns if column.wire is not None}
        self._shape = RowShape(
            str(self.path), self._shape.schema, self._shape.key, {**self._shape.wires, **wires}
        )

    def _widen(self, column: SourceColumn, found: pa.DataType, wanted: pa.DataType) -> None:
        try:
            table = self._client.widen_column(str(self.path), column.name, wanted)
        except InvalidSchemaError as error:
            raise SchemaMismatchError(
                f"table '{self.path}': column '{column.name}' is {type_name(found)}, and in"
                f" '{self.source.full_name}' it became {column.type_name}, which is"
                f" {type_name(wanted)};"
                " this change cannot be followed. Drop the table and start with --snapshot, or"
                " change the column back"
            ) from error
        _logger.warning(
            "event=column_widened table=%s column=%s type=%r", self.path, column.name, str(wanted)
        )
        self._shape = self._shaped(table, self._shape.wires)

    def add(self, op: str, row: Mapping[str, Any], text: str) -> None:
        """Take a change of the source's transaction at hand."""
        if op == "t":
            self.changes.truncate()
            return
        if not self._shape.key:
            row = {**row, OP_COLUMN: op}
        self.changes.add(op, row, text, self._shape)

    # -- the snapshot --------------------------------------------------------------------------

    def stage_snapshot(self, lsn: int) -> None:
        """Store the taken rows, as of `lsn` in the source; readers do not see the rows yet."""
        if self._snapshot is None:
            begun = self._client.begin_transaction(
                str(self.path),
                operation="overwrite",
                app_id=self._app_id,
                version=lsn,
                timeout_s=_SNAPSHOT_IDLE_S,
                schema_id=self._schema_id,
            )
            # Positions of a server only grow, and what this stream committed lies before.
            assert not begun.is_skipped
            self._snapshot = (begun, [])
        transaction, parts = self._snapshot
        self.changes.end_transaction(self._shape)
        for rows in self.changes.complete_tables(self._shape):
            parts.append(transaction.stage(rows))
        self.changes.discard_complete()

    def commit_snapshot(self, lsn: int) -> int:
        """Replace the table by the snapshot in one step; return the number of rows.

        Changes committed up to `lsn` are skipped from now on.
        """
        self.stage_snapshot(lsn)
        assert self._snapshot is not None
        transaction, parts = self._snapshot
        self._snapshot = None
        return transaction.commit(parts).row_count

    def abort_snapshot(self) -> None:
        """Drop what was staged."""
        if self._snapshot is not None:
            transaction, _ = self._snapshot
            self._snapshot = None
            transaction.abort()

    # -- the changes ---------------------------------------------------------------------------

    def end_transaction(self, lsn: int) -> None:
        """The source's transaction that ended at `lsn` is complete."""
        if not self.changes.has_open:
            return
        self.changes.end_transaction(self._shape)
        if not self._is_caught_up:
            # One by one, until a commit is not skipped: the table's own position is unknown.
            self.commit(lsn)

    def commit(self, lsn: int) -> int:
        """Commit all complete changes, the last of which ended at `lsn`; return their number."""
        if not self.changes.has_complete:
            return 0
        keyed = bool(self._shape.key)
        is_replaced = self.changes.is_replaced
        operation = "overwrite" if is_replaced else "upsert" if keyed else "append"
        with self._client.begin_transaction(
            str(self.path),
            operation=operation,
            app_id=self._app_id,
            version=lsn,
            schema_id=self._schema_id,
        ) as transaction:
            count = 0
            if not transaction.is_skipped:
                self._is_caught_up = True
                tables = self.changes.complete_tables(self._shape)
                parts = [transaction.stage(table) for table in tables]
                transaction.commit(parts)
                count = sum(table.num_rows for table in tables)
        self.changes.discard_complete()
        return count

    def _lookup(self, keys: list[Key]) -> pa.Table:
        names = self._shape.key
        columns = {name: [key[at] for key in keys] for at, name in enumerate(names)}
        table = pa.table({name: self._shape.array(name, columns[name]) for name in names})
        rows = self._client.lookup(str(self.path), table)
        if self._client.describe_table(str(self.path)).schema_id != self._schema_id:
            raise UnavailableError(
                f"table '{self.path}': its schema was changed by others, and a row of it is to be"
                " read by the columns there are now"
            )
        return rows


def _keeps(found: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether a column of type `found` holds all values of `wanted` as it is."""
    integers = [pa.int16(), pa.int32(), pa.int64()]
    if found in integers and wanted in integers:
        return integers.index(found) > integers.index(wanted)
    if pa.types.is_decimal(found) and pa.types.is_decimal(wanted):
        return bool(found.scale == wanted.scale and found.precision > wanted.precision)
    return bool(found == pa.float64() and wanted == pa.float32())
