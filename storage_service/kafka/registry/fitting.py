"""What a table must become to have the values of a schema, and which schema has all its rows.

A field is the column of its name. One that there is no column for becomes a new one, a wider type
widens it, and a column that the schema leaves out may be null from then on. What those changes of a
table's schema do not reach is refused, naming the field.
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
    known_schema,
)
from streamhouse.storage_service.kafka.registry.subjects import Part, Subject
from streamhouse.storage_service.kafka.topics import TOPIC_PROPERTY, needs_property

__all__ = [
    "TableChange",
    "change_for",
    "check_says_all",
    "check_says_rows",
    "new_table",
    "reading_schema",
    "table_in_place_of",
]

_SYMBOLS_SHOWN_MAX: Final = 5
_VALUE_FORMAT: Final = "kafka.value.format"
_KEY_FORMAT: Final = "kafka.key.format"
_ON_SCHEMA: Final = "kafka.on.schema"
_KEY_COLUMNS: Final = "kafka.key.columns"
_KEY_COLUMN: Final = "key"
"""The column of keys that are no records, where the table names none."""


@dataclass(slots=True)
class TableChange:
    """What is changed of a table: its schema as by `change_schema`, and its properties."""

    schema: list[Mapping[str, Any]] = field(default_factory=list)
    properties: dict[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.schema or self.properties)


def new_table(subject: Subject, schema: AvroSchema, *, bucket_count: int) -> TableDescriptor:
    """Return the table of a topic that has none, with the columns of its first schema.

    Those of keys may be null: values may have none of them. Raises `UnsupportedError`.
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
                        canonical_type(of.type.arrow, where=name),
                        of.type.is_nullable or subject.part is Part.KEY,
                    )
                    for name, of in columns.items()
                ]
            )
        ),
        bucket_count=bucket_count,
        properties=properties,
    )


def table_in_place_of(
    info: TableInfo, subject: Subject, schema: AvroSchema
) -> TableDescriptor | None:
    """Return what a raw table is to become if it never had a row; None if it is to stay as it is.

    That is the table which registering first would have made, with the buckets and the properties
    that this one has. Serializers register when they send, and their clients have asked for the
    topic before, which made it. Raises as `new_table`.
    """
    raw = info.descriptor
    form = raw.record_format()
    is_as_made = info.schema_id == 0 and not (raw.effective_bucket_key or raw.partitioned_by)
    is_to_be_replaced = form.value is ValueFormat.RAW and form.on_schema is OnSchema.REPLACE
    # Whoever has said what keys are does not mean Avro.
    is_said = subject.part is Part.KEY and _KEY_FORMAT in raw.properties
    if not (is_as_made and is_to_be_replaced) or is_said:
        return None
    made = new_table(subject, schema, bucket_count=raw.bucket_count)
    kept = {key: value for key, value in raw.properties.items() if key != _ON_SCHEMA}
    return replace(made, properties={**kept, **made.properties})


def change_for(info: TableInfo, subject: Subject, schema: AvroSchema) -> TableChange:
    """Return what must change so that a table has the values of a schema.

    Raises `SchemaMismatchError` naming the field if nothing that may change does it.
    """
    form = info.descriptor.record_format()
    is_avro = form.value is ValueFormat.AVRO
    if subject.part is Part.KEY:
        is_avro = form.key is KeyFormat.AVRO
    if not is_avro:
        used = form.value if subject.part is Part.VALUE else form.key
        raise SchemaMismatchError(
            f"table '{info.path}' has kafka.{subject.part}.format = {used}, and a schema is of"
            f" Avro; change that with 'streamhouse alter {info.path} --set"
            f" kafka.{subject.part}.format=avro' if its records are to be Avro"
        )
    change = TableChange()
    if subject.part is Part.VALUE:
        columns = _columns(subject, schema)
        left = {*form.key_columns, form.timestamp_column, form.headers_column, *columns}
        change.schema += [
            {"drop_not_null": column.name}
            for column in info.schema.columns
            if not column.nullable and column.name not in left
        ]
    elif form.key_columns:
        columns = _of_key_columns(info, form.key_columns, schema)
    else:
        columns = _columns(subject, schema)
        change.properties[_KEY_COLUMNS] = ", ".join(columns)
    own = {column.name: column for column in info.schema.columns}
    for name, of in columns.items():
        given = canonical_type(of.type.arrow, where=name)
        if name not in own:
            change.schema.append({"add": name, "type": type_to_json(given)})
        else:
            change.schema += _column_changes(info, own[name], given)
    return change


