"""Rows on their way to a table: checked, routed to buckets, numbered, sent.

A batch has a writer and, in its bucket, a sequence: the service stores each sequence once, however
often it arrives. A writer has one batch for each bucket under way at a time.
"""

from __future__ import annotations

import functools
import json
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import pyarrow as pa

from streamhouse.client.http._transport import HttpTransport
from streamhouse.client.values._python_rows import rows_as_arrow
from streamhouse.client.values.arguments import checked_calls
from streamhouse.client.values.forms import PythonRows
from streamhouse.client.writing._request_batches import (
    REQUEST_BYTES_TARGET,
    bounded_batches,
    check_row_sizes,
    has_flat_columns,
    rows_by_bucket,
)
from streamhouse.core.errors import (
    InternalError,
    OutOfOrderSequenceError,
    SchemaMismatchError,
    StreamhouseError,
    UnknownOutcomeError,
    UnsupportedError,
)
from streamhouse.core.model.bucketing import split_by_bucket, split_evenly
from streamhouse.core.model.casts.conform import check_schema, conform
from streamhouse.core.model.casts.lossless import castings, fitted
from streamhouse.core.model.casts.written_rows import in_current_version, version_of
from streamhouse.core.model.offsets import ranges_in
from streamhouse.core.model.schema import CHANGE_TYPE_COLUMN, Schema
from streamhouse.core.model.table import TableInfo
from streamhouse.core.model.transaction import TransactionOperation
from streamhouse.core.wire.arrow_body import encode_append_body

__all__ = [
    "AppendWriter",
    "ColumnChecks",
    "Ranges",
    "TableWrites",
    "WriteProgress",
    "log_rows_by_bucket",
    "route",
    "send",
    "spread_anywhere",
]

_SPREAD_ROWS_MIN: Final = 8_192
# A writer to more tables has their columns checked again: the cache does not grow for ever.
_CHECKS_KEPT_MAX: Final = 256
_VERBS_OF_KEY_TABLES: Final = {
    TransactionOperation.UPSERT: "upsert into",
    TransactionOperation.DELETE: "delete from",
}

Parts = Mapping[int, pa.RecordBatch]
"""Bucket -> its rows."""

Ranges = dict[int, tuple[int, int]]
"""Bucket -> (start offset, end offset)."""


@checked_calls
class AppendWriter:
    """Numbers the batches of a writer: the service stores each number once.

    Not thread-safe: sequences must reach the service in order, and a thread needs its own writer.

    Args:
        writer_id: the writer's number, by default random. Batches of a second writer with the same
            number count as repetitions of the first writer's batches, from the first batch on.
    """

    def __init__(self, writer_id: int | None = None) -> None:
        # 0 means "no writer" in the log; 63 random bits do not collide in practice.
        self.writer_id = writer_id or secrets.randbits(63) | 1
        self._next_sequence: dict[int, int] = {}
        self.transactions = 0
        """The number of calls sent as transactions, as calls that reject rows are."""

    def __repr__(self) -> str:
        return f"AppendWriter({self.writer_id})"

    def next_sequence(self, bucket: int) -> int:
        """Return the sequence of the next batch for `bucket`; the first is 1."""
        return self._next_sequence.get(bucket, 1)

    def advance(self, bucket: int) -> None:
        """Count one acknowledged batch of `bucket`."""
        self._next_sequence[bucket] = self.next_sequence(bucket) + 1

    def renew(self) -> None:
        """Become a new writer: batches sent before no longer count for the sequences."""
        self.writer_id = secrets.randbits(63) | 1
        self._next_sequence.clear()


class ColumnChecks:
    """Checks the columns of writes, with a cache of the last good columns by table and operation.

    Most writes repeat their columns, and a check costs a tenth of a small write. Thread-safe.
    """

    def __init__(self) -> None:
        self._last: dict[tuple[int, TransactionOperation], CheckedColumns] = {}

    def check(
        self,
        table: TableInfo,
        schema: pa.Schema,
        operation: TransactionOperation,
        columns: Sequence[str] | None,
    ) -> CheckedColumns:
        """Raise before the first request if rows with this schema cannot be written."""
        column_names = None if columns is None else tuple(columns)
        cached = self._last.get((table.table_id, operation))
        if (
            cached is None
            or cached.table is not table
            or cached.columns != column_names
            or not cached.schema.equals(schema)
        ):
            casts = _check_columns(table, schema, operation, columns)
            if len(self._last) >= _CHECKS_KEPT_MAX:
                self._last.clear()
            cached = CheckedColumns(
                table, column_names, schema.remove_metadata(), has_flat_columns(schema), casts
            )
            self._last[table.table_id, operation] = cached
        return cached


class CheckedColumns(NamedTuple):
    table: TableInfo
    columns: tuple[str, ...] | None
    schema: pa.Schema
    is_flat: bool
    """The result of `has_flat_columns`."""
    casts: Mapping[str, pa.DataType]
    """Column -> the type to which its values must be converted (`fitted`)."""


