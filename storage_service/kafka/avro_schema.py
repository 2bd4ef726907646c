"""Avro schemas as types of columns.

The Avro library gets each schema without unsupported parts: logical types are removed, and bytes
become texts. Named types get new names without namespaces. `values/_avro_arrays.py` converts whole
columns.

The library trusts a schema: with a type whose values have no bytes, a few bytes of data could be
any number of rows. These types are refused, as are types without a column type.

Source: Apache Avro 1.11, specification.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import pyarrow as pa

from streamhouse.core.errors import InvalidSchemaError, UnsupportedError
from streamhouse.core.text.text_rows import width_of
from streamhouse.core.types.registry import SIMPLE, type_of

__all__ = ["AvroField", "AvroSchema", "AvroType", "avro_schema", "avro_text_of", "cached_schema"]

_SCHEMA_CHARACTERS_MAX: Final = 1 << 20
_CACHED_CHARACTERS_MAX: Final = 4 << 20
"""The cache limit for schema texts; a parsed schema takes about ten times as many bytes."""
_DEPTH_MAX: Final = 32
_FIELDS_MAX: Final = 2_000
_DECIMAL_DIGITS_MAX: Final = 38
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_RULE: Final = "is no name of Avro: letters, digits and underscores, no digit first"
_ITEM: Final = "element"
WRAPPED: Final = "value"
"""The only field of the record that wraps a schema of another type."""

# Of the integers with the name `int`, the widest is the column's type.
_PRIMITIVES: Final = {t.avro: t.arrow for t in SIMPLE if isinstance(t.avro, str)}
_RESERVED: Final = frozenset((*_PRIMITIVES, "null", "record", "enum", "array", "map", "fixed"))
_LOGICAL: Final[dict[tuple[str, str], pa.DataType]] = {
    (t.avro["type"], t.avro["logicalType"].replace("micros", unit)): t.arrow
    for t in SIMPLE
    if isinstance(t.avro, Mapping)
    for unit in ("millis", "micros")
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AvroType:
    """One type of a schema.

    `plain` is the JSON for the library, and `arrow` the type of a column for the values. `logical`
    is Avro's logical type, if unknown to the library. `symbols` are the texts of an enum. `parts`
    are the types inside a record, an array or a map.
    """

    plain: Any
    arrow: pa.DataType
    logical: str = ""
    symbols: frozenset[str] = frozenset()
    is_nullable: bool = False
    parts: Sequence[AvroField] = ()


@dataclass(frozen=True, slots=True)
class AvroField:
    """A field of a record, the element of an array, or the value of a map."""

    name: str
    type: AvroType


@dataclass(frozen=True, slots=True, kw_only=True)
class AvroSchema:
    """A schema whose values are records.

    `is_wrapped` marks another type, wrapped into a record with a single field and the same bytes.
    """

    fields: Sequence[AvroField]
    plain: str
    is_wrapped: bool

    @property
    def width(self) -> int:
        """The maximal bytes of a row without values."""
        return width_of(field.type.arrow for field in self.fields)

    @property
    def growth(self) -> int:
        """The maximal bytes of a column for a byte of data, in an array or a map.

        A null in an array is one byte of data, but as wide as any element in the column.
        """
        return max(_growth(field.type) for field in self.fields)


def _growth(t: AvroType) -> int:
    growth = max((_growth(part.type) for part in t.parts), default=1)
    if pa.types.is_list(t.arrow) or pa.types.is_map(t.arrow):
        item = t.parts[0].type
        return max(growth, -(-width_of([item.arrow]) // _bytes_min(item)))
    return growth


def _bytes_min(t: AvroType) -> int:
    """Return the minimal bytes of a value."""
    if t.is_nullable or not pa.types.is_struct(t.arrow):
        return 1
    return sum(_bytes_min(part.type) for part in t.parts)


def avro_schema(text: str) -> AvroSchema:
    """Read a schema; raises `InvalidSchemaError` or `UnsupportedError` with the part's name."""
    if len(text) > _SCHEMA_CHARACTERS_MAX:
        raise InvalidSchemaError(f"an Avro schema of {len(text)} characters is too long")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidSchemaError(f"an Avro schema is no JSON: {error}") from error
    parsed = _Parser().type(value, where="schema")
    is_record = pa.types.is_struct(parsed.arrow) and not parsed.is_nullable
    if not is_record:
        field = AvroField(WRAPPED, parsed)
        plain = {
            "type": "record",
            "name": "wrapped",
            "fields": [{"name": WRAPPED, "type": parsed.plain}],
        }
        return AvroSchema(fields=[field], plain=json.dumps(plain), is_wrapped=True)
    return AvroSchema(fields=parsed.parts, plain=json.dumps(parsed.plain), is_wrapped=False)


