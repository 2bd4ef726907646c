"""Writes that keep the rows that do not fit: in `t$rejected`, together with the others.

Rows are divided here to see whether any does not fit: a request all of whose rows fit is one like
any other. Else the service gets all of them in one request, divides them, and writes both kinds in
one transaction. Who stages rows in a transaction stages the rejected ones beside it (`Rejects`).
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import pyarrow as pa

from streamhouse.client.http._transport import HttpTransport
from streamhouse.client.values._python_rows import rows_as_tried
from streamhouse.client.values.forms import PythonRows
from streamhouse.client.writing._request_batches import bounded_batches
from streamhouse.client.writing.transactions import StagedRejects, Transaction
from streamhouse.client.writing.writes import AppendWriter, Ranges, Written
from streamhouse.core.errors import (
    InvalidRequestError,
    StreamhouseError,
    UnknownOutcomeError,
    UnsupportedError,
)
from streamhouse.core.model.casts.lossless import castings, fitted
from streamhouse.core.model.offsets import ranges_in
from streamhouse.core.model.table import TableInfo
from streamhouse.core.model.transaction import TransactionOperation
from streamhouse.core.rows.checked_rows import CheckedRows
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

    def __init__(self, client: RejectsClient, transaction: Transaction, *, path: str) -> None:
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
        self, checked: CheckedRows, *, operation: str, source: str, first_row: int = 0
    ) -> None:
        """Stage misfits as rejected; `first_row` is the number of the batch's row 0."""
        for rows in rejected_rows(checked, operation=operation, source=source, first_row=first_row):
            self._stage(rows)
        self.row_count += len(checked.misfits)

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
    """Yield batches, each fit for one request, and which of their rows fit.

    Raises for columns that no row of the table could have.
    """
    is_delete = operation is TransactionOperation.DELETE
    data = _fitted(table, data)
    if data.num_rows == 0:
        divide(table, data.schema, (), is_delete=is_delete)
    for batch in bounded_batches(data):
        yield batch, divide(table, batch.schema, [batch], is_delete=is_delete)


def _fitted(table: TableInfo, data: pa.Table | pa.RecordBatch) -> pa.Table | pa.RecordBatch:
    """Return rows with columns as the table has them, where no value is tried by itself."""
    tried = castable(data.schema, table)
    casts = {
        name: t
        for name, t in castings(data.schema, table.schema).items()
        if tried.field(name).type == data.schema.field(name).type
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

    `first_row` is the number of the first row in what it is from. An `app`, a name and a version,
    writes this version once, however late it is repeated. Returns where the rows that fit are.
    Raises `UnknownOutcomeError` for any refusal after an attempt that may have been stored.
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
    said = json.loads(answer.data)
    return ranges_in(said.get("table_id"), said["buckets"])


@dataclass
class RejectingCall:
    """One call that may reject rows: which of them are written, and where.

    It may be told to go on with the table as it is by then: nothing is written twice.
    """

    transport: HttpTransport
    data: pa.Table | pa.RecordBatch | PythonRows
    operation: TransactionOperation
    writer: AppendWriter | None
    write: Callable[[TableInfo, pa.RecordBatch], Ranges]
    """Writes rows that fit, which is one request."""
    written: Written = field(default_factory=Written)
    first_row: int = 0
    """The number of the data's first row in what it is from."""

    def go_on(self, table: TableInfo) -> Ranges:
        """Write what is not written yet; return where the rows that fit are."""
        written = self.written
        data = self.data
        if isinstance(data, PythonRows):
            data = rows_as_tried(table, data.rows)
        left = data.slice(written.row_count) if written.row_count else data
        for rows, checked in divided_batches(table, left, self.operation):
            # Rows may take more memory in the table's types, and then need several requests.
            fit = list(bounded_batches(checked.rows))
            if checked.misfits or len(fit) > 1:
                ranges = self._send(table, rows)
            else:
                ranges = self.write(table, fit[0])
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
