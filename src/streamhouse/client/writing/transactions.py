"""Transactions: staged rows, visible from one instant on or never."""

from __future__ import annotations

import functools
import json
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import pyarrow as pa

from streamhouse.client.http._transport import HttpTransport
from streamhouse.client.values._python_rows import rows_as_arrow
from streamhouse.client.values.arguments import checked_calls, choice, names
from streamhouse.client.values.forms import (
    Arrow,
    PythonRows,
    Rows,
    batches_of,
    is_arrow,
    normalized_rows,
)
from streamhouse.client.writing._request_batches import (
    bounded_batches,
    check_row_sizes,
    rows_by_bucket,
)
from streamhouse.client.writing.writes import log_rows_by_bucket, spread_anywhere
from streamhouse.core.errors import (
    InvalidRequestError,
    StreamhouseError,
    TransactionNotFoundError,
    UnavailableError,
)
from streamhouse.core.model.casts.conform import check_schema
from streamhouse.core.model.casts.lossless import castings, fitted
from streamhouse.core.model.casts.written_rows import version_of
from streamhouse.core.model.offsets import table_of_offsets
from streamhouse.core.model.table import TableInfo, TablePath
from streamhouse.core.model.transaction import (
    CommitResult,
    Isolation,
    ReadPosition,
    TransactionStatus,
)
from streamhouse.core.wire.arrow_body import encode_append_body

__all__ = ["StagedRejects", "Transaction"]

_COMMIT_WAIT_S: Final = 20.0
# The target size of a staging request; the service holds its body in memory.
_STAGE_BYTES_TARGET: Final = 32 << 20
_SEPARATOR: Final = "+"


class StagedRejects(NamedTuple):
    """Staged parts of a transaction of the table of rejected rows.

    `broken` counts the rows by the constraint that they break.
    """

    transaction_id: str
    parts: Sequence[str]
    broken: Mapping[str, int] = MappingProxyType({})