class _SchemaCache:
    """The most recently used schemas, bounded by the lengths of their texts."""

    def __init__(self, *, characters_max: int) -> None:
        self._characters_max = characters_max
        self._lock = threading.Lock()
        self._cached: OrderedDict[str, AvroSchema] = OrderedDict()
        self._characters = 0

    def get(self, text: str) -> AvroSchema:
        with self._lock:
            if text in self._cached:
                self._cached.move_to_end(text)
                return self._cached[text]
        schema = avro_schema(text)
        with self._lock:
            if text not in self._cached:
                self._cached[text] = schema
                self._characters += len(text)
            while self._characters > self._characters_max:
                self._characters -= len(self._cached.popitem(last=False)[0])
        return schema


_schema_cache: Final = _SchemaCache(characters_max=_CACHED_CHARACTERS_MAX)


def cached_schema(text: str) -> AvroSchema:
    """Return `avro_schema` of a text from a cache. Any thread."""
    return _schema_cache.get(text)


class _Parser:
    def __init__(self) -> None:
        self._named: dict[str, AvroType | None] = {}
        self._field_count = 0

    def type(self, value: Any, *, where: str, space: str = "", depth: int = 0) -> AvroType:
        if depth > _DEPTH_MAX:
            raise UnsupportedError(f"Avro schema: {where} is nested too deep")
        if isinstance(value, list):
            return self._union(value, where, space, depth)
        if isinstance(value, str):
            return self._by_name(value, where, space, depth)
        if not isinstance(value, Mapping):
            raise InvalidSchemaError(f"Avro schema: {where} is no type")
        kind = value.get("type")
        if kind == "record":
            return self._record(value, where, space, depth)
        if kind == "enum":
            return self._enum(value, where, space)
        if kind == "fixed":
            raise UnsupportedError(f"Avro schema: {where} is fixed, which is not read; use bytes")
        if kind == "array":
            item = self.type(value.get("items"), where=f"{where}[]", space=space, depth=depth + 1)
            arrow = pa.list_(pa.field(_ITEM, item.arrow, nullable=item.is_nullable))
            plain = {"type": "array", "items": item.plain}
            return AvroType(plain=plain, arrow=arrow, parts=[AvroField(_ITEM, item)])
        if kind == "map":
            item = self.type(
                value.get("values"), where=f"{where}{{}}", space=space, depth=depth + 1
            )
            arrow = pa.map_(pa.string(), pa.field("value", item.arrow, nullable=item.is_nullable))
            plain = {"type": "map", "values": item.plain}
            return AvroType(plain=plain, arrow=arrow, parts=[AvroField("value", item)])
        inner = self.type(kind, where=where, space=space, depth=depth + 1)
        return _logical(inner, value, where)

    def _by_name(self, name: str, where: str, space: str, depth: int) -> AvroType:
        if name in _PRIMITIVES:
            # Both have the same encoding in Avro, and the library does not support bytes.
            plain = "string" if name == "bytes" else name
            return AvroType(plain=plain, arrow=_PRIMITIVES[name])
        if name == "null":
            raise UnsupportedError(
                f"Avro schema: {where} is null only, which is no type of a column"
            )
        full = name if "." in name or not space else f"{space}.{name}"
        if full not in self._named:
            raise InvalidSchemaError(f"Avro schema: {where} has the unknown type '{full[:80]}'")
        named_type = self._named[full]
        if named_type is None:
            raise UnsupportedError(f"Avro schema: {where} contains itself")
        self._count_again(named_type, where, depth)
        return replace(named_type, plain=named_type.plain["name"])

    def _count_again(self, named_type: AvroType, where: str, depth: int) -> None:
        """Count a named type as if written out, because columns have all of its fields.

        Otherwise a few names for nested types could stand for any number of columns.
        """
        field_count, inner_depth = _extent(named_type)
        if depth + inner_depth > _DEPTH_MAX:
            raise UnsupportedError(f"Avro schema: {where} is nested too deep")
        self._add_fields(field_count)

    def _add_fields(self, field_count: int) -> None:
        self._field_count += field_count
        if self._field_count > _FIELDS_MAX:
            raise UnsupportedError(f"Avro schema: more than {_FIELDS_MAX} fields")

    def _union(self, branches: Sequence[Any], where: str, space: str, depth: int) -> AvroType:
        value_branches = [branch for branch in branches if branch != "null"]
        if len(value_branches) != 1 or len(branches) > 2:
            raise UnsupportedError(
                f"Avro schema: {where} is a union of several types; a column can have a union of"
                " null and one type only"
            )
        value_type = self.type(value_branches[0], where=where, space=space, depth=depth + 1)
        if isinstance(value_type.plain, list):
            raise InvalidSchemaError(
                f"Avro schema: {where} is a union inside of a union, which Avro forbids; merge both"
                " unions"
            )
        if len(branches) == 1:
            # Values have one more byte than values of the type alone, without any meaning.
            raise UnsupportedError(
                f"Avro schema: {where} is a union of one type; write the type without the union"
            )
        plain = ["null" if branch == "null" else value_type.plain for branch in branches]
        return replace(value_type, plain=plain, is_nullable=True)

    def _define(self, value: Mapping[str, Any], where: str, space: str) -> tuple[str, str, str]:
        """Return a new type's full name, its namespace, and its name for the library."""
        name = value.get("name")
        if not isinstance(name, str) or not name:
            raise InvalidSchemaError(f"Avro schema: {where} has no name")
        namespace = value.get("namespace")
        if "." in name:
            full, space = name, name.rpartition(".")[0]
        else:
            space = namespace if isinstance(namespace, str) else space
            full = f"{space}.{name}" if space else name
        if not all(map(_NAME.fullmatch, full.split("."))) or full in _RESERVED:
            raise InvalidSchemaError(f"Avro schema: {where} is called '{full[:80]}', which {_RULE}")
        if full in self._named:
            raise InvalidSchemaError(f"Avro schema: {where} defines '{full[:80]}' again")
        self._named[full] = None
        return full, space, f"type{len(self._named)}"

    def _record(self, value: Mapping[str, Any], where: str, space: str, depth: int) -> AvroType:
        full, space, plain_name = self._define(value, where, space)
        fields = value.get("fields")
        if not isinstance(fields, list) or not fields:
            raise UnsupportedError(f"Avro schema: {where} is a record without fields")
        self._add_fields(len(fields))
        parts: list[AvroField] = []
        names: set[str] = set()
        for field in fields:
            name = field.get("name") if isinstance(field, Mapping) else None
            if not isinstance(name, str) or name in names:
                raise InvalidSchemaError(f"Avro schema: a field of {where} has no name of its own")
            if not _NAME.fullmatch(name):
                raise InvalidSchemaError(f"Avro schema: field '{name[:80]}' of {where} {_RULE}")
            inner = self.type(
                field.get("type"), where=f"{where}.{name}", space=space, depth=depth + 1
            )
            parts.append(AvroField(name, inner))
            names.add(name)
        record = AvroType(
            plain={
                "type": "record",
                "name": plain_name,
                "fields": [{"name": part.name, "type": part.type.plain} for part in parts],
            },
            arrow=pa.struct(
                [pa.field(p.name, p.type.arrow, nullable=p.type.is_nullable) for p in parts]
            ),
            parts=parts,
        )
        self._named[full] = record
        return record

    def _enum(self, value: Mapping[str, Any], where: str, space: str) -> AvroType:
        full, _, plain_name = self._define(value, where, space)
        symbols = value.get("symbols")
        if (
            not symbols
            or not isinstance(symbols, list)
            or not all(isinstance(s, str) for s in symbols)
        ):
            raise InvalidSchemaError(f"Avro schema: {where} is an enum without symbols")
        if len(set(symbols)) < len(symbols) or not all(map(_NAME.fullmatch, symbols)):
            raise InvalidSchemaError(f"Avro schema: a symbol of {where} is there twice, or {_RULE}")
        plain = {"type": "enum", "name": plain_name, "symbols": symbols}
        enum = AvroType(plain=plain, arrow=pa.string(), symbols=frozenset(symbols))
        self._named[full] = enum
        return enum


