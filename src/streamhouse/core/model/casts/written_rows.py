"""Which columns the rows of a write mean, and the same rows in a table's current version.

Every door of writes asks here, so a set of column names means the same at all of them. A writer
speaks of one version of the schema: the one its client knows, or names as `schema_id`. The names
in its rows are the names of that version, whatever was changed since:

- a column that was renamed since goes where it went
- a value of a column that was dropped since is refused by name
- a column that was added since is null, or stays as it is in a partial update

Rows may also have exactly the columns of an older version to which columns were merely added
until the version the writer speaks of. A writer that names no version speaks of the current one.
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
    """Raise `SchemaMismatchError` for a name that was another column's in an earlier version.

    For rows that were made by a schema and do not say which: the writer may mean either column.
    Versions before `since` were over when the writer began. `how` tells what to do to mean the
    current column.
    """
    if since == info.schema_id:
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
                    f" {schema_id} of its schema, and the rows do not say which version they are"
                    f" of; {how} to write the column of that name there is now"
                )


def version_of(info: TableInfo, columns: pa.Schema, *, stated: int) -> int:
    """Return the schema version of whole rows with these columns, in any order.

    `stated` is the version that the writer speaks of. The result is that version, or an older one
    that has exactly these columns, and the same fields inside of them, and to which columns and
    fields were merely added until `stated`.
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
    """Return the Arrow schema of log rows of a version, which says itself which version it is."""
    return info.log_schema_of(schema_id).with_metadata({_SCHEMA_ID: b"%d" % schema_id})


def stored_version_of(info: TableInfo, stored: pa.Schema) -> int:
    """Return the version in which rows with this Arrow schema were stored.

    The schema says it, as `staged_schema` has it; in files that are older it is the newest version
    with exactly this schema.
    """
    said = (stored.metadata or {}).get(_SCHEMA_ID)
    if said is not None and info.log_schema_of(int(said)).equals(stored):
        return int(said)
    for schema_id in sorted(info.schema_versions, reverse=True):
        if info.log_schema_of(schema_id).equals(stored):
            return schema_id
    raise CorruptDataError(f"table '{info.path}': rows of an unknown schema are stored: {stored}")


def current_columns(info: TableInfo, names: Sequence[str], *, schema_id: int) -> list[str]:
    """Return what columns that have these names in a version are called now.

    Raises `ColumnDroppedError`, or `UnknownColumnError` for a name that version has not.
    """
    if schema_id == info.schema_id:
        return list(names)
    version = info.schema_version(schema_id)
    now = {column.id: column.name for column in info.schema.columns}
    columns = [version.column(name, table=str(info.path)) for name in names]
    for column in columns:
        if column.id not in now:
            raise _dropped(info, column, schema_id)
    return [now[column.id] for column in columns]


def check_dropped(
    info: TableInfo,
    rows: pa.RecordBatch,
    *,
    schema_id: int,
    deletes: npt.NDArray[np.bool_] | None = None,
) -> None:
    """Raise `ColumnDroppedError` if rows of a version have a value in a column dropped since.

    Nulls are no loss: who fills a column that nobody named is not refused. Of rows that delete one
    only the key counts.
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
    """Raise `ColumnDroppedError` if a column of rows that wait in a log table's part is dropped.

    Their values are not looked at: whoever staged the rows stages them anew.
    """
    schema_id = stored_version_of(info, stored)
    current_columns(info, info.schema_version(schema_id).names, schema_id=schema_id)


def _dropped(info: TableInfo, column: Column, schema_id: int) -> ColumnDroppedError:
    other = ""
    if column.name in info.schema.names:
        other = f", and the '{column.name}' there is now is another column"
    return ColumnDroppedError(
        f"table '{info.path}': column '{column.name}' was dropped since version {schema_id} of the"
        f" schema, which the rows are written by{other}; write again by the current version,"
        f" {info.schema_id}, as a call that is repeated, a new producer or a new query does"
    )


def in_current_version(
    info: TableInfo,
    rows: pa.RecordBatch,
    *,
    schema_id: int,
    is_partial: bool = False,
    deletes: npt.NDArray[np.bool_] | None = None,
) -> pa.RecordBatch:
    """Return rows of a version of the schema as rows of the current one.

    Args:
        schema_id: the version that the rows are of. Those of the current one stay as they are.
        is_partial: whether the rows have some of that version's columns; so has the result.
        deletes: which rows delete one, of which only the key counts. With it columns beside the
            key may have nulls: which row may, is for the caller to check. Rows that all delete may
            have the key's columns only.

    A value of a column that was dropped since goes; `check_dropped` refuses it. Raises as `conform`
    does, and for a partial row that has such a column `ColumnDroppedError`.
    """
    if schema_id == info.schema_id:
        return rows
    table = str(info.path)
    old, new = info.schema_version(schema_id), info.schema
    if is_partial:
        current_columns(info, rows.schema.names, schema_id=schema_id)
        old = _with_nulls_beside((), old.select(rows.schema.names, table=table))
        new = _with_nulls_beside((), _of_ids(new, old))
        # As the current version has them, in its order.
        return convert_rows(conform(rows, old, table=table), old, new, table=table)
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
    return convert_rows(conform(rows, old, table=table), old, new, table=table)


def read_before_change(table: str, why: str) -> UnavailableError:
    """What is said of rows that were read before a change of the schema, and no longer fit."""
    return UnavailableError(
        f"table '{table}': its schema changed while the rows were on their way, and as they were"
        f" read they cannot be stored; send them again: {why}"
    )


def _of_ids(columns: Schema, others: Schema) -> Schema:
    """Return the columns that are among the others."""
    ids = {column.id for column in others.columns}
    return Schema(tuple(column for column in columns.columns if column.id in ids))


def _with_nulls_beside(key: Collection[int], schema: Schema) -> Schema:
    """Return a version of the schema with nulls allowed in all columns but those with `key` ids."""
    return Schema(
        tuple(
            column if column.id in key else dataclasses.replace(column, nullable=True)
            for column in schema.columns
        )
    )


def _with_nulls_of(old: Schema, new: Schema) -> Schema:
    """Return `old` with nulls allowed where `new`, as which rows are stored, allows them."""
    nullable = {column.id for column in new.columns if column.nullable}
    return Schema(
        tuple(
            dataclasses.replace(column, nullable=True) if column.id in nullable else column
            for column in old.columns
        )
    )
