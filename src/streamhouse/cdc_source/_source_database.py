"""Queries to the source database: tables, and the state of a replication slot.

Queries go through Debezium's JDBC driver, instead of a second driver.
"""

from __future__ import annotations

import fnmatch
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from streamhouse.cdc_source._java import java_class, start_java
from streamhouse.cdc_source._source_types import SourceColumn
from streamhouse.cdc_source._target_table import OldRows, SourceTable, quoted
from streamhouse.cdc_source.source_address import SourceAddress
from streamhouse.core.errors import (
    InvalidRequestError,
    StreamhouseError,
    UnavailableError,
)

__all__ = ["SlotState", "SourceDatabase"]

_TABLES: Final = """
SELECT n.nspname, c.relname, c.oid,
       c.relkind = 'r' AND EXISTS (SELECT 1 FROM pg_inherits i WHERE i.inhparent = c.oid),
       pg_has_role(c.relowner, 'USAGE'), row_security_active(c.oid)
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind IN ('r', 'p') AND c.relpersistence = 'p' AND NOT c.relispartition
  AND n.nspname NOT IN ('pg_catalog', 'information_schema', 'pg_toast')
ORDER BY 1, 2"""
# What is logged of old rows is up to each partition; one row for each column of an index.
_OLD_ROWS: Final = """
SELECT c.oid, n.nspname || '.' || l.relname, l.relreplident,
       l.relkind = 'r' AND l.relpersistence = 'p', a.attname
FROM pg_class c
CROSS JOIN LATERAL (
    SELECT c.oid AS relid WHERE c.relkind = 'r'
    UNION ALL SELECT t.relid FROM pg_partition_tree(c.oid) t WHERE t.isleaf AND c.relkind = 'p'
) p
JOIN pg_class l ON l.oid = p.relid
JOIN pg_namespace n ON n.oid = l.relnamespace
LEFT JOIN pg_index i ON i.indrelid = l.oid AND i.indisreplident AND l.relreplident = 'i'
LEFT JOIN pg_attribute a ON a.attrelid = l.oid AND a.attnum = ANY (i.indkey)
WHERE c.relkind IN ('r', 'p') AND NOT c.relispartition
ORDER BY 1, 2"""
# Of a domain the type below it; of an array the type's name has an underscore before it.
_COLUMNS: Final = """
SELECT n.nspname, c.relname, a.attname, coalesce(b.typname, t.typname),
       CASE WHEN t.typtype = 'd' THEN t.typtypmod ELSE a.atttypmod END,
       coalesce(e.typtype, b.typtype, t.typtype), a.attgenerated, a.attndims > 1, a.attnum
FROM pg_attribute a
JOIN pg_class c ON c.oid = a.attrelid
JOIN pg_namespace n ON n.oid = c.relnamespace
JOIN pg_type t ON t.oid = a.atttypid
LEFT JOIN pg_type b ON t.typtype = 'd' AND b.oid = t.typbasetype
LEFT JOIN pg_type e ON e.oid = t.typelem AND t.typcategory = 'A'
WHERE a.attnum > 0 AND NOT a.attisdropped AND c.relkind IN ('r', 'p')
ORDER BY n.nspname, c.relname, a.attnum"""
_KEYS: Final = """
SELECT n.nspname, c.relname, a.attname, i.indimmediate
FROM pg_index i
JOIN pg_class c ON c.oid = i.indrelid
JOIN pg_namespace n ON n.oid = c.relnamespace
JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = ANY (i.indkey)
WHERE i.indisprimary
ORDER BY n.nspname, c.relname, array_position(i.indkey::int2[], a.attnum)"""
_SLOT: Final = """
SELECT active, confirmed_flush_lsn - '0/0'::pg_lsn, wal_status
FROM pg_replication_slots WHERE slot_name = ?"""
_PUBLISHED: Final = """
SELECT c.oid, n.nspname, c.relname
FROM pg_publication_rel r
JOIN pg_publication p ON p.oid = r.prpubid
JOIN pg_class c ON c.oid = r.prrelid
JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE p.pubname = ?"""
_SLOT_POLL_S: Final = 0.2
# Writers of a table wait behind a lock that waits.
_LOCK_MS: Final = 2_000
_TYPMOD_HEADER: Final = 4
# Classes of SQL states in which trying again may help: connections, resources, shutdowns.
_PASSING: Final = ("08", "53", "57", "58", "XX")


@dataclass(frozen=True, slots=True)
class SlotState:
    """A replication slot: its reader, and the start of the log that the database keeps for it."""

    is_active: bool
    confirmed_lsn: int
    is_lost: bool