@dataclass
class WriteProgress:
    """The progress of a call: rows stored so far, and their offsets. A resumed call adds to it."""

    row_count: int = 0
    offsets: Ranges = field(default_factory=dict)


class TableWrites:
    """The writes of a client to all tables. Thread-safe.

    A call takes an idle writer and returns it only after every answer: after a failure the writer's
    sequences are uncertain, and the writer is dropped.
    """

    def __init__(self, transport: HttpTransport) -> None:
        self._transport = transport
        self._lock = threading.Lock()
        self._idle_writers: dict[int, list[AppendWriter]] = {}
        self._next_bucket: dict[int, int] = {}
        self._checks = ColumnChecks()

    def write(
        self,
        table: TableInfo,
        data: pa.Table | pa.RecordBatch | PythonRows,
        operation: TransactionOperation,
        *,
        columns: Sequence[str] | None = None,
        writer: AppendWriter | None,
        written: WriteProgress | None = None,
    ) -> Ranges:
        """Append, upsert or delete the rows of `data` that `written` lacks; see `StorageClient`."""
        if isinstance(data, PythonRows):
            if not data.rows:
                return {}
            data = rows_as_arrow(table, data.rows)
        checked = self._checks.check(table, data.schema, operation, columns)
        if checked.casts:
            data = fitted(data, checked.casts, table=str(table.path))
        numbering_writer = writer or self._take_writer(table.table_id)
        written = written or WriteProgress()
        offsets = written.offsets
        remaining_rows = data.slice(written.row_count) if written.row_count else data
        if remaining_rows.nbytes > REQUEST_BYTES_TARGET:
            check_row_sizes(data, table)
        for rows in bounded_batches(remaining_rows, is_flat=checked.is_flat):
            parts = route(table, rows, operation, columns, spread=self._spread)
            send_rows = functools.partial(
                send,
                self._transport,
                table,
                parts,
                operation,
                columns=columns,
                writer=numbering_writer,
            )
            try:
                part_ranges = send_rows()
            except OutOfOrderSequenceError:
                if writer is not None:
                    raise
                # The service has forgotten the writer, or has a new table: none of these rows, sent
                # for the first time, is stored.
                numbering_writer.renew()
                part_ranges = send_rows()
            written.row_count += rows.num_rows
            for bucket, span in part_ranges.items():
                offsets[bucket] = (offsets.get(bucket, span)[0], span[1])
        if writer is None:
            with self._lock:
                self._idle_writers.setdefault(table.table_id, []).append(numbering_writer)
        return offsets

    def _take_writer(self, table_id: int) -> AppendWriter:
        with self._lock:
            idle = self._idle_writers.get(table_id)
            return idle.pop() if idle else AppendWriter()

    def _spread(self, table: TableInfo, rows: pa.RecordBatch) -> Parts:
        """Start with the bucket after the last one: many small batches are spread, too."""
        with self._lock:
            first = self._next_bucket.get(table.table_id)
            if first is None:
                first = secrets.randbelow(table.bucket_count)
            parts = spread_anywhere(table, rows, first_bucket=first)
            self._next_bucket[table.table_id] = (first + len(parts)) % table.bucket_count
        return parts


def spread_anywhere(
    table: TableInfo, rows: pa.RecordBatch, *, first_bucket: int | None = None
) -> Parts:
    """Spread rows without a bucket key over the buckets from one on, by default a random one."""
    if first_bucket is None:
        first_bucket = secrets.randbelow(table.bucket_count)
    return split_evenly(
        rows, table.bucket_count, first_bucket=first_bucket, rows_min=_SPREAD_ROWS_MIN
    )


def _check_columns(
    table: TableInfo,
    schema: pa.Schema,
    operation: TransactionOperation,
    columns: Sequence[str] | None,
) -> Mapping[str, pa.DataType]:
    """Raise before the first request if rows with this schema cannot be written.

    Returns column -> type for the columns whose values must be converted.
    """
    name = str(table.path)
    if operation in _VERBS_OF_KEY_TABLES and not table.is_primary_key_table:
        raise UnsupportedError(
            f"table '{name}' has no primary key: cannot {_VERBS_OF_KEY_TABLES[operation]} it"
        )
    if operation is TransactionOperation.APPEND and table.is_primary_key_table:
        raise UnsupportedError(
            f"table '{name}' has a primary key: upsert rows instead of appending them"
        )
    if operation is TransactionOperation.DELETE:
        expected = table.schema.select(table.descriptor.primary_key, table=name)
    elif operation is TransactionOperation.UPSERT and CHANGE_TYPE_COLUMN in schema.names:
        # Deletes need only the key: the service sees which rows are deletes.
        return castings(schema, table.schema)
    elif columns is None:
        expected = table.schema_version(version_of(table, schema, stated=table.schema_id))
    else:
        expected = table.schema.select(columns, table=name)
    _check_selected(schema, expected, table, operation)
    casts = castings(schema, expected)
    if casts:
        schema = pa.schema([f.with_type(casts.get(f.name, f.type)) for f in schema])
    try:
        check_schema(schema, expected, table=name)
    except SchemaMismatchError as error:
        column_names = [column.name for column in expected.columns]
        is_partial = set(table.descriptor.primary_key) <= set(schema.names) < set(column_names)
        if not is_partial:
            raise
        advice = f"columns={schema.names} leaves the others as they are"
        if operation is TransactionOperation.APPEND:
            advice = "a table or a frame names every column, dicts may leave out nullable ones"
        raise SchemaMismatchError(f"{error.message}; {advice}") from error
    return casts


