"""The columns meant by the rows of a write, and the same rows in a table's current version.

Every kind of write uses this module, so a set of column names means the same in all kinds. A
writer refers to one version of the schema: the version known to its client, or sent as `schema_id`.
The names in the rows are the names of this version, whatever has changed since:

- a column renamed since keeps its values under the new name
- a value of a column dropped since is refused by name
- a column added since is null, or keeps its value in a partial update

Rows may also have exactly the columns of an older version, if later versions up to the writer's
version only added columns. A writer without a version refers to the current version.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from streamhouse.core.errors import (
    ColumnDroppedError,
    CorruptDataError,
    SchemaMismatchError,
    UnavailableError,
)
from streamhouse.core.model.casts.conform import conform
from streamhouse.core.model.nested_fields import has_same_fields
from streamhouse.core.model.schema import Column, Schema
from streamhouse.core.model.schema_change import convert_rows
from streamhouse.core.model.table import TableInfo

__all__ = [
    "check_dropped",
    "check_names",
    "check_staged",
    "current_columns",
    "in_current_version",
    "read_before_change",
    "staged_schema",
    "stored_version_of",
    "version_of",
]

_SCHEMA_ID: Final = b"schema_id"


def check_names(
    info: TableInfo, names: Iterable[str], *, since: int | None = None, how: str = ""
) -> None:
    """Raise `SchemaMismatchError` for a name that belonged to another column in an earlier version.

    The check is for rows without a schema version: the writer may mean either column. Versions
    before `since` had ended when the writer began. `how` is the advice for writing to the current
    column.
    """
    if since == info.schema_id or len(info.schema_versions) == 1:
        return
    how = how or f"send schema_id={info.schema_id}"
    ids = {column.name: column.id for column in info.schema.columns}
    named = {name: ids[name] for name in names if name in ids}
    for schema_id in sorted(info.schema_versions, reverse=True):
        if since is not None and schema_id < since:
            return
        for column in info.schema_versions[schema_id].columns:
            if named.get(column.name, column.id) != column.id:
                raise SchemaMismatchError(
                    f"table '{info.path}': column '{column.name}' was another column in version"
                    f" {schema_id} of the schema, and the rows name no schema version; {how} to"
                    " write to the current column of this name"
                )


def version_of(info: TableInfo, columns: pa.Schema, *, stated: int) -> int:
    """Return the schema version of whole rows with these columns, in any order.

    `stated` is the writer's version. The result is `stated`, or an older version with exactly these
    columns and nested fields, if all later changes up to `stated` only added columns and fields.
    """
    if len(info.schema_versions) == 1:
        return stated
    names = set(columns.names)
    whole = info.schema_version(stated)
    named = [
        schema_id
        for schema_id in sorted(info.schema_versions, reverse=True)
        if schema_id <= stated
        and names == set(info.schema_versions[schema_id].names)
        and _is_added_to(info.schema_versions[schema_id], whole)
    ]
    if any(pa.types.is_nested(t) for t in columns.types):
        for schema_id in named:
            version = info.schema_versions[schema_id].columns
            if all(has_same_fields(columns.field(c.name).type, c.type) for c in version):
                return schema_id
    return named[0] if named else stated


def _is_added_to(earlier: Schema, later: Schema) -> bool:
    """Whether each column of `earlier` has the same name in `later`."""
    names = {column.id: column.name for column in later.columns}
    return all(names.get(column.id) == column.name for column in earlier.columns)


def staged_schema(info: TableInfo, schema_id: int) -> pa.Schema:
    """Return the Arrow schema of log rows of a version, with the version in its metadata."""
    return info.log_schema_of(schema_id).with_metadata({_SCHEMA_ID: b"%d" % schema_id})


def stored_version_of(info: TableInfo, stored: pa.Schema) -> int:
    """Return the version in which rows with this Arrow schema were stored.

    The metadata of the schema names the version, as written by `staged_schema`. For older files
    without metadata the result is the newest version with exactly this schema.
    """
    metadata_id = (stored.metadata or {}).get(_SCHEMA_ID)
    if metadata_id is not None and info.log_schema_of(int(metadata_id)).equals(stored):
        return int(metadata_id)
    for schema_id in sorted(info.schema_versions, reverse=True):
        if info.log_schema_of(schema_id).equals(stored):
            return schema_id
    raise CorruptDataError(f"table '{info.path}': rows of an unknown schema are stored: {stored}")


def current_columns(info: TableInfo, names: Sequence[str], *, schema_id: int) -> list[str]:
    """Return the current names of the columns with these names in a version.

    Raises `ColumnDroppedError`, or `UnknownColumnError` for a name unknown to the version.
    """
    if schema_id == info.schema_id:
        return list(names)
    version = info.schema_version(schema_id)
    current_names = {column.id: column.name for column in info.schema.columns}
    columns = [version.column(name, table=str(info.path)) for name in names]
    for column in columns:
        if column.id not in current_names:
            raise _dropped(info, column, schema_id)
    return [current_names[column.id] for column in columns]


def check_dropped(
    info: TableInfo,
    rows: pa.RecordBatch,
    *,
    schema_id: int,
    deletes: npt.NDArray[np.bool_] | None = None,
) -> None:
    """Raise `ColumnDroppedError` if rows of a version have a value in a column dropped since.

    Nulls pass: a writer may fill an unnamed column with nulls. Of rows marked in `deletes` only the
    key counts.
    """
    if schema_id == info.schema_id:
        return
    if deletes is not None and deletes.any():
        rows = rows.filter(pa.array(~deletes))
    ids = {column.id for column in info.schema.columns}
    for column in info.schema_version(schema_id).columns:
        if column.id not in ids and column.name in rows.schema.names:
            array = rows.column(column.name)
            if array.null_count < len(array):
                raise _dropped(info, column, schema_id)


def check_staged(info: TableInfo, stored: pa.Schema) -> None:
    """Raise `ColumnDroppedError` if a column of staged rows of a log table is dropped.

    The values of the column do not matter; the writer has to stage the rows anew.
    """
    schema_id = stored_version_of(info, stored)
    current_columns(info, info.schema_version(schema_id).names, schema_id=schema_id)


def _dropped(info: TableInfo, column: Column, schema_id: int) -> ColumnDroppedError:
    homonym = ""
    if column.name in info.schema.names:
        homonym = f", and the current '{column.name}' is another column"
    return ColumnDroppedError(
        f"table '{info.path}': column '{column.name}' was dropped since version {schema_id} of the"
        f" schema, the version of these rows{homonym}; write again with the current version,"
        f" {info.schema_id}: repeat the call, or start a new producer or query"
    )


def in_current_version(
    info: TableInfo,
    rows: pa.RecordBatch,
    *,
    schema_id: int,
    is_partial: bool = False,
    deletes: npt.NDArray[np.bool_] | None = None,
) -> pa.RecordBatch:
    """Return rows of a version of the schema as rows of the current version.

    Args:
        schema_id: the version of the rows. Rows of the current version stay as they are.
        is_partial: whether the rows have only some columns of the version; the result has the same.
        deletes: which rows are deletes, where only the key counts. With `deletes`, columns outside
            of the key may have nulls; the caller checks the rows which may not. If all rows are
            deletes, the key's columns are enough.

    A value of a column dropped since is left out; `check_dropped` refuses such values. Raises like
    `conform`, and `ColumnDroppedError` for partial rows with such a column.
    """
    if schema_id == info.schema_id:
        return rows
    table = str(info.path)
    old, new = info.schema_version(schema_id), info.schema
    if is_partial:
        current_columns(info, rows.schema.names, schema_id=schema_id)
        old = _with_nulls_beside((), old.select(rows.schema.names, table=table))
        new = _with_nulls_beside((), _of_ids(new, old))
        # The columns in the order of the current version.
        conformed = conform(rows, old, table=table, key=info.descriptor.primary_key)
        return convert_rows(conformed, old, new, table=table)
    if deletes is None:
        old = _with_nulls_of(old, new)
    else:
        key = new.select(info.descriptor.primary_key, table=table)
        of_key = _of_ids(old, key)
        if deletes.all() and set(rows.schema.names) <= set(of_key.names):
            old, new = of_key, key
        else:
            ids = {column.id for column in key.columns}
            old, new = _with_nulls_beside(ids, old), _with_nulls_beside(ids, new)
    conformed = conform(rows, old, table=table, key=info.descriptor.primary_key)
    return convert_rows(conformed, old, new, table=table)


def read_before_change(table: str, why: str) -> UnavailableError:
    """Return the error for rows that were read before a schema change and no longer fit."""
    return UnavailableError(
        f"table '{table}': its schema changed while the rows were on their way, and rows read with"
        f" the earlier schema cannot be stored; send them again: {why}"
    )


def _of_ids(columns: Schema, selection: Schema) -> Schema:
    """Return the columns whose ids are in `selection`."""
    ids = {column.id for column in selection.columns}
    return Schema(tuple(column for column in columns.columns if column.id in ids))


def _with_nulls_beside(key: Collection[int], schema: Schema) -> Schema:
    """Return the schema with nulls allowed in all columns except the ids in `key`."""
    return Schema(
        tuple(
            column if column.id in key else dataclasses.replace(column, nullable=True)
            for column in schema.columns
        )
    )


def _with_nulls_of(old: Schema, new: Schema) -> Schema:
    """Return `old` with nulls allowed wherever the stored schema `new` allows nulls."""
    nullable = {column.id for column in new.columns if column.nullable}
    return Schema(
        tuple(
            dataclasses.replace(column, nullable=True) if column.id in nullable else column
            for column in old.columns
        )
    )
