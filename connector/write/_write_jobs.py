"""The jobs of a write: straight to the table, or one transaction of all tasks.

A job is made on the driver and pickled to every task, and to the process that commits or aborts.
Every task runs `run`. Spark may repeat or duplicate a task; `commit` gets the message of exactly
one attempt. `abort` may come while tasks still run, and after a commit that was applied.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final, Protocol

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql.datasource import WriterCommitMessage

from streamhouse.client import (
    AppendWriter,
    CommitResult,
    StagedRejects,
    StorageClient,
    Transaction,
)
from streamhouse.connector.write._sieve import OpenedOnce, Sieve, check_table
from streamhouse.connector.write._write_options import WriteMode, WriteOptions
from streamhouse.connector.write._write_target import WriteTarget
from streamhouse.core.errors import (
    InternalError,
    InvalidRequestError,
    SchemaMismatchError,
    StreamhouseError,
    UnavailableError,
)
from streamhouse.core.model.transaction import TransactionStatus
from streamhouse.core.threads import Pool
from streamhouse.reading.options.connection import client_for
from streamhouse.reading.scan.split_reader import coalesce

__all__ = [
    "DirectJob",
    "SequenceCheck",
    "SequenceSpan",
    "StagedRows",
    "StreamJob",
    "TransactionJob",
    "WriteJob",
    "WrittenRows",
    "tasks_in_sequence",
]

_log = logging.getLogger(__name__)

Messages = Sequence[WriterCommitMessage | None]

# Spark's properties of the tasks of a micro-batch.
_QUERY_ID: Final = "sql.streaming.queryId"
_BATCH_ID: Final = "streaming.sql.batchId"

_SKIPPED: Final = (
    "table=%s: nothing is written, because version %s of application '%s' was committed before"
)

REQUEST_ROWS: Final = 65_536
"""The rows of a full request: Spark's own batches have 10,000, too few for one fsync."""


