"""Metadata that nobody wrote through the service: put into a SQL catalog on disk behind its back.

`Entered*` are classes that a property can name; what they note is code that a table chose.
"""

from __future__ import annotations

import json
import sqlite3
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.table.locations import SimpleLocationProvider

__all__ = [
    "HOSTILE_PROPERTIES",
    "EnteredIO",
    "EnteredProvider",
    "assert_create",
    "entered",
    "rewrite_metadata",
]

entered: list[str] = []


class EnteredProvider(SimpleLocationProvider):
    """A location provider by name."""

    def __init__(self, *arguments: Any) -> None:
        entered.append("location provider")
        super().__init__(*arguments)


class EnteredIO(PyArrowFileIO):
    """A file IO by name."""

    properties_seen: ClassVar[list[dict[str, str]]] = []

    def __init__(self, properties: Any = None) -> None:
        entered.append("file IO")
        super().__init__(properties)


HOSTILE_PROPERTIES = {
    "write.py-location-provider.impl": f"{__name__}.EnteredProvider",
    "py-io-impl": f"{__name__}.EnteredIO",
    "s3.endpoint": "http://127.0.0.1:1",
    "write.data.path": "file:///tmp/elsewhere-data",
    "write.metadata.path": "file:///tmp/elsewhere-metadata",
}


def assert_create(schema: dict[str, Any], location: str, **properties: str) -> dict[str, Any]:
    """The commit that makes a table of `schema`, as a REST client sends it."""
    return {
        "requirements": [{"type": "assert-create"}],
        "updates": [
            {"action": "assign-uuid", "uuid": "3c1bc1b0-7d0d-4e0e-9d0a-1d3d6c1d2a11"},
            {"action": "upgrade-format-version", "format-version": 2},
            {"action": "add-schema", "schema": schema},
            {"action": "set-current-schema", "schema-id": -1},
            {"action": "add-spec", "spec": {"spec-id": 0, "fields": []}},
            {"action": "set-default-spec", "spec-id": -1},
            {"action": "add-sort-order", "sort-order": {"order-id": 0, "fields": []}},
            {"action": "set-default-sort-order", "sort-order-id": -1},
            {"action": "set-location", "location": location},
            {"action": "set-properties", "updates": properties},
        ],
    }


def rewrite_metadata(catalog_db: Path, name: str, change: Callable[[dict[str, Any]], Any]) -> str:
    """Change the metadata of a table as somebody with the catalog's database can."""
    namespace, table = name.rsplit(".", 1)
    where = "WHERE table_namespace = ? AND table_name = ?"
    connection = sqlite3.connect(catalog_db)
    try:
        (found,) = connection.execute(
            f"SELECT metadata_location FROM iceberg_tables {where}", (namespace, table)
        ).fetchone()
        old = Path(found.removeprefix("file://"))
        value = json.loads(old.read_text())
        change(value)
        version = int(old.name.partition("-")[0])
        new = old.with_name(f"{version:05d}-{uuid.uuid4()}.metadata.json")
        new.write_text(json.dumps(value))
        connection.execute(
            f"UPDATE iceberg_tables SET metadata_location = ? {where}",
            (f"file://{new}", namespace, table),
        )
        connection.commit()
    finally:
        connection.close()
    return f"file://{new}"
