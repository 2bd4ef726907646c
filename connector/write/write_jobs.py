"""How a write happens: straight to the table, or as one transaction of all its tasks.

A job is made on the driver and pickled to every task, and to the process that commits or aborts.
Every task runs `run`; of attempts that Spark repeats or duplicates, `commit` gets the message of
exactly one. `abort` may come while tasks still run, and after a commit that was applied.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Protocol

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import WriterCommitMessage

from streamhouse.connector.format.service_connection import client_for
from streamhouse.connector.scan.split_reader import coalesce
from streamhouse.connector.write.direct_write import (
    REQUEST_ROWS,
    WrittenRows,
    check_table,
    write_directly,
)
from streamhouse.connector.write.sequence_order import (
    SequenceCheck,
    SequenceSpan,
    tasks_in_sequence,
)
from streamhouse.connector.write.write_target import WriteTarget
from streamhouse.storage_service.client import StorageClient, Transaction
from streamhouse.storage_service.errors import (
    InternalError,
    StreamhouseError,
    UnavailableError,
)

__all__ = ["DirectJob", "StagedRows", "StreamJob", "TransactionJob", "WriteJob"]

_log = logging.getLogger(__name__)

Messages = Sequence[WriterCommitMessage | None]

# What Spark tells the tasks of a micro-batch.
_QUERY_ID: Final = "sql.streaming.queryId"
_BATCH_ID: Final = "streaming.sql.batchId"


class WriteJob(Protocol):
    """One batch job's, or micro-batch's, way to write."""

    def run(self, batches: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Take in the rows of one task, in their order."""
        ...

    def commit(self, messages: Messages) -> None:
        """Make the rows of these tasks, in this order, rows of the table."""
        ...

    def abort(self, messages: Messages) -> None:
        """Take back what can be taken back."""
        ...


@dataclass(frozen=True, slots=True)
class DirectJob:
    """Rows are in the table as soon as a task has sent them, and stay: at-least-once."""

    target: WriteTarget

    def run(self, batches: Iterator[pa.RecordBatch]) -> WrittenRows:
        """Write one task's rows."""
        return write_directly(self.target, batches)

    def commit(self, messages: Messages) -> None:
        """Nothing is left to do."""

    def abort(self, messages: Messages) -> None:
        """Say what stays."""
        rows = sum(m.row_count for m in messages if isinstance(m, WrittenRows))
        _log.warning(
            "the write to table=%s failed; at least %d rows of it stay", self.target.path, rows
        )


