"""The table changes that a schema needs, and the schema that has all rows of a table.

A field maps to the column of its name. A field without a column becomes a new column, a wider type
widens the column, and a column without a field becomes nullable. Any other difference is refused,
with the name of the field.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import pyarrow as pa

from streamhouse.core.errors import (
    InvalidRequestError,
    SchemaMismatchError,
    UnsupportedError,
)
from streamhouse.core.model.casts.lossless import may_fit
from streamhouse.core.model.casts.nested import fields_of, with_fields
from streamhouse.core.model.nested_fields import fields_lacking, is_wider, wider_parts
from streamhouse.core.model.records.record_format import (
    KeyFormat,
    OnSchema,
    ValueFormat,
)
from streamhouse.core.model.schema import (
    Column,
    Schema,
    canonical_type,
    type_name,
    type_to_json,
)
from streamhouse.core.model.table import TableDescriptor, TableInfo
from streamhouse.storage_service.kafka.avro_schema import (
    AvroField,
    AvroSchema,
    AvroType,
    avro_schema,
    avro_text_of,
    cached_schema,
)
from streamhouse.storage_service.kafka.registry.subjects import Part, Subject
from streamhouse.storage_service.kafka.topics import TOPIC_PROPERTY, needs_property

__all__ = [
    "TableChange",
    "change_for",
    "check_covers_rows",
    "check_covers_schema",
    "new_table",
    "reading_schema",
    "replacement_table",
]

_SYMBOLS_SHOWN_MAX: Final = 5
_VALUE_FORMAT: Final = "kafka.value.format"
_KEY_FORMAT: Final = "kafka.key.format"
_ON_SCHEMA: Final = "kafka.on.schema"
_KEY_COLUMNS: Final = "kafka.key.columns"
_KEY_COLUMN: Final = "key"
"""The default column of keys that are no records."""


@dataclass(slots=True)
class TableChange:
    """Changes to a table: the schema, in the form of `change_schema`, and the properties."""

    schema: list[Mapping[str, Any]] = field(default_factory=list)
    properties: dict[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.schema or self.properties)


def new_table(subject: Subject, schema: AvroSchema, *, bucket_count: int) -> TableDescriptor:
    """Return the table of a new topic, with the columns of the topic's first schema.

    Key columns are nullable, because values may lack them. Raises `UnsupportedError`.
    """
    columns = _columns(subject, schema)
    properties = {_VALUE_FORMAT: str(ValueFormat.AVRO)}
    if needs_property(subject.topic, subject.path):
        properties[TOPIC_PROPERTY] = subject.topic
    if subject.part is Part.KEY:
        properties[_KEY_COLUMNS] = ", ".join(columns)
    return TableDescriptor(
        path=subject.path,
        schema=Schema.from_arrow(
            pa.schema(
                [
                    pa.field(
                        name,
                        canonical_type(avro_field.type.arrow, where=name),
                        avro_field.type.is_nullable or subject.part is Part.KEY,
                    )
                    for name, avro_field in columns.items()
                ]
            )
        ),
        bucket_count=bucket_count,
        properties=properties,
    )


def replacement_table(
    info: TableInfo, subject: Subject, schema: AvroSchema
) -> TableDescriptor | None:
    """Return the table that replaces a raw table without any rows; None if the table stays.

    The result is the table of a first registration, with the buckets and properties of the raw
    table. Serializers register at the first record, but their clients have created the raw table
    before, by requesting the topic. Raises as `new_table`.
    """
    raw = info.descriptor
    form = raw.record_format()
    is_as_made = info.schema_id == 0 and not (raw.effective_bucket_key or raw.partitioned_by)
    is_to_be_replaced = form.value is ValueFormat.RAW and form.on_schema is OnSchema.REPLACE
    # A stated key format means that keys are not Avro.
    has_key_format = subject.part is Part.KEY and _KEY_FORMAT in raw.properties
    if not (is_as_made and is_to_be_replaced) or has_key_format:
        return None
    table = new_table(subject, schema, bucket_count=raw.bucket_count)
    kept_properties = {key: value for key, value in raw.properties.items() if key != _ON_SCHEMA}
    return replace(table, properties={**kept_properties, **table.properties})


def change_for(info: TableInfo, subject: Subject, schema: AvroSchema) -> TableChange:
    """Return the changes with which a table can store the values of a schema.

    Raises `SchemaMismatchError` with the field's name if no allowed change suffices.
    """
    form = info.descriptor.record_format()
    is_avro = form.value is ValueFormat.AVRO
    if subject.part is Part.KEY:
        is_avro = form.key is KeyFormat.AVRO
    if not is_avro:
        table_format = form.value if subject.part is Part.VALUE else form.key
        raise SchemaMismatchError(
            f"table '{info.path}' has kafka.{subject.part}.format = {table_format}, and a schema"
            f" is of Avro; change that with 'streamhouse alter {info.path} --set"
            f" kafka.{subject.part}.format=avro' if its records are to be Avro"
        )
    change = TableChange()
    if subject.part is Part.VALUE:
        columns = _columns(subject, schema)
        written_columns = {*form.key_columns, form.timestamp_column, form.headers_column, *columns}
        change.schema += [
            {"drop_not_null": column.name}
            for column in info.schema.columns
            if not column.nullable and column.name not in written_columns
        ]
    elif form.key_columns:
        columns = _key_columns(info, form.key_columns, schema)
    else:
        columns = _columns(subject, schema)
        change.properties[_KEY_COLUMNS] = ", ".join(columns)
    table_columns = {column.name: column for column in info.schema.columns}
    for name, avro_field in columns.items():
        field_type = canonical_type(avro_field.type.arrow, where=name)
        if name not in table_columns:
            change.schema.append({"add": name, "type": type_to_json(field_type)})
        else:
            change.schema += _column_changes(info, table_columns[name], field_type)
    return change


def check_covers_schema(subject: Subject, schema: AvroSchema, newest: AvroSchema) -> None:
    """Raise `SchemaMismatchError` if `schema` cannot express rows of the `newest` schema.

    For values only enums and units of time are checked: for other differences `reading_schema` adds
    a complete schema. Keys have no reading schema, since each key is written in one form.
    """
    types = {avro_field.name: avro_field.type for avro_field in schema.fields}
    for newest_field in newest.fields:
        new_type = types.get(newest_field.name)
        why = "" if new_type is None else _value_loss(new_type, newest_field.type)
        if subject.part is Part.KEY and not why:
            why = "is left out" if new_type is None else _key_loss(new_type, newest_field.type)
        if why:
            raise SchemaMismatchError(
                f"field '{newest_field.name}' of the schema {why}, and rows may have other values"
                f" there, by the newest schema of subject '{subject}'"
            )


def check_covers_rows(subject: Subject, schema: AvroSchema, info: TableInfo) -> None:
    """Raise `SchemaMismatchError` if a first schema cannot express the existing rows of a table.

    The rows were not written as Avro, so texts may have any value and times have microseconds.
    """
    form = info.descriptor.record_format()
    fields = {avro_field.name: avro_field for avro_field in schema.fields}
    if subject.part is Part.KEY and schema.is_wrapped and len(form.key_columns) == 1:
        fields = {form.key_columns[0]: schema.fields[0]}
    for column in info.schema.columns:
        avro_field = fields.get(column.name)
        column_type = AvroType(plain=None, arrow=column.type)
        why = "" if avro_field is None else _value_loss(avro_field.type, column_type)
        if why:
            raise SchemaMismatchError(
                f"field '{column.name}' of the schema {why}, and table '{info.path}' has rows that"
                f" may have any {type_name(column.type)} there"
            )


def _value_loss(new_type: AvroType, old_type: AvroType) -> str:
    """Return the values of `old_type` that `new_type` cannot express, as words; "" if none."""
    if new_type.symbols and pa.types.is_string(old_type.arrow):
        missing_symbols = (
            old_type.symbols - new_type.symbols if old_type.symbols else {"other texts"}
        )
        return (
            f"lacks {', '.join(sorted(missing_symbols)[:_SYMBOLS_SHOWN_MAX])} in its enum"
            if missing_symbols
            else ""
        )
    if new_type.logical.endswith("-millis") and not old_type.logical.endswith("-millis"):
        return (
            "has milliseconds instead of microseconds (timestamp-micros says them)"
            if pa.types.is_timestamp(old_type.arrow)
            else ""
        )
    old_parts = {part.name: part.type for part in old_type.parts} or _parts_of(old_type.arrow)
    losses = (
        _value_loss(part.type, old_parts[part.name])
        for part in new_type.parts
        if part.name in old_parts
    )
    return next(filter(None, losses), "")


def _parts_of(t: pa.DataType) -> dict[str, AvroType]:
    """Return the types inside a column's type, by the names of a schema's parts."""
    return {child.name: AvroType(plain=None, arrow=child.type) for child in fields_of(t)}


def _key_loss(new_type: AvroType, old_type: AvroType) -> str:
    if old_type.is_nullable and not new_type.is_nullable:
        return "has no null"
    if new_type.arrow != old_type.arrow and not is_wider(new_type.arrow, old_type.arrow):
        return f"has a narrower type ({type_name(new_type.arrow)})"
    return ""


def _columns(subject: Subject, schema: AvroSchema) -> dict[str, AvroField]:
    if not schema.is_wrapped:
        return {avro_field.name: avro_field for avro_field in schema.fields}
    if subject.part is Part.VALUE:
        raise UnsupportedError(
            f"the schema of subject '{subject}' is no record, and fields of a record become columns"
        )
    return {_KEY_COLUMN: schema.fields[0]}


def _key_columns(info: TableInfo, names: Sequence[str], schema: AvroSchema) -> dict[str, AvroField]:
    if schema.is_wrapped and len(names) == 1:
        return {names[0]: schema.fields[0]}
    fields = {avro_field.name: avro_field for avro_field in schema.fields}
    extra_names = [name for name in fields if name not in names]
    if schema.is_wrapped or extra_names:
        difference = "is no record" if schema.is_wrapped else f"has field '{extra_names[0]}'"
        raise SchemaMismatchError(
            f"the schema {difference}, and the keys of table '{info.path}' have the columns"
            f" {', '.join(names)} (kafka.key.columns)"
        )
    return fields


def _column_changes(
    info: TableInfo, column: Column, field_type: pa.DataType
) -> Iterator[Mapping[str, Any]]:
    is_fixed = column.name in info.descriptor.primary_key
    changes = [] if is_fixed else list(_changes(column.name, field_type, column.type))
    widened_type = _widened(field_type, column.type)
    if not may_fit(field_type, widened_type if changes else column.type):
        raise SchemaMismatchError(
            f"field '{column.name}' of the schema is {type_name(field_type)}, and column"
            f" '{column.name}' of table '{info.path}' is {type_name(column.type)}, which cannot"
            " change to that type: numbers widen, and fields are added; rename the field"
        )
    yield from changes


def _changes(
    name: str, field_type: pa.DataType, column_type: pa.DataType
) -> Iterator[Mapping[str, Any]]:
    """Return the changes that widen a column's type, and the types inside, to a field's type."""
    for path, t in wider_parts(column_type, field_type):
        yield {"widen": [name, *path] if path else name, "to": type_to_json(t)}
    for path, t in fields_lacking(column_type, field_type):
        yield {"add": [name, *path], "type": type_to_json(t)}


def _widened(field_type: pa.DataType, column_type: pa.DataType) -> pa.DataType:
    """Return `column_type` after `_changes`."""
    if is_wider(field_type, column_type):
        return field_type
    if pa.types.is_struct(field_type) and pa.types.is_struct(column_type):
        new_children = {child.name: child for child in field_type}
        children = [
            child.with_type(_widened(new_children[child.name].type, child.type))
            if child.name in new_children
            else child
            for child in column_type
        ]
        names = {child.name for child in column_type}
        added = [child.with_nullable(True) for child in field_type if child.name not in names]
        return pa.struct([*children, *added])
    fields = fields_of(column_type)
    if not fields or field_type.id != column_type.id:
        return column_type
    inner = zip(fields_of(field_type), fields, strict=True)
    return with_fields(column_type, [f.with_type(_widened(n.type, f.type)) for n, f in inner])


def reading_schema(
    info: TableInfo, part: Part, newest: str | None, *, bytes_max: int
) -> str | None:
    """Return a schema of values, or keys, that has every row; None if the newest schema does.

    Rows are read with the present columns, so the schema must have all columns, and nulls where
    columns are nullable. The result extends the newest schema if that fits into `bytes_max`;
    otherwise the result has the columns' fields only, and may be larger. Raises `UnsupportedError`
    for columns that Avro cannot express.
    """
    newest_schema = None if newest is None else cached_schema(newest)
    if part is Part.KEY:
        if newest_schema is not None:
            return None
        names = info.descriptor.record_format().key_columns
        key_schema = avro_text_of(_fields(info.schema, names), name=f"{info.path.table}_key")
        return (
            key_schema
            if len(names) > 1
            else json.dumps(json.loads(key_schema)["fields"][0]["type"])
        )
    avro_fields = (
        {}
        if newest_schema is None
        else {avro_field.name: avro_field for avro_field in newest_schema.fields}
    )
    columns = _value_columns(info, avro_fields)
    if not columns or (
        newest_schema is not None and all(_has_all(avro_fields.get(c.name), c) for c in columns)
    ):
        return None
    table_schema = avro_text_of(
        _fields(info.schema, [column.name for column in columns]), name=info.path.table
    )
    if newest is None:
        return table_schema
    try:
        extended = _extended(json.loads(newest), json.loads(table_schema), avro_fields, columns)
        avro_schema(extended)
    except InvalidRequestError:
        # The schema names a type that a dropped field defined.
        return table_schema
    return extended if len(extended.encode()) <= bytes_max else table_schema


def _value_columns(info: TableInfo, schema_names: Container[str]) -> list[Column]:
    form = info.descriptor.record_format()
    record_columns = {*form.key_columns, form.timestamp_column}
    return [
        column
        for column in info.schema.columns
        if column.name != form.headers_column
        and (column.name not in record_columns or column.name in schema_names)
    ]


def _fields(schema: Schema, names: Sequence[str]) -> list[pa.Field]:
    columns = {column.name: column for column in schema.columns}
    return [pa.field(name, columns[name].type, columns[name].nullable) for name in names]


def _extended(
    newest: dict[str, Any],
    table_schema: Mapping[str, Any],
    avro_fields: Mapping[str, AvroField],
    columns: Sequence[Column],
) -> str:
    """Return the newest schema with a field for each column; `table_schema` has new fields.

    The newest schema's own fields come first and keep their order, because a type must be defined
    before a reference to its name.
    """
    newest = _unwrapped(newest)
    newest_fields = {avro["name"]: avro for avro in newest["fields"]}
    table_fields = {avro["name"]: avro for avro in table_schema["fields"]}
    places = {name: number for number, name in enumerate(newest_fields)}
    fields = []
    for column in sorted(columns, key=lambda column: places.get(column.name, len(places))):
        avro_field = avro_fields.get(column.name)
        if (
            avro_field is None
            or canonical_type(avro_field.type.arrow, where=column.name) != column.type
        ):
            fields.append(table_fields[column.name])
        elif column.nullable and not avro_field.type.is_nullable:
            # The type of a field without null is no union: such a union would have one branch only.
            fields.append(
                {
                    **newest_fields[column.name],
                    "type": ["null", newest_fields[column.name]["type"]],
                    "default": None,
                }
            )
        else:
            fields.append(newest_fields[column.name])
    return json.dumps({**newest, "fields": fields}, separators=(",", ":"))


def _unwrapped(record: dict[str, Any]) -> dict[str, Any]:
    """Return the record inside a schema of the form `{"type": {"type": "record", ...}}`."""
    while isinstance(record["type"], dict):
        record = record["type"]
    return record


def _has_all(avro_field: AvroField | None, column: Column) -> bool:
    if avro_field is None or (column.nullable and not avro_field.type.is_nullable):
        return False
    return bool(canonical_type(avro_field.type.arrow, where=column.name) == column.type)
