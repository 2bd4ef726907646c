"""`StreamhouseClient.query`: DuckDB's SQL over tables of a service, without Spark.

DuckDB asks each table, as an Arrow dataset, for the columns and rows that a statement needs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, Final

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds

from streamhouse.connector.options.options import BATCH, as_options, read_options
from streamhouse.connector.plan.table_read import PinnedTable
from streamhouse.connector.query.arrow_filter import Condition, condition_of
from streamhouse.storage_service.client import StorageClient
from streamhouse.storage_service.errors import (
    InvalidNameError,
    InvalidPredicateError,
    InvalidRequestError,
    NotFoundError,
    StreamhouseError,
)

__all__ = ["query_tables"]

_OF_TABLES: Final = ("table", "columns", "where")
_NO_SELECT: Final = "Only SELECT statements"
"""How DuckDB begins to say that a statement is none."""

_NAME: Final = re.compile(r"\w+(\$\w+)?")
_Name = tuple[str, str]
"""A database, or nothing for the default one, and a table."""


def query_tables(
    client: StorageClient,
    statement: str,
    args: Sequence[Any] | Mapping[str, Any] | None,
    options: Mapping[str, object],
) -> pa.Table:
    """Return what a SELECT of DuckDB's SQL finds; see `StreamhouseClient.query`."""
    given = as_options(options)
    for key in given:
        if key.lower() in _OF_TABLES:
            raise InvalidRequestError(f"query: option '{key}' is said by the statement; remove it")
    zone = read_options({"table": "db.t", **given}, use=BATCH).time_zone
    # Variables of this module are no tables.
    with duckdb.connect(":memory:", config={"python_enable_replacements": "false"}) as connection:
        connection.execute(f"SET TimeZone = {_text(zone)}")
        tables, missing = _pinned(client, _names(connection, statement), given)
        datasets = [
            _register(connection, number, name, table)
            for number, (name, table) in enumerate(tables.items())
        ]
        try:
            return connection.execute(statement, args).to_arrow_table()
        except duckdb.Error as error:
            failures = [dataset.failure for dataset in datasets if dataset.failure is not None]
            if failures:
                raise failures[0] from None
            if isinstance(error, duckdb.CatalogException):
                for name, reason in missing.items():
                    if re.search(rf'Table with name "?\S*\b{re.escape(name)}"? ', str(error)):
                        raise reason from None
            raise _refused(str(error)) from None


def _names(connection: duckdb.DuckDBPyConnection, statement: str) -> list[_Name]:
    """Return what may be tables' names in a statement, as DuckDB's own parser finds them."""
    found = connection.execute("SELECT json_serialize_sql(?)", [statement]).fetchone()
    assert found is not None, "a SELECT without FROM has one row"
    tree = json.loads(found[0])
    if tree["error"]:
        message = tree["error_message"]
        raise _refused("one SELECT is expected" if message.startswith(_NO_SELECT) else message)
    if len(tree["statements"]) != 1:
        raise _refused(f"one SELECT is expected, not {len(tree['statements'])} statements")
    return list(dict.fromkeys(_tables(tree)))


def _tables(node: Any) -> Iterator[_Name]:
    if isinstance(node, dict):
        is_table = node.get("type") == "BASE_TABLE" and not node["catalog_name"]
        # A name alone may also be a CTE's, which goes first, or a file's.
        if is_table and (node["schema_name"] or _NAME.fullmatch(node["table_name"])):
            yield node["schema_name"], node["table_name"]
        for part in node.values():
            yield from _tables(part)
    elif isinstance(node, list):
        for part in node:
            yield from _tables(part)


def _pinned(
    client: StorageClient, names: Sequence[_Name], options: Mapping[str, str]
) -> tuple[dict[_Name, PinnedTable], dict[str, StreamhouseError]]:
    """Return the service's tables of these names, and why others are none."""
    tables: dict[_Name, PinnedTable] = {}
    missing: dict[str, StreamhouseError] = {}
    for name in names:
        path = ".".join(part for part in name if part)
        given = {**options, "table": path, "endpoint": client.endpoint}
        try:
            tables[name] = PinnedTable.of(client, read_options(given, use=BATCH))
        except (InvalidNameError, NotFoundError) as error:
            # DuckDB has tables of its own, as in information_schema.
            missing[name[1]] = error
    return tables, missing


def _register(
    connection: duckdb.DuckDBPyConnection, number: int, name: _Name, table: PinnedTable
) -> _TableDataset:
    dataset = _TableDataset(table)
    connection.register(f"streamhouse_{number}", dataset)
    database, own = _quoted(name[0] or "main"), _quoted(name[1])
    connection.execute(f"CREATE SCHEMA IF NOT EXISTS {database}")
    # Names that differ in case are one for DuckDB, and in the service none of them is another.
    connection.execute(
        f"CREATE OR REPLACE VIEW {database}.{own} AS SELECT * FROM streamhouse_{number}"
    )
    return dataset


class _TableDataset(ds.Dataset):  # type: ignore[misc]  # pyarrow has no types
    """A table as DuckDB takes it: a dataset that is asked for columns and rows.

    Whatever `scanner` is given, DuckDB relies on it: it does not filter again.
    """

    def __init__(self, table: PinnedTable) -> None:
        # No dataset of pyarrow's own is behind this one.
        self._table = table
        self.failure: StreamhouseError | None = None

    @property
    def schema(self) -> pa.Schema:
        return self._table.schema

    def scanner(
        self,
        columns: Sequence[str] | None = None,
        filter: Any = None,  # noqa: A002 - pyarrow's name
        **_: Any,
    ) -> _TableScanner:
        names = self.schema.names if columns is None else list(columns)
        return _TableScanner(pa.schema([self.schema.field(name) for name in names]), self, filter)

    def batches(self, schema: pa.Schema, kept: Any) -> Generator[pa.RecordBatch]:
        try:
            rows, is_exact = self._planned(schema, kept)
            with closing(rows):
                for batch in rows:
                    found = batch.select(schema.names)
                    yield found if is_exact else found.filter(kept)
        except StreamhouseError as error:
            self.failure = error
            raise

    def _planned(self, schema: pa.Schema, kept: Any) -> tuple[Generator[pa.RecordBatch], bool]:
        everything = Condition(None, is_exact=kept is None)
        condition = everything if kept is None else condition_of(str(kept), schema)
        try:
            narrowed = self._table.narrowed(schema.names, condition.where)
            return narrowed.batches(), condition.is_exact
        except InvalidPredicateError:
            return self._table.narrowed(schema.names, None).batches(), kept is None


class _TableScanner:
    """What `Dataset.scanner` returns, as far as DuckDB uses it."""

    def __init__(self, schema: pa.Schema, dataset: _TableDataset, kept: Any) -> None:
        self._schema = schema
        self._dataset = dataset
        self._kept = kept

    def to_reader(self) -> pa.RecordBatchReader:
        batches = self._dataset.batches(self._schema, self._kept)
        return pa.RecordBatchReader.from_batches(self._schema, batches)


def _refused(message: str) -> InvalidRequestError:
    sentence = message.strip().split("\n", 1)[0]
    return InvalidRequestError(f"query: {sentence}")


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"
