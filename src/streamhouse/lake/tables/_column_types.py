"""Types of Arrow as Iceberg's and back, and which columns of any Iceberg table can be read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import pyarrow as pa
from pyiceberg.schema import Schema as IcebergSchema
from pyiceberg.table import Table, TableProperties
from pyiceberg.table.name_mapping import MappedField as IcebergMappedField
from pyiceberg.table.name_mapping import parse_mapping_from_json
from pyiceberg.types import (
    DecimalType,
    FixedType,
    IcebergType,
    ListType,
    MapType,
    NestedField,
    StructType,
)

from streamhouse.core.errors import CorruptDataError, InvalidSchemaError, UnsupportedError
from streamhouse.core.model.casts.column_defaults import default_text
from streamhouse.core.model.lake.facts import (
    CHANGE_TYPE_FIELD_ID,
    LAKE_SYSTEM_FIELDS,
    SYSTEM_FIELD_ID_FIRST,
)
from streamhouse.core.model.schema import CHANGE_TYPE_COLUMN, RESERVED_COLUMNS, Column
from streamhouse.core.types.registry import type_of, type_of_iceberg
from streamhouse.lake.files._field_ids import FIELD_ID_KEY
from streamhouse.lake.files.name_mapping import MappedField, NameMapping
from streamhouse.lake.iceberg_errors import sentence_of

__all__ = ["iceberg_field", "name_mapping_of", "nested_fields", "readable_columns"]

_SYSTEM_IDS: Final = {CHANGE_TYPE_COLUMN: CHANGE_TYPE_FIELD_ID} | {
    field.name: SYSTEM_FIELD_ID_FIRST + place for place, field in enumerate(LAKE_SYSTEM_FIELDS)
}
_NAME_MAPPING: Final = TableProperties.DEFAULT_NAME_MAPPING


def iceberg_field(field: pa.Field, *, doc: str | None = None) -> NestedField:
    """Return a field with its id, and with the ids of all nested fields."""
    return NestedField(
        field_id=_id(field),
        name=field.name,
        field_type=_iceberg_type(field.type),
        required=not field.nullable,
        doc=doc,
    )


def _id(field: pa.Field) -> int:
    return int(field.metadata[FIELD_ID_KEY])


def _iceberg_type(data_type: pa.DataType) -> IcebergType:
    name = type_of(data_type).iceberg_name
    if name is not None:
        return IcebergType.model_validate(name)
    if pa.types.is_decimal(data_type):
        return DecimalType(data_type.precision, data_type.scale)
    if pa.types.is_list(data_type):
        element = data_type.value_field
        return ListType(
            element_id=_id(element),
            element_type=_iceberg_type(element.type),
            element_required=not element.nullable,
        )
    if pa.types.is_map(data_type):
        key, value = data_type.key_field, data_type.item_field
        return MapType(
            key_id=_id(key),
            key_type=_iceberg_type(key.type),
            value_id=_id(value),
            value_type=_iceberg_type(value.type),
            value_required=not value.nullable,
        )
    assert pa.types.is_struct(data_type), data_type
    return StructType(*[iceberg_field(field) for field in data_type])


def readable_columns(
    schema: IcebergSchema, history: Iterable[IcebergSchema]
) -> tuple[list[Column], dict[str, str]]:
    """Return a table's readable columns, and by name the reason for each unreadable column.

    The system columns of a Streamhouse table are in neither result; a column of another table with
    the name of a system column is unreadable. `history` has every possible schema of the table's
    files.
    """
    versions = list(history)
    columns, refused = [], {}
    for field in schema.fields:
        try:
            if _is_ours(field):
                continue
            data_type = _arrow_type(field.field_type)
            default = _default(field, data_type)
            _check_nested(field, versions)
        except UnsupportedError as error:
            refused[field.name] = error.message
            continue
        columns.append(
            Column(
                id=field.field_id,
                name=field.name,
                type=data_type,
                nullable=not field.required,
                comment=field.doc or "",
                default=default,
            )
        )
    return columns, refused


def _is_ours(field: NestedField) -> bool:
    """Whether it is a column that Streamhouse adds; raises if another one has such a name."""
    if field.name.lower() not in RESERVED_COLUMNS:
        return False
    if _SYSTEM_IDS.get(field.name) != field.field_id:
        raise UnsupportedError("Streamhouse gives this name to a column of its own")
    return True


def _arrow_type(iceberg_type: IcebergType) -> pa.DataType:
    simple = type_of_iceberg(str(iceberg_type))
    if simple is not None:
        return simple.arrow
    if isinstance(iceberg_type, FixedType):
        return pa.binary()
    if isinstance(iceberg_type, ListType):
        return pa.list_(_arrow_field(iceberg_type.element_field))
    if isinstance(iceberg_type, MapType):
        return pa.map_(_arrow_field(iceberg_type.key_field), _arrow_field(iceberg_type.value_field))
    if isinstance(iceberg_type, StructType):
        return pa.struct([_arrow_field(field) for field in iceberg_type.fields])
    raise UnsupportedError(f"its type {iceberg_type} is not supported")


def _arrow_field(field: NestedField) -> pa.Field:
    return pa.field(field.name, _arrow_type(field.field_type), nullable=not field.required)


def _default(field: NestedField, data_type: pa.DataType) -> str | None:
    """Return the value of rows in files older than the column, as a text; None for null."""
    for path, inner in nested_fields(field.field_type):
        if inner.initial_default is not None:
            raise UnsupportedError(f"its field '{'.'.join(path)}' was added with a default value")
    if field.initial_default is None:
        return None
    try:
        return default_text(field.initial_default, data_type, where="it was added with a default")
    except InvalidSchemaError as error:
        raise UnsupportedError(error.message) from error


def _check_nested(field: NestedField, versions: Iterable[IcebergSchema]) -> None:
    """Raise if a field inside the column was renamed, or made again: there we read by name."""
    names: dict[int, tuple[str, ...]] = {}
    ids: dict[tuple[str, ...], int] = {}
    for version in versions:
        for sibling in version.fields:
            if sibling.field_id != field.field_id:
                continue
            for path, inner in nested_fields(sibling.field_type):
                same_name = names.setdefault(inner.field_id, path) == path
                if not same_name or ids.setdefault(path, inner.field_id) != inner.field_id:
                    raise UnsupportedError(
                        f"its field '{'.'.join(path)}' was renamed, or dropped and added again"
                    )


def name_mapping_of(table: Table) -> NameMapping | None:
    """Return the table's name mapping, with the current names of its fields.

    For a table without a mapping the result is empty if a column was renamed or a name reused:
    names mean nothing in old files. Otherwise the result is None. Raises `CorruptDataError` for an
    unreadable mapping.
    """
    text = table.properties.get(_NAME_MAPPING)
    if not text:
        pairs = {(f.name, f.field_id) for schema in table.metadata.schemas for f in schema.fields}
        counts = len({name for name, _ in pairs}), len({field_id for _, field_id in pairs})
        return None if counts == (len(pairs), len(pairs)) else {}
    names = {
        field.field_id: field.name
        for top in table.schema().fields
        for field in (top, *(inner for _, inner in nested_fields(top.field_type)))
    }
    try:
        return _mapped(parse_mapping_from_json(text).root, names)
    except ValueError as error:
        raise CorruptDataError(
            f"lake table '{'.'.join(table.name())}': property '{_NAME_MAPPING}' cannot be read:"
            f" {sentence_of(error)}"
        ) from error


def _mapped(fields: Iterable[IcebergMappedField], names: Mapping[int, str]) -> NameMapping:
    mapping: dict[str, MappedField] = {}
    for field in fields:
        name = None if field.field_id is None else names.get(field.field_id)
        mapped = MappedField(field.field_id, name, _mapped(field.fields, names))
        for key in field.names:
            if key in mapping:
                raise ValueError(f"it has name '{key}' twice")
            mapping[key] = mapped
    return mapping


def nested_fields(
    iceberg_type: IcebergType, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], NestedField]]:
    """Yield every field inside a type, with the path of names; depth first."""
    children: tuple[NestedField, ...] = ()
    if isinstance(iceberg_type, StructType):
        children = iceberg_type.fields
    elif isinstance(iceberg_type, ListType):
        children = (iceberg_type.element_field,)
    elif isinstance(iceberg_type, MapType):
        children = (iceberg_type.key_field, iceberg_type.value_field)
    for child in children:
        yield (*path, child.name), child
        yield from nested_fields(child.field_type, (*path, child.name))
