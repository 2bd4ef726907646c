"""The client of applications: the service's client, plus reads of log and lake without Spark."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import pyarrow as pa

from streamhouse.client import (
    ApplicationClient,
    LogBatch,
    LogStart,
    Source,
    StopSignal,
    StorageClient,
    Subscription,
)
from streamhouse.client.values.arguments import names
from streamhouse.client.writing.replay import Replayed, replay_rejected
from streamhouse.core.errors import InvalidRequestError
from streamhouse.core.extras import require

if TYPE_CHECKING:
    from streamhouse.reading.follow.full_subscription import TableBatch
    from streamhouse.reading.options.options import ReadOptions
    from streamhouse.reading.plan.pinned_table import TableScan

__all__ = ["StreamhouseClient"]


# `self` is positional where a call has `**options`: `AsyncStreamhouseClient` wraps the calls.
class StreamhouseClient(ApplicationClient):
    """A connection to a Streamhouse service. Thread-safe; call `close`, or use a `with` block.

        with StreamhouseClient("http://127.0.0.1:8765") as client:
            client.create_table("clicks", "id bigint, shop bigint", if_not_exists=True)
            client.append("clicks", [{"id": 1, "shop": 5}])
            print(client.read("clicks", where="shop = 5"))

    Args:
        endpoint: the service's URL, or the URLs of the service's processes with commas between, and
            the client finds the owner; default: `STREAMHOUSE_ENDPOINT`, else http://127.0.0.1:8765.
        token: the bearer token; default: `STREAMHOUSE_TOKEN`, else none.
        timeout_s: the most time of a call, retries included, besides the waits in its arguments.
            With several endpoints: the most time for the answer of one process. The search for the
            owner takes 60 s at most, or `#failover_s=SECONDS` at the end of an endpoint.
        ca_file: certificates of the CAs for an `https` endpoint; default:
            `STREAMHOUSE_CA_FILE`, else the machine's CAs.
        read_from: `any`: standbys among the endpoints answer lookups as well, never older than what
            this client has written or read, and fetches of scans; default: the `#read_from=` of an
            endpoint, else `owner`.

    Every call raises a `StreamhouseError` with a message of one sentence, and `UnavailableError`
    when the service cannot be reached.
    """

    def read(
        self,
        /,
        path: str,
        *,
        columns: Sequence[str] | None = None,
        where: str | None = None,
        **options: object,
    ) -> pa.Table:
        """Return a table's rows, lake and log together, as of one instant.

        Rows come in no particular order. All rows are read into memory.

        Args:
            path: `database.table`, or a part of it as in `database.table$log`.
            columns: only these columns, in this order.
            where: only rows for which this SQL predicate is true.
            options: options of Spark's batch read, as in `asOfTimestamp="2026-01-31T12:00:00Z"`.
        """
        from streamhouse.reading.plan.pinned_table import read_table  # noqa: PLC0415 - an application that only writes loads no reader

        return read_table(
            StorageClient.of(self), self._read_options("read", path, columns, where, options)
        )

    def scan(
        self,
        /,
        path: str,
        *,
        columns: Sequence[str] | None = None,
        where: str | None = None,
        limit: int | None = None,
        **options: object,
    ) -> TableScan:
        """Read a table's rows batch after batch: the rows of `read`, in bounded memory.

        The rows are as of the instant of the call, also during writes, in no particular order.
        Any consumer of Arrow streams takes the result: pyarrow, DuckDB, Polars.

            with client.scan("shop.orders", columns=["id"], where="price > 100") as rows:
                for batch in rows:
                    print(batch.num_rows)

        Args:
            path: `database.table`, or a part of it as in `database.table$log`.
            columns: only these columns, in this order.
            where: only rows for which this SQL predicate is true.
            limit: at most this many rows, in no particular choice.
            options: options of Spark's batch read, as in `asOfTimestamp="2026-01-31T12:00:00Z"`.
        """
        from streamhouse.reading.plan.pinned_table import scan_table  # noqa: PLC0415 - an application that only writes loads no reader

        read_options = self._read_options("scan", path, columns, where, options)
        return scan_table(StorageClient.of(self), read_options, limit=limit)

    def count(self, /, path: str, *, where: str | None = None, **options: object) -> int:
        """Count a table's rows as of one instant.

        The service counts the keys of a primary key table. Rows of a log are counted by
        offsets, rows of lake files by the lake's metadata. Rows are read only with `where`, or for
        an earlier instant.

            client.count("shop.orders")

        Args:
            path: `database.table`, or a part of it as in `database.table$log`.
            where: only rows for which this SQL predicate is true.
            options: options of Spark's batch read, as in `asOfTimestamp="2026-01-31T12:00:00Z"`.
        """
        from streamhouse.reading.plan.pinned_table import count_rows  # noqa: PLC0415 - an application that only writes loads no reader

        read_options = self._read_options("count", path, None, where, options)
        is_whole = where is None and not options and not read_options.connection.name.part
        if is_whole and self.describe_table(path).is_primary_key_table:
            return super().count(path)
        return count_rows(StorageClient.of(self), read_options)

    def query(
        self,
        /,
        statement: str,
        args: Sequence[Any] | Mapping[str, Any] | None = None,
        *,
        memory_limit: str | None = None,
        **options: object,
    ) -> pa.Table:
        """Return the rows of a SELECT in DuckDB's SQL; `pip install 'pyspark-streamhouse[sql]'`.

        Tables of the service are named `database.table`, or `table` in the default database (for
        DuckDB `default` is a keyword: `"default"`), with a part `database."table$part"`. Only the
        needed columns and rows are read, each table as of one instant; the whole result is in
        memory. Times without a zone are in UTC, or in `timeZone`.

            client.query("SELECT region, sum(price) FROM shop.orders GROUP BY region")
            client.query("SELECT * FROM shop.orders WHERE id = ?", [7])

        Args:
            statement: one SELECT, with joins, CTEs and all else of DuckDB, also files as in
                `FROM 'prices.parquet'`.
            args: values of `?`, or a mapping with the values of `$name`.
            memory_limit: the most memory of DuckDB, as in `"8GB"`, by default `2GB`; beyond
                the limit DuckDB uses temporary files.
            options: options of Spark's batch read for every table, as in
                `asOfTimestamp="2026-01-31T12:00:00Z"`.
        """
        require("sql", "client.query")
        from streamhouse.reading.duckdb.duckdb_query import MEMORY_LIMIT, query_tables  # noqa: PLC0415 - an application that only writes loads no reader

        limit = MEMORY_LIMIT if memory_limit is None else memory_limit
        return query_tables(StorageClient.of(self), statement, args, options, memory_limit=limit)

    def _read_options(
        self,
        call: str,
        path: str,
        columns: Sequence[str] | None,
        where: str | None,
        options: Mapping[str, object],
    ) -> ReadOptions:
        from streamhouse.reading.options.options import BATCH, call_options, read_options  # noqa: PLC0415 - an application that only writes loads no reader

        all_options = call_options(options, call=call) | self._format_options(path, columns, where)
        return read_options(all_options, use=BATCH)

    def _format_options(
        self, path: str, columns: Sequence[str] | None, where: str | None
    ) -> dict[str, str]:
        """Return a read's arguments as options of the format."""
        from streamhouse.reading.options.quoted_names import quoted_list  # noqa: PLC0415 - an application that only writes loads no reader

        format_options = {"table": path, "endpoint": self.endpoint}
        if columns is not None:
            format_options["columns"] = quoted_list(names(columns, argument="columns"))
        if where is not None:
            format_options["where"] = where
        return format_options

    @overload
    def subscribe(
        self,
        path: str | Sequence[str],
        *,
        start: LogStart = "latest",
        columns: Sequence[str] | None = None,
        schema_id: int | None = None,
        consumer: str | None = None,
    ) -> Subscription[LogBatch]: ...

    @overload
    def subscribe(
        self,
        path: str | Sequence[str],
        *,
        start: Literal["full"],
        columns: Sequence[str] | None = None,
        schema_id: int | None = None,
        consumer: str | None = None,
        where: str | None = None,
    ) -> Subscription[TableBatch]: ...

    # A token, a time, path -> start, or JSON text: the value decides.
    @overload
    def subscribe(
        self,
        path: str | Sequence[str],
        *,
        start: str | Mapping[str, Any],
        columns: Sequence[str] | None = None,
        schema_id: int | None = None,
        consumer: str | None = None,
        where: str | None = None,
    ) -> Subscription[Any]: ...

    def subscribe(
        self,
        path: str | Sequence[str],
        *,
        start: Any = "latest",
        columns: Sequence[str] | None = None,
        schema_id: int | None = None,
        consumer: str | None = None,
        where: str | None = None,
    ) -> Subscription[Any]:
        """Follow a table, or several: batches of rows as they become durable, without end.

        Iterate over the result, or poll it; any thread may close it, and so does the client. A
        batch names its `table`.

        `start` takes the values of a read's option `startingOffsets`, and `committed`: `latest`,
        `earliest` (the log's oldest row), a time, or bucket -> offset, as in `{0: 12, 1: "latest"}`
        or its JSON text, for only these buckets. Such offsets are of the present table with the
        name, unless they carry a table id, as offsets of batches do, and `{"table_id": 7,
        "offsets": {"0": 12}}`. `full` delivers all rows of the table, from the lake and from the
        log, then live rows, without a gap. For a primary key table these are the rows of one lake
        snapshot as `+I`, then every change, by `__change_type`. For several tables `start` may be
        path -> start. When a table is dropped, the subscription ends with `TableNotFoundError`,
        even if a new table has the name.

        With `full` each batch has a `token`, a JSON object. Pass the token, or its text, as `start`
        to resume after the batch, also in another process, also in the middle of the history.

        Args:
            columns: only these columns, in this order.
            schema_id: rows come in this version of the table's schema, by default the current one.
            consumer: the name under which the position is reported to the service. A batch counts
                as read when the next batch is requested; with `committed`, only by `commit`.
            where: with `full`, only rows for which this SQL predicate is true.
        """

        def source(table: str, begin: Any) -> Source[Any]:
            is_token = isinstance(begin, Mapping) and {"version", "offsets"} <= begin.keys()
            is_full = isinstance(begin, str) and begin.strip().lower() == "full"
            if is_full or is_token:
                return self._full_source(
                    table,
                    begin if is_token else None,
                    columns=columns,
                    schema_id=schema_id,
                    consumer=consumer,
                    where=where,
                )
            if where is not None:
                raise InvalidRequestError(
                    "subscribe: 'where' is for start='full', or a token of such a subscription"
                )
            return self._log_source(
                table, begin, columns=columns, schema_id=schema_id, consumer=consumer
            )

        return self._subscribed(path, start, schema_id, source)

    def _full_source(
        self,
        path: str,
        token: Mapping[str, Any] | None,
        *,
        columns: Sequence[str] | None,
        schema_id: int | None,
        consumer: str | None,
        where: str | None,
    ) -> Source[TableBatch]:
        from streamhouse.reading.follow.full_subscription import subscribe_full  # noqa: PLC0415 - an application that only writes loads no reader

        format_options = self._format_options(path, columns, where)
        if consumer is not None:
            format_options["consumer"] = consumer
        return Source(
            path,
            subscribe_full(
                StorageClient.of(self), format_options, token=token, schema_id=schema_id
            ),
            stop=StopSignal(),
            no_commit=(
                f"the subscription to '{path}' began with start='full', which commits nothing: keep"
                " the 'token' of the last batch, and begin with it"
            ),
        )

    def replay_rejected(
        self,
        path: str,
        *,
        fix: Callable[[dict[str, Any]], Mapping[str, Any] | None] | None = None,
    ) -> Replayed:
        """Try the rejected rows of a table again: fitting rows move into the table, exactly once.

        A transaction writes rows to the table and deletes them from `path$rejected`. So a replay
        may be interrupted, repeated, or run twice at a time.

        Args:
            path: the table, not the table of its rejected rows.
            fix: called with each row, as a dict of JSON values; returns the row to try, or None to
                leave the row rejected.

        Returns:
            the numbers of moved rows and of rows still rejected.
        """
        return replay_rejected(self, path, read=self.read, fix=fix)