def _extent(t: AvroType) -> tuple[int, int]:
    """Return the number of fields in a type, including nested fields, and the depth."""
    extents = [_extent(part.type) for part in t.parts]
    fields = sum(count for count, _ in extents) + len(extents)
    return fields, 1 + max((depth for _, depth in extents), default=-1)


def _logical(inner: AvroType, value: Mapping[str, Any], where: str) -> AvroType:
    """Return a type with its logical type; unknown logical types are ignored."""
    name = value.get("logicalType")
    kind = inner.plain if isinstance(inner.plain, str) else ""
    arrow = _LOGICAL.get((kind, str(name)))
    if arrow is not None:
        return AvroType(plain=inner.plain, arrow=arrow, logical=str(name))
    if name == "decimal" and kind and inner.arrow == pa.binary():
        precision, scale = value.get("precision"), value.get("scale", 0)
        if (
            not isinstance(precision, int)
            or not isinstance(scale, int)
            or not 1 <= precision <= _DECIMAL_DIGITS_MAX
            or not 0 <= scale <= precision
        ):
            raise UnsupportedError(
                f"Avro schema: {where} is decimal({precision},{scale}); up to"
                f" {_DECIMAL_DIGITS_MAX} digits are possible, with a scale from 0 to the precision"
            )
        return AvroType(
            plain=inner.plain,
            arrow=pa.decimal128(precision, scale),
            logical="decimal",
        )
    return inner


