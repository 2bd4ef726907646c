"""Iceberg field ids of a table's columns, and the Arrow schema of lake files with the ids.

Invariants:
- a column's field id is its column id; system columns start at SYSTEM_FIELD_ID_FIRST
- fields inside nested columns are numbered from NESTED_FIELD_ID_FIRST on, in the order of columns
  and depth first, when the lake table is created; from then on the lake table has the ids, and a
  new field gets the next id never used
- tinyint and smallint are int in the lake; every other type is itself
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import pyarrow as pa

from streamhouse.core.errors import InvalidSchemaError
from streamhouse.core.model.casts.nested import fields_of, with_fields
from streamhouse.core.model.lake.facts import (
    CHANGE_TYPE_FIELD_ID,
    LAKE_CHANGE_TYPE_FIELD,
    LAKE_SYSTEM_FIELDS,
    SYSTEM_FIELD_ID_FIRST,
    LakeRole,
)
from streamhouse.core.model.lake.limits import NESTED_FIELD_ID_FIRST
from streamhouse.core.model.schema import Schema

__all__ = [
    "BUCKET_FIELD_ID",
    "NESTED_FIELD_ID_FIRST",
    "OFFSET_FIELD_ID",
    "TIMESTAMP_FIELD_ID",
    "FieldPath",
    "assign_nested_ids",
    "lake_arrow_schema",
    "lake_type",
    "with_defaults",
]

FieldPath = tuple[int | str, ...]
"""Column id, then names downwards: (3, 'element', 'city')."""

FIELD_ID_KEY: Final = b"PARQUET:field_id"
DEFAULT_KEY: Final = b"streamhouse.default"
BUCKET_FIELD_ID, OFFSET_FIELD_ID, TIMESTAMP_FIELD_ID = (
    SYSTEM_FIELD_ID_FIRST + position for position in range(len(LAKE_SYSTEM_FIELDS))
)


def assign_nested_ids(
    schema: Schema, *, assigned_ids: Mapping[FieldPath, int] | None = None, highest_used: int = 0
) -> dict[FieldPath, int]:
    """Return the field id of every field inside the schema's nested columns.

    Args:
        assigned_ids: ids already in the lake table; they are kept.
        highest_used: the highest nested id that any schema of the lake table ever had.
    """
    assigned_ids = assigned_ids or {}
    for column in schema.columns:
        if not 0 < column.id < NESTED_FIELD_ID_FIRST:
            raise InvalidSchemaError(
                f"column '{column.name}' has id {column.id}; a lake table holds ids up to"
                f" {NESTED_FIELD_ID_FIRST - 1}"
            )
    next_id = max(NESTED_FIELD_ID_FIRST - 1, highest_used, *assigned_ids.values(), 0) + 1
    ids: dict[FieldPath, int] = {}
    for column in schema.columns:
        for path in _paths_inside(column.type, (column.id,)):
            if path in assigned_ids:
                ids[path] = assigned_ids[path]
            else:
                ids[path] = next_id
                next_id += 1
    if next_id > SYSTEM_FIELD_ID_FIRST:
        raise InvalidSchemaError("the table has more nested fields than a lake table can number")
    return ids


def _paths_inside(data_type: pa.DataType, path: FieldPath) -> Iterator[FieldPath]:
    for child in fields_of(data_type):
        yield (*path, child.name)
        yield from _paths_inside(child.type, (*path, child.name))


def lake_arrow_schema(
    schema: Schema, nested_ids: Mapping[FieldPath, int], *, role: LakeRole = LakeRole.ROWS
) -> pa.Schema:
    """Return the schema of the table's lake files: user columns, then the system columns.

    Files of a full history have the change type before the system columns.
    """
    fields = [
        _numbered(
            pa.field(column.name, column.type, nullable=column.nullable),
            column.id,
            (column.id,),
            nested_ids,
        )
        for column in schema.columns
    ]
    if role is LakeRole.CHANGES:
        fields.append(_with_id(LAKE_CHANGE_TYPE_FIELD, CHANGE_TYPE_FIELD_ID))
    fields += [
        _with_id(field, SYSTEM_FIELD_ID_FIRST + position)
        for position, field in enumerate(LAKE_SYSTEM_FIELDS)
    ]
    return with_defaults(pa.schema(fields), schema)


def lake_type(data_type: pa.DataType) -> pa.DataType:
    """Return the type that values of `data_type` have in the lake."""
    if pa.types.is_int8(data_type) or pa.types.is_int16(data_type):
        return pa.int32()
    children = [f.with_type(lake_type(f.type)) for f in fields_of(data_type)]
    return with_fields(data_type, children) if children else data_type


def with_defaults(file_schema: pa.Schema, schema: Schema) -> pa.Schema:
    """Return a schema of lake files with the columns' defaults, for rows of files without them."""
    defaults = {str(c.id).encode(): c.default for c in schema.columns if c.default is not None}
    for position, field in enumerate(file_schema):
        default = defaults.get((field.metadata or {}).get(FIELD_ID_KEY, b""))
        if default is not None:
            metadata = {**field.metadata, DEFAULT_KEY: default.encode()}
            file_schema = file_schema.set(position, field.with_metadata(metadata))
    return file_schema


def _numbered(
    field: pa.Field, field_id: int, path: FieldPath, nested_ids: Mapping[FieldPath, int]
) -> pa.Field:
    children = [
        _numbered(child, nested_ids[(*path, child.name)], (*path, child.name), nested_ids)
        for child in fields_of(field.type)
    ]
    data_type = with_fields(field.type, children) if children else lake_type(field.type)
    return _with_id(field.with_type(data_type), field_id)


def _with_id(field: pa.Field, field_id: int) -> pa.Field:
    return field.with_metadata({FIELD_ID_KEY: str(field_id).encode()})