def check_says_all(subject: Subject, schema: AvroSchema, newest: AvroSchema) -> None:
    """Raise `SchemaMismatchError` if rows could not be said by a schema that the newest one says.

    Of values only enums and units of time are looked at: behind a schema that lacks anything else
    `reading_schema` has one that does not. Keys have none, since each key is written in one form.
    """
    fields = {one.name: one.type for one in schema.fields}
    for one in newest.fields:
        given = fields.get(one.name)
        why = "" if given is None else _lost(given, one.type)
        if subject.part is Part.KEY and not why:
            why = "is left out" if given is None else _not_said(given, one.type)
        if why:
            raise SchemaMismatchError(
                f"field '{one.name}' of the schema {why}, and rows may have what the newest schema"
                f" of subject '{subject}' says there"
            )


def check_says_rows(subject: Subject, schema: AvroSchema, info: TableInfo) -> None:
    """Raise `SchemaMismatchError` if a first schema could not say rows that a table has already.

    They were brought otherwise, so texts may be any and times have microseconds.
    """
    form = info.descriptor.record_format()
    fields = {one.name: one for one in schema.fields}
    if subject.part is Part.KEY and schema.is_wrapped and len(form.key_columns) == 1:
        fields = {form.key_columns[0]: schema.fields[0]}
    for column in info.schema.columns:
        one = fields.get(column.name)
        has = AvroType(plain=None, arrow=column.type)
        why = "" if one is None else _lost(one.type, has)
        if why:
            raise SchemaMismatchError(
                f"field '{column.name}' of the schema {why}, and table '{info.path}' has rows that"
                f" may have any {type_name(column.type)} there"
            )


def _lost(given: AvroType, has: AvroType) -> str:
    """Return what values may have that is not said; `has` need not know what is within it."""
    if given.symbols and pa.types.is_string(has.arrow):
        lost = has.symbols - given.symbols if has.symbols else {"other texts"}
        return f"lacks {', '.join(sorted(lost)[:_SYMBOLS_SHOWN_MAX])} in its enum" if lost else ""
    if given.logical.endswith("-millis") and not has.logical.endswith("-millis"):
        return (
            "has milliseconds instead of microseconds (timestamp-micros says them)"
            if pa.types.is_timestamp(has.arrow)
            else ""
        )
    inside = {part.name: part.type for part in has.parts} or _parts_of(has.arrow)
    found = (_lost(part.type, inside[part.name]) for part in given.parts if part.name in inside)
    return next(filter(None, found), "")


def _parts_of(t: pa.DataType) -> dict[str, AvroType]:
    """Return what is in a column's type, by the names that the parts of a schema have."""
    if pa.types.is_struct(t):
        return {one.name: AvroType(plain=None, arrow=one.type) for one in t}
    if pa.types.is_list(t):
        return {"element": AvroType(plain=None, arrow=t.value_type)}
    return {"value": AvroType(plain=None, arrow=t.item_type)} if pa.types.is_map(t) else {}


def _not_said(given: AvroType, has: AvroType) -> str:
    if has.is_nullable and not given.is_nullable:
        return "has no null"
    if given.arrow != has.arrow and not is_wider(given.arrow, has.arrow):
        return f"has a narrower type ({type_name(given.arrow)})"
    return ""


def _columns(subject: Subject, schema: AvroSchema) -> dict[str, AvroField]:
    if not schema.is_wrapped:
        return {one.name: one for one in schema.fields}
    if subject.part is Part.VALUE:
        raise UnsupportedError(
            f"the schema of subject '{subject}' is no record, and fields of a record become columns"
        )
    return {_KEY_COLUMN: schema.fields[0]}


def _of_key_columns(
    info: TableInfo, names: Sequence[str], schema: AvroSchema
) -> dict[str, AvroField]:
    if schema.is_wrapped and len(names) == 1:
        return {names[0]: schema.fields[0]}
    found = {one.name: one for one in schema.fields}
    others = [name for name in found if name not in names]
    if schema.is_wrapped or others:
        what = "is no record" if schema.is_wrapped else f"has field '{others[0]}'"
        raise SchemaMismatchError(
            f"the schema {what}, and the keys of table '{info.path}' have the columns"
            f" {', '.join(names)} (kafka.key.columns)"
        )
    return found


def _column_changes(
    info: TableInfo, column: Column, given: pa.DataType
) -> Iterator[Mapping[str, Any]]:
    is_fixed = column.name in info.descriptor.primary_key
    changes = [] if is_fixed else list(_changes(column.name, given, column.type))
    wanted = _widened(given, column.type)
    if not may_fit(given, wanted if changes else column.type):
        raise SchemaMismatchError(
            f"field '{column.name}' of the schema is {type_name(given)}, and column"
            f" '{column.name}' of table '{info.path}' is {type_name(column.type)}, which does not"
            " become that: numbers widen, and fields are added; name the field otherwise"
        )
    yield from changes


