"""Checks the shape of a message before kio parses the message.

kio allocates as many elements as an array announces, so eight bytes could exhaust the memory of the
process. Therefore a message is first walked by the fields of its class: every length must lie
within the message, and all arrays together may have few elements.

The encoding is Kafka's: big-endian numbers; strings, bytes and arrays after their length. A length
has 16 or 32 bits, or is a varint of one more in flexible versions.
"""

from __future__ import annotations

import dataclasses
import functools
import struct
import types
import typing
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeAlias

__all__ = [
    "FieldShape",
    "MalformedRequestError",
    "ManyElementsError",
    "check_shape",
    "end_of_tags",
    "know_shape",
    "shape_of",
]

Step: TypeAlias = "Callable[[_Walk, int], int]"

_FIXED: Final = {
    "bool": 1,
    "datetime_i64": 8,
    "error_code": 2,
    "float64": 8,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "int8": 1,
    "timedelta_i32": 4,
    "timedelta_i64": 8,
    "uint16": 2,
    "uint32": 4,
    "uuid": 16,
}
_VARINT_BYTES_MAX: Final = 5
_TAGS_MAX: Final = 100
_SHORT: Final = struct.Struct(">h")
_INT: Final = struct.Struct(">i")


class MalformedRequestError(Exception):
    """Bytes are no message of the announced API and version, or exceed the limits."""


class ManyElementsError(MalformedRequestError):
    """The arrays of a message have too many elements together."""


class FieldShape(NamedTuple):
    """The type of a field in kio's entities: one value of `element`, or an array."""

    element: Any
    is_array: bool
    may_be_null: bool


class _Walk:
    """A message, and the number of elements still allowed in its arrays."""

    __slots__ = ("data", "elements_left", "end")

    def __init__(self, data: memoryview, *, elements_max: int) -> None:
        self.data = data
        self.end = len(data)
        self.elements_left = elements_max

    def skip(self, at: int, byte_count: int) -> int:
        """Return the position after `byte_count` bytes."""
        if byte_count > self.end - at:
            raise MalformedRequestError(f"{byte_count} bytes at byte {at} of {self.end}")
        return at + byte_count

    def number(self, kind: struct.Struct, at: int) -> int:
        """Return the number at a position."""
        self.skip(at, kind.size)
        value: int = kind.unpack_from(self.data, at)[0]
        return value

    def varint(self, at: int) -> tuple[int, int]:
        """Return an unsigned varint, and the position behind."""
        value = 0
        for count in range(_VARINT_BYTES_MAX):
            if at + count >= self.end:
                break
            byte = self.data[at + count]
            value |= (byte & 0x7F) << (7 * count)
            if byte < 0x80:
                return value, at + count + 1
        raise MalformedRequestError(f"no varint at byte {at}")

    def elements(self, count: int, at: int) -> None:
        """Count the elements of an array."""
        # Each element has at least one byte.
        if count > self.end - at:
            raise MalformedRequestError(f"an array of {count} elements at byte {at} of {self.end}")
        if count > self.elements_left:
            raise ManyElementsError(
                f"an array of {count} elements at byte {at}, where there may be"
                f" {self.elements_left} more"
            )
        self.elements_left -= count


def check_shape(message: Any, data: memoryview, *, elements_max: int) -> None:
    """Raise `MalformedRequestError` unless `data` begins with a message of this class.

    Too many elements raise `ManyElementsError`; the walk stops at the limit.
    """
    _entity(message)(_Walk(data, elements_max=elements_max), 0)


def know_shape(message: Any) -> None:
    """Cache the shape of a message class before the first check."""
    _entity(message)


def end_of_tags(data: memoryview, at: int) -> int:
    """Return the end of unknown tagged fields; raises `MalformedRequestError`."""
    return _tagged(_Walk(data, elements_max=_TAGS_MAX), at, {})