def avro_text_of(columns: Sequence[pa.Field], *, name: str) -> str:
    """Return a schema for the values of columns; `name` is the record's name.

    Raises `UnsupportedError` for a column without an Avro name or type.
    """
    return json.dumps(_record_of(columns, name=name, where=name))


def _record_of(fields: Sequence[pa.Field], *, name: str, where: str) -> dict[str, Any]:
    avro_fields = []
    for field in fields:
        part = f"{where}.{field.name}"
        if not _NAME.fullmatch(field.name):
            raise UnsupportedError(
                f"column '{part}': Avro has names of letters, digits and underscores only"
            )
        t = _written_type(field.type, name=f"{name}_{field.name}", where=part)
        avro_fields.append(
            {"name": field.name, "type": t}
            if not field.nullable
            else {"name": field.name, "type": ["null", t], "default": None}
        )
    return {"type": "record", "name": name, "fields": avro_fields}


def _written_type(t: pa.DataType, *, name: str, where: str) -> Any:
    if pa.types.is_struct(t):
        return _record_of(list(t), name=name, where=where)
    if pa.types.is_list(t):
        return {"type": "array", "items": _inner_type(t.value_field, name=name, where=where)}
    if pa.types.is_map(t):
        if not pa.types.is_string(t.key_type):
            raise UnsupportedError(f"column '{where}': the keys of a map of Avro are texts")
        return {"type": "map", "values": _inner_type(t.item_field, name=name, where=where)}
    return type_of(t).avro


def _inner_type(field: pa.Field, *, name: str, where: str) -> Any:
    t = _written_type(field.type, name=f"{name}_{field.name}", where=f"{where}.{field.name}")
    return ["null", t] if field.nullable else t
