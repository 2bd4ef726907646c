"""Rows computed by Spark from a table, written to the table in one transaction, once.

An attempt takes the table's positions, reads the table, and commits with the positions. The service
refuses the commit if a row with a written key has changed since the positions. After a refusal the
next attempt starts with a new read. Every commit therefore writes the result for the rows at the
time of the commit.

A frame of changes has the columns to write (`_assigned_values.py` describes their types),
`__change_type` (`+I`, `+U`, `-D`, or `=` for a row that stays) and `PROBLEM_COLUMN`: a sentence for
a row that must not be written, else null.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame

from streamhouse.client import CommitResult, StorageClient
from streamhouse.connector._arrow_maps import mapped_in_arrow
from streamhouse.connector._partition_reader import spark_iterator_errors
from streamhouse.connector._spark_versions import to_arrow_schema
from streamhouse.connector.changes._assigned_values import converted_schema, settled
from streamhouse.connector.query._narrowing import Pushed
from streamhouse.connector.write._write_jobs import StagedRows, TransactionJob
from streamhouse.connector.write._write_options import WriteOptions
from streamhouse.connector.write._write_target import WriteTarget, resolve_target
from streamhouse.core.errors import (
    CommitConflictError,
    InvalidRequestError,
    StreamhouseError,
    TransactionNotFoundError,
    UnknownOutcomeError,
)
from streamhouse.core.model.schema import CHANGE_TYPE_COLUMN
from streamhouse.core.model.table import TableInfo
from streamhouse.core.model.transaction import TransactionStatus
from streamhouse.reading.options.connection import client_for

__all__ = [
    "DELETED",
    "INSERTED",
    "PROBLEM_COLUMN",
    "UNCHANGED",
    "UPDATED",
    "Changes",
    "Compute",
    "ComputedRows",
    "commit_changes",
    "committed",
]

INSERTED: Final = "+I"
UPDATED: Final = "+U"
DELETED: Final = "-D"
UNCHANGED: Final = "="
PROBLEM_COLUMN: Final = "__problem"

_ATTEMPTS: Final = 10
_STAGED: Final = (
    "transaction_id string, parts array<string>, inserted long, updated long, deleted long,"
    " refusal string"
)
_ARROW_STAGED: Final = pa.schema(
    [
        ("transaction_id", pa.string()),
        ("parts", pa.list_(pa.string())),
        ("inserted", pa.int64()),
        ("updated", pa.int64()),
        ("deleted", pa.int64()),
        ("refusal", pa.string()),
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """The counts of changed rows. `is_skipped`: the version was committed before."""

    rows_inserted: int = 0
    rows_updated: int = 0
    rows_deleted: int = 0
    attempts: int = 1
    is_skipped: bool = False


@dataclass(frozen=True, slots=True)
class ComputedRows:
    """A frame of changes, and the rows of the table that the frame reads.

    `read` is a read of the table, or the words for a lookup. With `looks_up_inserts` the keys of
    rows to insert are looked up too.
    """

    frame: DataFrame
    read: Pushed | str
    looks_up_inserts: bool = False


Compute = Callable[[TableInfo], ComputedRows]


def commit_changes(
    options: WriteOptions,
    compute: Compute,
    *,
    isolation: str,
    is_overwrite: bool = False,
) -> Changes:
    """Write the result of `compute` for the table; raise `CommitConflictError` after all attempts.

    With `is_overwrite` these rows replace all rows of the table.
    """
    conflict: CommitConflictError | None = None
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            return _attempt(options, compute, isolation, is_overwrite, attempt)
        except CommitConflictError as error:
            conflict = error
    assert conflict is not None
    raise CommitConflictError(
        f"table '{options.connection.name.path}': concurrent writers changed the rows of this"
        f" change in each of its {_ATTEMPTS} attempts, and nothing was written; run the change"
        " while fewer writers are active, or for fewer rows at a time. The last conflict:"
        f" {conflict.message}"
    )


def _attempt(
    options: WriteOptions,
    compute: Compute,
    isolation: str,
    is_overwrite: bool,
    attempt: int,
) -> Changes:
    client = client_for(options.connection.endpoint, options.connection.token)
    # The positions are taken before the read: a row that is unchanged since is as it was read.
    state = client.table_state(str(options.connection.name.path))
    frame = compute(state.table).frame
    # The frame has the column names of this schema version.
    options = dataclasses.replace(options, schema_id=state.table.schema_id)
    job = _started_job(client, options, frame, state.table, is_overwrite=is_overwrite)
    if job.is_skipped:
        return Changes(attempts=attempt, is_skipped=True)
    if job.target.table_id != state.table.table_id:
        raise CommitConflictError("the table was dropped and created again in the meantime")
    try:
        messages, counts = _staged(frame, job)
    except BaseException:
        job.abort([])
        raise
    read_offsets = {b: at.high_watermark for b, at in state.positions.items()}
    result = committed(job, messages, read_offsets=read_offsets, isolation=isolation)
    if result.is_skipped:
        return Changes(attempts=attempt, is_skipped=True)
    return Changes(
        rows_inserted=counts[INSERTED],
        rows_updated=counts[UPDATED],
        rows_deleted=counts[DELETED],
        attempts=attempt,
    )


def committed(
    job: TransactionJob,
    messages: Sequence[StagedRows],
    *,
    read_offsets: Mapping[int, int],
    isolation: str,
) -> CommitResult:
    """Commit; after a failure find out the outcome, and raise only if nothing was written.

    If the outcome cannot be found out, raise `UnknownOutcomeError`, which says how to learn it.
    """
    try:
        return job.commit_if_unchanged(messages, read_offsets=read_offsets, isolation=isolation)
    except (CommitConflictError, TransactionNotFoundError):
        raise
    except StreamhouseError as error:
        try:
            status = job.end()
        except StreamhouseError:
            raise UnknownOutcomeError(
                f"it is not known whether this change was committed ({error.message}):"
                f" Table.history() shows transaction {job.transaction_id} if it was; a call with"
                " app_id and app_version may be repeated, and happens once"
            ) from error
        if status is TransactionStatus.ABORTED or not error.retriable:
            raise
    except BaseException:
        # A committed transaction stays; an undecided transaction is aborted.
        with contextlib.suppress(StreamhouseError):
            job.end()
        raise
    # The commit is decided, so a repeated call waits for its end and gets the same answer.
    return job.commit_if_unchanged(messages, read_offsets=read_offsets, isolation=isolation)


def _started_job(
    client: StorageClient,
    options: WriteOptions,
    frame: DataFrame,
    info: TableInfo,
    *,
    is_overwrite: bool,
) -> TransactionJob:
    helper_columns = {PROBLEM_COLUMN, CHANGE_TYPE_COLUMN} if is_overwrite else {PROBLEM_COLUMN}
    schema = to_arrow_schema(frame.schema)
    types = {column.name: column.type for column in info.schema.columns}
    schema = converted_schema(pa.schema([f for f in schema if f.name not in helper_columns]), types)
    target = resolve_target(client, options, schema, is_stream=False, is_overwrite=is_overwrite)
    return TransactionJob.of_options(client, target, options)


def _staged(frame: DataFrame, job: TransactionJob) -> tuple[list[StagedRows], Counter[str]]:
    """Let the tasks of `frame` stage its rows; of a repeated task only one attempt counts."""

    def stage(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from _stage_task(job, batches)

    messages = []
    counts: Counter[str] = Counter()
    for row in mapped_in_arrow(frame, stage, _STAGED).collect():
        if row.refusal is not None:
            raise InvalidRequestError(row.refusal)
        counts.update({INSERTED: row.inserted, UPDATED: row.updated, DELETED: row.deleted})
        messages.append(StagedRows(transaction_id=row.transaction_id, parts=tuple(row.parts)))
    return messages, counts


@spark_iterator_errors
def _stage_task(job: TransactionJob, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    counts: Counter[str] = Counter()
    refusal = None
    staged = StagedRows()
    try:
        staged = job.run(_counted(batches, counts, job.target))
    except StreamhouseError as error:
        if error.retriable:
            raise
        # A row with the refusal, in place of an exception, keeps Spark from repeating the task.
        refusal = error.message
        for _ in batches:
            pass
    values = [
        staged.transaction_id,
        list(staged.parts),
        *(counts[kind] for kind in (INSERTED, UPDATED, DELETED)),
        refusal,
    ]
    columns = [pa.array([v], f.type) for v, f in zip(values, _ARROW_STAGED, strict=True)]
    yield pa.RecordBatch.from_arrays(columns, schema=_ARROW_STAGED)


def _counted(
    batches: Iterator[pa.RecordBatch], counts: Counter[str], target: WriteTarget
) -> Iterator[pa.RecordBatch]:
    """Yield the rows to stage, and count them; raise for the first row with a problem."""
    types = {field.name: field.type for field in target.shape.types}
    for batch in batches:
        problems = batch.column(PROBLEM_COLUMN).drop_null()
        if len(problems):
            raise InvalidRequestError(problems[0].as_py())
        kinds = batch.column(CHANGE_TYPE_COLUMN)
        counts.update(_count_of(kinds))
        rows = settled(batch.drop_columns([PROBLEM_COLUMN]), types, zone=target.shape.zone)
        if target.is_overwrite:
            rows = rows.filter(pc.not_equal(kinds, DELETED)).drop_columns([CHANGE_TYPE_COLUMN])
        yield rows


def _count_of(kinds: pa.Array) -> Mapping[str, int]:
    counts = pc.value_counts(kinds)
    return dict(zip(counts.field(0).to_pylist(), counts.field(1).to_pylist(), strict=True))
