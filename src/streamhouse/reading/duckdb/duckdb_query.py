"""`StreamhouseClient.query`: DuckDB's SQL over tables of a service, without Spark."""

from __future__ import annotations

import contextvars
import json
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from streamhouse.client import STOP, StopSignal, StorageClient
from streamhouse.core.errors import (
    InvalidNameError,
    InvalidRequestError,
    NotFoundError,
    StreamhouseError,
    UnavailableError,
)
from streamhouse.core.model.values.zone import parse_zone
from streamhouse.core.threads import Pool
from streamhouse.reading.duckdb._queried_tables import Counted, TableDataset, counted
from streamhouse.reading.duckdb._query_database import (
    MEMORY_LIMIT,
    QueryDatabase,
    query_database,
    registered,
)
from streamhouse.reading.duckdb._statement_names import (
    NameOfTable,
    columns_named,
    has_joins,
    tables_named,
)
from streamhouse.reading.options.options import BATCH, call_options, read_options
from streamhouse.reading.plan._read_cut import ReadPlan
from streamhouse.reading.plan.pinned_table import PinnedTable

__all__ = ["MEMORY_LIMIT", "query_tables"]

_THREADS_MAX: Final = 8
_LOOK_S: Final = 0.1
_T = TypeVar("_T")
_R = TypeVar("_R")

_OF_TABLES: Final = ("table", "columns", "where")
_CATALOGS_OF_DUCKDB: Final = ("information_schema", "pg_catalog")
_OWN_TABLES: Final = (
    "{} tells of DuckDB's own tables; client.list_tables() and client.describe_table() tell of the"
    " service's"
)
_HOUR_US: Final = 3_600_000_000
_NO_SELECT: Final = "Only SELECT statements"
"""How DuckDB begins to say that a statement is none."""


def query_tables(
    client: StorageClient,
    statement: str,
    args: Sequence[Any] | Mapping[str, Any] | None,
    options: Mapping[str, object],
    *,
    memory_limit: str = MEMORY_LIMIT,
) -> pa.Table:
    """Return the result of a SELECT in DuckDB's SQL; see `StreamhouseClient.query`.

    An interrupt of the caller, or the stop signal of the context, ends the query.
    """
    for key in options:
        if key.lower() in _OF_TABLES:
            raise InvalidRequestError(f"query: option '{key}' is said by the statement; remove it")
    query_options = call_options(options, call="query")
    zone = _zone(read_options({"table": "db.t", **query_options}, use=BATCH).time_zone)
    with (
        tempfile.TemporaryDirectory(prefix="streamhouse-query-") as folder,
        query_database(memory_limit) as database,
        database.connection() as connection,
    ):
        connection.execute(f"SET TimeZone = {_text(zone)}")
        connection.execute(f"SET temp_directory = {_text(folder)}")
        try:
            connection.execute(f"SET memory_limit = {_text(memory_limit)}")
        except duckdb.Error as error:
            raise InvalidRequestError(
                f"query: memory_limit is {memory_limit!r}, but must be as in '2GB': {error}"
            ) from None
        query = _Query(client, database, connection, statement, args, query_options, Path(folder))
        return _stoppable(connection, query.result)


def _stoppable(connection: duckdb.DuckDBPyConnection, call: Callable[[], pa.Table]) -> pa.Table:
    """Call on a separate thread: DuckDB cannot cancel a call of the same thread."""
    stop_asked, stop = STOP.get(), StopSignal()
    context = contextvars.copy_context()
    context.run(STOP.set, stop)
    with Pool("streamhouse-query", 1) as threads:
        waiting = threads.submit(context.run, call)
        try:
            while not wait([waiting], None if stop_asked is None else _LOOK_S).done:
                if stop_asked is not None and stop_asked.is_set():
                    raise UnavailableError("query: it was broken off")
        except BaseException:
            stop.set()
            # It may be between two calls of DuckDB, which take no note of it.
            while not wait([waiting], _LOOK_S).done:
                connection.interrupt()
            raise
        return waiting.result()


