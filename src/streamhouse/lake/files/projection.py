"""Rows of a lake file in the current schema of the lake table: columns found by field id.

A file keeps the schema of its writing. A renamed column is found under its id, an added column has
its default or is null, a widened column is cast, a dropped column is left out; inside nested
columns too. A file without ids is read by the table's name mapping, and without one not at all.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pyarrow as pa

from streamhouse.core.errors import CorruptDataError, UnsupportedError
from streamhouse.core.model.casts.column_defaults import repeated_default
from streamhouse.core.model.casts.nested import fields_of
from streamhouse.lake.files._field_ids import DEFAULT_KEY, FIELD_ID_KEY
from streamhouse.lake.files.name_mapping import (
    MappedField,
    NameMapping,
    inside,
    is_renaming,
)

__all__ = ["FileColumns", "conformed", "project"]


class FileColumns:
    """The columns of a file, or the fields of a struct in it, found by field id.

    A field without an id gets the id for its name in the table's name mapping. Without a mapping, a
    file without ids is read by name.
    """

    def __init__(self, fields: Iterable[pa.Field], names: NameMapping | None = None) -> None:
        self._by_id: dict[int, int] = {}
        self._by_name: dict[str, int] = {}
        self._inside: dict[int, NameMapping] = {}
        mapped: dict[int, int] = {}
        for position, field in enumerate(fields):
            field_id, name = _field_id(field), field.name
            if field_id is not None:
                self._by_id[field_id] = position
            elif names:
                mapped_field = names.get(field.name, MappedField(None, None, {}))
                self._inside[position], name = mapped_field.fields, mapped_field.name
                first = (
                    mapped.setdefault(mapped_field.field_id, position)
                    if mapped_field.field_id
                    else position
                )
                if first != position:
                    raise CorruptDataError(
                        f"two columns are field {mapped_field.field_id} by the name mapping of the"
                        f" table: '{field.name}' and one before it; take a name out of the mapping"
                    )
            if name is not None:
                self._by_name[name] = position
        # An id of its own goes before a name.
        self._by_id = mapped | self._by_id

    @classmethod
    def of_file(cls, schema: pa.Schema, names: NameMapping | None, *, path: str) -> FileColumns:
        """Return the columns of a lake file.

        Raises `UnsupportedError` if no name of the file is a column's.
        """
        try:
            columns = cls(schema, names)
        except CorruptDataError as error:
            raise CorruptDataError(f"lake file '{path}': {error.message}") from None
        if names is not None and not columns._by_id:
            raise UnsupportedError(
                f"lake file '{path}' has no field ids, and no name mapping of its table says which"
                " column is which; set the Iceberg table's property 'schema.name-mapping.default'"
            )
        return columns

    def position(self, field_id: int | None, name: str) -> int | None:
        """Return the position of the column, None if the file lacks the column."""
        if not self._by_id:
            return self._by_name.get(name)
        return None if field_id is None else self._by_id.get(field_id)

    def position_inside(self, wanted: pa.Field) -> int | None:
        """Return where the field of a struct is; by name if either side has no ids."""
        field_id = _field_id(wanted)
        if field_id is None:
            return self._by_name.get(wanted.name)
        return self.position(field_id, wanted.name)

    def names_inside(self, position: int) -> NameMapping | None:
        """Return the name mapping inside a column; None where its fields have their own ids."""
        return self._inside.get(position)


def project(
    rows: pa.Table, schema: pa.Schema, *, path: str, names: NameMapping | None = None
) -> pa.Table:
    """Return `rows` of the file at `path` with exactly `schema`, which carries field ids.

    `names` is the table's name mapping. Raises `CorruptDataError` when a column that must not be
    null is not in the file.
    """
    if all(
        a.equals(b, check_metadata=True) for a, b in zip(rows.schema, schema, strict=False)
    ) and (len(rows.schema) == len(schema)):
        return rows
    in_file = FileColumns.of_file(rows.schema, names, path=path)
    columns = []
    for target in schema:
        position = in_file.position(_field_id(target), target.name)
        if position is None:
            columns.append(pa.chunked_array([_missing(target, rows.num_rows, path)]))
            continue
        column = rows.column(position)
        if not column.type.equals(target.type, check_metadata=True):
            below = in_file.names_inside(position)
            chunks = [conformed(chunk, target, below, path=path) for chunk in column.chunks]
            column = pa.chunked_array(chunks, target.type)
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
    default = (wanted.metadata or {}).get(DEFAULT_KEY)
    return repeated_default(None if default is None else default.decode(), wanted.type, count)


def conformed(
    array: pa.Array, wanted: pa.Field, names: NameMapping | None = None, *, path: str
) -> pa.Array:
    """Return `array` of the file at `path` in the type of `wanted`, nested fields included.

    Nested fields are matched by id; without ids, `names` maps the file's names to the table's.
    """
    if array.type.equals(wanted.type, check_metadata=True) and not is_renaming(names):
        return array
    old, new = fields_of(array.type), fields_of(wanted.type)
    if not old or not new or array.type.id != wanted.type.id:
        if old and is_renaming(names):
            raise UnsupportedError(
                f"lake file '{path}' has no field ids, and other names inside column"
                f" '{wanted.name}' than the table; rewrite the file with the engine that wrote it"
            )
        return array.cast(wanted.type)
    if pa.types.is_struct(wanted.type):
        in_file = FileColumns(old, names)
        children = []
        for child in new:
            position = in_file.position_inside(child)
            if position is None:
                children.append(_missing(child.with_nullable(True), len(array), path))
            else:
                field, below = array.field(position), in_file.names_inside(position)
                children.append(conformed(field, child, below, path=path))
        mask = array.is_null() if array.null_count else None
        return pa.StructArray.from_arrays(children, fields=new, mask=mask)
    # Nulls are said by the offsets: a part of a list array takes no mask.
    offsets = array.offsets
    if array.null_count:
        is_null = np.append(array.is_null().to_numpy(zero_copy_only=False), False)
        offsets = pa.array(offsets.to_numpy(), mask=is_null)
    if pa.types.is_map(wanted.type):
        keys = conformed(array.keys, new[0], inside(names, "key"), path=path)
        items = conformed(array.items, new[1], inside(names, "value"), path=path)
        return pa.MapArray.from_arrays(offsets, keys, items, type=wanted.type)
    values = conformed(array.values, new[0], inside(names, "element"), path=path)
    return pa.ListArray.from_arrays(offsets, values, type=wanted.type)
