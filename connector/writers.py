"""Spark's side of writes: checked before any task starts, then Arrow batches to the service.

A task appends as it goes, each batch atomic and idempotent within the task. What a retried task or
a failed job had appended before stays: writes are at-least-once across task retries.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from streamhouse.connector.options import ConnectionOptions, WriteOptions
from streamhouse.connector.service_connection import client_for
from streamhouse.connector.spark_errors import spark_errors
from streamhouse.connector.split_reader import coalesce
from streamhouse.storage_service.client import AppendWriter, StorageClient
from streamhouse.storage_service.errors import (
    DatabaseExistsError,
    DatabaseNotFoundError,
    SchemaMismatchError,
    TableExistsError,
    TableNotFoundError,
    UnsupportedError,
)
from streamhouse.storage_service.model.conform import check_schema
from streamhouse.storage_service.model.table import TableInfo

__all__ = ["AppendedRows", "StreamhouseStreamWriter", "StreamhouseWriter"]

_log = logging.getLogger(__name__)

REQUEST_ROWS: Final = 65_536
"""Rows an append is filled up to: Spark's own batches have 10,000, too few for one fsync."""


@dataclass
class AppendedRows(WriterCommitMessage):
    """What one task appended: its rows, and per bucket the offsets they lie between."""

    row_count: int
    offsets: dict[int, tuple[int, int]]

    def add(self, offsets: Mapping[int, tuple[int, int]]) -> None:
        """Take in what one append answered."""
        for bucket, (start, end) in offsets.items():
            self.offsets[bucket] = (self.offsets.get(bucket, (start, end))[0], end)


class _Append:
    """One job's appends to one table; pickled to every task."""

    def __init__(self, connection: ConnectionOptions, table_id: int, schema: pa.Schema) -> None:
        self._connection = connection
        self._table_id = table_id
        self._schema = schema

    def run(self, batches: Iterator[pa.RecordBatch]) -> AppendedRows:
        """Append all rows of one task."""
        client = client_for(self._connection.endpoint, self._connection.token)
        path = str(self._connection.name.path)
        if client.describe_table(path).table_id != self._table_id:
            raise TableNotFoundError(
                f"table '{path}' was dropped and created again while this job was writing to it"
            )
        writer = AppendWriter()
        appended = AppendedRows(0, {})
        utc = (_in_utc(batch, self._schema) for batch in batches if batch.num_rows)
        # One append is on its way while Spark makes the next batch; never two, so order holds.
        with ThreadPoolExecutor(1, thread_name_prefix="streamhouse-append") as sender:
            pending: Future[dict[int, tuple[int, int]]] | None = None
            for batch in coalesce(utc, rows_max=REQUEST_ROWS):
                if pending is not None:
                    appended.add(pending.result())
                pending = sender.submit(client.append, path, batch, writer=writer)
                appended.row_count += batch.num_rows
            if pending is not None:
                appended.add(pending.result())
        return appended


class StreamhouseWriter(DataSourceArrowWriter):
    """Appends the rows of a batch job."""

    def __init__(self, append: _Append) -> None:
        self._append = append

    @classmethod
    def planned(
        cls, options: WriteOptions, schema: StructType, *, overwrite: bool
    ) -> StreamhouseWriter:
        """Check everything that can be checked before a row is written."""
        return cls(_planned(options, schema, overwrite=overwrite))

    @spark_errors
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Append one task's rows."""
        return self._append.run(iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Nothing is left to do: rows became visible as they were appended."""

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Say what stays; an append cannot be taken back."""
        _log_abort(messages)


class StreamhouseStreamWriter(DataSourceStreamArrowWriter):
    """Appends the rows of one micro-batch."""

    def __init__(self, append: _Append) -> None:
        self._append = append

    @classmethod
    def planned(
        cls, options: WriteOptions, schema: StructType, *, overwrite: bool
    ) -> StreamhouseStreamWriter:
        """Check everything that can be checked before a row is written."""
        return cls(_planned(options, schema, overwrite=overwrite))

    @spark_errors
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Append one task's rows."""
        return self._append.run(iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Nothing is left to do: rows became visible as they were appended."""

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Say what stays; the micro-batch will be appended again."""
        _log_abort(messages)


def _planned(options: WriteOptions, schema: StructType, *, overwrite: bool) -> _Append:
    table = str(options.connection.name.path)
    if overwrite:
        raise UnsupportedError(
            f"table '{table}': overwriting (mode 'overwrite', INSERT OVERWRITE, output mode"
            " 'complete') is not supported yet; use mode('append')"
        )
    if options.primary_key:
        # Before the table is made: it could not be written.
        raise _has_primary_key(table)
    client = client_for(options.connection.endpoint, options.connection.token)
    arrow_schema = to_arrow_schema(schema, timezone="UTC")
    info = _existing_or_created(client, options, arrow_schema)
    if info.is_primary_key_table:
        raise _has_primary_key(table)
    check_schema(arrow_schema, info.schema, table=table)
    return _Append(options.connection, info.table_id, info.schema.to_arrow())


def _has_primary_key(table: str) -> UnsupportedError:
    return UnsupportedError(
        f"table '{table}': writing tables with a primary key from Spark is not supported yet; use"
        " the client's upsert"
    )


def _existing_or_created(
    client: StorageClient, options: WriteOptions, schema: pa.Schema
) -> TableInfo:
    path = options.connection.name.path
    try:
        return client.describe_table(str(path))
    except (DatabaseNotFoundError, TableNotFoundError):
        _log.info("creating table=%s from the DataFrame's schema", path)
    # The first write sets up all it needs; a database is only a name.
    with contextlib.suppress(DatabaseExistsError):
        client.create_database(path.database)
    try:
        return client.create_table(
            str(path),
            schema,
            primary_key=options.primary_key,
            bucket_count=options.bucket_count,
            bucket_key=options.bucket_key,
            partitioned_by=options.partitioned_by,
            properties=options.properties,
        )
    except TableExistsError:
        # Another job created it in between; its schema is checked like any other's.
        return client.describe_table(str(path))


def _in_utc(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return the batch with the table's own types where Spark's session zone made them differ.

    Timestamps arrive labelled with the session's time zone; the instants are right.
    """
    arrays = []
    for field, array in zip(batch.schema, batch.columns, strict=True):
        position = schema.get_field_index(field.name)
        wanted = array.type if position < 0 else schema.field(position).type
        try:
            arrays.append(array if array.type == wanted else array.cast(wanted))
        except pa.ArrowInvalid as error:
            raise SchemaMismatchError(f"column '{field.name}': {error}") from error
    fields = [pa.field(f.name, a.type) for f, a in zip(batch.schema, arrays, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))


def _log_abort(messages: list[Any]) -> None:
    rows = sum(message.row_count for message in messages if message is not None)
    _log.warning("the write failed; at least %d rows it had appended stay in the table", rows)
