"""The DuckDB database of successive queries, with tables of earlier queries.

A file of a lake never changes, so two equal plans of lake files alone have the same rows. Every
query asks the service and the lake for a plan; only reading the files is saved. The rows of a plan
with a part of a log are never kept.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import duckdb
import pyarrow as pa

from streamhouse.core.errors import InvalidRequestError, NotFoundError
from streamhouse.reading.plan._read_cut import ReadPlan
from streamhouse.reading.scan.scan import LakePiece

__all__ = ["KEPT_BYTES", "MEMORY_LIMIT", "QueryDatabase", "query_database", "registered"]

MEMORY_LIMIT: Final = "2GB"
"""The memory limit of DuckDB by default; beyond the limit DuckDB uses files."""

KEPT_BYTES: Final = 128 << 20
"""The largest sum of bytes of the tables that a process keeps between queries."""

_KEPT_TABLES: Final = 512
_KEPT: Final = "streamhouse_kept"
_ROWS: Final = "streamhouse_rows"

_lock: Final = threading.Lock()
_idle: Final[list[QueryDatabase]] = []
_of_parents: Final[list[QueryDatabase]] = []
"""Databases of the parent of a forked process: closing them would wait for threads."""


@dataclass(frozen=True, slots=True)
class _KeptTable:
    plan: ReadPlan
    place: str
    byte_count: int


class QueryDatabase:
    """A database in memory for a single query at a time."""

    def __init__(self) -> None:
        # Variables of this module are no tables.
        self._database = duckdb.connect(":memory:", config={"python_enable_replacements": "false"})
        self._database.execute(f"ATTACH ':memory:' AS {_KEPT}")
        # The least recently used first.
        self._tables: list[_KeptTable] = []
        self._numbers = itertools.count()
        self._process = os.getpid()

    @property
    def is_usable(self) -> bool:
        """Whether this process made the database; a forked process lacks DuckDB's threads."""
        return self._process == os.getpid()

    def connection(self) -> duckdb.DuckDBPyConnection:
        """Return a connection with a new session."""
        return self._database.cursor()

    def place(self, plan: ReadPlan) -> str | None:
        """Return the name of the table with the rows of a plan, None without such a table."""
        table = self._table(plan)
        return None if table is None else table.place

    def keep(
        self, connection: duckdb.DuckDBPyConnection, plan: ReadPlan, rows: pa.Table | None
    ) -> str | None:
        """Keep the rows of a plan of lake files alone; return the name of the table.

        `rows` is None for a plan with a `place`. No table is dropped before `trim`.
        """
        table = self._table(plan)
        if table is not None:
            self._tables.remove(table)
        elif rows is not None and _is_lasting(plan):
            table = _KeptTable(plan, f"{_KEPT}.rows_{next(self._numbers)}", rows.nbytes)
            with registered(connection, rows) as name:
                connection.execute(f"CREATE TABLE {table.place} AS SELECT * FROM {name}")
        else:
            return None
        self._tables.append(table)
        return table.place

    def _table(self, plan: ReadPlan) -> _KeptTable | None:
        return next((table for table in self._tables if table.plan == plan), None)

    def trim(self) -> None:
        """Drop the least recently used tables beyond `KEPT_BYTES`."""
        byte_count = sum(table.byte_count for table in self._tables)
        while byte_count > KEPT_BYTES or len(self._tables) > _KEPT_TABLES:
            table = self._tables.pop(0)
            self._database.execute(f"DROP TABLE {table.place}")
            byte_count -= table.byte_count
        # DuckDB refuses after a spill: kept tables may be in the files.
        self._database.execute("SET temp_directory = ''")

    def close(self) -> None:
        """Free everything."""
        self._database.close()


@contextlib.contextmanager
def query_database(memory_limit: str) -> Iterator[QueryDatabase]:
    """Yield a database for a query, and keep the database for later unless the query failed.

    With a limit other than the default a query has a new database: kept tables need memory too.
    """
    database = _take_database() if memory_limit == MEMORY_LIMIT else QueryDatabase()
    is_broken = True
    try:
        yield database
        is_broken = False
    except (InvalidRequestError, NotFoundError):
        is_broken = False
        raise
    finally:
        if is_broken or memory_limit != MEMORY_LIMIT or not _give_back(database):
            database.close()


def _is_lasting(plan: ReadPlan) -> bool:
    return all(isinstance(piece, LakePiece) for split in plan.splits for piece in split.pieces)


def _take_database() -> QueryDatabase:
    with _lock:
        database = _idle.pop() if _idle else None
    if database is not None and not database.is_usable:
        _of_parents.append(database)
        database = None
    return database or QueryDatabase()


def _give_back(database: QueryDatabase) -> bool:
    try:
        database.trim()
    except duckdb.Error:
        return False
    with _lock:
        if _idle:
            return False
        _idle.append(database)
    return True


@contextlib.contextmanager
def registered(connection: duckdb.DuckDBPyConnection, rows: pa.Table) -> Iterator[str]:
    """Yield the name of rows in the connection, registered for the time of the block."""
    connection.register(_ROWS, rows)
    try:
        yield _ROWS
    finally:
        connection.unregister(_ROWS)
