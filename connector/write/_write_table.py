"""The table of a write: created by the write's options, or checked against the options.

With option `mergeSchema` the write adds columns of the DataFrame to the table, and fields of the
DataFrame's structs.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Container, Iterable, Mapping
from typing import Any, Final

import pyarrow as pa

from streamhouse.client import StorageClient
from streamhouse.connector.write._write_options import WriteMode, WriteOptions
from streamhouse.core.errors import (
    DatabaseNotFoundError,
    InvalidRequestError,
    InvalidSchemaError,
    TableExistsError,
    TableNotFoundError,
)
from streamhouse.core.model.merge_engine import (
    MERGE_PROPERTY_HELP,
    is_merge_property,
)
from streamhouse.core.model.nested_fields import fields_lacking, wider_parts
from streamhouse.core.model.partitioning import PartitionField
from streamhouse.core.model.properties import TableProperties
from streamhouse.core.model.records.record_format import (
    RECORD_PROPERTY_HELP,
    is_record_property,
)
from streamhouse.core.model.schema import (
    BUCKET_COLUMN,
    CHANGE_TYPE_COLUMN,
    OFFSET_COLUMN,
    SPARK_CHANGE_TYPE_COLUMN,
    TIMESTAMP_COLUMN,
    Column,
    canonical_type,
    type_to_json,
)
from streamhouse.core.model.table import TableInfo
from streamhouse.core.model.values.checks import is_check_property

__all__ = [
    "CHANGELOG_COLUMNS",
    "as_changes",
    "existing_or_created",
    "merge_schema",
    "missing_columns",
]

# What Spark, Delta and Iceberg have beside `_change_type`.
_COMMIT_PREFIX: Final = "_commit_"
_CHANGE_ORDINAL: Final = "_change_ordinal"
_log = logging.getLogger(__name__)

CHANGELOG_COLUMNS: Final = frozenset({BUCKET_COLUMN, OFFSET_COLUMN, TIMESTAMP_COLUMN})
"""The columns of a `$changelog` beside the table's columns and the change type."""

_COLUMN_PROPERTY: Final = re.compile(r"fields\.(?P<column>.+?)(?P<suffix>\.agg|\.listagg\..+)")


def existing_or_created(
    client: StorageClient, options: WriteOptions, schema: pa.Schema, *, is_stream: bool
) -> TableInfo:
    """Return the table, created from the DataFrame's `schema` if it does not exist.

    Raise `InvalidRequestError` for an option that disagrees with the existing table. A stream
    checks again with every micro-batch; properties altered in the meantime do not end the stream.
    """
    path = options.connection.name.path
    options = _in_names_of(options, schema.names)
    try:
        info = client.describe_table(str(path))
    except (DatabaseNotFoundError, TableNotFoundError):
        if options.mode in (WriteMode.DELETE, WriteMode.PARTIAL):
            raise
        try:
            return _created(client, options, schema)
        except TableExistsError:
            # Another job has created the table in between.
            info = client.describe_table(str(path))
    options = _in_names_of(options, info.schema.names)
    _check_described(options, info)
    _check_properties(options, info, is_stream=is_stream)
    return info


def _in_names_of(options: WriteOptions, columns: Iterable[str]) -> WriteOptions:
    """Return the options with the columns' spelling of keys, which match columns without case."""
    by_lower = {column.lower(): column for column in columns}

    def named(names: tuple[str, ...] | None) -> tuple[str, ...] | None:
        return names and tuple(by_lower.get(name.lower(), name) for name in names)

    return dataclasses.replace(
        options, primary_key=named(options.primary_key), bucket_key=named(options.bucket_key)
    )


def _created(client: StorageClient, options: WriteOptions, schema: pa.Schema) -> TableInfo:
    path = options.connection.name.path
    if options.primary_key or options.mode is WriteMode.UPSERT:
        schema, foreign = as_changes(schema, (), table=str(path))
        schema = pa.schema([field for field in schema if field.name not in foreign])
    has_changes = CHANGE_TYPE_COLUMN in schema.names
    if not options.primary_key and (has_changes or options.mode is WriteMode.UPSERT):
        request = f"column '{CHANGE_TYPE_COLUMN}'" if has_changes else "write.mode = 'upsert'"
        raise InvalidRequestError(
            f"table '{path}' does not exist, and {request} needs a table with a primary key; name"
            " its columns with option 'primary.key'"
        )
    _log.info("creating table=%s from the DataFrame's schema", path)
    fields = [
        _as_created(field, options)
        for field in schema
        if not has_changes or field.name not in (CHANGE_TYPE_COLUMN, *CHANGELOG_COLUMNS)
    ]
    for field in fields:
        if pa.types.is_null(field.type):
            raise InvalidSchemaError(
                f"table '{path}': column '{field.name}' is VOID, since all its values are NULL;"
                f" write cast({field.name} AS string), or a cast to another type"
            )
    return client.create_table(
        str(path),
        pa.schema(fields),
        primary_key=options.primary_key or (),
        bucket_count=options.bucket_count or 1,
        bucket_key=options.bucket_key or (),
        partitioned_by=options.partitioned_by or (),
        properties=_with_column_names(options.properties, [field.name for field in fields]),
    )


