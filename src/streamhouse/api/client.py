"""The client applications use: the storage service's, plus reading both tiers without Spark."""

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
    from streamhouse.reading.plan.table_read import TableScan

__all__ = ["StreamhouseClient"]


class StreamhouseClient(ApplicationClient):
    """A connection to a Streamhouse service; see `ApplicationClient` for the rest."""

    def read(
        self,
        path: str,
        *,
        columns: Sequence[str] | None = None,
        where: str | None = None,
        **options: object,
    ) -> pa.Table:
        """Return a table's rows, lake and log together, as of one instant.

        Rows come in no particular order. Everything is read into memory.

        Args:
            path: `database.table`, or a part of it as in `database.table$log`.
            columns: only these columns, in this order.
            where: only rows for which this SQL predicate is true.
            options: options of Spark's batch read, as in `asOfTimestamp="2026-01-31T12:00:00Z"`.
        """
        # Applications that only write never load what reading the lake needs.
        from streamhouse.reading.plan.table_read import read_table

        return read_table(StorageClient.of(self), self._read_options(path, columns, where, options))

    def scan(
        self,
        path: str,
        *,
        columns: Sequence[str] | None = None,
        where: str | None = None,
        limit: int | None = None,
        **options: object,
    ) -> TableScan:
        """Read a table's rows batch after batch: those of `read`, in bounded memory.

        The rows are those of the instant of the call, also while others write. They come in no
        particular order. What takes Arrow streams takes the result: pyarrow, DuckDB, Polars.

            with client.scan("shop.orders", columns=["id"], where="price > 100") as rows:
                for batch in rows:
                    print(batch.num_rows)

        Args:
            path: `database.table`, or a part of it as in `database.table$log`.
            columns: only these columns, in this order.
            where: only rows for which this SQL predicate is true.
            limit: no more rows than this; any of them.
            options: options of Spark's batch read, as in `asOfTimestamp="2026-01-31T12:00:00Z"`.
        """
        from streamhouse.reading.plan.table_read import scan_table

        given = self._read_options(path, columns, where, options)
        return scan_table(StorageClient.of(self), given, limit=limit)

    def count(self, path: str, *, where: str | None = None, **options: object) -> int:
        """Count a table's rows as of one instant.

        The service knows how many keys a primary key table has. Rows of a log are counted by their
        offsets, and files of the lake by what the lake says of them. Rows are read only where those
        do not tell: with `where`, and of an earlier instant.

            client.count("shop.orders")

        Args:
            path: `database.table`, or a part of it as in `database.table$log`.
            where: only rows for which this SQL predicate is true.
            options: options of Spark's batch read, as in `asOfTimestamp="2026-01-31T12:00:00Z"`.
        """
        from streamhouse.reading.plan.table_read import count_rows

        given = self._read_options(path, None, where, options)
        is_whole = where is None and not options and not given.connection.name.part
        if is_whole and self.describe_table(path).is_primary_key_table:
            return super().count(path)
        return count_rows(StorageClient.of(self), given)

    def query(
        self,
        statement: str,
        args: Sequence[Any] | Mapping[str, Any] | None = None,
        *,
        memory_limit: str | None = None,
        **options: object,
    ) -> pa.Table:
        """Return what a SELECT in DuckDB's SQL finds; `pip install 'pyspark-streamhouse[sql]'`.

        Tables of the service are named `database.table`, or `table` in the default database (for
        DuckDB `default` is a word of its own: `"default"`), with a part `database."table$part"`. Of
        each only the columns and rows are read that the statement needs, as of one instant a table;
        the result is in memory as a whole. Times without a zone are in UTC, or in `timeZone`.

            client.query("SELECT region, sum(price) FROM shop.orders GROUP BY region")
            client.query("SELECT * FROM shop.orders WHERE id = ?", [7])

        Args:
            statement: one SELECT, with joins, CTEs and all that DuckDB has, also its own files as
                in `FROM 'prices.parquet'`.
            args: values of `?`, or by name of `$name`.
            memory_limit: how much memory DuckDB may take, as in `"8GB"`, by default `2GB`; beyond
                that it uses temporary files.
            options: options of Spark's batch read for every table, as in
                `asOfTimestamp="2026-01-31T12:00:00Z"`.
        """
        require("sql", "client.query")
        from streamhouse.reading.duckdb.duckdb_query import MEMORY_LIMIT, query_tables

        limit = MEMORY_LIMIT if memory_limit is None else memory_limit
        return query_tables(StorageClient.of(self), statement, args, options, memory_limit=limit)

    def _read_options(
        self,
        path: str,
        columns: Sequence[str] | None,
        where: str | None,
        options: Mapping[str, object],
    ) -> ReadOptions:
        from streamhouse.reading.options.options import BATCH, as_options, read_options

        given = as_options(options) | self._asked(path, columns, where)
        return read_options(given, use=BATCH)

    def _asked(self, path: str, columns: Sequence[str] | None, where: str | None) -> dict[str, str]:
        """Return a read's arguments as options of the format."""
        from streamhouse.reading.options.quoted_names import quoted_list

        asked = {"table": path, "endpoint": self.endpoint}
        if columns is not None:
            asked["columns"] = quoted_list(names(columns, argument="columns"))
        if where is not None:
            asked["where"] = where
        return asked

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

    # A token, a time, path -> start, or JSON text: what they say decides.
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
        """Follow a table, or several: batches of rows as they become durable, for ever.

        What is returned is iterated over, polled, closed from any thread, and closed with the
        client; a batch says its `table`.

        `start` takes what option `startingOffsets` of a read does, and `committed`: `latest`,
        `earliest` (the log's oldest row), a time, or bucket -> offset, as in `{0: 12, 1: "latest"}`
        or its JSON text, for only those buckets. Such offsets are of the table that has the name
        now, unless they know theirs, as offsets of batches do, and `{"table_id": 7, "offsets":
        {"0": 12}}`. With `full` it is the rows that the table has, from the lake and from the log,
        then live ones, without a gap. Of a primary key table these are the rows of one lake
        snapshot as `+I`, then every change, by `__change_type`. Of several tables `start` may be
        path -> start. A table that is dropped ends the subscription with `TableNotFoundError`,
        also if another one has its name.

        With `full` each batch has a `token`, a JSON object. Give it, or its text, as `start` to go
        on after that batch, also in another process, also in the middle of the history.

        Args:
            columns: only these columns, in this order.
            schema_id: rows come in this version of the table's schema, by default the current one.
            consumer: the name under which the service is told how far the caller is. A batch counts
                as read when the next one is asked for; with `committed`, by `commit` alone.
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
        from streamhouse.reading.follow.full_subscription import subscribe_full

        given = self._asked(path, columns, where)
        if consumer is not None:
            given["consumer"] = consumer
        return Source(
            path,
            subscribe_full(StorageClient.of(self), given, token=token, schema_id=schema_id),
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
        """Try the rejected rows of a table again: what fits moves into it, exactly once.

        Rows move in transactions that write them to the table and delete them from
        `path$rejected`, so a replay may be broken off, repeated, or run twice at a time.

        Args:
            path: the table, not its rejected rows.
            fix: is called with each row, as a dict of JSON values, and returns the row to try, or
                None to leave it where it is.

        Returns:
            how many rows moved and how many are left.
        """
        return replay_rejected(self, path, read=self.read, fix=fix)