@dataclass(frozen=True, slots=True)
class _Query:
    """One statement over tables of a service; `folder` is for its files."""

    client: StorageClient
    database: QueryDatabase
    connection: duckdb.DuckDBPyConnection
    statement: str
    args: Sequence[Any] | Mapping[str, Any] | None
    options: Mapping[str, str]
    folder: Path

    def result(self) -> pa.Table:
        """Return the rows."""
        tree = _parsed(self.connection, self.statement)
        tables, missing = self._pinned(tables_named(tree))
        _check_told_apart(tables)
        counts = self._counted(tables, columns_named(tree, tables)) if has_joins(tree) else None
        # Closing the connection undoes what is made for this query alone.
        self.connection.execute("BEGIN")
        if counts is None:
            datasets = [self._registered(0, name, table) for name, table in tables.items()]
        else:
            datasets = self._made(tables, counts)
        # It hands datasets Bloom filters, which DuckDB has no words for (duckdb-python #463).
        disabled = "join_filter_pushdown" if counts and datasets else ""
        self.connection.execute(f"SET disabled_optimizers = '{disabled}'")
        try:
            return self.connection.execute(self.statement, self.args).to_arrow_table()
        except duckdb.Error as error:
            failures = [dataset.failure for dataset in datasets if dataset.failure is not None]
            if failures:
                raise failures[0] from None
            if isinstance(error, duckdb.CatalogException):
                for name, reason in missing.items():
                    if re.search(rf'Table with name "?\S*\b{re.escape(name)}"? ', str(error)):
                        raise reason from None
            if isinstance(error, duckdb.OutOfMemoryException):
                raise UnavailableError(
                    "query: it needs more memory than 'memory_limit', and cannot do with disk"
                    f" instead: {_sentence(error)}"
                ) from None
            raise _refused(str(error)) from None

    def _pinned(
        self, names: Sequence[NameOfTable]
    ) -> tuple[dict[NameOfTable, PinnedTable], dict[str, StreamhouseError]]:
        """Return the service's tables of these names, and the reasons for missing tables."""

        def pinned(name: NameOfTable) -> PinnedTable | StreamhouseError:
            path = ".".join(part for part in name if part)
            table_options = {**self.options, "table": path, "endpoint": self.client.endpoint}
            try:
                return PinnedTable.of(self.client, read_options(table_options, use=BATCH))
            except (InvalidNameError, NotFoundError) as error:
                if (name[0] or "").lower() in _CATALOGS_OF_DUCKDB:
                    raise _refused(_OWN_TABLES.format(f"{name[0]}.{name[1]}")) from None
                return error

        tables: dict[NameOfTable, PinnedTable] = {}
        missing: dict[str, StreamhouseError] = {}
        for name, table in zip(names, _each(pinned, names), strict=True):
            if isinstance(table, PinnedTable):
                tables[name] = table
            else:
                missing[name[1]] = table
        return tables, missing

    def _counted(
        self,
        tables: Mapping[NameOfTable, PinnedTable],
        columns: Mapping[NameOfTable, set[str] | None],
    ) -> dict[NameOfTable, tuple[Counted, str | None]]:
        """Count the rows of the tables; return the names of kept rows too."""

        def is_kept(plan: ReadPlan) -> bool:
            return self.database.place(plan) is not None

        def count(name: NameOfTable) -> Counted:
            return counted(tables[name], columns[name], is_kept)

        counts = dict(zip(tables, _each(count, list(tables)), strict=True))
        return {
            name: (
                table,
                None
                if table.plan is None
                else self.database.keep(self.connection, table.plan, table.rows),
            )
            for name, table in counts.items()
        }

    def _made(
        self,
        tables: Mapping[NameOfTable, PinnedTable],
        counts: Mapping[NameOfTable, tuple[Counted, str | None]],
    ) -> list[TableDataset]:
        """Give DuckDB tables whose rows it can count; return the datasets among them."""
        datasets = []
        for number, (name, (count, place)) in enumerate(counts.items()):
            if place is not None:
                self._create("VIEW", name, f"SELECT * FROM {place}")
            elif count.rows is None:
                table = tables[name]
                dataset = self._registered(number, name, table, row_count=count.row_count)
                datasets.append(dataset)
            else:
                with registered(self.connection, count.rows) as rows:
                    self._create("TABLE", name, f"SELECT * FROM {rows}")
        return datasets

    def _registered(
        self, number: int, name: NameOfTable, table: PinnedTable, *, row_count: int | None = None
    ) -> TableDataset:
        """Give DuckDB a dataset, which is read while the statement runs."""
        dataset = TableDataset(table)
        self.connection.register(f"streamhouse_{number}", dataset)
        rows = f"SELECT * FROM streamhouse_{number}"
        if row_count is not None:
            # DuckDB believes what is said of a Parquet file, and takes a dataset for one row.
            path = self.folder / f"{number}.parquet"
            pq.write_table(dataset.schema.empty_table(), path)
            file = f"read_parquet({_text(str(path))}, explicit_cardinality = {row_count})"
            rows += f" UNION ALL SELECT * FROM {file}"
        self._create("VIEW", name, rows)
        return dataset

    def _create(self, kind: str, name: NameOfTable, rows: str) -> None:
        database, table = _quoted(name[0] or "main"), _quoted(name[1])
        self.connection.execute(f"CREATE SCHEMA IF NOT EXISTS {database}")
        self.connection.execute(f"CREATE OR REPLACE {kind} {database}.{table} AS {rows}")