def _changes(name: str, given: pa.DataType, has: pa.DataType) -> Iterator[Mapping[str, Any]]:
    """Return what widens a column's type, and the types inside of it, to those of another."""
    for path, t in wider_parts(has, given):
        yield {"widen": [name, *path] if path else name, "to": type_to_json(t)}
    for path, t in fields_lacking(has, given):
        yield {"add": [name, *path], "type": type_to_json(t)}


def _widened(given: pa.DataType, has: pa.DataType) -> pa.DataType:
    """Return what `has` is after `_changes`."""
    if is_wider(given, has):
        return given
    if pa.types.is_struct(given) and pa.types.is_struct(has):
        wanted = {one.name: one for one in given}
        kept = [
            one.with_type(_widened(wanted[one.name].type, one.type)) if one.name in wanted else one
            for one in has
        ]
        names = {one.name for one in has}
        added = [one.with_nullable(True) for one in given if one.name not in names]
        return pa.struct([*kept, *added])
    if pa.types.is_list(given) and pa.types.is_list(has):
        inner = _widened(given.value_type, has.value_type)
        return pa.list_(has.value_field.with_type(inner))
    if pa.types.is_map(given) and pa.types.is_map(has):
        inner = _widened(given.item_type, has.item_type)
        return pa.map_(has.key_field, has.item_field.with_type(inner))
    return has


def reading_schema(
    info: TableInfo, part: Part, newest: str | None, *, bytes_max: int
) -> str | None:
    """Return a schema of values, or keys, that has every row; None if the newest one does.

    Rows come with their columns as they are now, so it must have all of them, and nulls where they
    may be. It is the newest one as far as that goes in `bytes_max`; what columns need may be more.
    Raises `UnsupportedError` for columns that
    Avro cannot have.
    """
    known = None if newest is None else known_schema(newest)
    if part is Part.KEY:
        if known is not None:
            return None
        names = info.descriptor.record_format().key_columns
        made = avro_text_of(_fields(info.schema, names), name=f"{info.path.table}_key")
        return made if len(names) > 1 else json.dumps(json.loads(made)["fields"][0]["type"])
    has = {} if known is None else {one.name: one for one in known.fields}
    wanted = _value_columns(info, has)
    if not wanted or (known is not None and all(_has_all(has.get(c.name), c) for c in wanted)):
        return None
    own = avro_text_of(
        _fields(info.schema, [column.name for column in wanted]), name=info.path.table
    )
    if newest is None:
        return own
    try:
        extended = _extended(json.loads(newest), json.loads(own), has, wanted)
        avro_schema(extended)
    except InvalidRequestError:
        # A name that one of its fields gave a type is gone with that field.
        return own
    return extended if len(extended.encode()) <= bytes_max else own


def _value_columns(info: TableInfo, has: Container[str]) -> list[Column]:
    form = info.descriptor.record_format()
    beside = {*form.key_columns, form.timestamp_column}
    return [
        column
        for column in info.schema.columns
        if column.name != form.headers_column and (column.name not in beside or column.name in has)
    ]


def _fields(schema: Schema, names: Sequence[str]) -> list[pa.Field]:
    own = {column.name: column for column in schema.columns}
    return [pa.field(name, own[name].type, own[name].nullable) for name in names]


def _extended(
    newest: dict[str, Any],
    own: Mapping[str, Any],
    has: Mapping[str, AvroField],
    wanted: Sequence[Column],
) -> str:
    """Return the newest schema with the fields that columns want; `own` has these, made of them.

    Its own fields come first and in their order: what defines a type is before what names it.
    """
    newest = _unwrapped(newest)
    given = {one["name"]: one for one in newest["fields"]}
    made = {one["name"]: one for one in own["fields"]}
    places = {name: number for number, name in enumerate(given)}
    fields = []
    for column in sorted(wanted, key=lambda column: places.get(column.name, len(places))):
        of = has.get(column.name)
        if of is None or canonical_type(of.type.arrow, where=column.name) != column.type:
            fields.append(made[column.name])
        elif column.nullable and not of.type.is_nullable:
            # Its type is no union: that of a field without null would have but one type.
            fields.append(
                {
                    **given[column.name],
                    "type": ["null", given[column.name]["type"]],
                    "default": None,
                }
            )
        else:
            fields.append(given[column.name])
    return json.dumps({**newest, "fields": fields}, separators=(",", ":"))


def _unwrapped(record: dict[str, Any]) -> dict[str, Any]:
    """Return the record itself of one that is written as `{"type": {"type": "record", ...}}`."""
    while isinstance(record["type"], dict):
        record = record["type"]
    return record


def _has_all(of: AvroField | None, column: Column) -> bool:
    if of is None or (column.nullable and not of.type.is_nullable):
        return False
    return bool(canonical_type(of.type.arrow, where=column.name) == column.type)