def shape_of(hint: Any) -> FieldShape:
    """Return the shape of a type hint: `T`, `tuple[T, ...]`, or either type `| None`."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    inner = next(option for option in options if option is not types.NoneType)
    is_array = typing.get_origin(inner) is tuple
    element = typing.get_args(inner)[0] if is_array else inner
    return FieldShape(element, is_array, types.NoneType in options)


@functools.cache
def _entity(message: Any) -> Step:
    is_flexible = bool(message.__flexible__)
    hints = typing.get_type_hints(message)
    steps, tagged = list[Step](), dict[int, Step]()
    for field in dataclasses.fields(message):
        step = _field(hints[field.name], field.metadata.get("kafka_type"), is_flexible=is_flexible)
        if "tag" in field.metadata:
            tagged[field.metadata["tag"]] = step
        else:
            steps.append(step)

    def walk_entity(walk: _Walk, at: int) -> int:
        for step in steps:
            at = step(walk, at)
        return _tagged(walk, at, tagged) if is_flexible else at

    return walk_entity


def _tagged(walk: _Walk, at: int, steps: dict[int, Step]) -> int:
    """Walk the tagged fields at the end of an entity, in the order of their tags."""
    count, at = walk.varint(at)
    walk.elements(count, at)
    last = -1
    for _ in range(count):
        tag, at = walk.varint(at)
        if tag <= last:
            raise MalformedRequestError(f"tag {tag} after {last} at byte {at}")
        last = tag
        byte_count, at = walk.varint(at)
        end = walk.skip(at, byte_count)
        if tag in steps and steps[tag](walk, at) != end:
            raise MalformedRequestError(f"tag {tag} at byte {at} is not {byte_count} bytes long")
        at = end
    return at


def _field(hint: Any, kafka_type: str | None, *, is_flexible: bool) -> Step:
    """Return the step for a field; nested entities have no Kafka type."""
    element, is_array, may_be_null = shape_of(hint)
    if kafka_type is not None:
        step = _primitive(kafka_type, is_flexible=is_flexible)
    else:
        step = _entity(element)
        if may_be_null and not is_array:
            step = _nullable(step)
    if not is_array:
        return step
    return _array(step, is_flexible=is_flexible, may_be_null=may_be_null)


def _nullable(step: Step) -> Step:
    def walk_nullable(walk: _Walk, at: int) -> int:
        value_at = walk.skip(at, 1)
        return value_at if walk.data[at] >= 0x80 else step(walk, value_at)

    return walk_nullable


def _primitive(kafka_type: str, *, is_flexible: bool) -> Step:
    if kafka_type in _FIXED:
        byte_count = _FIXED[kafka_type]
        return lambda walk, at: walk.skip(at, byte_count)
    assert kafka_type in ("string", "bytes", "records"), kafka_type
    if is_flexible:
        return _compact_bytes
    return _legacy_string if kafka_type == "string" else _legacy_bytes


def _compact_bytes(walk: _Walk, at: int) -> int:
    length, at = walk.varint(at)
    return walk.skip(at, max(0, length - 1))


def _legacy_string(walk: _Walk, at: int) -> int:
    return walk.skip(at + 2, _length(walk.number(_SHORT, at), at))


def _legacy_bytes(walk: _Walk, at: int) -> int:
    return walk.skip(at + 4, _length(walk.number(_INT, at), at))


def _length(length: int, at: int) -> int:
    if length < -1:
        raise MalformedRequestError(f"length {length} at byte {at}")
    return max(0, length)


def _array(step: Step, *, is_flexible: bool, may_be_null: bool) -> Step:
    # kio accepts a null for any array.
    count_min = -1 if may_be_null else 0

    def walk_array(walk: _Walk, at: int) -> int:
        if is_flexible:
            count, at = walk.varint(at)
            count -= 1
        else:
            count, at = walk.number(_INT, at), at + 4
        if count < count_min:
            raise MalformedRequestError(f"an array of {count} elements before byte {at}")
        count = max(0, count)
        walk.elements(count, at)
        for _ in range(count):
            at = step(walk, at)
        return at

    return walk_array
