"""Writes that keep rows which do not fit in `t$rejected`, together with the fitting rows.

The client divides rows only to see whether all fit: then the request is an ordinary one. Otherwise,
or if a row breaks a constraint, the service gets all rows in a request, divides the rows, and
writes both kinds in a transaction. A caller of a transaction stages the rejected rows beside it
(`Rejects`).
"""

from __future__ import annotations

import json
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import pyarrow as pa

from streamhouse.client.http._transport import HttpTransport
from streamhouse.client.values._python_rows import rows_as_tried
from streamhouse.client.values.forms import PythonRows
from streamhouse.client.writing._request_batches import bounded_batches
from streamhouse.client.writing.transactions import StagedRejects, Transaction
from streamhouse.client.writing.writes import AppendWriter, Ranges, WriteProgress
from streamhouse.core.errors import (
    CheckFailedError,
    InvalidRequestError,
    StreamhouseError,
    UnknownOutcomeError,
    UnsupportedError,
)
from streamhouse.core.model.casts.lossless import castings, fitted
from streamhouse.core.model.offsets import ranges_in
from streamhouse.core.model.table import TableInfo
from streamhouse.core.model.transaction import TransactionOperation
from streamhouse.core.rows.checked_rows import CheckedRows, broken_rows
from streamhouse.core.rows.companion import rejected_rows
from streamhouse.core.rows.division import divide
from streamhouse.core.rows.row_splitter import castable
from streamhouse.core.wire.arrow_body import encode_append_body

__all__ = [
    "OnError",
    "RejectingCall",
    "Rejects",
    "RejectsClient",
    "divided_batches",
    "is_rejecting",
    "send_divided",
]

OnError = Literal["refuse", "reject"]


class RejectsClient(Protocol):
    """The calls of `StorageClient` that this module needs."""

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
    """Stages rejected rows beside a transaction, which commits both.

    Processes with a common transaction also share the transaction of rejected rows: the app id is
    the main transaction's id.
    """

    def __init__(self, client: RejectsClient, transaction: Transaction, *, path: str) -> None:
        self._client = client
        self._transaction = transaction
        self._path = path
        self._companion_transaction: Transaction | None = None
        self._parts: list[str] = []
        self._broken: Counter[str] = Counter()
        self.row_count = 0

    @property
    def staged(self) -> StagedRejects | None:
        """The rejected rows for the commit; None: nothing was rejected."""
        if self._companion_transaction is None:
            return None
        transaction_id = self._companion_transaction.transaction_id
        return StagedRejects(transaction_id, tuple(self._parts), dict(self._broken))

    def stage(
        self, checked: CheckedRows, *, operation: str, source: str, first_row: int = 0
    ) -> None:
        """Stage misfits as rejected; `first_row` is the number of the batch's row 0."""
        for rows in rejected_rows(checked, operation=operation, source=source, first_row=first_row):
            self._stage(rows)
        self._broken += broken_rows(checked.misfits.values())
        self.row_count += len(checked.misfits)

    def _stage(self, rows: pa.RecordBatch) -> None:
        if self._companion_transaction is None:
            self._companion_transaction = self.begin("upsert")
        self._parts.append(self._companion_transaction.stage(rows))

    def begin(self, operation: str) -> Transaction:
        """Begin or join the transaction of the rejected rows; creates the table if needed."""
        companion = self._client.keep_rejected(self._path)
        return self._client.begin_transaction(
            str(companion.path),
            operation=operation,
            app_id=self._transaction.transaction_id,
            version=0,
            join=True,
        )


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


def divided_batches(
    table: TableInfo, data: pa.Table | pa.RecordBatch, operation: TransactionOperation
) -> Iterator[tuple[pa.RecordBatch, CheckedRows]]:
    """Yield batches, each fit for one request, with its fitting rows and misfits.

    Raises for columns unknown to the table.
    """
    is_delete = operation is TransactionOperation.DELETE
    data = _fitted(table, data)
    if data.num_rows == 0:
        divide(table, data.schema, (), is_delete=is_delete)
    for batch in bounded_batches(data):
        yield batch, divide(table, batch.schema, [batch], is_delete=is_delete)