def _zone(text: str) -> str:
    """Return DuckDB's name of a zone of Spark."""
    zone = parse_zone(text, name="option 'timeZone'")
    if zone.fixed_us is None or zone.is_utc:
        return zone.id
    hours, rest = divmod(zone.fixed_us, _HOUR_US)
    if rest or not -12 <= hours <= 14:
        raise InvalidRequestError(
            f"query: option 'timeZone' = '{text}' is no zone of DuckDB: write a region like"
            " 'Europe/Berlin', or whole hours like '+01:00'"
        )
    # The sign of these names is that of POSIX.
    return f"Etc/GMT{-hours:+d}"


def _each(call: Callable[[_T], _R], items: Sequence[_T]) -> Iterator[_R]:
    """Return the result of `call` for each item; the calls run in parallel."""
    threads = Pool("streamhouse-open", min(len(items), _THREADS_MAX) or 1)
    try:
        contexts = [contextvars.copy_context() for _ in items]
        return iter(
            list(threads.map(lambda context, item: context.run(call, item), contexts, items))
        )
    finally:
        threads.shutdown(cancel_futures=True)


def _check_told_apart(names: Iterable[NameOfTable]) -> None:
    """Refuse tables whose names are one for DuckDB, which ignores the case."""
    paths: dict[str, str] = {}
    for name in names:
        path = ".".join(part for part in name if part)
        first = paths.setdefault(path.lower(), path)
        if first != path:
            raise InvalidRequestError(
                f"query: '{first}' and '{path}' differ in case alone, and DuckDB takes both for one"
                " table; read one of them with client.read"
            )


def _parsed(connection: duckdb.DuckDBPyConnection, statement: str) -> Any:
    """Return the tree of a SELECT from DuckDB's own parser."""
    row = connection.execute("SELECT json_serialize_sql(?)", [statement]).fetchone()
    assert row is not None, "a SELECT without FROM has one row"
    tree = json.loads(row[0])
    if tree["error"]:
        message = tree["error_message"]
        raise _refused("one SELECT is expected" if message.startswith(_NO_SELECT) else message)
    if any(_is_show(statement) for statement in tree["statements"]):
        raise _refused(_OWN_TABLES.format("SHOW"))
    if len(tree["statements"]) != 1:
        raise _refused(f"one SELECT is expected, not {len(tree['statements'])} statements")
    return tree


def _is_show(statement: Any) -> bool:
    source = (statement.get("node") or {}).get("from_table") or {}
    return str(source.get("type")).startswith("SHOW")


def _refused(message: str) -> InvalidRequestError:
    return InvalidRequestError(f"query: {_sentence(message)}")


def _sentence(message: object) -> str:
    return str(message).strip().split("\n", 1)[0]


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"