def as_changes(
    schema: pa.Schema, own: Container[str], *, table: str
) -> tuple[pa.Schema, frozenset[str]]:
    """Return a DataFrame's schema with our name of a change type of Spark, Delta or Iceberg.

    Also returns the columns which those have beside it and the table has not: they are no data.
    A table with a column `_change_type` of its `own` gets it as data. Raises
    `InvalidRequestError` for two change types.
    """
    names = [name for name in schema.names if name not in own]
    types = [name for name in names if name.lower() == SPARK_CHANGE_TYPE_COLUMN]
    if not types:
        return schema, frozenset()
    if len(types) > 1 or CHANGE_TYPE_COLUMN in names:
        raise InvalidRequestError(
            f"table '{table}': the rows have a change type in '{types[0]}' and in"
            f" '{CHANGE_TYPE_COLUMN if len(types) == 1 else types[1]}'; drop one of the columns"
        )
    foreign = {
        name
        for name in names
        if name.lower().startswith(_COMMIT_PREFIX) or name.lower() == _CHANGE_ORDINAL
    }
    named = [CHANGE_TYPE_COLUMN if name == types[0] else name for name in schema.names]
    fields = [field.with_name(name) for field, name in zip(schema, named, strict=True)]
    return pa.schema(fields), frozenset(foreign)


def _as_created(field: pa.Field, options: WriteOptions) -> pa.Field:
    """Return a DataFrame's column for a new table.

    Spark reports literals and ranges as not nullable, which says nothing of later rows. And Spark
    rarely knows that a key is not null.
    """
    if field.name in (options.primary_key or ()):
        return field.with_nullable(False)
    if options.keeps_nullability:
        return field
    return pa.field(field.name, _nullable(field.type), metadata=field.metadata)


def _nullable(t: pa.DataType) -> pa.DataType:
    """Return a type with nulls allowed at every depth; the keys of a map are never null."""
    if pa.types.is_struct(t):
        return pa.struct([pa.field(f.name, _nullable(f.type)) for f in t])
    if pa.types.is_list(t):
        return pa.list_(pa.field(t.value_field.name, _nullable(t.value_type)))
    if pa.types.is_map(t):
        return pa.map_(t.key_type, _nullable(t.item_type))
    return t


def _with_column_names(properties: Mapping[str, str], columns: list[str]) -> dict[str, str]:
    """Return the properties with the table's spelling of columns: Spark lowers option keys."""
    by_lower = {column.lower(): column for column in columns}
    named = {}
    for key, text in properties.items():
        match = _COLUMN_PROPERTY.fullmatch(key)
        if match is not None:
            column = by_lower.get(match["column"], match["column"])
            key = f"fields.{column}{match['suffix']}"
        named[key] = text
    return named


def _check_described(options: WriteOptions, info: TableInfo) -> None:
    descriptor = info.descriptor
    partitioned_by = options.partitioned_by
    partition_fields = (
        None
        if partitioned_by is None
        else [str(PartitionField.parse(text)) for text in partitioned_by]
    )
    for key, option, actual in (
        ("bucket.num", options.bucket_count, descriptor.bucket_count),
        ("primary.key", _listed(options.primary_key), _listed(descriptor.primary_key)),
        ("bucket.key", _listed(options.bucket_key), _listed(descriptor.effective_bucket_key)),
        ("partitioned.by", _listed(partition_fields), _listed(map(str, descriptor.partitioned_by))),
    ):
        if option is not None and option != actual:
            raise InvalidRequestError(
                f"table '{info.path}' exists with {key} = {actual or 'none'}, and this write says"
                f" {option}; a table never changes it: remove the option, or write to another"
                " table"
            )


