"""ApplicationClient: what an application asks of the storage service.

What is said of tables as a whole is in `TableCalls`, and of transactions in `TransactionCalls`;
here are the rows: writes and reads. What workers and readers of this package ask beside it is in
`StorageClient`.
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
from streamhouse.client.http.endpoint import with_ca_file
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
    PythonRows,
    Rows,
    Taken,
    batches_of,
    is_arrow,
    taken,
)
from streamhouse.client.writing._rejects import OnError, RejectingCall, is_rejecting
from streamhouse.client.writing._request_batches import bounded_parts
from streamhouse.client.writing.writes import AppendWriter, Ranges, TableWrites, Written
from streamhouse.core.errors import InvalidRequestError, SchemaMismatchError
from streamhouse.core.model.casts.lossless import castings, fitted
from streamhouse.core.model.offsets import (
    table_of_offsets,
)
from streamhouse.core.model.table import TableInfo, TablePath
from streamhouse.core.model.transaction import TransactionOperation

__all__ = ["DEFAULT_ENDPOINT", "ENDPOINT_VARIABLE", "TOKEN_VARIABLE", "ApplicationClient"]

DEFAULT_ENDPOINT: Final = "http://127.0.0.1:8765"
ENDPOINT_VARIABLE: Final = "STREAMHOUSE_ENDPOINT"
TOKEN_VARIABLE: Final = "STREAMHOUSE_TOKEN"

_Self = TypeVar("_Self", bound="ApplicationClient")
_B = TypeVar("_B")


class ApplicationClient(TransactionCalls):
    """A connection to one storage service. Thread-safe; close it or use it in a `with` block.

    Args:
        endpoint: the service's URL, or those of its processes with commas between them: the one
            that is the owner is found; default: `STREAMHOUSE_ENDPOINT`, else http://127.0.0.1:8765.
        token: the bearer token; default: `STREAMHOUSE_TOKEN`, else none.
        timeout_s: how long one call may take, retries included, besides waits it asks for. With
            several endpoints it is how long one process may take to answer; who is the owner is
            looked for 60 s, or for what `#failover_s=SECONDS` at the end of an endpoint says.
        ca_file: certificates of the CAs that may vouch for an `https` endpoint; default:
            `STREAMHOUSE_CA_FILE`, else those the machine trusts.

    Every call raises a `StreamhouseError` whose message is one sentence, and `UnavailableError`
    when the service cannot be reached.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        token: str | None = None,
        timeout_s: float = 30.0,
        ca_file: str | None = None,
    ) -> None:
        endpoint = endpoint or os.environ.get(ENDPOINT_VARIABLE) or DEFAULT_ENDPOINT
        if not isinstance(endpoint, str):
            raise InvalidRequestError(
                f"the endpoint is a URL, as {DEFAULT_ENDPOINT}, not {endpoint!r:.80}"
            )
        super().__init__(
            HttpTransport(
                endpoint if ca_file is None else with_ca_file(endpoint, ca_file),
                token=token or os.environ.get(TOKEN_VARIABLE) or None,
                timeout_s=seconds(timeout_s, what="timeout_s"),
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
        """The service's URL or URLs, with `#ca=FILE` if a CA file vouches for it."""
        return self._transport.endpoint_text

    def endpoint_of(self, path: str) -> str:
        """Return the URL at which the table is asked for, as far as is known."""
        return self._transport.routes.of("", table=str(TablePath.parse(path)))

    def _remember(self, table: TableInfo) -> TableInfo:
        known = self._known(str(table.path))
        if known is not None and known.table_id != table.table_id:
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
        """Append rows to a log table; when it returns they are durable and visible.

        Columns are matched by name. Large data is sent in several requests, each of them atomic.
        Retries inside the call never store a row twice.

        Args:
            data: an Arrow table, record batch or reader, a pandas or polars frame, a DuckDB
                relation or whatever lends its columns to Arrow, a dict (one row) or a list of them.
                Values may be of another type where they stay the same: 5 of a bigint fits an int.
                A stream is written in bounded memory: if it is refused later on, what came before
                is there.
            writer: number the batches under this writer; a call that raised `UnknownOutcomeError`
                may then be repeated with the same data and a copy of the writer's state.
            on_error: `reject`: rows that do not fit go to the table `path$rejected`, in one
                transaction with the others of their request, and texts are tried as numbers, dates
                and timestamps.
            schema_id: the version of the table's schema that the columns are named by; default: the
                one that this client knows. A column that was renamed since goes where it went, and
                a value of one that was dropped since raises `ColumnDroppedError`.

        Returns:
            bucket -> (start offset, end offset) of the rows, for the buckets that got any; when
            other writers append meanwhile, rows of theirs may lie between.

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
        """Insert rows, and replace those with the same primary key; on return that is visible.

        Columns are matched by name. Rows of one key take effect in their order. Large data is sent
        in several requests, each of them atomic. Retries inside the call apply nothing twice.

        Args:
            data: rows, as for `append`; a column `__change_type` (`+I`, `-U`, `+U`, `-D`, or
                Debezium's `c`, `r`, `u`, `d`) makes it a change stream, whose `-D` rows delete.
            columns: update only these columns, the key among them: existing rows keep the others,
                new rows have null there. `data` has exactly these columns.
            writer, on_error, schema_id: as for `append`; there is no partial update that rejects.

        Returns:
            bucket -> (start, end) of the changes in the changelog, for the buckets rows went to; an
            empty range where no row was different.

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
        """Delete the rows with these keys, those that exist; `keys` has the key columns only.

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
        given = data if is_arrow(data) else taken(data, call=str(operation))
        chosen = None if columns is None else names(columns, what="columns")
        if not isinstance(given, pa.RecordBatchReader):
            return self._write_rows(
                path,
                given,
                operation,
                columns=chosen,
                writer=writer,
                on_error=on_error,
                schema_id=schema_id,
            )
        ranges: Ranges = {}
        row_count = 0
        for rows in bounded_parts(given, call=str(operation)):
            try:
                part = self._write_rows(
                    path,
                    rows,
                    operation,
                    columns=chosen,
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
            return self._with_table(path, lambda table: call.go_on(table.in_version(schema_id)))
        # What was stored before the table turned out to be otherwise is not written again.
        written = Written()
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

        Offsets of batches, of `positions` and of `committed` know their table. A plain number is
        one of the table `table_id`, by default of the one that this client knows by the name.
        Raises `TableNotFoundError` when that was dropped and another one has its name.

        At the end of the log it waits up to `max_wait_ms` for an append and returns an empty list
        if none comes. Raises `OffsetOutOfRangeError` naming the valid range.
        """
        if table_id is None:
            table_id = self._table_of(path, (offset, end_offset or 0), what="fetch")
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

        Rows come in version `schema_id` of the table's schema, by default the current one when
        the first page is read. Plain numbers are offsets of the table `table_id`, by default of
        the one that has the name now; see `fetch`.
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
            columns=columns,
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
        """Follow a table, or several: log batches as they become durable, for ever.

        The schema stays what it is now, or version `schema_id`, also when the table's changes.

        The service pushes; within a bucket rows come in offset order, each once, also when the
        connection breaks in between. `start` is `latest`, `earliest` (the log's oldest row),
        `committed`, a time, or bucket -> offset for only those buckets, also as JSON text; of
        several tables it may be path -> start. Each batch is a `LogBatch`. When the table is
        dropped it ends with `TableNotFoundError`, also if another one has its name.

        Under the name `consumer`, if it is given, the service is told about once a second how far
        the caller is: `streamhouse consumers` shows it. A batch counts as read when the next one is
        asked for. `committed` begins where this consumer was told to be last, or with the log's
        oldest row; then a batch counts as read by `commit` of the subscription alone.
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
        made = Subscription([source(table, begin) for table, begin in starts.items()])
        with self._subscriptions_lock:
            self._subscriptions.add(made)
        return made

    def _log_source(
        self,
        path: str,
        start: LogStart,
        *,
        columns: Sequence[str] | None,
        schema_id: int | None,
        consumer: str | None,
    ) -> Source[LogBatch]:
        return log_source(
            self,
            self.describe_table(path),
            start,
            columns=None if columns is None else names(columns, what="columns"),
            schema_id=schema_id,
            consumer=consumer,
            reached=self._reached,
            transport=self._transport,
        )

    def lookup(self, path: str, keys: Rows, *, columns: Sequence[str] | None = None) -> pa.Table:
        """Return one row for each key, in the order of `keys`, all null where there is none.

        The column `__found` says which are there. Acknowledged writes are seen. `keys` has the key
        columns, in any form that `append` takes.
        """
        name = str(TablePath.parse(path))
        chosen = None if columns is None else names(columns, what="columns")
        return self._by_keys(
            path, keys, lambda rows: reads.lookup(self._transport, name, rows, columns=chosen)
        )

    def lookup_one(self, path: str, **key: Any) -> dict[str, Any] | None:
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
        most = whole(limit, what="limit", least=1)
        chosen = None if columns is None else names(columns, what="columns")
        return self._by_keys(
            path,
            keys,
            lambda rows: reads.prefix_lookup(
                self._transport, name, rows, limit=most, columns=chosen
            ),
        )

    def _by_keys(self, path: str, keys: Rows, ask: Callable[[Arrow], pa.Table]) -> pa.Table:
        given: Taken = keys if is_arrow(keys) else taken(keys, call="lookup")
        if isinstance(given, PythonRows):
            rows = given.rows
            return self._with_table(path, lambda table: ask(keys_as_arrow(table, rows)))
        if isinstance(given, pa.RecordBatchReader):
            given = pa.Table.from_batches(batches_of(given, call="lookup"), given.schema)
        try:
            return ask(given)
        except SchemaMismatchError:
            # Nearly all keys have the types of their table, and need no one to ask for them.
            table = self.describe_table(path)
            casts = castings(given.schema, table.schema)
            if not casts:
                raise
            return ask(fitted(given, casts, table=str(table.path)))