class WriteJob(Protocol):
    """The way of a batch job, or of a micro-batch, to write."""

    def run(self, batches: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Write or stage the rows of one task, in their order."""
        ...

    def commit(self, messages: Messages) -> None:
        """Make the rows of these tasks, in this order, rows of the table."""
        ...

    def abort(self, messages: Messages) -> None:
        """Undo as much as possible."""
        ...


@dataclass
class WrittenRows(WriterCommitMessage):
    """The number of rows that one task wrote."""

    row_count: int = 0


@dataclass(frozen=True, slots=True)
class DirectJob:
    """Rows are in the table as soon as a task has sent them, and stay: at-least-once."""

    target: WriteTarget

    def run(self, batches: Iterator[pa.RecordBatch]) -> WrittenRows:
        """Write one task's rows."""
        return _write_directly(self.target, batches)

    def commit(self, messages: Messages) -> None:
        """Do nothing: the rows are already in the table."""

    def abort(self, messages: Messages) -> None:
        """Log how many rows stay."""
        rows = sum(m.row_count for m in messages if isinstance(m, WrittenRows))
        _log.warning(
            "the write to table=%s failed; at least %d rows of it stay", self.target.path, rows
        )


def _write_directly(target: WriteTarget, batches: Iterator[pa.RecordBatch]) -> WrittenRows:
    """Write all rows of a task, in order; after a failure the written rows stay."""
    client = client_for(target.connection.endpoint, target.connection.token)
    check_table(client.describe_table(target.path).table_id, target)
    writer = AppendWriter()
    written = WrittenRows()
    shaped = (target.shape.apply(batch) for batch in batches if batch.num_rows)
    # One request is on its way while Spark makes the next batch. A second concurrent request could
    # change the order.
    with Pool("streamhouse-write", 1) as sender:
        pending: Future[None] | None = None
        for batch in coalesce(shaped, rows_max=REQUEST_ROWS):
            if pending is not None:
                pending.result()
            pending = sender.submit(_send, client, target, batch, writer)
            written.row_count += batch.num_rows
        if pending is not None:
            pending.result()
    return written


def _send(
    client: StorageClient, target: WriteTarget, batch: pa.RecordBatch, writer: AppendWriter
) -> None:
    path, schema_id = target.path, target.schema_id
    if target.mode is WriteMode.APPEND:
        client.append(path, batch, writer=writer, schema_id=schema_id)
    elif target.mode is WriteMode.DELETE:
        client.delete(path, batch, writer=writer, schema_id=schema_id)
    else:
        client.upsert(path, batch, columns=target.columns, writer=writer, schema_id=schema_id)


@dataclass
class StagedRows(WriterCommitMessage):
    """The staged rows of one task, in order; without `transaction_id` the task had no rows."""

    transaction_id: str | None = None
    parts: tuple[str, ...] = ()
    row_count: int = 0
    span: SequenceSpan | None = None
    rejected: StagedRejects | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionJob:
    """A batch job as one transaction, begun before the first task."""

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
        source: str | None = None,
        run: str | None = None,
    ) -> TransactionJob:
        """Begin the transaction; an already committed version of the application writes nothing."""
        transaction = _begin(
            client,
            target,
            app_id=app_id,
            version=version,
            timeout_ms=timeout_ms,
            source=source if app_id else None,
            run=run if app_id else None,
        )
        if transaction.is_skipped:
            _log.warning(_SKIPPED, target.path, version, app_id)
        return cls(
            target=target,
            transaction_id=transaction.transaction_id,
            is_skipped=transaction.is_skipped,
        )

    @classmethod
    def of_options(
        cls, client: StorageClient, target: WriteTarget, options: WriteOptions
    ) -> TransactionJob:
        """As `begun`, with the options of a write."""
        return cls.begun(
            client,
            target,
            app_id=options.app_id,
            version=options.app_version,
            timeout_ms=options.timeout_ms,
            source=options.query_id,
            run=options.run_id,
        )

    def run(self, batches: Iterator[pa.RecordBatch]) -> StagedRows:
        """Stage one task's rows."""
        if self.is_skipped:
            return _drained(batches)
        return _stage(
            self.target,
            batches,
            lambda client: client.open_transaction(
                self.target.path, self.transaction_id, schema_id=self.target.schema_id
            ),
        )

    def commit(self, messages: Messages) -> None:
        """Commit exactly the staged rows in these messages."""
        if self.is_skipped:
            return
        client = _client(self.target)
        transaction = client.open_transaction(self.target.path, self.transaction_id)
        transaction.commit(_parts(self.target, messages), rejected=_rejected(self.target, messages))

    def commit_if_unchanged(
        self, messages: Messages, *, read_offsets: Mapping[int, int], isolation: str
    ) -> CommitResult:
        """Commit as `commit` does, if the rows that Spark read are still unchanged.

        See `Transaction.commit`; raises `CommitConflictError`.
        """
        transaction = _client(self.target).open_transaction(self.target.path, self.transaction_id)
        return transaction.commit(
            _parts(self.target, messages),
            read_offsets=read_offsets,
            isolation=isolation,
            rejected=_rejected(self.target, messages),
        )

    def end(self) -> TransactionStatus:
        """Abort the transaction unless it is decided; return its status."""
        transaction = _client(self.target).open_transaction(self.target.path, self.transaction_id)
        return transaction.abort()

    def abort(self, messages: Messages) -> None:
        """Drop all staged rows; a committed transaction stays as it is."""
        if not self.is_skipped:
            _abort(self.target, self.transaction_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamJob:
    """A micro-batch as one transaction, identified by the application and Spark's batch id.

    Only the tasks of a stream writer know their batch. The first task begins the transaction, and
    the remaining tasks join it. A replayed batch finds the transaction committed, and writes
    nothing.
    """

    target: WriteTarget
    app_id: str | None
    timeout_ms: int

    def run(self, batches: Iterator[pa.RecordBatch]) -> StagedRows:
        """Stage one task's rows."""
        return _stage(self.target, batches, self._begin)

    def commit(self, messages: Messages) -> None:
        """Commit the rows that the tasks staged; a batch without rows leaves no trace."""
        ids = {m.transaction_id for m in _staged(messages) if m.transaction_id is not None}
        if not ids:
            return
        if len(ids) > 1:
            raise _ended_between(self.target)
        client = _client(self.target)
        transaction = client.open_transaction(self.target.path, ids.pop())
        transaction.commit(_parts(self.target, messages), rejected=_rejected(self.target, messages))

    def abort(self, messages: Messages) -> None:
        """Drop the rows of known transactions; a replay begins anew."""
        for transaction_id in {m.transaction_id for m in _staged(messages)} - {None}:
            assert transaction_id is not None
            _abort(self.target, transaction_id)

    def _begin(self, client: StorageClient) -> Transaction:
        context = TaskContext.get()
        assert context is not None, "runs in a task"
        query_id, batch_id = (context.getLocalProperty(key) for key in (_QUERY_ID, _BATCH_ID))
        if query_id is None or batch_id is None:
            raise InternalError("Spark told a streaming task neither its query nor its batch")
        app_id = self.app_id or query_id
        transaction = _begin(
            client,
            self.target,
            app_id=app_id,
            version=int(batch_id),
            timeout_ms=self.timeout_ms,
            join=True,
            source=query_id,
        )
        if transaction.is_skipped:
            _log.warning(_SKIPPED, self.target.path, batch_id, app_id)
        return transaction


def _begin(
    client: StorageClient,
    target: WriteTarget,
    *,
    app_id: str | None,
    version: int | None,
    timeout_ms: int,
    join: bool = False,
    source: str | None = None,
    run: str | None = None,
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
        schema_id=target.schema_id,
        source=source,
        run=run,
    )


def _client(target: WriteTarget) -> StorageClient:
    return client_for(target.connection.endpoint, target.connection.token)


def _stage(
    target: WriteTarget,
    batches: Iterator[pa.RecordBatch],
    open_transaction: Callable[[StorageClient], Transaction],
) -> StagedRows:
    """Stage all rows of one task: a request is on the way while Spark makes the next batch."""
    staged = StagedRows()
    opened = OpenedOnce(_client(target), open_transaction, target)
    sieve = None if target.rejecting is None else Sieve(target, opened)
    sequence = (
        None if target.ordered_by is None else SequenceCheck(target.ordered_by, table=target.path)
    )
    parts: list[str] = []
    pending: Future[str] | None = None
    rows = coalesce(_shaped(target, batches, sequence, sieve), rows_max=REQUEST_ROWS)
    with Pool("streamhouse-stage", 1) as sender:
        for batch in rows:
            transaction = opened.transaction()
            if transaction.is_skipped:
                staged.transaction_id = transaction.transaction_id
                return _drained(batches)
            if pending is not None:
                parts.append(pending.result())
            pending = sender.submit(transaction.stage, batch)
            staged.row_count += batch.num_rows
        if pending is not None:
            parts.append(pending.result())
    staged.transaction_id = opened.transaction_id
    staged.rejected = None if sieve is None else sieve.staged
    staged.parts = tuple(parts)
    staged.span = None if sequence is None else sequence.span
    return staged


def _shaped(
    target: WriteTarget,
    batches: Iterator[pa.RecordBatch],
    sequence: SequenceCheck | None,
    sieve: Sieve | None,
) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        if batch.num_rows == 0:
            continue
        if sequence is not None:
            sequence.take(batch)
        if sieve is None:
            yield target.shape.apply(batch)
        elif (fit := sieve.fitting(batch)).num_rows:
            yield fit


def _drained(batches: Iterator[pa.RecordBatch]) -> StagedRows:
    # Spark ends a worker with unread input.
    for _ in batches:
        pass
    return StagedRows()


def _staged(messages: Messages) -> list[StagedRows]:
    return [message for message in messages if isinstance(message, StagedRows)]


def _rejected(target: WriteTarget, messages: Messages) -> StagedRejects | None:
    """Return the rows that the tasks rejected."""
    rejects = [m.rejected for m in _staged(messages) if m.rejected is not None]
    if not rejects:
        return None
    if len({rejected.transaction_id for rejected in rejects}) > 1:
        raise _ended_between(target)
    broken: Counter[str] = Counter()
    for staged in rejects:
        broken.update(staged.broken)
    parts = [part for staged in rejects for part in staged.parts]
    return StagedRejects(rejects[0].transaction_id, parts, broken)


def _ended_between(target: WriteTarget) -> UnavailableError:
    return UnavailableError(
        f"table '{target.path}': the transaction of this write ended while its tasks ran; run the"
        " job again, or restart the query, which runs the micro-batch again"
    )


def _parts(target: WriteTarget, messages: Messages) -> list[str]:
    """Return the parts of the tasks of these messages, in the order of application."""
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
        # Spark is failing the job already; the service drops the staged rows after a while.
        _log.warning("transaction=%s of table=%s: %s", transaction_id, target.path, error)


@dataclass(frozen=True, slots=True, order=True)
class SequenceSpan:
    """The smallest and the greatest value in the rows of a task."""

    first: Any
    last: Any


class SequenceCheck:
    """Checks the order of a task's rows, in constant memory; raises for the first row out of order.

    The check is for `sequence.column` in a table that keeps the row written last. Such a table does
    not compare rows: the order of application decides. Each task checks its own rows, and the
    driver orders the tasks by their spans. `DataFrame.orderBy` makes this order; a wrong order is
    refused before a row is applied.
    """

    def __init__(self, column: str, *, table: str) -> None:
        self._column = column
        self._table = table
        self._span: SequenceSpan | None = None

    @property
    def span(self) -> SequenceSpan | None:
        """The span of the rows checked so far; None before the first row."""
        return self._span

    def take(self, batch: pa.RecordBatch) -> None:
        """Check the rows of a batch that is not empty."""
        values = batch.column(self._column)
        if values.null_count:
            raise SchemaMismatchError(
                f"table '{self._table}': sequence column '{self._column}' must not be null, but"
                f" row {pc.index(values.is_null(), True).as_py()} is"
            )
        rises = pc.greater_equal(values.slice(1), values.slice(0, len(values) - 1))
        first, last = values[0].as_py(), values[-1].as_py()
        continues_span = self._span is None or first >= self._span.last
        if not continues_span or not pc.all(rises, min_count=0).as_py():
            raise _out_of_order(self._column, table=self._table)
        self._span = SequenceSpan(first if self._span is None else self._span.first, last)


def tasks_in_sequence(
    spans: Sequence[SequenceSpan | None], *, column: str, table: str
) -> list[int]:
    """Return the tasks with rows, in the order in which their rows must be applied.

    Raise `InvalidRequestError` if the values of two tasks interleave.
    """
    tasks = sorted((span, task) for task, span in enumerate(spans) if span is not None)
    for (earlier, _), (later, _) in itertools.pairwise(tasks):
        if later.first < earlier.last:
            raise _out_of_order(column, table=table)
    return [task for _, task in tasks]


def _out_of_order(column: str, *, table: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"table '{table}' keeps the row written last, so for 'sequence.column' = '{column}' rows"
        f" must come in its order: write df.orderBy('{column}'), or a stream with"
        " streamhouse.connector.write_batch, or create the table with table.merge-engine ="
        f" versioned and table.merge-engine.versioned.ver-column = {column}"
    )
