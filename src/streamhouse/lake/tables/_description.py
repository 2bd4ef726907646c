"""The description of a table, as JSON in a property of its lake table, for adoptions.

The description adds to Iceberg's own metadata: buckets and their key, narrow types, the table's
properties, every version of its schema.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Final

from streamhouse.core.errors import StreamhouseError, UnsupportedError
from streamhouse.core.model.properties import IMPORT_SOURCE_PROPERTY
from streamhouse.core.model.table import TableInfo, TablePath

__all__ = ["TABLE_PROPERTY", "description_of", "table_described_by"]

TABLE_PROPERTY: Final = "streamhouse.table"
# What the lake table's name and each service say for themselves.
_LEFT_OUT: Final = ("path", "table_id", "created_at_us", "nodes")


def description_of(table: TableInfo) -> str:
    """Return the value of the property; equal tables give equal texts."""
    value = table.to_json()
    for name in _LEFT_OUT:
        del value[name]
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def table_described_by(
    text: str, *, path: TablePath, table_id: int, created_at_us: int
) -> TableInfo:
    """Return the described table, under this name and id.

    An import ends here: only the importing service has its progress. Raises `UnsupportedError` for
    a text of an unknown version.
    """
    try:
        value = json.loads(text)
        stored_table = TableInfo.from_json(
            {**value, "path": str(path), "table_id": table_id, "created_at_us": created_at_us}
        )
    except (StreamhouseError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UnsupportedError(
            f"lake table '{path}': its property {TABLE_PROPERTY} describes no table that this"
            f" version of Streamhouse knows: {error}"
        ) from error
    properties = dict(stored_table.descriptor.properties)
    properties.pop(IMPORT_SOURCE_PROPERTY, None)
    return replace(
        stored_table,
        descriptor=replace(stored_table.descriptor, properties=properties),
        nodes=dict.fromkeys(range(stored_table.bucket_count), ""),
    )
