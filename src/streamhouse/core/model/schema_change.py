"""Changes of a table's schema, and rows of one schema version as rows of another.

`model.casts.written_rows` decides the version of the rows of a write.

A column keeps its id for life: renames and moves leave stored rows unchanged, the id of a dropped
column is never used again, and a new column has its default in earlier rows, else null. Rows of any
version can thus be read as rows of any other version, column by column through the ids. Nested
fields can only be added and widened, and are matched by name.

Changes, as in the body of `PATCH /v1/tables/{path}/schema`:

    {"add": "note", "type": "string", "comment": "", "after": "id"}     (or "first": true)
    {"add": "note", "type": "string", "default": "none"}                (of earlier rows)
    {"add": ["address", "street"], "type": "string"}                    (a field in a struct)
    {"add": "clicks", "type": "bigint", "aggregate": "sum"}             (engine aggregation)
    {"rename": "note", "to": "remark"}
    {"widen": "amount", "to": "bigint"}
    {"widen": ["address", "number"], "to": "bigint"}
    {"drop_not_null": "amount"}
    {"comment": "amount", "to": "in cents"}
    {"drop": "note", "confirm": "note"}
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa

from streamhouse.core.errors import (
    CorruptDataError,
    InvalidRequestError,
    InvalidSchemaError,
    SchemaMismatchError,
)
from streamhouse.core.model.casts.column_defaults import default_text, missing_values
from streamhouse.core.model.merge_engine import is_merge_property
from streamhouse.core.model.nested_fields import with_field, with_type
from streamhouse.core.model.records.record_format import (
    record_columns,
    with_renamed_column,
)
from streamhouse.core.model.schema import (
    Column,
    Schema,
    check_new_schema,
    type_from_json,
    type_name,
)
from streamhouse.core.model.table import TableDescriptor, TableInfo

__all__ = [
    "KEY_TABLE_SCHEMA_ID_MAX",
    "change_schema",
    "convert_rows",
    "read_stored",
    "replace_columns",
]

KEY_TABLE_SCHEMA_ID_MAX: Final = 255
"""Rows by key are stored with their schema version in one byte."""
SCHEMA_VERSIONS_MAX: Final = 1_000
"""Every description of the table has all versions."""

_ADD_FIELDS: Final = {
    "add",
    "type",
    "comment",
    "default",
    "after",
    "first",
    "aggregate",
    "delimiter",
}
_FIELD_PROPERTY: Final = re.compile(r"fields\.(?P<column>.+?)(?P<rest>\.agg|\.listagg\.delimiter)")
_VERSION_COLUMN: Final = "table.merge-engine.versioned.ver-column"


def change_schema(info: TableInfo, changes: Sequence[Mapping[str, Any]]) -> TableInfo:
    """Return the table after `changes`, applied in order, all of them or none.

    Raises `InvalidRequestError` or `InvalidSchemaError` naming table, change and column.
    """
    if not changes:
        raise InvalidRequestError(f"table '{info.path}': there is no change of the schema to make")
    if info.is_primary_key_table and info.schema_id >= KEY_TABLE_SCHEMA_ID_MAX:
        raise InvalidSchemaError(
            f"table '{info.path}': a primary key table has at most {KEY_TABLE_SCHEMA_ID_MAX + 1}"
            " versions of its schema"
        )
    if len(info.schema_versions) >= SCHEMA_VERSIONS_MAX:
        raise InvalidSchemaError(
            f"table '{info.path}' has {SCHEMA_VERSIONS_MAX} versions of its schema, the most there"
            " may be; make several changes at once, or a new table"
        )
    state = _Change(info)
    for number, change in enumerate(changes, start=1):
        state.apply(number, change)
    if any("add" in change or "comment" in change for change in changes):
        check_new_schema(state.descriptor.schema, table=str(info.path))
    versions = {**info.schema_versions, info.schema_id + 1: state.descriptor.schema}
    return dataclasses.replace(
        info, descriptor=state.descriptor, schema_id=info.schema_id + 1, schema_versions=versions
    )


def replace_columns(info: TableInfo, descriptor: TableDescriptor) -> TableInfo:
    """Return a table without rows, with the columns and properties of another descriptor.

    Earlier schema versions are removed, so late rows of such a version are refused. The new columns
    have new ids.
    """
    next_id = max(info.column_ids) + 1
    columns = tuple(
        dataclasses.replace(column, id=column_id)
        for column_id, column in enumerate(descriptor.schema.columns, start=next_id)
    )
    changed = dataclasses.replace(descriptor, schema=Schema(columns))
    check_new_schema(changed.schema, table=str(info.path))
    return dataclasses.replace(
        info, descriptor=changed, schema_id=info.schema_id + 1, schema_versions={}
    )


def read_stored(
    payload: memoryview, info: TableInfo, *, stored_as: int, read_as: int | None = None
) -> pa.RecordBatch:
    """Return the log rows of a stored record batch in version `read_as`, by default the current.

    `stored_as` is the version of the stored rows. Raises `CorruptDataError`, and the errors of
    `convert_rows`.
    """
    try:
        rows = pa.ipc.read_record_batch(pa.py_buffer(payload), info.log_schema_of(stored_as))
    except (pa.ArrowException, OSError) as error:
        raise CorruptDataError(f"a stored record batch is unreadable: {error}") from error
    read_as = info.schema_id if read_as is None else read_as
    if stored_as == read_as:
        return rows
    versions = info.schema_version(stored_as), info.schema_version(read_as)
    return convert_rows(rows, *versions, table=str(info.path))


def convert_rows(rows: pa.RecordBatch, old: Schema, new: Schema, *, table: str) -> pa.RecordBatch:
    """Return rows of schema `old` as rows of schema `new`; further columns of `rows` stay.

    Raises `SchemaMismatchError` if a value does not fit its type in an older version, or a required
    column is missing from `old` or has a null.
    """
    extra = len(old.columns)
    by_id = {
        column.id: array for column, array in zip(old.columns, rows.columns[:extra], strict=True)
    }
    arrays = [_convert(by_id.get(c.id), c, rows.num_rows, table=table) for c in new.columns]
    fields = [*new.to_arrow(), *list(rows.schema)[extra:]]
    return pa.RecordBatch.from_arrays([*arrays, *rows.columns[extra:]], schema=pa.schema(fields))


def _convert(array: pa.Array | None, column: Column, row_count: int, *, table: str) -> pa.Array:
    if array is None:
        if not column.nullable and row_count:
            raise SchemaMismatchError(
                f"table '{table}': column '{column.name}' was dropped and has no value in newer"
                " rows; read the table with its current schema"
            )
        return missing_values(column, row_count)
    if not column.nullable and array.null_count:
        raise SchemaMismatchError(
            f"table '{table}': a newer row has a null in column '{column.name}', which was NOT NULL"
            " in an older version of the schema; read the table with its current schema"
        )
    if array.type == column.type:
        return array
    try:
        return array.cast(column.type)
    except pa.ArrowInvalid as error:
        raise SchemaMismatchError(
            f"table '{table}': a newer value of column '{column.name}' does not fit"
            f" {type_name(column.type)}, its type in an older version of the schema: {error}; read"
            " the table with its current schema"
        ) from error


class _Change:
    """A table under change."""

    def __init__(self, info: TableInfo) -> None:
        self.descriptor = info.descriptor
        self._table = str(info.path)
        every = (c for schema in info.schema_versions.values() for c in schema.columns)
        self._next_id = max(column.id for column in every) + 1
        self._verbs: dict[str, Callable[[str, Mapping[str, Any]], TableDescriptor]] = {
            "add": self._add,
            "rename": self._rename,
            "widen": self._widen,
            "drop_not_null": self._drop_not_null,
            "comment": self._comment,
            "drop": self._drop,
        }

    def apply(self, number: int, change: Mapping[str, Any]) -> None:
        verbs = [verb for verb in self._verbs if verb in change]
        # "comment" is also a field of "add".
        verb = verbs[0] if verbs else ""
        path = _path(change[verb]) if verb else ()
        if not path:
            raise InvalidRequestError(
                f"table '{self._table}': change {number} of the schema must name a column under one"
                f" of {', '.join(self._verbs)}"
            )
        shown = ".".join(path)
        allowed_fields = {
            "add": _ADD_FIELDS,
            "drop": {"drop", "confirm"},
            "drop_not_null": {"drop_not_null"},
        }.get(verb, {verb, "to"})
        unknown = sorted(set(change) - allowed_fields)
        if unknown:
            raise InvalidRequestError(
                f"table '{self._table}': change {number} of the schema, {verb} '{shown}',"
                f" has no field '{unknown[0][:80]}'"
            )
        if len(path) == 1:
            self.descriptor = self._verbs[verb](path[0], change)
        elif verb == "add":
            self.descriptor = self._add_inside(path, change)
        elif verb == "widen":
            self.descriptor = self._widen_inside(path, change)
        else:
            raise InvalidSchemaError(
                f"table '{self._table}': '{shown}' is inside column '{path[0]}', where fields can"
                " only be added and widened; to change it, add a field or a column, and write the"
                " values there"
            )

    def _column(self, name: str) -> Column:
        return self.descriptor.schema.column(name, table=self._table)

    def _with_columns(self, columns: Sequence[Column]) -> TableDescriptor:
        return dataclasses.replace(self.descriptor, schema=Schema(tuple(columns)))

    def _with_column(self, name: str, **changed: Any) -> TableDescriptor:
        return self._with_columns(
            [
                dataclasses.replace(column, **changed) if column.name == name else column
                for column in self.descriptor.schema.columns
            ]
        )

    def _text(self, change: Mapping[str, Any], name: str, *, what: str) -> str:
        text = change.get(name)
        if not isinstance(text, str):
            raise InvalidRequestError(f"table '{self._table}': {what} needs '{name}', a text")
        return text

    def _add(self, name: str, change: Mapping[str, Any]) -> TableDescriptor:
        outer = name.split(".")[0]
        if outer != name and self._is_nested(outer):
            # The caller means a nested field, not a column with a dotted name.
            raise InvalidRequestError(
                f"table '{self._table}': column '{outer}' is nested; name a new field in it by the"
                f" list {json.dumps(name.split('.'))}, not by '{name}'"
            )
        if "type" not in change:
            raise InvalidRequestError(f"table '{self._table}': new column '{name}' needs a type")
        data_type, default = type_from_json(change["type"], where=name), change.get("default")
        if default is not None:
            where = f"table '{self._table}', column '{name}'"
            default = default_text(default, data_type, where=where)
        added = Column(
            id=self._next_id,
            name=name,
            type=data_type,
            comment=str(change.get("comment", "")),
            default=default,
        )
        columns = list(self.descriptor.schema.columns)
        place = len(columns)
        if change.get("first"):
            place = 0
        elif change.get("after") is not None:
            place = columns.index(self._column(str(change["after"]))) + 1
        self._next_id += 1
        changed = self._with_columns([*columns[:place], added, *columns[place:]])
        return self._with_aggregate(changed, name, change)

    def _with_aggregate(
        self, descriptor: TableDescriptor, name: str, change: Mapping[str, Any]
    ) -> TableDescriptor:
        """Return the table with the aggregate of a new column in the properties, as at creation."""
        aggregate_properties = {
            key: self._text(change, field, what=f"the aggregate of column '{name}'")
            for field, key in (
                ("aggregate", f"fields.{name}.agg"),
                ("delimiter", f"fields.{name}.listagg.delimiter"),
            )
            if change.get(field) is not None
        }
        if not aggregate_properties:
            return descriptor
        if change.get("default") is not None:
            raise InvalidSchemaError(
                f"table '{self._table}': column '{name}' cannot have an aggregate and a default:"
                " rows from before count as null in the aggregate; leave the default out"
            )
        changed = dataclasses.replace(
            descriptor, properties={**descriptor.properties, **aggregate_properties}
        )
        changed.merge_rules()
        return changed

    def _is_nested(self, name: str) -> bool:
        columns = self.descriptor.schema.columns
        return any(c.name == name and pa.types.is_nested(c.type) for c in columns)

    def _add_inside(self, path: Sequence[str], change: Mapping[str, Any]) -> TableDescriptor:
        """Add a field inside a column; the field is null in earlier rows."""
        name, shown = path[0], ".".join(path)
        if change.get("aggregate") is not None:
            raise InvalidSchemaError(
                f"table '{self._table}': field '{shown}' cannot have an aggregate: column '{name}'"
                " is merged as a whole"
            )
        if "type" not in change:
            raise InvalidRequestError(f"table '{self._table}': new field '{shown}' needs a type")
        for given in ("comment", "default"):
            if change.get(given) not in (None, ""):
                raise InvalidSchemaError(
                    f"table '{self._table}': field '{shown}' cannot have a {given}, only columns"
                    f" can; column '{name}' is one"
                )
        column = self._column(name)
        predecessor = change.get("after")
        try:
            wider = with_field(
                column.type,
                path[1:],
                type_from_json(change["type"], where=shown),
                where=name,
                predecessor=None if predecessor is None else str(predecessor),
                is_first=bool(change.get("first")),
            )
        except InvalidSchemaError as error:
            raise InvalidSchemaError(f"table '{self._table}': {error.message}") from error
        return self._with_column(name, type=wider)

    def _rename(self, name: str, change: Mapping[str, Any]) -> TableDescriptor:
        self._column(name)
        new = self._text(change, "to", what=f"renaming column '{name}'")

        def renamed(names: Sequence[str]) -> tuple[str, ...]:
            return tuple(new if column_name == name else column_name for column_name in names)

        descriptor = self.descriptor
        layout = descriptor.batch_layout()
        partitioned_by = tuple(
            dataclasses.replace(field, column=new) if field.column == name else field
            for field in descriptor.partitioned_by
        )
        return dataclasses.replace(
            descriptor,
            schema=Schema(
                tuple(
                    dataclasses.replace(column, name=new) if column.name == name else column
                    for column in descriptor.schema.columns
                )
            ),
            primary_key=renamed(descriptor.primary_key),
            bucket_key=renamed(descriptor.bucket_key),
            partitioned_by=partitioned_by,
            properties={
                **with_renamed_column(
                    _renamed_properties(descriptor.properties, name, new), name, new
                ),
                **({} if layout is None else layout.renamed(name, new)),
            },
        )

    def _widen(self, name: str, change: Mapping[str, Any]) -> TableDescriptor:
        return self._widen_inside((name,), change)

    def _widen_inside(self, path: Sequence[str], change: Mapping[str, Any]) -> TableDescriptor:
        """Widen a column, or a nested field, element or value type."""
        name, shown = path[0], ".".join(path)
        column = self._column(name)
        target = type_from_json(change.get("to"), where=shown)
        try:
            wider = with_type(column.type, path[1:], target, where=name)
        except InvalidSchemaError as error:
            kind = "column " if len(path) == 1 else ""
            raise InvalidSchemaError(f"table '{self._table}': {kind}{error.message}") from error
        if name in self.descriptor.primary_key:
            raise InvalidSchemaError(
                f"table '{self._table}': column '{name}' is part of the primary key, whose types"
                " are fixed"
            )
        return self._with_column(name, type=wider)

    def _drop_not_null(self, name: str, _: Mapping[str, Any]) -> TableDescriptor:
        if self._column(name).nullable:
            raise InvalidSchemaError(
                f"table '{self._table}': column '{name}' is not NOT NULL, it may be null already"
            )
        if name in self.descriptor.primary_key:
            raise InvalidSchemaError(
                f"table '{self._table}': column '{name}' is part of the primary key, which is never"
                " null"
            )
        return self._with_column(name, nullable=True)

    def _comment(self, name: str, change: Mapping[str, Any]) -> TableDescriptor:
        self._column(name)
        return self._with_column(
            name, comment=self._text(change, "to", what=f"the comment of column '{name}'")
        )

    def _drop(self, name: str, change: Mapping[str, Any]) -> TableDescriptor:
        self._column(name)
        descriptor = self.descriptor
        layout = descriptor.batch_layout()
        uses: dict[str, Collection[str | None]] = {
            "the primary key": descriptor.primary_key,
            "the bucket key": descriptor.bucket_key,
            "the lake partitioning": [field.column for field in descriptor.partitioned_by],
            "the batch layout": () if layout is None else layout.columns,
            "property " + _VERSION_COLUMN: [descriptor.properties.get(_VERSION_COLUMN)],
            **{
                f"property {key}": named
                for key, named in record_columns(descriptor.properties).items()
            },
        }
        for use, names in uses.items():
            if name in names:
                raise InvalidSchemaError(
                    f"table '{self._table}': column '{name}' cannot be dropped: it is used by {use}"
                )
        if change.get("confirm") != name:
            raise InvalidRequestError(
                f"table '{self._table}': dropping column '{name}' hides its values for good; repeat"
                " its name as 'confirm'"
            )
        columns = [column for column in descriptor.schema.columns if column.name != name]
        if not columns:
            raise InvalidSchemaError(
                f"table '{self._table}': '{name}' is its only column and cannot be dropped"
            )
        properties = {
            key: value
            for key, value in descriptor.properties.items()
            if not ((match := _FIELD_PROPERTY.fullmatch(key)) and match["column"] == name)
        }
        return dataclasses.replace(descriptor, schema=Schema(tuple(columns)), properties=properties)


def _path(value: Any) -> tuple[str, ...]:
    """Return the path of a column or a nested field in a change; empty for any other value."""
    parts = value if isinstance(value, list | tuple) else [value]
    return tuple(parts) if all(isinstance(part, str) for part in parts) else ()


def _renamed_properties(properties: Mapping[str, str], name: str, new: str) -> dict[str, str]:
    result = {}
    for key, value in properties.items():
        match = _FIELD_PROPERTY.fullmatch(key) if is_merge_property(key) else None
        if match and match["column"] == name:
            key = f"fields.{new}{match['rest']}"
        result[key] = new if key == _VERSION_COLUMN and value == name else value
    return result
