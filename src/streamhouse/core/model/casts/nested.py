"""Conversion of the inner values of lists, maps and structs, and the first value which fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa

__all__ = [
    "Convert",
    "Places",
    "are_alike",
    "converted",
    "entries_of",
    "fields_of",
    "first_bad",
    "offsets_of",
    "with_fields",
]

Convert = Callable[[pa.Array, pa.DataType], pa.Array]
"""Converts simple values to another type; raises `ArrowInvalid`."""

Places = Callable[[pa.StructType, pa.StructType], Sequence[int] | None]
"""Returns the position in the first struct of each field of the second; -1 becomes null."""


def fields_of(t: pa.DataType) -> list[pa.Field]:
    """Return the fields directly inside a nested type; none for a simple one."""
    if pa.types.is_map(t):
        return [t.key_field, t.item_field]
    if pa.types.is_list(t):
        return [t.value_field]
    return list(t) if pa.types.is_struct(t) else []


def with_fields(t: pa.DataType, fields: Sequence[pa.Field]) -> pa.DataType:
    """Return a nested type with other fields directly inside."""
    if pa.types.is_map(t):
        return pa.map_(*fields)
    return pa.list_(fields[0]) if pa.types.is_list(t) else pa.struct(fields)


def are_alike(
    first: pa.DataType, second: pa.DataType, test: Callable[[pa.DataType, pa.DataType], bool]
) -> bool | None:
    """Whether the fields of two nested types have the same names, and types that pass a test.

    None for simple types, and for types of different kinds.
    """
    fields, others = fields_of(first), fields_of(second)
    if not fields or first.id != second.id:
        return None
    has_names = pa.types.is_struct(first)
    return not (has_names and [f.name for f in fields] != [f.name for f in others]) and all(
        test(field.type, other.type) for field, other in zip(fields, others, strict=True)
    )


def converted(
    array: pa.Array, target: pa.DataType, convert: Convert, *, places: Places
) -> pa.Array:
    """Return the values as values of `target`, a type of the same nesting."""
    source = array.type
    if source == target:
        return array
    if pa.types.is_struct(target) and pa.types.is_struct(source):
        field_places = places(source, target)
        assert field_places is not None, (source, target)
        children = array.flatten()
        return pa.StructArray.from_arrays(
            [
                pa.nulls(len(array), field.type)
                if place < 0
                else converted(children[place], field.type, convert, places=places)
                for place, field in zip(field_places, target, strict=True)
            ],
            fields=list(target),
            mask=array.is_null(),
        )
    if pa.types.is_list(target) and pa.types.is_list(source):
        values = converted(array.flatten(), target.value_type, convert, places=places)
        return pa.ListArray.from_arrays(offsets_of(array), values, target, mask=array.is_null())
    if pa.types.is_map(target) and pa.types.is_map(source):
        entries = entries_of(array)
        keys, items = entries.flatten().flatten()
        return pa.MapArray.from_arrays(
            offsets_of(entries),
            converted(keys, target.key_type, convert, places=places),
            converted(items, target.item_type, convert, places=places),
            type=target,
            mask=array.is_null(),
        )
    return convert(array, target)


def first_bad(array: pa.Array, convert: Callable[[pa.Array], object]) -> int | None:
    """Return the first row refused by `convert`, by bisection."""
    start, end = 0, len(array)
    while end - start > 1:
        middle = (start + end) // 2
        try:
            convert(array.slice(start, middle - start))
        except pa.ArrowInvalid:
            end = middle
        else:
            start = middle
    return start if end > start else None


def entries_of(array: pa.MapArray) -> pa.ListArray:
    """Return the entries of maps as lists of structs of `key` and `value`."""
    fields = [pa.field("key", array.type.key_type), pa.field("value", array.type.item_type)]
    return array.cast(pa.list_(pa.struct(fields)))


def offsets_of(array: pa.ListArray) -> pa.Array:
    """Return the start of each list in the flattened array, and the end; a null has no values."""
    lengths = array.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    return pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
