"""Transactions: rows staged by many, in the table at one instant or not at all."""

from __future__ import annotations

import functools
import json
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Final

import pyarrow as pa

from streamhouse.storage_service.client.request_batches import bounded_batches, rows_by_bucket
from streamhouse.storage_service.client.transport import HttpTransport
from streamhouse.storage_service.errors import (
    StreamhouseError,
    TransactionNotFoundError,
    UnavailableError,
)
from streamhouse.storage_service.model.bucketing import split_by_bucket, split_evenly
from streamhouse.storage_service.model.conform import check_schema, conform
from streamhouse.storage_service.model.table import TableInfo, TablePath
from streamhouse.storage_service.model.transaction import (
    CommitResult,
    TransactionOperation,
    TransactionStatus,
)
from streamhouse.storage_service.wire.arrow_body import encode_append_body

__all__ = ["Transaction", "TransactionCalls"]

_COMMIT_WAIT_S: Final = 20.0
# One request stages about so much; the service holds a body in memory while it takes it.
_STAGE_BYTES_TARGET: Final = 32 << 20
_SPREAD_ROWS_MIN: Final = 8_192
_SEPARATOR: Final = "+"


class Transaction:
    """One transaction of one table; from `begin_transaction`, or `open_transaction` elsewhere.

    Thread-safe: many may stage at once, also from many processes that know the id. In a `with`
    block it is aborted at the end unless it was committed.
    """

    def __init__(
        self,
        transport: HttpTransport,
        path: TablePath,
        *,
        transaction_id: str,
        table: Callable[[], TableInfo],
    ) -> None:
        self._transport = transport
        self._path = path
        self._describe = table
        self._url = f"/v1/tables/{path}/transactions/{transaction_id}"
        self._is_over = False
        self.transaction_id = transaction_id

    def __enter__(self) -> Transaction:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._is_over:
            return
        try:
            self.abort()
        except StreamhouseError:
            # It times out by itself; what ended the block matters more.
            if error is None:
                raise

    @property
    def is_skipped(self) -> bool:
        """Whether there is nothing to do: the application has committed that version before.

        Staging into such a transaction does nothing, and committing answers that it was skipped.
        """
        return not self.transaction_id

    @functools.cached_property
    def table(self) -> TableInfo:
        """The table, as it was when the first rows were staged; commit and abort do not ask."""
        return self._describe()

    def stage(self, data: pa.Table | pa.RecordBatch) -> str:
        """Store rows durably, seen by nobody; return what names them in `commit`.

        Rows are checked as `append`, `upsert` and `delete` check them. Retries inside the call are
        harmless, and what no commit names is dropped, so that a task may simply be run again.
        """
        if self.is_skipped:
            return ""
        parts = [self._stage(body) for body in self._bodies(data)]
        return _SEPARATOR.join(parts)

    def commit(self, parts: Sequence[str], *, timeout_s: float = 600.0) -> CommitResult:
        """Make the named rows visible at one instant, all or none, in this order.

        Repeating it is harmless and answered alike. Parts not named are dropped. Raises
        `UnavailableError` when it is not done in `timeout_s`; it goes on, and may be asked again.
        """
        if self.is_skipped:
            return CommitResult(
                status=TransactionStatus.SKIPPED, ranges={}, row_count=0, timestamp_us=0
            )
        named = [part for joined in parts for part in joined.split(_SEPARATOR) if part]
        deadline = time.monotonic() + timeout_s
        while True:
            left_s = max(deadline - time.monotonic(), 0.0)
            wait_s = min(_COMMIT_WAIT_S, left_s)
            answer = self._transport.request_json(
                "POST",
                f"{self._url}/commit",
                query={"max_wait_ms": str(round(wait_s * 1000))},
                body={"parts": named},
                is_repeatable=True,
                wait_s=wait_s,
            )
            if answer["status"] in (TransactionStatus.COMMITTED, TransactionStatus.SKIPPED):
                self._is_over = True
                return CommitResult.from_json(answer)
            if time.monotonic() >= deadline:
                raise UnavailableError(
                    f"transaction {self.transaction_id} of '{self._path}' is still being"
                    f" committed, {answer['rows_committed']} of {answer['rows_to_commit']} rows;"
                    " commit again to wait for it"
                )

    def abort(self) -> TransactionStatus:
        """Drop what is staged; return the status, which is not `aborted` if it is committed."""
        self._is_over = True
        if self.is_skipped:
            return TransactionStatus.SKIPPED
        try:
            answer = self._transport.request_json("POST", f"{self._url}/abort", is_repeatable=True)
        except TransactionNotFoundError:
            return TransactionStatus.ABORTED
        return TransactionStatus(answer["status"])

    def status(self) -> dict[str, Any]:
        """Return how far it is: `status`, rows and bytes staged, rows committed so far."""
        answer: dict[str, Any] = self._transport.request_json("GET", self._url)
        return answer

    def _stage(self, body: pa.Buffer) -> str:
        answer = self._transport.request(
            "POST",
            f"{self._url}/stage",
            # A repetition of this very request is answered with the part that it made.
            query={"token": secrets.token_hex(16)},
            body=body,
            is_repeatable=True,
        )
        return str(json.loads(answer)["part"])

    def _bodies(self, data: pa.Table | pa.RecordBatch) -> Iterator[pa.Buffer]:
        """Yield the requests that stage `data`, at least one."""
        schema = data.schema
        waiting: list[tuple[int | None, int, pa.RecordBatch]] = []
        size = 0
        is_empty = True
        if not self.table.is_primary_key_table:
            check_schema(schema, self.table.schema, table=str(self._path))
            schema = self.table.schema.to_arrow()
        for rows in bounded_batches(data):
            if waiting and size + rows.nbytes > _STAGE_BYTES_TARGET:
                yield encode_append_body(waiting[0][2].schema, waiting)
                waiting, size = [], 0
            is_empty = False
            waiting += [(bucket, 0, part) for bucket, part in self._by_bucket(rows).items()]
            size += rows.nbytes
        if waiting or is_empty:
            yield encode_append_body(waiting[0][2].schema if waiting else schema, waiting)

    def _by_bucket(self, rows: pa.RecordBatch) -> Mapping[int, pa.RecordBatch]:
        table = self.table
        if table.is_primary_key_table:
            return rows_by_bucket(table, rows)
        rows = conform(rows, table.schema, table=str(table.path))
        key = table.descriptor.effective_bucket_key
        if key:
            return split_by_bucket(rows, key, table.bucket_count)
        first = secrets.randbelow(table.bucket_count)
        return split_evenly(rows, table.bucket_count, first_bucket=first, rows_min=_SPREAD_ROWS_MIN)