@dataclass
class StagedRows(WriterCommitMessage):
    """What one task staged, in order; without `transaction_id` it had no rows to stage."""

    transaction_id: str | None = None
    parts: tuple[str, ...] = ()
    row_count: int = 0
    span: SequenceSpan | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionJob:
    """A batch job as one transaction, begun before its first task."""

    target: WriteTarget
    transaction_id: str
    is_skipped: bool

    @classmethod
    def begun(
        cls,
        client: StorageClient,
        target: WriteTarget,
        *,
        app_id: str | None,
        version: int | None,
        timeout_ms: int,
    ) -> TransactionJob:
        """Begin the transaction; one that its application has committed before writes nothing."""
        transaction = _begin(client, target, app_id=app_id, version=version, timeout_ms=timeout_ms)
        return cls(
            target=target,
            transaction_id=transaction.transaction_id,
            is_skipped=transaction.is_skipped,
        )

    def run(self, batches: Iterator[pa.RecordBatch]) -> StagedRows:
        """Stage one task's rows."""
        if self.is_skipped:
            return _drained(batches)
        return _stage(
            self.target,
            batches,
            lambda client: client.open_transaction(self.target.path, self.transaction_id),
        )

    def commit(self, messages: Messages) -> None:
        """Commit what the tasks staged, whatever else lies in the transaction."""
        if self.is_skipped:
            _log.info("table=%s has this version of the application already", self.target.path)
            return
        client = _client(self.target)
        transaction = client.open_transaction(self.target.path, self.transaction_id)
        transaction.commit(_parts(self.target, messages))

    def abort(self, messages: Messages) -> None:
        """Drop all that was staged; a transaction that is committed stays as it is."""
        if not self.is_skipped:
            _abort(self.target, self.transaction_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamJob:
    """A micro-batch as one transaction, named by its application and Spark's batch id.

    The driver's side of a stream writer does not know its batch, its tasks do: the first of them
    begins the transaction, and the others find it begun. A batch that is replayed finds it
    committed, and writes nothing.
    """

    target: WriteTarget
    app_id: str | None
    timeout_ms: int

    def run(self, batches: Iterator[pa.RecordBatch]) -> StagedRows:
        """Stage one task's rows."""
        return _stage(self.target, batches, self._begin)

    def commit(self, messages: Messages) -> None:
        """Commit what the tasks staged; a batch without rows leaves no trace."""
        ids = {m.transaction_id for m in _staged(messages) if m.transaction_id is not None}
        if not ids:
            return
        if len(ids) > 1:
            raise UnavailableError(
                f"table '{self.target.path}': the transaction of this micro-batch ended while its"
                " tasks ran; restart the query, which runs the micro-batch again"
            )
        client = _client(self.target)
        transaction = client.open_transaction(self.target.path, ids.pop())
        transaction.commit(_parts(self.target, messages))

    def abort(self, messages: Messages) -> None:
        """Drop what was staged as far as it is known; a replay begins anew."""
        for transaction_id in {m.transaction_id for m in _staged(messages)} - {None}:
            assert transaction_id is not None
            _abort(self.target, transaction_id)

    def _begin(self, client: StorageClient) -> Transaction:
        context = TaskContext.get()
        assert context is not None, "runs in a task"
        query_id, batch_id = (context.getLocalProperty(key) for key in (_QUERY_ID, _BATCH_ID))
        if query_id is None or batch_id is None:
            raise InternalError("Spark told a streaming task neither its query nor its batch")
        return _begin(
            client,
            self.target,
            app_id=self.app_id or query_id,
            version=int(batch_id),
            timeout_ms=self.timeout_ms,
            join=True,
        )


def _begin(
    client: StorageClient,
    target: WriteTarget,
    *,
    app_id: str | None,
    version: int | None,
    timeout_ms: int,
    join: bool = False,
) -> Transaction:
    operation = "upsert" if target.columns is not None else str(target.mode)
    if target.is_overwrite:
        operation = "overwrite"
    return client.begin_transaction(
        target.path,
        operation=operation,
        columns=target.columns,
        app_id=app_id,
        version=version,
        timeout_s=timeout_ms / 1000,
        join=join,
    )


def _client(target: WriteTarget) -> StorageClient:
    return client_for(target.connection.endpoint, target.connection.token)


def _stage(
    target: WriteTarget,
    batches: Iterator[pa.RecordBatch],
    open_transaction: Callable[[StorageClient], Transaction],
) -> StagedRows:
    """Stage all rows of one task: one request on its way while Spark makes the next batch."""
    staged = StagedRows()
    transaction: Transaction | None = None
    sequence = (
        None if target.ordered_by is None else SequenceCheck(target.ordered_by, table=target.path)
    )
    parts: list[str] = []
    pending: Future[str] | None = None
    rows = coalesce(_shaped(target, batches, sequence), rows_max=REQUEST_ROWS)
    with ThreadPoolExecutor(1, thread_name_prefix="streamhouse-stage") as sender:
        for batch in rows:
            if transaction is None:
                transaction = open_transaction(_client(target))
                staged.transaction_id = transaction.transaction_id
                if transaction.is_skipped:
                    return _drained(batches)
                check_table(transaction.table.table_id, target)
            if pending is not None:
                parts.append(pending.result())
            pending = sender.submit(transaction.stage, batch)
            staged.row_count += batch.num_rows
        if pending is not None:
            parts.append(pending.result())
    staged.parts = tuple(parts)
    staged.span = None if sequence is None else sequence.span
    return staged


def _shaped(
    target: WriteTarget, batches: Iterator[pa.RecordBatch], sequence: SequenceCheck | None
) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        if batch.num_rows == 0:
            continue
        if sequence is not None:
            sequence.take(batch)
        yield target.shape.apply(batch)


def _drained(batches: Iterator[pa.RecordBatch]) -> StagedRows:
    # Spark throws away a worker that leaves its input unread.
    for _ in batches:
        pass
    return StagedRows()


def _staged(messages: Messages) -> list[StagedRows]:
    return [message for message in messages if isinstance(message, StagedRows)]


def _parts(target: WriteTarget, messages: Messages) -> list[str]:
    """Return the parts of the tasks Spark reports, in the order in which they apply."""
    tasks = _staged(messages)
    order: Sequence[int] = range(len(tasks))
    if target.ordered_by is not None:
        spans = [task.span for task in tasks]
        order = tasks_in_sequence(spans, column=target.ordered_by, table=target.path)
    return [part for task in order for part in tasks[task].parts]


def _abort(target: WriteTarget, transaction_id: str) -> None:
    try:
        client = _client(target)
        client.open_transaction(target.path, transaction_id).abort()
    except StreamhouseError as error:
        # Spark is failing the job already; what stays staged is dropped by the service in time.
        _log.warning("transaction=%s of table=%s: %s", transaction_id, target.path, error)