class SourceDatabase:
    """A connection to the database."""

    def __init__(self, address: SourceAddress) -> None:
        start_java()
        self._address = address
        properties = java_class("java.util.Properties")()
        for name, value in address.jdbc_properties().items():
            properties.setProperty(name, value)
        try:
            self._connection = java_class("java.sql.DriverManager").getConnection(
                address.jdbc_url(), properties
            )
        except java_class("java.sql.SQLException") as error:
            raise self._error(error) from None

    def __enter__(self) -> SourceDatabase:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def rows(self, sql: str, *parameters: str) -> list[tuple[str | None, ...]]:
        """Run one statement; return its rows as texts."""
        try:
            statement = self._connection.prepareStatement(sql)
            for at, value in enumerate(parameters, 1):
                statement.setString(at, value)
            if not statement.execute():
                return []
            results = statement.getResultSet()
            width = results.getMetaData().getColumnCount()
            texts = []
            while results.next():
                row = [results.getString(at) for at in range(1, width + 1)]
                texts.append(tuple(None if value is None else str(value) for value in row))
            return texts
        except java_class("java.sql.SQLException") as error:
            raise self._error(error) from None

    def check_can_stream(self) -> None:
        """Raise `InvalidRequestError` with the setting, if the server keeps too little log."""
        ((level,),) = self.rows("SHOW wal_level")
        if level != "logical":
            raise InvalidRequestError(
                f"{self._address}: the server has wal_level = {level}; set wal_level = logical"
                " and restart it"
            )

    def system_id(self) -> str:
        """Return what tells this server's data from another's; empty if it may not be asked."""
        try:
            ((identifier,),) = self.rows("SELECT system_identifier FROM pg_control_system()")
        except InvalidRequestError:
            return ""
        return identifier or ""

    def tables(self, patterns: Sequence[str], exclude: Sequence[str] = ()) -> list[SourceTable]:
        """Return the tables whose `schema.name` matches one of the patterns, as in `public.*`.

        Tables that match a pattern of `exclude` are left out. Partitions belong to their table.
        Raises `InvalidRequestError` for a pattern without a table.
        """
        tables = self._catalog_rows()
        for pattern in patterns:
            if not any(_matches(key, [pattern]) for key in tables):
                raise InvalidRequestError(f"{self._address}: no table matches '{pattern}'")
        return self._described(tables, patterns, exclude)

    def tables_now(self, patterns: Sequence[str], exclude: Sequence[str] = ()) -> list[SourceTable]:
        """Return the result of `tables`, perhaps empty."""
        return self._described(self._catalog_rows(), patterns, exclude)

    def _catalog_rows(self) -> dict[tuple[str, str], Sequence[str | None]]:
        return {(str(schema), str(name)): values for schema, name, *values in self.rows(_TABLES)}

    def _described(
        self,
        tables: Mapping[tuple[str, str], Sequence[str | None]],
        patterns: Sequence[str],
        exclude: Sequence[str],
    ) -> list[SourceTable]:
        columns: dict[tuple[str, str], list[SourceColumn]] = defaultdict(list)
        left_out: dict[tuple[str, str], list[str]] = defaultdict(list)
        numbers: dict[tuple[str, str], dict[str, int]] = defaultdict(dict)
        for schema, table, name, type_name, typmod, kind, computed, is_deep, number in self.rows(
            _COLUMNS
        ):
            key = (str(schema), str(table))
            numbers[key][str(name)] = int(number or 0)
            # Arrays of arrays have no form here.
            if computed or is_deep == "t":
                left_out[key].append(str(name))
                continue
            length, scale = _digits(str(type_name), int(typmod or -1))
            columns[key].append(
                SourceColumn(str(name), str(type_name), length, scale, is_enum=kind == "e")
            )
        keys: dict[tuple[str, str], list[str]] = defaultdict(list)
        deferrable = set()
        for schema, table, name, is_immediate in self.rows(_KEYS):
            keys[(str(schema), str(table))].append(str(name))
            if is_immediate == "f":
                deferrable.add((str(schema), str(table)))
        old_rows = self._old_rows()
        return [
            SourceTable(
                *key,
                tuple(columns[key]),
                tuple(keys[key]),
                tuple(left_out[key]),
                int(oid or 0),
                numbers[key],
                old_rows=old_rows[int(oid or 0)],
                has_heirs=has_heirs == "t",
                has_deferrable_key=key in deferrable,
                is_owned=is_owned == "t",
                hides_rows=hides_rows == "t",
            )
            for key, (oid, has_heirs, is_owned, hides_rows) in tables.items()
            if _matches(key, patterns) and not _matches(key, exclude)
        ]

    def _old_rows(self) -> dict[int, tuple[OldRows, ...]]:
        parts: dict[tuple[int, str], OldRows] = {}
        for oid, table, identity, is_logged, column in self.rows(_OLD_ROWS):
            at = (int(oid or 0), str(table))
            older_part = parts.get(at)
            columns = frozenset() if older_part is None else older_part.columns
            columns |= frozenset() if column is None else {column}
            parts[at] = OldRows(str(table), str(identity), columns, is_logged == "t")
        old_rows: dict[int, tuple[OldRows, ...]] = defaultdict(tuple)
        for (number, _), part in parts.items():
            old_rows[number] += (part,)
        return old_rows

    def slot(self, name: str) -> SlotState | None:
        """Return the state of a replication slot, or None without a slot of this name."""
        rows = self.rows(_SLOT, name)
        if not rows:
            return None
        ((active, confirmed, status),) = rows
        return SlotState(active == "t", int(confirmed or 0), status == "lost")

    def drop_slot(self, name: str, *, wait_s: float = 0.0) -> bool:
        """Drop a replication slot; return whether there was one.

        Raises `InvalidRequestError` if a reader still has the slot after `wait_s`.
        """
        deadline = time.monotonic() + wait_s
        while (state := self.slot(name)) is not None:
            if not state.is_active:
                self.rows("SELECT pg_drop_replication_slot(?)", name)
                return True
            if time.monotonic() >= deadline:
                raise InvalidRequestError(
                    f"{self._address}: replication slot '{name}' is in use; stop the command that"
                    " reads from it first"
                )
            time.sleep(_SLOT_POLL_S)
        return False

    def publish(self, name: str, tables: Sequence[SourceTable]) -> None:
        """Create a publication with these tables, or add the tables to the publication.

        A table is added without writers at work: otherwise PostgreSQL would not publish the changes
        of a transaction with earlier writes, or any later changes. Raises `InvalidRequestError` if
        a writer does not end soon.
        """
        if not self.rows("SELECT 1 FROM pg_publication WHERE pubname = ?", name):
            listed = ", ".join(_quoted(table) for table in tables)
            self.rows(
                f'CREATE PUBLICATION "{name}" FOR TABLE {listed}'
                " WITH (publish_via_partition_root = true)"
            )
            return
        published = {int(oid or 0) for oid, _, _ in self.rows(_PUBLISHED, name)}
        for table in tables:
            if table.oid not in published:
                self._add_to_publication(name, _quoted(table))

    def _add_to_publication(self, name: str, table: str) -> None:
        self._connection.setAutoCommit(False)
        try:
            self.rows(f"SET LOCAL lock_timeout = {_LOCK_MS}")
            self.rows(f"LOCK TABLE {table} IN SHARE ROW EXCLUSIVE MODE")
            self.rows(f'ALTER PUBLICATION "{name}" ADD TABLE {table}')
            self._connection.commit()
        except StreamhouseError:
            self._connection.rollback()
            raise
        finally:
            self._connection.setAutoCommit(True)

    def unpublish_all_but(self, name: str, tables: Sequence[SourceTable]) -> None:
        """Remove all tables but these from a publication."""
        oids = {table.oid for table in tables}
        for oid, schema, table in self.rows(_PUBLISHED, name):
            if int(oid or 0) not in oids:
                named = SourceTable(str(schema), str(table), (), ())
                self.rows(f'ALTER PUBLICATION "{name}" DROP TABLE {_quoted(named)}')

    def drop_publication(self, name: str) -> None:
        """Drop a publication where there is one."""
        self.rows(f'DROP PUBLICATION IF EXISTS "{name}"')

    def _error(self, error: Any) -> InvalidRequestError | UnavailableError:
        text = str(error.getMessage()).strip().replace("\n", " ")
        if str(error.getSQLState() or "08")[:2] in _PASSING:
            return UnavailableError(f"{self._address}: {text}")
        return InvalidRequestError(f"{self._address}: {text}")


def _matches(key: tuple[str, str], patterns: Sequence[str]) -> bool:
    full = (pattern if "." in pattern else f"public.{pattern}" for pattern in patterns)
    return any(fnmatch.fnmatchcase(".".join(key), pattern) for pattern in full)


def _quoted(table: SourceTable) -> str:
    return f"{quoted(table.schema)}.{quoted(table.name)}"


def _digits(type_name: str, typmod: int) -> tuple[int | None, int | None]:
    """Return precision and scale of `numeric(p,s)`, or of an array of it."""
    if type_name.lstrip("_") != "numeric" or typmod < _TYPMOD_HEADER:
        return None, None
    value = typmod - _TYPMOD_HEADER
    scale = value & 0x7FF
    return value >> 16 & 0xFFFF, scale - 0x800 if scale & 0x400 else scale
