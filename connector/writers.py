"""Spark's side of writes: checked before any task starts, then Arrow batches to the service.

A task writes as it goes, each batch atomic and idempotent within the task. What a retried task or
a failed job had written before stays: writes are at-least-once across task retries.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from streamhouse.connector.direct_write import write_directly
from streamhouse.connector.service_connection import client_for
from streamhouse.connector.spark_errors import spark_errors
from streamhouse.connector.write_options import WriteOptions
from streamhouse.connector.write_target import WriteTarget, resolve_target
from streamhouse.storage_service.errors import UnsupportedError

__all__ = ["StreamhouseStreamWriter", "StreamhouseWriter"]

_log = logging.getLogger(__name__)


class StreamhouseWriter(DataSourceArrowWriter):
    """Writes the rows of a batch job."""

    def __init__(self, target: WriteTarget) -> None:
        self._target = target

    @classmethod
    def planned(
        cls, options: WriteOptions, schema: StructType, *, overwrite: bool
    ) -> StreamhouseWriter:
        """Check everything that can be checked before a row is written."""
        return cls(_planned(options, schema, overwrite=overwrite, is_stream=False))

    @spark_errors
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Write one task's rows."""
        return write_directly(self._target, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Nothing is left to do: rows became visible as they were written."""

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Say what stays; a write cannot be taken back."""
        _log_abort(messages)


class StreamhouseStreamWriter(DataSourceStreamArrowWriter):
    """Writes the rows of one micro-batch."""

    def __init__(self, target: WriteTarget) -> None:
        self._target = target

    @classmethod
    def planned(
        cls, options: WriteOptions, schema: StructType, *, overwrite: bool
    ) -> StreamhouseStreamWriter:
        """Check everything that can be checked before a row is written."""
        return cls(_planned(options, schema, overwrite=overwrite, is_stream=True))

    @spark_errors
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Write one task's rows."""
        return write_directly(self._target, iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Nothing is left to do: rows became visible as they were written."""

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Say what stays; the micro-batch will be written again."""
        _log_abort(messages)


def _planned(
    options: WriteOptions, schema: StructType, *, overwrite: bool, is_stream: bool
) -> WriteTarget:
    table = str(options.connection.name.path)
    if overwrite:
        raise UnsupportedError(
            f"table '{table}': overwriting (mode 'overwrite', INSERT OVERWRITE, output mode"
            " 'complete') is not supported yet; use mode('append')"
        )
    client = client_for(options.connection.endpoint, options.connection.token)
    arrow_schema = to_arrow_schema(schema, timezone="UTC")
    target = resolve_target(client, options, arrow_schema, is_stream=is_stream)
    if target.ordered_by is not None:
        raise UnsupportedError(
            f"table '{table}' keeps the row written last, and tasks write at the same time; for"
            f" 'sequence.column' = '{target.ordered_by}' create it with table.merge-engine ="
            " versioned and table.merge-engine.versioned.ver-column ="
            f" {target.ordered_by}"
        )
    return target


def _log_abort(messages: list[Any]) -> None:
    rows = sum(message.row_count for message in messages if message is not None)
    _log.warning("the write failed; at least %d rows it had written stay in the table", rows)
