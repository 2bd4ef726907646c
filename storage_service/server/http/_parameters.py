"""Query parameters of the data routes, checked and named in their errors."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from typing import Final

from streamhouse.core.errors import InvalidRequestError
from streamhouse.core.model.table import TableInfo

__all__ = [
    "column_names",
    "fingerprints",
    "integer",
    "log_column_names",
    "offsets",
    "schema_version",
    "table_id",
    "written_version",
]

_OFFSET_MAX: Final = (1 << 63) - 1


def integer(name: str, text: str, *, least: int) -> int:
    """Read a whole number of at least `least`."""
    value = int(text) if text.isascii() and text.isdigit() and len(text) <= 19 else -1
    if not least <= value <= _OFFSET_MAX:
        raise InvalidRequestError(
            f"parameter {name} = '{text[:40]}' must be a whole number from {least} on"
        )
    return value


def table_id(query: Mapping[str, str]) -> int | None:
    """Read `table_id`, the table of the request's offsets; None if the request has no table id."""
    text = query.get("table_id")
    return None if text is None else integer("table_id", text, least=0)


def column_names(
    text: str | None, table: TableInfo, schema_id: int | None = None
) -> Sequence[str] | None:
    """Read `a,b` (or a JSON list, for names with commas) as columns of `table`; None: all columns.

    The names are of version `schema_id` of the schema, by default of the current version.
    """
    names = _names(text)
    if names is None:
        return None
    schema = table.schema if schema_id is None else table.schema_version(schema_id)
    return schema.select(names, table=str(table.path)).names


def schema_version(text: str | None, table: TableInfo) -> int:
    """Read `schema_id`, a version of the table's schema; None: the current version."""
    schema_id = table.schema_id if text is None else integer("schema_id", text, least=0)
    table.schema_version(schema_id)
    return schema_id


def written_version(text: str | None, table: TableInfo) -> int | None:
    """Read `schema_id` of a write, the schema version of the column names.

    The text is a version number, or the `VERSION_HEADER` from an earlier answer about the table.
    The result is None without the parameter, and for a header of a dropped table of the same name.
    """
    if text is None:
        return None
    table_id, dot, schema_id = text.partition(".")
    if not dot:
        return schema_version(text, table)
    number = integer("schema_id", schema_id, least=0)
    if integer("schema_id", table_id, least=0) != table.table_id:
        return None
    table.schema_version(number)
    return number


def log_column_names(text: str | None, table: TableInfo, schema_id: int) -> Sequence[str] | None:
    """Read columns as `column_names` does, from the columns of the log in this version."""
    names = _names(text)
    if names is not None:
        schema = table.schema_version(schema_id)
        change_columns = table.log_schema_of(schema_id).names[len(schema.names) :]
        # A request may name columns that describe the change and no column of the row.
        if row_columns := [name for name in names if name not in change_columns]:
            schema.select(row_columns, table=str(table.path))
    return names


def _names(text: str | None) -> list[str] | None:
    if text is None:
        return None
    names = text.split(",")
    if text.startswith("["):
        try:
            names = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(
                f"parameter columns = '{text[:80]}' is no JSON list of names"
            ) from error
    if not all(isinstance(name, str) for name in names) or len(set(names)) != len(names):
        raise InvalidRequestError("parameter columns must be column names, each once")
    if not names:
        raise InvalidRequestError("parameter columns must name at least one column")
    return names


def fingerprints(name: str, text: str, buckets: Container[int]) -> dict[int, str]:
    """Read a JSON object of bucket -> fingerprint, for a part of `buckets`."""
    try:
        value = json.loads(text)
        by_bucket = {int(bucket): fingerprint for bucket, fingerprint in value.items()}
    except (ValueError, AttributeError, RecursionError) as error:
        raise InvalidRequestError(
            f"parameter {name} = '{text[:80]}' must be a JSON object of bucket to fingerprint"
        ) from error
    for bucket, fingerprint in by_bucket.items():
        if bucket not in buckets or not isinstance(fingerprint, str):
            raise InvalidRequestError(
                f"parameter {name}: bucket {bucket} must be one that is started at, its fingerprint"
                " as an answer has it"
            )
    return by_bucket


def offsets(name: str, text: str, table: TableInfo, *, table_id: int | None) -> dict[int, int]:
    """Read a JSON object of bucket -> offset, such as `{"0": 12}`, of the table with this id."""
    try:
        value = json.loads(text)
        by_bucket = {int(bucket): offset for bucket, offset in value.items()}
    except (ValueError, AttributeError, RecursionError) as error:
        raise InvalidRequestError(
            f"parameter {name} = '{text[:80]}' must be a JSON object of bucket to offset, as in"
            ' {"0": 12}'
        ) from error
    for bucket, offset in by_bucket.items():
        if not isinstance(offset, int) or isinstance(offset, bool) or offset < 0:
            raise InvalidRequestError(
                f"parameter {name}: offset {str(offset)[:40]} of bucket {bucket} must be a whole"
                " number from 0 on"
            )
    # The table id is checked first: a new table of the same name may have different buckets.
    table.check_positions(by_bucket, table_id=table_id)
    for bucket in by_bucket:
        if not 0 <= bucket < table.bucket_count:
            raise InvalidRequestError(
                f"parameter {name}: table '{table.path}' has no bucket {bucket}; its buckets are"
                f" 0..{table.bucket_count - 1}"
            )
    return by_bucket