class TransactionCalls:
    """The transaction calls of the client."""

    _transport: HttpTransport

    _tables: dict[TablePath, TableInfo]

    def describe_table(self, path: str) -> TableInfo:
        """Return the table; `StorageClient` does."""
        raise NotImplementedError

    def begin_transaction(
        self,
        path: str,
        *,
        operation: str = "append",
        columns: Sequence[str] | None = None,
        app_id: str | None = None,
        version: int | None = None,
        timeout_s: float | None = None,
        join: bool = False,
    ) -> Transaction:
        """Begin a transaction: stage rows, then commit them at one instant, or abort.

        Args:
            operation: `append` (log tables), `upsert` or `delete` (primary key tables), or
                `overwrite`, which leaves a table with what its rows make of an empty one. Rows to
                upsert may have a column `__change_type`, as for `upsert`.
            columns: upsert only these columns, as for `upsert`.
            app_id: with `version`, makes the transaction happen once: a version that is not above
                the last one that `app_id` committed to this table is skipped (`is_skipped`).
            timeout_s: drop the transaction when nobody has staged for so long; default: the
                service's, an hour.
            join: return the open transaction that does the same for this version of `app_id`, if
                there is one: so many processes share one that none of them began before the others.
        """
        answer = self._transport.request_json(
            "POST",
            f"/v1/tables/{TablePath.parse(path)}/transactions",
            body={
                "operation": str(TransactionOperation(operation)),
                "columns": None if columns is None else list(columns),
                "app_id": app_id,
                "version": version,
                "timeout_ms": None if timeout_s is None else max(1, round(timeout_s * 1000)),
                "join": join,
            },
            # One that was begun for nothing times out.
            is_repeatable=True,
        )
        known = self._tables.get(TablePath.parse(path))
        is_current = known is not None and (known.table_id, known.schema_id) == (
            answer["table_id"],
            answer["schema_id"],
        )
        transaction = self.open_transaction(path, str(answer["transaction_id"]))
        if known is not None and is_current:
            transaction.table = known
        return transaction

    def open_transaction(self, path: str, transaction_id: str) -> Transaction:
        """Return a transaction that was begun elsewhere; the id of a skipped one is empty.

        Nothing is asked of the service before it is used.
        """
        return Transaction(
            self._transport,
            TablePath.parse(path),
            transaction_id=transaction_id,
            table=functools.partial(self.describe_table, path),
        )
