"""Rows of a lake file as the lake table's schema has them now: columns found by field id.

A file keeps the schema it was written with. A column renamed since is found under its id, one
added since is null, one widened since is cast, one dropped since is left out; inside nested
columns too.
"""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

from streamhouse.storage_service.errors import CorruptDataError
from streamhouse.storage_service.lake.files.field_ids import FIELD_ID_KEY, children_of

__all__ = ["FileColumns", "project"]


class FileColumns:
    """The columns of a file, or the fields of a struct in it: found by field id.

    Where the file was written without ids, they are found by name (Iceberg: name mapping).
    """

    def __init__(self, fields: Iterable[pa.Field]) -> None:
        fields = list(fields)
        self._by_id = {
            field_id: position
            for position, field in enumerate(fields)
            if (field_id := _field_id(field)) is not None
        }
        self._by_name = {field.name: position for position, field in enumerate(fields)}

    def position(self, field_id: int | None, name: str) -> int | None:
        """Return where the column is, None if the file lacks it."""
        if not self._by_id:
            return self._by_name.get(name)
        return None if field_id is None else self._by_id.get(field_id)


def project(rows: pa.Table, schema: pa.Schema, *, path: str) -> pa.Table:
    """Return `rows` of the file at `path` with exactly `schema`, which carries field ids.

    Raises `CorruptDataError` when a column that must not be null is not in the file.
    """
    if all(
        a.equals(b, check_metadata=True) for a, b in zip(rows.schema, schema, strict=False)
    ) and (len(rows.schema) == len(schema)):
        return rows
    in_file = FileColumns(rows.schema)
    columns = []
    for wanted in schema:
        position = in_file.position(_field_id(wanted), wanted.name)
        if position is None:
            columns.append(pa.chunked_array([_missing(wanted, rows.num_rows, path)]))
            continue
        column = rows.column(position)
        if not column.type.equals(wanted.type):
            chunks = [_conformed(chunk, wanted, path) for chunk in column.chunks]
            column = pa.chunked_array(chunks, wanted.type)
        columns.append(column)
    try:
        return pa.table(columns, schema=schema)
    except (pa.ArrowException, ValueError) as error:
        raise CorruptDataError(f"lake file '{path}' does not fit its table: {error}") from error


def _field_id(field: pa.Field) -> int | None:
    text = (field.metadata or {}).get(FIELD_ID_KEY)
    return None if text is None else int(text)


def _missing(wanted: pa.Field, count: int, path: str) -> pa.Array:
    if not wanted.nullable:
        raise CorruptDataError(
            f"lake file '{path}' lacks column '{wanted.name}', which must not be null"
        )
    return pa.nulls(count, wanted.type)


def _conformed(array: pa.Array, wanted: pa.Field, path: str) -> pa.Array:
    """Return `array` in the type of `wanted`, with nested fields found by id."""
    if array.type.equals(wanted.type):
        return array
    old, new = children_of(array.type), children_of(wanted.type)
    if not old or not new or array.type.id != wanted.type.id:
        return array.cast(wanted.type)
    mask = array.is_null() if array.null_count else None
    if pa.types.is_struct(wanted.type):
        in_file = FileColumns(old)
        children = []
        for child in new:
            position = in_file.position(_field_id(child), child.name)
            if position is None:
                children.append(_missing(child.with_nullable(True), len(array), path))
            else:
                children.append(_conformed(array.field(position), child, path))
        return pa.StructArray.from_arrays(children, fields=new, mask=mask)
    if pa.types.is_map(wanted.type):
        keys = _conformed(array.keys, new[0], path)
        items = _conformed(array.items, new[1], path)
        return pa.MapArray.from_arrays(array.offsets, keys, items, type=wanted.type, mask=mask)
    values = _conformed(array.values, new[0], path)
    return pa.ListArray.from_arrays(array.offsets, values, type=wanted.type, mask=mask)
