"""The table a write goes to: created as its options say, or found to be what they say."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterable, Mapping
from typing import Final

import pyarrow as pa

from streamhouse.connector.options.write_options import WriteMode, WriteOptions
from streamhouse.connector.write.write_rows import CHANGELOG_COLUMNS
from streamhouse.storage_service.client import StorageClient
from streamhouse.storage_service.errors import (
    DatabaseExistsError,
    DatabaseNotFoundError,
    InvalidRequestError,
    TableExistsError,
    TableNotFoundError,
)
from streamhouse.storage_service.model.merge_engine import (
    MERGE_PROPERTY_HELP,
    is_merge_property,
)
from streamhouse.storage_service.model.partitioning import PartitionField
from streamhouse.storage_service.model.properties import TableProperties
from streamhouse.storage_service.model.schema import CHANGE_TYPE_COLUMN
from streamhouse.storage_service.model.table import TableInfo

__all__ = ["existing_or_created"]

_log = logging.getLogger(__name__)

_COLUMN_PROPERTY: Final = re.compile(r"fields\.(?P<column>.+?)(?P<rest>\.agg|\.listagg\..+)")


def existing_or_created(
    client: StorageClient, options: WriteOptions, schema: pa.Schema, *, is_stream: bool
) -> TableInfo:
    """Return the table, created from the DataFrame's `schema` if there is none.

    Raises `InvalidRequestError` for an option that describes another table than the one there is.
    A stream asks again with every micro-batch: properties altered meanwhile do not end it.
    """
    path = options.connection.name.path
    try:
        info = client.describe_table(str(path))
    except (DatabaseNotFoundError, TableNotFoundError):
        if options.mode in (WriteMode.DELETE, WriteMode.PARTIAL):
            raise
        try:
            return _created(client, options, schema)
        except TableExistsError:
            # Another job created it in between.
            info = client.describe_table(str(path))
    _check_described(options, info)
    _check_properties(options, info, is_stream=is_stream)
    return info


def _created(client: StorageClient, options: WriteOptions, schema: pa.Schema) -> TableInfo:
    path = options.connection.name.path
    has_changes = CHANGE_TYPE_COLUMN in schema.names
    if not options.primary_key and (has_changes or options.mode is WriteMode.UPSERT):
        what = f"column '{CHANGE_TYPE_COLUMN}'" if has_changes else "write.mode = 'upsert'"
        raise InvalidRequestError(
            f"table '{path}' does not exist, and {what} needs a table with a primary key; name"
            " its columns with option 'primary.key'"
        )
    _log.info("creating table=%s from the DataFrame's schema", path)
    own = [
        # Spark hardly ever knows that a key column has no nulls.
        field.with_nullable(field.nullable and field.name not in (options.primary_key or ()))
        for field in schema
        if not has_changes or field.name not in (CHANGE_TYPE_COLUMN, *CHANGELOG_COLUMNS)
    ]
    # The first write sets up all it needs; a database is only a name.
    with contextlib.suppress(DatabaseExistsError):
        client.create_database(path.database)
    return client.create_table(
        str(path),
        pa.schema(own),
        primary_key=options.primary_key or (),
        bucket_count=options.bucket_count or 1,
        bucket_key=options.bucket_key or (),
        partitioned_by=options.partitioned_by or (),
        properties=_with_column_names(options.properties, [field.name for field in own]),
    )


def _with_column_names(properties: Mapping[str, str], columns: list[str]) -> dict[str, str]:
    """Return the properties with columns named as the table does: Spark lowers option keys."""
    by_lower = {column.lower(): column for column in columns}
    named = {}
    for key, text in properties.items():
        match = _COLUMN_PROPERTY.fullmatch(key)
        if match is not None:
            column = by_lower.get(match["column"], match["column"])
            key = f"fields.{column}{match['rest']}"
        named[key] = text
    return named


def _check_described(options: WriteOptions, info: TableInfo) -> None:
    descriptor = info.descriptor
    partitioned_by = options.partitioned_by
    wanted_fields = (
        None
        if partitioned_by is None
        else [str(PartitionField.parse(text)) for text in partitioned_by]
    )
    for key, given, actual in (
        ("bucket.num", options.bucket_count, descriptor.bucket_count),
        ("primary.key", _listed(options.primary_key), _listed(descriptor.primary_key)),
        ("bucket.key", _listed(options.bucket_key), _listed(descriptor.effective_bucket_key)),
        ("partitioned.by", _listed(wanted_fields), _listed(map(str, descriptor.partitioned_by))),
    ):
        if given is not None and given != actual:
            raise InvalidRequestError(
                f"table '{info.path}' exists with {key} = {actual or 'none'}, and this write says"
                f" {given}; a table keeps that for life: remove the option, or write to another"
                " table"
            )


def _listed(names: Iterable[str] | None) -> str | None:
    return None if names is None else ", ".join(names)


def _check_properties(options: WriteOptions, info: TableInfo, *, is_stream: bool) -> None:
    table = str(info.path)
    actual = info.descriptor.properties
    given = _with_column_names(options.properties, info.schema.names)
    differing = [key for key in given if _differs(key, given[key], actual, table=table)]
    if not differing:
        return
    key = differing[0]
    sentence = (
        f"table '{table}' exists with {key} = {actual.get(key) or 'its default'}, and this write"
        f" says {given[key]}; remove the option, or change the table with the client's"
        " alter_properties"
    )
    if not is_stream:
        raise InvalidRequestError(sentence)
    _log.warning("%s", sentence)


def _differs(key: str, text: str, actual: Mapping[str, str], *, table: str) -> bool:
    if is_merge_property(key):
        default = MERGE_PROPERTY_HELP.get(key, ("", ""))[0]
        return text.strip().lower() != actual.get(key, default).strip().lower()
    return TableProperties.parse({key: text}, table=table) != TableProperties.parse(
        {key: actual[key]} if key in actual else {}, table=table
    )
