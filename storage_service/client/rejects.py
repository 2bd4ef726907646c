"""Writes that keep the rows that do not fit: in `t$rejected`, in one transaction with the others.

A call all of whose rows fit is a call like any other.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol

import pyarrow as pa

from streamhouse.storage_service.client.request_batches import bounded_batches
from streamhouse.storage_service.client.transactions import StagedRejects, Transaction
from streamhouse.storage_service.client.writes import AppendWriter, Ranges
from streamhouse.storage_service.errors import InvalidRequestError, UnsupportedError
from streamhouse.storage_service.model.conform import check_schema
from streamhouse.storage_service.model.rejected.companion import rejected_rows
from streamhouse.storage_service.model.rejected.row_splitter import BadRow, RowSplitter, castable
from streamhouse.storage_service.model.schema import CHANGE_TYPE_COLUMN
from streamhouse.storage_service.model.table import TableInfo
from streamhouse.storage_service.model.transaction import TransactionOperation

__all__ = ["Divided", "OnError", "Rejects", "divide", "is_rejecting", "write_divided"]

OnError = Literal["refuse", "reject"]
_BATCH_ROWS: Final = 4_096


class _Client(Protocol):
    """What is asked of a `StorageClient` here."""

    def keep_rejected(self, path: str) -> TableInfo: ...

    def begin_transaction(
        self,
        path: str,
        *,
        operation: str = ...,
        app_id: str | None = ...,
        version: int | None = ...,
        join: bool = ...,
    ) -> Transaction: ...


class Rejects:
    """Stages rejected rows beside one transaction, which commits them.

    Many processes that stage into one transaction share one of the rejected rows, too: it is named
    by the other's id.
    """

    def __init__(self, client: _Client, transaction: Transaction, *, path: str) -> None:
        self._client = client
        self._transaction = transaction
        self._path = path
        self._begun: Transaction | None = None
        self._parts: list[str] = []
        self.row_count = 0

    @property
    def staged(self) -> StagedRejects | None:
        """What to name in the commit; None: nothing was rejected."""
        if self._begun is None:
            return None
        return StagedRejects(self._begun.transaction_id, tuple(self._parts))

    def stage(
        self, bad: Sequence[BadRow], *, operation: str, source: str, first_row: int = 0
    ) -> None:
        """Stage rows as rejected; `first_row` is the number of the batch's row 0 in its source."""
        for start in range(0, len(bad), _BATCH_ROWS):
            rows = rejected_rows(
                bad[start : start + _BATCH_ROWS],
                operation=operation,
                source=source,
                first_row=first_row,
                now_us=time.time_ns() // 1_000,
            )
            self._stage(rows)
        self.row_count += len(bad)

    def _stage(self, rows: pa.RecordBatch) -> None:
        if self._begun is None:
            self._begun = self.begin("upsert")
        self._parts.append(self._begun.stage(rows))

    def begin(self, operation: str) -> Transaction:
        """Begin the transaction of the rejected rows, or join it; the table is made if need be."""
        companion = self._client.keep_rejected(self._path)
        return self._client.begin_transaction(
            str(companion.path),
            operation=operation,
            app_id=self._transaction.transaction_id,
            version=0,
            join=True,
        )


@dataclass(frozen=True, slots=True)
class Divided:
    """Rows that fit, as the table has them, and batches with those that do not.

    Of each batch: the number of its first row, and its bad rows.
    """

    good: pa.Table
    bad: Sequence[tuple[int, Sequence[BadRow]]]


def is_rejecting(on_error: str, columns: Sequence[str] | None, *, path: str) -> bool:
    """Check the argument `on_error` of a write."""
    if on_error not in ("refuse", "reject"):
        raise InvalidRequestError(f"on_error = '{on_error}' is not one of refuse, reject")
    if on_error == "reject" and columns is not None:
        raise UnsupportedError(
            f"table '{path}': a partial update cannot reject rows; write whole rows, or remove"
            " on_error"
        )
    return on_error == "reject"


def divide(
    table: TableInfo, data: pa.Table | pa.RecordBatch, operation: TransactionOperation
) -> Divided:
    """Divide rows; raises for columns that no row of the table could have."""
    has_changes = table.is_primary_key_table and CHANGE_TYPE_COLUMN in data.schema.names
    own = [field for field in data.schema if not (has_changes and field.name == CHANGE_TYPE_COLUMN)]
    check_schema(castable(pa.schema(own), table), table.schema, table=str(table.path))
    splitter = RowSplitter(table, is_delete=operation is TransactionOperation.DELETE)
    good: list[pa.RecordBatch] = []
    bad: list[tuple[int, Sequence[BadRow]]] = []
    first = 0
    for batch in bounded_batches(data):
        fit, misfits = splitter.split(batch)
        good.append(fit)
        if misfits:
            bad.append((first, misfits))
        first += batch.num_rows
    if not good:
        return Divided(pa.Table.from_batches([], castable(data.schema, table)), ())
    return Divided(pa.Table.from_batches(good), bad)


def write_divided(
    client: _Client,
    path: str,
    divided: Divided,
    operation: TransactionOperation,
    *,
    writer: AppendWriter | None,
) -> Ranges:
    """Write both kinds of rows in one transaction; a writer's call happens once."""
    transaction = client.begin_transaction(
        path,
        operation=str(operation),
        app_id=None if writer is None else f"writer-{writer.writer_id:x}",
        version=None if writer is None else writer.transactions,
    )
    with transaction:
        if transaction.is_skipped:
            ranges: Ranges = {}
        else:
            rejects = Rejects(client, transaction, path=path)
            stage_rejects(rejects, divided.bad, operation=str(operation), source="client")
            result = transaction.commit([transaction.stage(divided.good)], rejected=rejects.staged)
            ranges = dict(result.ranges)
    if writer is not None:
        writer.transactions += 1
    return ranges


def stage_rejects(
    rejects: Rejects,
    bad: Iterable[tuple[int, Sequence[BadRow]]],
    *,
    operation: str,
    source: str,
) -> None:
    """Stage the bad rows of batches."""
    for first, rows in bad:
        rejects.stage(rows, operation=operation, source=source, first_row=first)
