"""Answers to Kafka clients: kio's entities in the requested version, and their bytes.

A handler returns an answer once, with the field names of the newest version. Fields unknown to the
requested version are left out, and missing fields get defaults.

    length: i32 | correlation id: i32 | tagged fields | body

Flexible versions have the tagged fields, except in an answer about versions.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import io
import struct
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

from kio.schema.errors import ErrorCode
from kio.schema.index import api_key_map, schema_name_map
from kio.serial import entity_writer

from streamhouse.storage_service.kafka.messages.requests import response_class
from streamhouse.storage_service.kafka.messages.shapes import shape_of

__all__ = [
    "Piece",
    "answer_body",
    "answer_entity",
    "answer_frame",
    "element_count",
    "entity_bytes",
    "know_fields",
    "varint_bytes",
]

Piece: TypeAlias = bytes | bytearray | memoryview

_LENGTH: Final = struct.Struct(">i")
_DEFAULTS: Final[Mapping[str, Any]] = {
    "bool": False,
    "bytes": b"",
    "error_code": ErrorCode.none,
    "string": "",
    "timedelta_i32": datetime.timedelta(0),
    "timedelta_i64": datetime.timedelta(0),
}


def answer_entity(api_key: int, version: int, values: Mapping[str, Any]) -> Any:
    """Return the answer of an API; nested values are mappings or lists."""
    return _entity(response_class(api_key, version), values)


def entity_bytes(entity: Any) -> bytes:
    """Return the encoded entity."""
    with io.BytesIO() as buffer:
        entity_writer(type(entity))(buffer, entity)
        return buffer.getvalue()


def varint_bytes(number: int) -> bytes:
    """Return a length or count in the encoding of flexible versions."""
    if number < 0x80:
        return bytes((number,))
    return bytes((number & 0x7F | 0x80,)) + varint_bytes(number >> 7)


def know_fields(answer_class: Any) -> None:
    """Cache the fields of an answer's class in all versions, before the first answer."""
    for version_class in _versions_of(answer_class):
        _names_below(version_class, "")


def answer_body(api_key: int, version: int, values: Mapping[str, Any]) -> bytes:
    """Return the body of an answer; takes about 20 microseconds for each element."""
    return entity_bytes(answer_entity(api_key, version, values))


def element_count(values: Mapping[str, Any], *, most: int) -> int:
    """Return the number of elements in all arrays of an answer; stops counting above `most`."""
    count = 0
    for value in values.values():
        if isinstance(value, str | bytes | bytearray | memoryview):
            continue
        if isinstance(value, Mapping):
            count += element_count(value, most=most - count)
        elif isinstance(value, Sequence):
            count += len(value)
            for element in value:
                if count > most or not isinstance(element, Mapping):
                    break
                count += element_count(element, most=most - count)
        if count > most:
            break
    return count


def answer_frame(
    api_key: int, version: int, correlation_id: int, body: Sequence[Piece]
) -> list[Piece]:
    """Return a complete answer with its length; `body` is already encoded."""
    is_flexible = response_class(api_key, version).__header_schema__.__version__ > 0
    header = _LENGTH.pack(correlation_id) + (b"\0" if is_flexible else b"")
    length = len(header) + sum(map(len, body))
    return [_LENGTH.pack(length) + header, *body]


def _entity(kind: Any, values: Mapping[str, Any]) -> Any:
    fields = _fields(kind)
    arguments = {
        name: fields[name].value(value) for name, value in values.items() if name in fields
    }
    if len(arguments) < len(values):
        _check_names(kind, frozenset(values) - frozenset(fields))
    for name, field in fields.items():
        if name not in arguments and field.default is not dataclasses.MISSING:
            arguments[name] = field.default
    return kind(**arguments)


@dataclasses.dataclass(frozen=True, slots=True)
class _Field:
    """A field of an entity: another entity, or plain values."""

    nested: type[Any] | None
    is_array: bool
    default: Any

    def value(self, value: Any) -> Any:
        if value is None:
            return None
        if self.is_array:
            if self.nested is None:
                return tuple(value)
            return tuple(_entity(self.nested, element) for element in value)
        return value if self.nested is None else _entity(self.nested, value)


@functools.cache
def _fields(kind: Any) -> Mapping[str, _Field]:
    hints = typing.get_type_hints(kind)
    return {field.name: _field(field, hints[field.name]) for field in dataclasses.fields(kind)}


def _field(field: dataclasses.Field[Any], hint: Any) -> _Field:
    element, is_array, may_be_null = shape_of(hint)
    nested: Any = element if dataclasses.is_dataclass(element) else None
    default = field.default
    if default is dataclasses.MISSING:
        if is_array:
            default = ()
        elif may_be_null:
            default = None
        elif nested is None:
            default = _DEFAULTS.get(field.metadata["kafka_type"], 0)
    return _Field(nested, is_array, default)


@functools.cache
def _check_names(kind: Any, names: frozenset[str]) -> None:
    """Raise unless a version of the entity has these fields: an error in this project."""
    names_of_versions = set[str]()
    for version_class in _versions_of(kind):
        names_of_versions |= _names_below(version_class, kind.__name__)
    if not names <= names_of_versions:
        raise TypeError(f"{kind.__name__} of no version has {sorted(names - names_of_versions)}")


def _versions_of(kind: Any) -> list[Any]:
    api_key = int(kind.__api_key__)
    versions = schema_name_map[api_key_map[api_key]]
    return [response_class(api_key, int(version)) for version in versions]


def _names_below(kind: Any, name: str) -> set[str]:
    """Return the fields of the entity `name`, wherever nested in `kind`."""
    fields = _fields(kind)
    names = set(fields) if kind.__name__ == name else set[str]()
    for field in fields.values():
        if field.nested is not None:
            names |= _names_below(field.nested, name)
    return names