def _fitted(table: TableInfo, data: pa.Table | pa.RecordBatch) -> pa.Table | pa.RecordBatch:
    """Return rows converted to the table's types where whole columns convert at once."""
    castable_schema = castable(data.schema, table)
    casts = {
        name: t
        for name, t in castings(data.schema, table.schema).items()
        if castable_schema.field(name).type == data.schema.field(name).type
    }
    return fitted(data, casts, table=str(table.path))


def send_divided(
    transport: HttpTransport,
    table: TableInfo,
    rows: pa.RecordBatch,
    operation: TransactionOperation,
    *,
    source: str,
    first_row: int,
    transaction_id: str,
    app: tuple[str, int] | None = None,
) -> Ranges:
    """Let the service divide rows and write both kinds, once for a `transaction_id`.

    `first_row` is the first row's number in the source. With an `app`, a name and a version, this
    version is written once, however late a repetition comes. Returns the ranges of the fitting
    rows. Raises `UnknownOutcomeError` for any refusal after an attempt that may have been stored.
    """
    query = {
        "on_error": "reject",
        "schema_id": table.stated_version,
        "transaction_id": transaction_id,
        "source": source,
        "first_row": str(first_row),
    }
    if app is not None:
        query |= {"app_id": app[0], "version": str(app[1])}
    failures: list[StreamhouseError] = []
    try:
        answer = transport.request(
            "POST",
            f"/v1/tables/{table.path}/{operation}",
            query=query,
            body=encode_append_body(rows.schema, [(None, 0, rows)]),
            is_repeatable=True,
            on_repeat=failures.append,
        )
    except StreamhouseError as error:
        if any(isinstance(failure, UnknownOutcomeError) for failure in failures):
            raise UnknownOutcomeError(error.message, request_id=error.request_id) from error
        raise
    answer_body = json.loads(answer.data)
    ranges: Ranges = ranges_in(answer_body.get("table_id"), answer_body["buckets"])
    transport.any_process.note_written(ranges)
    return ranges


@dataclass
class RejectingCall:
    """A call that may reject rows: the progress, and the ranges written.

    `resume` may be called again with a fresh table: nothing is written twice.
    """

    transport: HttpTransport
    data: pa.Table | pa.RecordBatch | PythonRows
    operation: TransactionOperation
    writer: AppendWriter | None
    write: Callable[[TableInfo, pa.RecordBatch], Ranges]
    """Writes fitting rows by one request."""
    written: WriteProgress = field(default_factory=WriteProgress)
    first_row: int = 0
    """The number of the data's first row in the source."""

    def resume(self, table: TableInfo) -> Ranges:
        """Write the remaining rows; return the ranges of the fitting rows."""
        written = self.written
        data = self.data
        if isinstance(data, PythonRows):
            data = rows_as_tried(table, data.rows)
        remaining_rows = data.slice(written.row_count) if written.row_count else data
        for rows, checked in divided_batches(table, remaining_rows, self.operation):
            # Rows may take more memory in the table's types, and then need several requests.
            fit = list(bounded_batches(checked.rows))
            if checked.misfits or len(fit) > 1:
                ranges = self._send(table, rows)
            else:
                try:
                    ranges = self.write(table, fit[0])
                except CheckFailedError:
                    # Only the service judges rows by constraints.
                    ranges = self._send(table, rows)
            written.row_count += rows.num_rows
            for bucket, span in ranges.items():
                written.offsets[bucket] = (written.offsets.get(bucket, span)[0], span[1])
        return written.offsets

    def _send(self, table: TableInfo, rows: pa.RecordBatch) -> Ranges:
        writer, app = self.writer, None
        if writer is not None:
            app = (f"writer-{writer.writer_id:x}", writer.transactions)
        ranges = send_divided(
            self.transport,
            table,
            rows,
            self.operation,
            source="client",
            first_row=self.first_row + self.written.row_count,
            transaction_id=secrets.token_hex(16),
            app=app,
        )
        if writer is not None:
            writer.transactions += 1
        return ranges
