"""A task's rows with `on.error=reject`: fitting rows are written, others staged as rejected."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final

import pyarrow as pa
from pyspark import TaskContext

from streamhouse.client import Rejects, StagedRejects, StorageClient, Transaction
from streamhouse.connector.write._assignment import assigned, assigned_key
from streamhouse.connector.write._write_options import WriteMode
from streamhouse.connector.write._write_target import RowShape, WriteTarget
from streamhouse.core.errors import TableNotFoundError
from streamhouse.core.model.casts.column_defaults import missing_values
from streamhouse.core.model.values.zone import Zone
from streamhouse.core.rows.row_splitter import RowSplitter, cast_values
from streamhouse.reading.where.checks import judged

__all__ = ["OpenedOnce", "Sieve", "check_table"]

_BATCH_ID: Final = "streaming.sql.batchId"


class OpenedOnce:
    """The transaction of a task, opened at its first row."""

    def __init__(
        self,
        client: StorageClient,
        open_transaction: Callable[[StorageClient], Transaction],
        target: WriteTarget,
    ) -> None:
        self.client: Final = client
        self._open = open_transaction
        self._target = target
        self._transaction: Transaction | None = None

    @property
    def transaction_id(self) -> str | None:
        """The id of the transaction; None before it is opened."""
        return None if self._transaction is None else self._transaction.transaction_id

    def transaction(self) -> Transaction:
        """Return the transaction; raise if a new table has the name since the write was planned."""
        if self._transaction is None:
            opened = self._open(self.client)
            if not opened.is_skipped:
                check_table(opened.table.table_id, self._target)
            self._transaction = opened
        return self._transaction


def check_table(table_id: int, target: WriteTarget) -> None:
    """Raise unless the table is still the table of the planned write."""
    if table_id != target.table_id:
        raise TableNotFoundError(
            f"table '{target.path}' was dropped and created again while this job was writing to it"
        )


class Sieve:
    """Filters the rows of one task."""

    def __init__(self, target: WriteTarget, opened: OpenedOnce) -> None:
        assert target.rejecting is not None
        self._target = target
        self._opened = opened
        self._splitter = RowSplitter(
            target.rejecting,
            is_delete=target.mode is WriteMode.DELETE,
            cast=functools.partial(_assigned, assign=assigned, zone=target.shape.zone),
            cast_key=functools.partial(_assigned, assign=assigned_key, zone=target.shape.zone),
        )
        self._rejects: Rejects | None = None
        self._row_count = 0

    @property
    def staged(self) -> StagedRejects | None:
        """The staged rejected rows, None without any."""
        return None if self._rejects is None else self._rejects.staged

    def fitting(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the fitting rows in the table's types; stage the remaining rows as rejected."""
        first, self._row_count = self._row_count, self._row_count + batch.num_rows
        target = self._target
        assert target.rejecting is not None
        checked = judged(
            target.rejecting,
            self._splitter.split(_arranged(batch, target.shape)),
            schema_id=target.rejecting.schema_id,
            is_delete=target.mode is WriteMode.DELETE,
            checks=target.checks,
        )
        if checked.misfits:
            transaction = self._opened.transaction()
            if transaction.is_skipped:
                return checked.rows
            if self._rejects is None:
                self._rejects = Rejects(self._opened.client, transaction, path=self._target.path)
            operation = str(self._target.mode)
            self._rejects.stage(checked, operation=operation, source=_source(), first_row=first)
        return checked.rows


def _arranged(batch: pa.RecordBatch, shape: RowShape) -> pa.RecordBatch:
    """Return the columns of the table, filled columns included, in the types of the batch."""
    columns = {
        name: column
        for name, column in zip(shape.names, batch.columns, strict=True)
        if name not in shape.dropped
    }
    columns |= {c.name: missing_values(c, batch.num_rows) for c in shape.filled}
    return pa.RecordBatch.from_pydict(columns)


def _assigned(
    array: pa.Array, data_type: pa.DataType, *, assign: Callable[..., pa.Array], zone: Zone | None
) -> pa.Array:
    """Return values as INSERT INTO assigns them; texts are parsed as the column's type."""
    is_text = pa.types.is_string(array.type) or pa.types.is_large_string(array.type)
    if is_text:
        return cast_values(array, data_type)
    return assign(array, data_type, column="", zone=zone)


def _source() -> str:
    """Return the task and the micro-batch of the rows, for a message."""
    context = TaskContext.get()
    if context is None:
        return "task"
    batch_id = context.getLocalProperty(_BATCH_ID)
    task = f"task {context.partitionId()}"
    return task if batch_id is None else f"batch {batch_id}, {task}"
