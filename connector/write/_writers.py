"""Spark's side of writes: checked before any task starts, and handed to the write's job."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from streamhouse.client import StorageClient
from streamhouse.connector._partition_reader import spark_errors
from streamhouse.connector._spark_versions import DataSourceStreamArrowWriter
from streamhouse.connector.write._spark_types import arrow_columns
from streamhouse.connector.write._write_jobs import DirectJob, StreamJob, TransactionJob, WriteJob
from streamhouse.connector.write._write_options import WriteMode, WriteOptions
from streamhouse.connector.write._write_target import WriteTarget, resolve_target
from streamhouse.core.errors import InvalidRequestError, UnsupportedError
from streamhouse.reading.options.connection import client_for

__all__ = ["StreamhouseStreamWriter", "StreamhouseWriter"]


class StreamhouseWriter(DataSourceArrowWriter):
    """Writes the rows of a batch job."""

    def __init__(self, job: WriteJob) -> None:
        self._job = job

    @classmethod
    def planned(
        cls, options: WriteOptions, schema: StructType, *, overwrite: bool
    ) -> StreamhouseWriter:
        """Make every check possible before a row is written, and begin the transaction."""
        if options.app_id is not None and options.app_version is None:
            raise InvalidRequestError(
                f"option 'app.id' = '{options.app_id}' of a batch write needs 'app.version', the"
                " number of this write"
            )
        client, target = _planned(options, schema, overwrite=overwrite, is_stream=False)
        if not options.is_transactional:
            return cls(DirectJob(target))
        return cls(TransactionJob.of_options(client, target, options))

    @spark_errors
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Write one task's rows."""
        return self._job.run(iterator)

    @spark_errors
    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Commit the write."""
        self._job.commit(messages)

    @spark_errors
    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """End a failed write."""
        self._job.abort(messages)


class StreamhouseStreamWriter(DataSourceStreamArrowWriter):
    """Writes the rows of one micro-batch.

    Spark makes a new writer for the tasks of each micro-batch, and another writer for the commit:
    making a writer changes nothing.
    """

    def __init__(self, job: WriteJob) -> None:
        self._job = job

    @classmethod
    def planned(
        cls, options: WriteOptions, schema: StructType, *, overwrite: bool
    ) -> StreamhouseStreamWriter:
        """Make every check possible before a row is written."""
        if options.app_version is not None:
            raise InvalidRequestError(
                "option 'app.version' has no meaning for a stream, whose batches are numbered;"
                " remove it"
            )
        _, target = _planned(options, schema, overwrite=overwrite, is_stream=True)
        if not options.is_transactional:
            return cls(DirectJob(target))
        return cls(StreamJob(target=target, app_id=options.app_id, timeout_ms=options.timeout_ms))

    @spark_errors
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Write one task's rows."""
        return self._job.run(iterator)

    @spark_errors
    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Commit the micro-batch."""
        self._job.commit(messages)

    @spark_errors
    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """End a failed micro-batch; Spark writes it again."""
        self._job.abort(messages)


def _planned(
    options: WriteOptions, schema: StructType, *, overwrite: bool, is_stream: bool
) -> tuple[StorageClient, WriteTarget]:
    table = str(options.connection.name.path)
    if overwrite:
        _check_overwrite(options, is_stream=is_stream)
    client = client_for(options.connection.endpoint, options.connection.token)
    arrow_schema = arrow_columns(schema, table=table)
    target = resolve_target(
        client, options, arrow_schema, is_stream=is_stream, is_overwrite=overwrite
    )
    if target.ordered_by is not None and not options.is_transactional:
        raise UnsupportedError(
            f"table '{table}' keeps the row written last, and without a transaction tasks write at"
            f" the same time; for 'sequence.column' = '{target.ordered_by}' write in one (the"
            " default), or create the table with table.merge-engine = versioned and"
            f" table.merge-engine.versioned.ver-column = {target.ordered_by}"
        )
    return client, target


def _check_overwrite(options: WriteOptions, *, is_stream: bool) -> None:
    table = str(options.connection.name.path)
    if is_stream:
        raise UnsupportedError(
            f"table '{table}': a stream cannot replace the table's rows with every micro-batch"
            " (output mode 'complete'); upsert its results into a table with a primary key, by"
            f" streamhouse.Table(spark, '{table}').upsert_stream(df), or write in foreachBatch with"
            " mode('overwrite')"
        )
    if not options.is_transactional:
        raise UnsupportedError(
            f"table '{table}': mode('overwrite') replaces all rows at one instant, which needs a"
            " transaction; remove 'write.transactional' = 'false'"
        )
    if options.mode in (WriteMode.DELETE, WriteMode.PARTIAL):
        raise InvalidRequestError(
            f"table '{table}': mode('overwrite') and 'write.mode' = '{options.mode}' contradict"
            " each other; use one"
        )