def _listed(names: Iterable[str] | None) -> str | None:
    return None if names is None else ", ".join(names)


def _check_properties(options: WriteOptions, info: TableInfo, *, is_stream: bool) -> None:
    table = str(info.path)
    actual = info.descriptor.properties
    properties = _with_column_names(options.properties, info.schema.names)
    differing = [
        key
        for key in properties
        if _differs(key, properties[key], actual, table=table)
        and not (options.merges_schema and _is_of_new_column(key, info))
    ]
    if not differing:
        return
    key = differing[0]
    sentence = (
        f"table '{table}' exists with {key} = {actual.get(key) or 'its default'}, and this write"
        f" says {properties[key]}; remove the option, or change the table with the client's"
        " alter_properties"
    )
    if not is_stream:
        raise InvalidRequestError(sentence)
    _log.warning("%s", sentence)


def _is_of_new_column(key: str, info: TableInfo) -> bool:
    """Whether a property is of a column that the table lacks and this write may add."""
    match = _COLUMN_PROPERTY.fullmatch(key)
    table_columns = {name.lower() for name in info.schema.names}
    return match is not None and match["column"].lower() not in table_columns


def _differs(key: str, text: str, actual: Mapping[str, str], *, table: str) -> bool:
    if is_merge_property(key):
        default = MERGE_PROPERTY_HELP.get(key, ("", ""))[0]
        return text.strip().lower() != actual.get(key, default).strip().lower()
    if is_record_property(key):
        return text.strip() != actual.get(key, RECORD_PROPERTY_HELP[key][0]).strip()
    if is_check_property(key):
        return text.strip() != actual.get(key, "").strip()
    return TableProperties.parse({key: text}, table=table) != TableProperties.parse(
        {key: actual[key]} if key in actual else {}, table=table
    )


def merge_schema(
    client: StorageClient,
    info: TableInfo,
    data: pa.Schema,
    properties: Mapping[str, str] | None = None,
) -> TableInfo:
    """Return the table with all columns and fields of `data`, and types at least as wide.

    New columns are at the end of the table, new fields at the end of their struct. A column that is
    nullable in `data` becomes nullable in the table, as in Iceberg's merging.

    If a concurrent job makes the same changes first, the changes are already done here.
    """
    named = _with_column_names(properties or {}, data.names)
    changes = _changes(info, data, named)
    if not changes:
        return info
    try:
        return _changed(client, info, changes)
    except InvalidSchemaError:
        newer_info = client.describe_table(str(info.path))
        if newer_info.schema_id == info.schema_id:
            raise
        remaining_changes = _changes(newer_info, data, named)
        return _changed(client, newer_info, remaining_changes) if remaining_changes else newer_info


def _aggregate(name: str, properties: Mapping[str, str]) -> dict[str, str]:
    """Return the merge function of a new column, if the write names one."""
    keys = {"aggregate": f"fields.{name}.agg", "delimiter": f"fields.{name}.listagg.delimiter"}
    return {attribute: properties[key] for attribute, key in keys.items() if key in properties}


def missing_columns(info: TableInfo, data: pa.Schema) -> tuple[Column, ...]:
    """Return the nullable columns of the table that `data` lacks."""
    return tuple(
        column
        for column in info.schema.columns
        if column.nullable and column.name not in data.names
    )


def _changed(client: StorageClient, info: TableInfo, changes: list[dict[str, Any]]) -> TableInfo:
    _log.info("mergeSchema: table=%s changes=%s", info.path, changes)
    return client.alter_schema(str(info.path), changes)


def _changes(
    info: TableInfo, data: pa.Schema, properties: Mapping[str, str]
) -> list[dict[str, Any]]:
    table_columns = {column.name: column for column in info.schema.columns}
    changes: list[dict[str, Any]] = []
    for field in data:
        data_type = canonical_type(field.type, where=field.name)
        column = table_columns.get(field.name)
        if column is None:
            added = {"add": field.name, "type": type_to_json(_nullable(data_type))}
            changes.append(added | _aggregate(field.name, properties))
            continue
        if field.name in info.descriptor.primary_key:
            continue
        for path, t in fields_lacking(column.type, data_type):
            changes.append({"add": [field.name, *path], "type": type_to_json(_nullable(t))})
        for path, t in wider_parts(column.type, data_type):
            changes.append({"widen": [field.name, *path], "to": type_to_json(t)})
        if field.nullable and not column.nullable:
            changes.append({"drop_not_null": field.name})
    return changes