def _check_selected(
    schema: pa.Schema, expected: Schema, table: TableInfo, operation: TransactionOperation
) -> None:
    """Refuse columns of the table that the call does not take."""
    for name in schema.names:
        if name in table.schema.names and name not in expected.names:
            columns = ", ".join(expected.names)
            takes = f"columns ({columns}) leave out column '{name}' of the rows"
            if operation is TransactionOperation.DELETE:
                takes = f"delete takes the key ({columns}) alone, not column '{name}'"
            raise SchemaMismatchError(f"table '{table.path}': {takes}")


def route(
    table: TableInfo,
    rows: pa.RecordBatch,
    operation: TransactionOperation,
    columns: Sequence[str] | None,
    *,
    spread: Callable[[TableInfo, pa.RecordBatch], Parts],
) -> Parts:
    """Return rows by bucket; `spread` places rows without a bucket key."""
    if operation is TransactionOperation.APPEND:
        schema_id = version_of(table, rows.schema, stated=table.schema_id)
        return log_rows_by_bucket(table, rows, schema_id=schema_id, spread=spread)
    if operation is TransactionOperation.UPSERT and columns is None:
        schema_id = version_of(table, rows.schema, stated=table.schema_id)
        rows = in_current_version(table, rows, schema_id=schema_id)
    return rows_by_bucket(table, rows)


def log_rows_by_bucket(
    table: TableInfo,
    rows: pa.RecordBatch,
    *,
    schema_id: int,
    spread: Callable[[TableInfo, pa.RecordBatch], Parts],
) -> Parts:
    """Return rows of a log table by bucket, in this version of its schema."""
    rows = conform(rows, table.schema_version(schema_id), table=str(table.path))
    key = table.bucket_key_of(schema_id)
    return split_by_bucket(rows, key, table.bucket_count) if key else spread(table, rows)


def send(
    transport: HttpTransport,
    table: TableInfo,
    parts: Parts,
    operation: TransactionOperation,
    *,
    columns: Sequence[str] | None,
    writer: AppendWriter,
    is_repeated: bool = False,
) -> Ranges:
    """Send one batch to each bucket under the writer's next sequences; return their offsets.

    After an error that may pass, call again with the same parts and `is_repeated`: they are stored
    once. Raises `UnknownOutcomeError` for a refusal after an attempt that may have been stored.
    """
    batches = [(bucket, writer.next_sequence(bucket), rows) for bucket, rows in parts.items()]
    target = f"/v1/tables/{table.path}/{operation}"
    query = {"writer_id": f"{writer.writer_id:x}", "schema_id": table.stated_version}
    if columns is not None:
        query["columns"] = json.dumps(list(columns))
    failures: list[StreamhouseError] = []
    try:
        answer = transport.request(
            "POST",
            target,
            query=query,
            body=encode_append_body(batches[0][2].schema, batches),
            is_repeatable=True,
            on_repeat=failures.append,
        )
    except StreamhouseError as error:
        if any(isinstance(failure, UnknownOutcomeError) for failure in failures):
            raise UnknownOutcomeError(error.message, request_id=error.request_id) from error
        raise
    answer_body = json.loads(answer.data)
    offsets: Ranges = ranges_in(answer_body.get("table_id"), answer_body["buckets"])
    transport.any_process.note_written(offsets)
    if operation is TransactionOperation.APPEND:
        _check_appended(table, parts, offsets)
    for bucket, (start, end) in offsets.items():
        # An upsert without a change was not stored, and its sequence is still the next one.
        if end > start:
            writer.advance(bucket)
    if (is_repeated or failures) and any(start == end for start, end in offsets.values()):
        # An attempt on its way may still take the sequence: the next write needs another writer.
        writer.renew()
    return offsets


def _check_appended(table: TableInfo, parts: Parts, offsets: Ranges) -> None:
    for bucket, rows in parts.items():
        start, end = offsets.get(bucket, (0, -1))
        if end - start != rows.num_rows:
            raise InternalError(
                f"append to '{table.path}': bucket {bucket} acknowledged offsets"
                f" [{start}, {end}) for {rows.num_rows} rows"
            )
