"""The lakes that a run of tests left, each table asked of all four outside readers.

A test that writes a lake proves what it is about with the readers that are quick. Here every lake
table below a folder is read whole, as it was left, by stock pyiceberg, DuckDB, Iceberg Java and our
own format in Spark; all must find the same rows. A table that stock pyiceberg cannot read, because
its test broke it, must be readable by nobody.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

from pyiceberg.schema import Schema
from pyiceberg.table import StaticTable
from pyiceberg.types import (
    DecimalType,
    IcebergType,
    ListType,
    MapType,
    StructType,
    TimestamptzType,
)

from integration.judges.json_rows import to_json

__all__ = ["LeftTable", "in_one_form", "left_tables", "pyiceberg_rows"]

_HIDDEN: Final = "__"


@dataclass(frozen=True)
class LeftTable:
    """A lake table that a test left: in which folder, its name, and its current metadata file."""

    home: Path
    name: str
    location: str

    def __str__(self) -> str:
        return f"{self.home}: {self.name}"

    def format_version(self) -> int:
        """Return the version in the metadata file."""
        version: int = StaticTable.from_metadata(self.location).format_version
        return version


def left_tables(folder: Path) -> list[LeftTable]:
    """Return the tables of every SQL catalog on SQLite below `folder`, by the file's name."""
    found = []
    for path in sorted(folder.rglob("*.db")):
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
            try:
                rows = database.execute(
                    "SELECT table_namespace || '.' || table_name, metadata_location"
                    " FROM iceberg_tables ORDER BY 1"
                ).fetchall()
            except sqlite3.DatabaseError:
                # Some other file, or one that a test has damaged.
                continue
        found += [LeftTable(path.parent, name, location) for name, location in rows]
    return [table for table in found if table.location.startswith(("file:", "/"))]


def pyiceberg_rows(table: LeftTable) -> tuple[Schema, list[dict[str, Any]]] | None:
    """Return the rows as stock pyiceberg finds them, None if it cannot read the table."""
    try:
        opened = StaticTable.from_metadata(table.location)
        return opened.schema(), opened.scan().to_arrow().to_pylist()
    except Exception:  # noqa: BLE001 - whatever is missing or broken, each library says otherwise
        return None


def in_one_form(
    schema: Schema, rows: Sequence[Mapping[str, Any]], *, hides: bool = False
) -> list[str]:
    """Return the rows of any engine in one form and order, as texts that can be compared.

    `hides`: without the columns that only Streamhouse's lake tables have, which our format does not
    show.
    """
    fields = [f for f in schema.fields if not (hides and f.name.startswith(_HIDDEN))]
    plain = json.loads(to_json(rows))
    return sorted(
        json.dumps([_value(row[field.name], field.field_type) for field in fields]) for row in plain
    )


def _value(value: Any, kind: IcebergType) -> Any:
    """Return a JSON value of an engine as all engines' values of this type are written."""
    if value is None:
        return None
    if isinstance(kind, TimestamptzType):
        # Spark gives the session's time, which is UTC, without a zone.
        return str(value).removesuffix("+00:00")
    if isinstance(kind, DecimalType):
        return f"{Decimal(str(value)):.{kind.scale}f}"
    if isinstance(kind, ListType):
        if isinstance(kind.element_type, StructType) and not value:
            # Stock pyiceberg 0.12 gives an empty list of structs for null; the others do not.
            return None
        return [_value(item, kind.element_type) for item in value]
    if isinstance(kind, MapType):
        return sorted(
            ([str(_value(k, kind.key_type)), _value(v, kind.value_type)] for k, v in _pairs(value)),
            key=json.dumps,
        )
    if isinstance(kind, StructType):
        return [_value(value[field.name], field.field_type) for field in kind.fields]
    return value


def _pairs(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield what is in a map: some engines give an object, others pairs or entries."""
    if isinstance(value, dict):
        yield from value.items()
        return
    for entry in value:
        yield (entry["key"], entry["value"]) if isinstance(entry, dict) else tuple(entry)
