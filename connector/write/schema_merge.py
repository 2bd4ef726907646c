"""Option `mergeSchema`: columns of the DataFrame that the table lacks are added to it."""

from __future__ import annotations

import logging
from typing import Any

import pyarrow as pa

from streamhouse.storage_service.client import StorageClient
from streamhouse.storage_service.errors import InvalidSchemaError
from streamhouse.storage_service.model.schema import canonical_type, type_to_json
from streamhouse.storage_service.model.schema_change import is_wider
from streamhouse.storage_service.model.table import TableInfo

__all__ = ["merge_schema", "missing_columns"]

_log = logging.getLogger(__name__)


def merge_schema(client: StorageClient, info: TableInfo, data: pa.Schema) -> TableInfo:
    """Return the table with all columns of `data`, added at its end, and types as wide as there.

    Another job may do the same at the same time: whoever comes second finds it done.
    """
    changes = _changes(info, data)
    if not changes:
        return info
    try:
        return _changed(client, info, changes)
    except InvalidSchemaError:
        found = client.describe_table(str(info.path))
        if found.schema_id == info.schema_id:
            raise
        left = _changes(found, data)
        return _changed(client, found, left) if left else found


def missing_columns(info: TableInfo, data: pa.Schema) -> tuple[pa.Field, ...]:
    """Return the nullable columns of the table that `data` has not: they become null."""
    return tuple(
        column.to_arrow()
        for column in info.schema.columns
        if column.nullable and column.name not in data.names
    )


def _changed(client: StorageClient, info: TableInfo, changes: list[dict[str, Any]]) -> TableInfo:
    _log.info("mergeSchema: table=%s changes=%s", info.path, changes)
    return client.alter_schema(str(info.path), changes)


def _changes(info: TableInfo, data: pa.Schema) -> list[dict[str, Any]]:
    own = {column.name: column for column in info.schema.columns}
    changes: list[dict[str, Any]] = []
    for field in data:
        wanted = canonical_type(field.type, where=field.name)
        column = own.get(field.name)
        if column is None:
            changes.append({"add": field.name, "type": type_to_json(wanted)})
        elif is_wider(wanted, column.type) and field.name not in info.descriptor.primary_key:
            changes.append({"widen": field.name, "to": type_to_json(wanted)})
    return changes