@checked_calls
class Transaction:
    """A transaction of one table; from `begin_transaction`, or elsewhere from `open_transaction`.

    Thread-safe: many threads may stage at once, also in many processes that know the id. At the end
    of a `with` block an uncommitted transaction is aborted.
    """

    def __init__(
        self,
        transport: HttpTransport,
        path: TablePath,
        *,
        transaction_id: str,
        table: Callable[[], TableInfo],
        see_all_writes: Callable[[], None],
    ) -> None:
        self._transport = transport
        self._path = path
        self._describe = table
        self._see_all_writes = see_all_writes
        self._url = f"/v1/tables/{path}/transactions/{transaction_id}"
        self._is_over = False
        self.transaction_id = transaction_id
        self.last_version: int | None = None
        """For a transaction begun here: the last version committed by its application, if
        remembered.
        """

    def __repr__(self) -> str:
        return f"Transaction('{self._path}', {self.transaction_id or 'skipped'})"

    def __enter__(self) -> Transaction:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._is_over:
            return
        try:
            self.abort()
        except StreamhouseError:
            # The transaction times out by itself; the exception of the block matters more.
            if error is None:
                raise

    @property
    def is_skipped(self) -> bool:
        """Whether the application has committed this version before: nothing is to do.

        Staging into a skipped transaction does nothing, and a commit returns the status `skipped`.
        """
        return not self.transaction_id

    @functools.cached_property
    def table(self) -> TableInfo:
        """The table at the first staged rows; commit and abort do not need it."""
        return self._describe()

    def stage(self, data: Rows) -> str:
        """Store rows durably but invisibly; return the name of the part for `commit`.

        Rows are checked as in `append`, `upsert` and `delete`. Retries inside the call are
        harmless, and parts that no commit names are dropped: a failed task may simply run again.
        """
        if self.is_skipped:
            return ""
        rows = data if is_arrow(data) else normalized_rows(data, call="stage")
        if isinstance(rows, PythonRows):
            rows = rows_as_arrow(self.table, rows.rows)
        parts = [self._stage(body) for body in self._bodies(rows)]
        return _SEPARATOR.join(parts)

    def commit(
        self,
        parts: Sequence[str],
        *,
        read_offsets: Mapping[int, int] | None = None,
        isolation: str = "snapshot",
        rejected: StagedRejects | None = None,
        timeout_s: float = 600.0,
    ) -> CommitResult:
        """Make the named rows visible at one instant, all or none, in this order.

        `read_offsets` are the high watermarks of all buckets before the rows were computed from the
        table. The commit then succeeds only if rows with the same keys are unchanged since; with
        `isolation="serializable"`, and in log tables, only if all rows are unchanged. The offsets
        carry the table's id, as those of `positions` do: the table must not have been created
        again. Otherwise the call raises `CommitConflictError` and writes nothing: read again and
        begin anew. The rows of `rejected` are committed together with the named rows.

        Repeating a commit is harmless and has the same result. Unnamed parts are dropped. After
        `timeout_s` the call raises `UnavailableError`; the commit goes on, and may be repeated.
        """
        if self.is_skipped:
            return CommitResult(
                status=TransactionStatus.SKIPPED, ranges={}, row_count=0, timestamp_us=0
            )
        body: dict[str, Any] = {"parts": _part_names(parts)}
        if read_offsets is not None:
            body |= self._read_position(read_offsets, isolation).to_json()
        if rejected is not None:
            body["rejected"] = {
                "transaction_id": rejected.transaction_id,
                "parts": _part_names(rejected.parts),
                "broken": dict(rejected.broken),
            }
        deadline = time.monotonic() + timeout_s
        while True:
            remaining_s = max(deadline - time.monotonic(), 0.0)
            wait_s = min(_COMMIT_WAIT_S, remaining_s)
            answer = self._transport.request_json(
                "POST",
                f"{self._url}/commit",
                query={"max_wait_ms": str(round(wait_s * 1000))},
                body=body,
                is_repeatable=True,
                wait_s=wait_s,
            )
            if answer["status"] in (TransactionStatus.COMMITTED, TransactionStatus.SKIPPED):
                self._is_over = True
                result = CommitResult.from_json(answer)
                self._transport.any_process.note_written(result.ranges)
                if result.is_skipped:
                    # Another transaction of the application has written the rows.
                    self._see_all_writes()
                return result
            if time.monotonic() >= deadline:
                raise UnavailableError(
                    f"transaction {self.transaction_id} of '{self._path}' is still being"
                    f" committed, {answer['rows_committed']} of {answer['rows_to_commit']} rows;"
                    " commit again to wait for it"
                )

    def _read_position(self, offsets: Mapping[int, int], isolation: str) -> ReadPosition:
        table_id = table_of_offsets(offsets.values(), what="commit: read_offsets")
        if table_id is None and any(offset > 0 for offset in offsets.values()):
            raise InvalidRequestError(
                f"commit to '{self._path}': read_offsets are plain numbers, which may be of an"
                " earlier table of this name: take them as client.positions() returns them, as in"
                " {bucket: at.high_watermark for bucket, at in client.positions(path).items()}"
            )
        return ReadPosition(
            offsets=offsets,
            table_id=table_id,
            isolation=Isolation(choice(isolation, Isolation, argument="isolation")),
        )

    def abort(self) -> TransactionStatus:
        """Drop the staged rows; return the status, which is not `aborted` after a commit."""
        self._is_over = True
        if self.is_skipped:
            return TransactionStatus.SKIPPED
        try:
            answer = self._transport.request_json("POST", f"{self._url}/abort", is_repeatable=True)
        except TransactionNotFoundError:
            return TransactionStatus.ABORTED
        return TransactionStatus(answer["status"])

    def status(self) -> dict[str, Any]:
        """Return the progress: `status`, staged rows and bytes, and committed rows."""
        answer: dict[str, Any] = self._transport.request_json("GET", self._url)
        return answer

    def _stage(self, body: pa.Buffer) -> str:
        answer = self._transport.request(
            "POST",
            f"{self._url}/stage",
            # A repeated request gets the part of the first one.
            query={"token": secrets.token_hex(16), "schema_id": self.table.stated_version},
            body=body,
            is_repeatable=True,
        )
        return str(json.loads(answer.data)["part"])

    def _bodies(self, data: Arrow | pa.RecordBatchReader) -> Iterator[pa.Buffer]:
        """Yield the bodies of staging requests for `data`, at least one."""
        schema = data.schema
        name = str(self._path)
        casts = castings(schema, self.table.schema)
        waiting: list[tuple[int | None, int, pa.RecordBatch]] = []
        size = 0
        is_empty = True
        if not self.table.is_primary_key_table:
            version = self.table.schema_version(
                version_of(self.table, schema, stated=self.table.schema_id)
            )
            casts = castings(schema, version)
            fit = pa.schema([f.with_type(casts.get(f.name, f.type)) for f in schema])
            check_schema(fit, version, table=name)
            schema = version.to_arrow()
        if isinstance(data, pa.RecordBatchReader):
            data = (self._checked(b, casts) for b in batches_of(data, call="stage"))
        else:
            data = self._checked(data, casts)
        for rows in bounded_batches(data):
            if waiting and size + rows.nbytes > _STAGE_BYTES_TARGET:
                yield encode_append_body(waiting[0][2].schema, waiting)
                waiting, size = [], 0
            is_empty = False
            waiting += [(bucket, 0, part) for bucket, part in self._by_bucket(rows).items()]
            size += rows.nbytes
        if waiting or is_empty:
            yield encode_append_body(waiting[0][2].schema if waiting else schema, waiting)

    def _checked(self, rows: Arrow, casts: Mapping[str, pa.DataType]) -> Arrow:
        rows = fitted(rows, casts, table=str(self._path))
        check_row_sizes(rows, self.table)
        return rows

    def _by_bucket(self, rows: pa.RecordBatch) -> Mapping[int, pa.RecordBatch]:
        if self.table.is_primary_key_table:
            return rows_by_bucket(self.table, rows)
        schema_id = version_of(self.table, rows.schema, stated=self.table.schema_id)
        return log_rows_by_bucket(self.table, rows, schema_id=schema_id, spread=spread_anywhere)


def _part_names(parts: Sequence[str]) -> list[str]:
    part_names = names(parts, argument="parts")
    return [part for joined in part_names for part in joined.split(_SEPARATOR) if part]
