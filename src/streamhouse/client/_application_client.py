"""ApplicationClient: an application's calls to the storage service.

The calls for rows are in this module: writes and reads. The calls for whole tables are in
`TableCalls`, for transactions in `TransactionCalls`. Calls of workers and readers of this package
are in `StorageClient`.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeVar

import pyarrow as pa

from streamhouse.client import reads
from streamhouse.client._transaction_calls import TransactionCalls
from streamhouse.client.following import Source, Subscription
from streamhouse.client.following._log_source import log_source
from streamhouse.client.following._starts import LogStart, starts_of
from streamhouse.client.http._transport import HttpTransport
from streamhouse.client.http.endpoint import with_ca_file, with_read_from
from streamhouse.client.positions._reached_offsets import ReachedOffsets
from streamhouse.client.reads import LogBatch
from streamhouse.client.values._python_rows import keys_as_arrow
from streamhouse.client.values.arguments import (
    names,
    seconds,
    whole,
)
from streamhouse.client.values.forms import (
    Arrow,
    NormalizedRows,
    PythonRows,
    Rows,
    batches_of,
    is_arrow,
    normalized_rows,
)
from streamhouse.client.writing._rejects import OnError, RejectingCall, is_rejecting
from streamhouse.client.writing._request_batches import bounded_parts
from streamhouse.client.writing.writes import AppendWriter, Ranges, TableWrites, WriteProgress
from streamhouse.core.errors import InvalidRequestError, SchemaMismatchError
from streamhouse.core.model.casts.lossless import castings, fitted
from streamhouse.core.model.offsets import (
    table_of_offsets,
)
from streamhouse.core.model.table import TableInfo, TablePath
from streamhouse.core.model.transaction import TransactionOperation
from streamhouse.core.model.values.consumer_names import check_consumer_name

__all__ = ["DEFAULT_ENDPOINT", "ENDPOINT_VARIABLE", "TOKEN_VARIABLE", "ApplicationClient"]

DEFAULT_ENDPOINT: Final = "http://127.0.0.1:8765"
ENDPOINT_VARIABLE: Final = "STREAMHOUSE_ENDPOINT"
TOKEN_VARIABLE: Final = "STREAMHOUSE_TOKEN"

_Self = TypeVar("_Self", bound="ApplicationClient")
_B = TypeVar("_B")


class ApplicationClient(TransactionCalls):
    """The calls of `StreamhouseClient` without reads of the lake; arguments as there."""

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        token: str | None = None,
        timeout_s: float = 30.0,
        ca_file: str | None = None,
        read_from: str | None = None,
    ) -> None:
        endpoint = endpoint or os.environ.get(ENDPOINT_VARIABLE) or DEFAULT_ENDPOINT
        if not isinstance(endpoint, str):
            raise InvalidRequestError(
                f"the endpoint is a URL, as {DEFAULT_ENDPOINT}, not {endpoint!r:.80}"
            )
        if ca_file is not None:
            endpoint = with_ca_file(endpoint, ca_file)
        super().__init__(
            HttpTransport(
                endpoint if read_from is None else with_read_from(endpoint, read_from),
                token=token or os.environ.get(TOKEN_VARIABLE) or None,
                timeout_s=seconds(timeout_s, argument="timeout_s"),
            )
        )
        self._writes = TableWrites(self._transport)
        self._reached = ReachedOffsets()
        self._subscriptions: weakref.WeakSet[Subscription[Any]] = weakref.WeakSet()
        self._subscriptions_lock = threading.Lock()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._transport.endpoint!r})"

    def __enter__(self: _Self) -> _Self:
        self._transport.check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def endpoint(self) -> str:
        """The service's URL or URLs, with `#ca=FILE` where a CA file vouches for it."""
        return self._transport.endpoint_text

    def endpoint_of(self, path: str) -> str:
        """Return the URL to which requests for the table go now."""
        return self._transport.routes.of("", table=str(TablePath.parse(path)))

    def _remember(self, table: TableInfo) -> TableInfo:
        cached_table = self._cached_table(str(table.path))
        if cached_table is not None and cached_table.table_id != table.table_id:
            self._reached.forget_table(str(table.path))
        return super()._remember(table)

    def close(self) -> None:
        """End the subscriptions and close the connections; a closed client refuses every call."""
        with self._subscriptions_lock:
            subscriptions = list(self._subscriptions)
        for subscription in subscriptions:
            subscription.close()
        self._transport.close()

    # -- writes --------------------------------------------------------------------------------

    def append(
        self,
        path: str,
        data: Rows,
        *,
        writer: AppendWriter | None = None,
        on_error: OnError = "refuse",
        schema_id: int | None = None,
    ) -> dict[int, tuple[int, int]]:
        """Append rows to a log table; when the call returns, the rows are durable and visible.

        Columns are matched by name. Large data is sent in several requests, each of them atomic.
        Retries inside the call never store a row twice.

        Args:
            data: an Arrow table, record batch or reader, a pandas or polars frame, a DuckDB
                relation, any object with an Arrow export, a dict (one row) or a list of dicts. A
                value of another type is taken if no conversion changes it: 5 of a bigint fits an
                int. A stream is written in bounded memory: if a later part is refused, the earlier
                parts are stored.
            writer: number the batches under this writer; a call that raised `UnknownOutcomeError`
                may then be repeated with the same data and a copy of the writer's state.
            on_error: `reject`: rows that do not fit go to the table `path$rejected`, in one
                transaction with the fitting rows of their request, and texts are tried as numbers,
                dates and timestamps.
            schema_id: the schema version by which the columns are named; default: the version that
                this client has cached. A column renamed since keeps its values; a value for a
                column dropped since raises `ColumnDroppedError`.

        Returns:
            bucket -> (start offset, end offset) of the rows, for the buckets that got rows. Rows of
            concurrent writers may lie in between.

        Raises:
            SchemaMismatchError, UnknownColumnError: naming table, column and row; nothing stored.
        """
        operation = TransactionOperation.APPEND
        return self._write(
            path, data, operation, writer=writer, on_error=on_error, schema_id=schema_id
        )

    def upsert(
        self,
        path: str,
        data: Rows,
        *,
        columns: Sequence[str] | None = None,
        writer: AppendWriter | None = None,
        on_error: OnError = "refuse",
        schema_id: int | None = None,
    ) -> dict[int, tuple[int, int]]:
        """Insert rows, and replace rows of the same primary key; on return the rows are visible.

        Columns are matched by name. Rows of one key take effect in their order. Large data is sent
        in several requests, each of them atomic. Retries inside the call apply nothing twice.

        Args:
            data: rows, as for `append`; a column `__change_type` (`+I`, `-U`, `+U`, `-D`, or
                Debezium's `c`, `r`, `u`, `d`) makes the data a change stream, whose `-D` rows
                delete.
            columns: update only these columns, the key among them: existing rows keep all other
                values, new rows get null. `data` has exactly these columns.
            writer, on_error, schema_id: as for `append`; a partial update cannot reject rows.

        Returns:
            bucket -> (start, end) of the changes in the changelog, for the buckets that got rows;
            an empty range where no row changed.

        Raises:
            SchemaMismatchError, UnknownColumnError: nothing of the request in question is applied.
        """
        operation = TransactionOperation.UPSERT
        return self._write(
            path,
            data,
            operation,
            columns=columns,
            writer=writer,
            on_error=on_error,
            schema_id=schema_id,
        )

    def delete(
        self,
        path: str,
        keys: Rows,
        *,
        writer: AppendWriter | None = None,
        schema_id: int | None = None,
    ) -> dict[int, tuple[int, int]]:
        """Delete the rows with these keys; missing rows are no error; `keys` has the key columns
        only.

        Otherwise as `upsert`.
        """
        operation = TransactionOperation.DELETE
        return self._write(path, keys, operation, writer=writer, schema_id=schema_id)

    def _write(
        self,
        path: str,
        data: Rows,
        operation: TransactionOperation,
        *,
        columns: Sequence[str] | None = None,
        writer: AppendWriter | None,
        on_error: OnError = "refuse",
        schema_id: int | None,
    ) -> Ranges:
        rows_in = data if is_arrow(data) else normalized_rows(data, call=str(operation))
        column_names = None if columns is None else names(columns, argument="columns")
        if not isinstance(rows_in, pa.RecordBatchReader):
            return self._write_rows(
                path,
                rows_in,
                operation,
                columns=column_names,
                writer=writer,
                on_error=on_error,
                schema_id=schema_id,
            )
        ranges: Ranges = {}
        row_count = 0
        for rows in bounded_parts(rows_in, call=str(operation)):
            try:
                part = self._write_rows(
                    path,
                    rows,
                    operation,
                    columns=column_names,
                    writer=writer,
                    on_error=on_error,
                    schema_id=schema_id,
                    first_row=row_count,
                )
            except InvalidRequestError as error:
                if not row_count:
                    raise
                raise type(error)(
                    f"{error.message} (in the part that begins with row {row_count} of the stream;"
                    " all rows before it are written)"
                ) from error
            row_count += rows.num_rows
            for bucket, span in part.items():
                ranges[bucket] = (ranges.get(bucket, span)[0], span[1])
        return ranges

    def _write_rows(
        self,
        path: str,
        data: Arrow | PythonRows,
        operation: TransactionOperation,
        *,
        columns: Sequence[str] | None = None,
        writer: AppendWriter | None,
        on_error: OnError = "refuse",
        schema_id: int | None,
        first_row: int = 0,
    ) -> Ranges:
        if is_rejecting(on_error, columns, path=path):
            call = RejectingCall(
                self._transport,
                data,
                operation,
                writer,
                lambda table, rows: self._writes.write(table, rows, operation, writer=writer),
                first_row=first_row,
            )
            return self._with_table(path, lambda table: call.resume(table.in_version(schema_id)))
        # Parts that were stored before the cached table turned out to be stale are not written
        # again.
        written = WriteProgress()
        return self._with_table(
            path,
            lambda table: self._writes.write(
                table.in_version(schema_id),
                data,
                operation,
                columns=columns,
                writer=writer,
                written=written,
            ),
        )

    # -- reads ---------------------------------------------------------------------------------

    def fetch(
        self,
        path: str,
        bucket: int,
        offset: int,
        *,
        columns: Sequence[str] | None = None,
        max_bytes: int = reads.FETCH_BYTES_DEFAULT,
        max_wait_ms: int = 0,
        end_offset: int | None = None,
        schema_id: int | None = None,
        table_id: int | None = None,
    ) -> list[LogBatch]:
        """Return log rows of one bucket from `offset` on, about `max_bytes` of them.

        Rows come in version `schema_id` of the table's schema, by default the current one.

        Offsets of batches, of `positions` and of `committed` carry their table's id. A plain number
        is an offset of the table `table_id`, by default of the table that this client has cached
        under the name. Raises `TableNotFoundError` when the offset's table was dropped, even if a
        new table has the name.

        At the end of the log the call waits up to `max_wait_ms` for an append, and then returns an
        empty list. Raises `OffsetOutOfRangeError` naming the valid range.
        """
        if table_id is None:
            table_id = self._table_of(path, (offset, end_offset or 0), argument="fetch")
        return reads.fetch(
            self._transport,
            str(TablePath.parse(path)),
            bucket,
            offset,
            columns=columns,
            max_bytes=max_bytes,
            max_wait_ms=max_wait_ms,
            end_offset=end_offset,
            reached=self._reached,
            table_id=table_id,
            schema_id=schema_id,
        )

    def read_range(
        self,
        path: str,
        bucket: int,
        start: int,
        end: int,
        *,
        columns: Sequence[str] | None = None,
        page_bytes: int = reads.FETCH_BYTES_DEFAULT,
        schema_id: int | None = None,
        table_id: int | None = None,
    ) -> Iterator[LogBatch]:
        """Yield exactly the log rows [start, end) of one bucket, in order, page by page.

        Rows come in version `schema_id` of the table's schema, by default the version that is
        current at the first page. Plain numbers are offsets of the table `table_id`, by default of
        the table with this name now; see `fetch`.
        """
        if table_id is None:
            table_id = table_of_offsets((start, end), what="read_range")
        if table_id is None or schema_id is None:
            table = self.describe_table(path)
            table_id = table.table_id if table_id is None else table_id
            schema_id = table.schema_id if schema_id is None else schema_id
        return reads.read_range(
            self._transport,
            str(TablePath.parse(path)),
            bucket,
            start,
            end,
            columns=None if columns is None else names(columns, argument="columns"),
            page_bytes=page_bytes,
            reached=self._reached,
            table_id=table_id,
            schema_id=schema_id,
        )

    def subscribe(
        self,
        path: str | Sequence[str],
        *,
        start: Any = "latest",
        columns: Sequence[str] | None = None,
        schema_id: int | None = None,
        consumer: str | None = None,
    ) -> Subscription[Any]:
        """Follow a table, or several: log batches as they become durable, without end.

        The schema stays the present one, or version `schema_id`, also when the table's schema
        changes.

        The service pushes the rows. Within a bucket rows come in offset order, each once, also when
        the connection breaks in between. `start` is `latest`, `earliest` (the log's oldest row),
        `committed`, a time, or bucket -> offset for only those buckets, also as JSON text; of
        several tables it may be path -> start. Each batch is a `LogBatch`. When the table is
        dropped, the subscription ends with `TableNotFoundError`, even if a new table has the name.

        With a `consumer` the subscription reports its position to the service about once a second:
        `streamhouse consumers` shows it. A batch counts as read when the next batch is requested.
        `committed` begins at the consumer's last reported position, or at the log's oldest row;
        then only the subscription's `commit` marks batches as read.
        """
        return self._subscribed(
            path,
            start,
            schema_id,
            lambda table, begin: self._log_source(
                table, begin, columns=columns, schema_id=schema_id, consumer=consumer
            ),
        )

    def _subscribed(
        self,
        path: str | Sequence[str],
        start: Any,
        schema_id: int | None,
        source: Callable[[str, Any], Source[_B]],
    ) -> Subscription[_B]:
        starts = starts_of(path, start)
        if schema_id is not None and len(starts) > 1:
            raise InvalidRequestError("subscribe: 'schema_id' is for one table, not for several")
        subscription = Subscription([source(table, begin) for table, begin in starts.items()])
        with self._subscriptions_lock:
            self._subscriptions.add(subscription)
        return subscription

    def _log_source(
        self,
        path: str,
        start: LogStart,
        *,
        columns: Sequence[str] | None,
        schema_id: int | None,
        consumer: str | None,
    ) -> Source[LogBatch]:
        if consumer:  # without a letter it is refused below
            check_consumer_name(consumer, table=path)
        return log_source(
            self,
            self.describe_table(path),
            start,
            columns=None if columns is None else names(columns, argument="columns"),
            schema_id=schema_id,
            consumer=consumer,
            reached=self._reached,
            transport=self._transport,
        )

    def lookup(self, path: str, keys: Rows, *, columns: Sequence[str] | None = None) -> pa.Table:
        """Return one row for each key, in the order of `keys`; a missing row is all null.

        The column `__found` tells rows from missing rows. Acknowledged writes are seen. `keys` has
        the key columns, in any form that `append` takes.
        """
        name = str(TablePath.parse(path))
        column_names = None if columns is None else names(columns, argument="columns")

        def look_up(rows: Arrow, table: TableInfo | None = None) -> pa.Table:
            return reads.lookup(self._transport, name, rows, columns=column_names, table=table)

        return self._with_named_table(path, keys, look_up)

    def lookup_one(self, /, path: str, **key: Any) -> dict[str, Any] | None:
        """Return the row with this key, as in `lookup_one("airlines", carrier="UA")`, or None."""
        return self._with_table(
            path,
            lambda table: reads.lookup_one(
                self._transport, table, key, describe=lambda: self.describe_table(path)
            ),
        )

    def prefix_lookup(
        self,
        path: str,
        keys: Rows,
        *,
        limit: int = 1_000,
        columns: Sequence[str] | None = None,
    ) -> pa.Table:
        """Return the rows whose leading key columns equal a row of `keys`, in key order.

        Prefix after prefix, at most `limit` rows of each.
        """
        name = str(TablePath.parse(path))
        row_limit = whole(limit, argument="limit", least=1)
        column_names = None if columns is None else names(columns, argument="columns")

        def look_up(rows: Arrow, table: TableInfo | None = None) -> pa.Table:
            return reads.prefix_lookup(
                self._transport, name, rows, limit=row_limit, columns=column_names, table=table
            )

        return self._with_named_table(path, keys, look_up)

    def _with_named_table(
        self, path: str, keys: Rows, look_up: Callable[..., pa.Table]
    ) -> pa.Table:
        """Look keys up with their table, if the answer is one of any process's answers."""
        if not self._transport.any_process.is_used:
            return self._with_keys(path, keys, look_up)
        return self._with_keys(
            path,
            keys,
            lambda rows: self._with_table(path, lambda table: look_up(rows, table)),
        )

    def _with_keys(self, path: str, keys: Rows, look_up: Callable[[Arrow], pa.Table]) -> pa.Table:
        rows_in: NormalizedRows = keys if is_arrow(keys) else normalized_rows(keys, call="lookup")
        if isinstance(rows_in, PythonRows):
            rows = rows_in.rows
            return self._with_table(path, lambda table: look_up(keys_as_arrow(table, rows)))
        if isinstance(rows_in, pa.RecordBatchReader):
            rows_in = pa.Table.from_batches(batches_of(rows_in, call="lookup"), rows_in.schema)
        try:
            return look_up(rows_in)
        except SchemaMismatchError:
            # Nearly all keys have their table's types already: the table is described only on a
            # mismatch.
            table = self.describe_table(path)
            casts = castings(rows_in.schema, table.schema)
            if not casts:
                raise
            return look_up(fitted(rows_in, casts, table=str(table.path)))
