"""What the command asks the database itself: its tables, and the state of a replication slot.

It speaks through the JDBC driver that Debezium brings, so that there is no second driver.
"""

from __future__ import annotations

import fnmatch
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final

from streamhouse.connector.cdc.source.java import java_class, start_java
from streamhouse.connector.cdc.source.source_address import SourceAddress
from streamhouse.connector.cdc.source.source_types import SourceColumn
from streamhouse.connector.cdc.source.target_table import SourceTable
from streamhouse.storage_service.errors import InvalidRequestError, UnavailableError

__all__ = ["SlotState", "SourceDatabase"]

_TABLES: Final = """
SELECT n.nspname, c.relname, c.relkind
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind IN ('r', 'p') AND c.relpersistence = 'p' AND NOT c.relispartition
  AND n.nspname NOT IN ('pg_catalog', 'information_schema', 'pg_toast')
ORDER BY 1, 2"""
# Of a domain the type below it; of an array the type's name has an underscore before it.
_COLUMNS: Final = """
SELECT n.nspname, c.relname, a.attname, coalesce(b.typname, t.typname),
       CASE WHEN t.typtype = 'd' THEN t.typtypmod ELSE a.atttypmod END,
       coalesce(e.typtype, b.typtype, t.typtype), a.attgenerated
FROM pg_attribute a
JOIN pg_class c ON c.oid = a.attrelid
JOIN pg_namespace n ON n.oid = c.relnamespace
JOIN pg_type t ON t.oid = a.atttypid
LEFT JOIN pg_type b ON t.typtype = 'd' AND b.oid = t.typbasetype
LEFT JOIN pg_type e ON e.oid = t.typelem AND t.typcategory = 'A'
WHERE a.attnum > 0 AND NOT a.attisdropped AND c.relkind = 'r'
ORDER BY n.nspname, c.relname, a.attnum"""
_KEYS: Final = """
SELECT n.nspname, c.relname, a.attname
FROM pg_index i
JOIN pg_class c ON c.oid = i.indrelid
JOIN pg_namespace n ON n.oid = c.relnamespace
JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = ANY (i.indkey)
WHERE i.indisprimary
ORDER BY n.nspname, c.relname, array_position(i.indkey::int2[], a.attnum)"""
_SLOT: Final = """
SELECT active, confirmed_flush_lsn - '0/0'::pg_lsn, wal_status
FROM pg_replication_slots WHERE slot_name = ?"""
_TYPMOD_HEADER: Final = 4
# Classes of SQL states in which trying again may help: connections, resources, shutdowns.
_PASSING: Final = ("08", "53", "57", "58", "XX")


@dataclass(frozen=True, slots=True)
class SlotState:
    """A replication slot: who uses it, and below which position the database keeps no log."""

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
            found = []
            while results.next():
                row = [results.getString(at) for at in range(1, width + 1)]
                found.append(tuple(None if value is None else str(value) for value in row))
            return found
        except java_class("java.sql.SQLException") as error:
            raise self._error(error) from None

    def check_can_stream(self) -> None:
        """Raise `InvalidRequestError` that names the setting, if the server keeps too little."""
        ((level,),) = self.rows("SHOW wal_level")
        if level != "logical":
            raise InvalidRequestError(
                f"{self._address}: the server has wal_level = {level}; set wal_level = logical"
                " and restart it"
            )

    def system_id(self) -> str:
        """Return what tells this server's data from another's; empty if it may not be asked."""
        try:
            ((found,),) = self.rows("SELECT system_identifier FROM pg_control_system()")
        except InvalidRequestError:
            return ""
        return found or ""

    def tables(self, patterns: Sequence[str]) -> list[SourceTable]:
        """Return the tables whose `schema.name` matches one of the patterns, as in `public.*`.

        Raises `InvalidRequestError` for a pattern without a table, and for partitioned tables.
        """
        kinds = {(str(s), str(t)): str(kind) for s, t, kind in self.rows(_TABLES)}
        chosen = []
        for pattern in patterns:
            full = pattern if "." in pattern else f"public.{pattern}"
            found = [key for key in kinds if fnmatch.fnmatchcase(".".join(key), full)]
            if not found:
                raise InvalidRequestError(f"{self._address}: no table matches '{pattern}'")
            chosen += [key for key in found if key not in chosen]
        partitioned = [".".join(key) for key in chosen if kinds[key] == "p"]
        if partitioned:
            raise InvalidRequestError(
                f"{self._address}: '{partitioned[0]}' is partitioned, which is not followed; name"
                " the tables to follow without it"
            )
        return self._described(chosen)

    def _described(self, chosen: list[tuple[str, str]]) -> list[SourceTable]:
        columns: dict[tuple[str, str], list[SourceColumn]] = defaultdict(list)
        generated: dict[tuple[str, str], list[str]] = defaultdict(list)
        for schema, table, name, type_name, typmod, kind, computed in self.rows(_COLUMNS):
            key = (str(schema), str(table))
            if computed:
                generated[key].append(str(name))
                continue
            length, scale = _digits(str(type_name), int(typmod or -1))
            columns[key].append(
                SourceColumn(str(name), str(type_name), length, scale, is_enum=kind == "e")
            )
        keys: dict[tuple[str, str], list[str]] = defaultdict(list)
        for schema, table, name in self.rows(_KEYS):
            keys[(str(schema), str(table))].append(str(name))
        return [
            SourceTable(*key, tuple(columns[key]), tuple(keys[key]), tuple(generated[key]))
            for key in chosen
        ]

    def slot(self, name: str) -> SlotState | None:
        """Return the state of a replication slot, or None if there is none of that name."""
        rows = self.rows(_SLOT, name)
        if not rows:
            return None
        ((active, confirmed, status),) = rows
        return SlotState(active == "t", int(confirmed or 0), status == "lost")

    def drop_slot(self, name: str) -> bool:
        """Drop a replication slot; return whether there was one.

        Raises `InvalidRequestError` while somebody reads from it.
        """
        state = self.slot(name)
        if state is None:
            return False
        if state.is_active:
            raise InvalidRequestError(
                f"{self._address}: replication slot '{name}' is in use; stop the command that"
                " reads from it first"
            )
        self.rows("SELECT pg_drop_replication_slot(?)", name)
        return True

    def drop_publication(self, name: str) -> None:
        """Drop a publication where there is one."""
        self.rows(f'DROP PUBLICATION IF EXISTS "{name}"')

    def _error(self, error: Any) -> InvalidRequestError | UnavailableError:
        text = str(error.getMessage()).strip().replace("\n", " ")
        if str(error.getSQLState() or "08")[:2] in _PASSING:
            return UnavailableError(f"{self._address}: {text}")
        return InvalidRequestError(f"{self._address}: {text}")


def _digits(type_name: str, typmod: int) -> tuple[int | None, int | None]:
    """Return precision and scale of `numeric(p,s)`, or of an array of it."""
    if type_name.lstrip("_") != "numeric" or typmod < _TYPMOD_HEADER:
        return None, None
    value = typmod - _TYPMOD_HEADER
    scale = value & 0x7FF
    return value >> 16 & 0xFFFF, scale - 0x800 if scale & 0x400 else scale
