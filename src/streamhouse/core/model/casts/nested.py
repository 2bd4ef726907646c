"""Lists, maps and structs whose inner values become others, and the first value that cannot."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa

__all__ = ["Convert", "Places", "converted", "entries_of", "first_bad", "offsets_of"]

Convert = Callable[[pa.Array, pa.DataType], pa.Array]
"""Makes values that are not nested those of another type; raises `ArrowInvalid`."""

Places = Callable[[pa.StructType, pa.StructType], Sequence[int] | None]
"""Says where the first struct has each field of the second, -1 for nowhere: null then."""


def converted(
    array: pa.Array, wanted: pa.DataType, convert: Convert, *, places: Places
) -> pa.Array:
    """Return the values as values of `wanted`, which is nested as they are."""
    given = array.type
    if given == wanted:
        return array
    if pa.types.is_struct(wanted) and pa.types.is_struct(given):
        found = places(given, wanted)
        assert found is not None, (given, wanted)
        children = array.flatten()
        return pa.StructArray.from_arrays(
            [
                pa.nulls(len(array), field.type)
                if place < 0
                else converted(children[place], field.type, convert, places=places)
                for place, field in zip(found, wanted, strict=True)
            ],
            fields=list(wanted),
            mask=array.is_null(),
        )
    if pa.types.is_list(wanted) and pa.types.is_list(given):
        values = converted(array.flatten(), wanted.value_type, convert, places=places)
        return pa.ListArray.from_arrays(offsets_of(array), values, wanted, mask=array.is_null())
    if pa.types.is_map(wanted) and pa.types.is_map(given):
        entries = entries_of(array)
        keys, items = entries.flatten().flatten()
        return pa.MapArray.from_arrays(
            offsets_of(entries),
            converted(keys, wanted.key_type, convert, places=places),
            converted(items, wanted.item_type, convert, places=places),
            type=wanted,
            mask=array.is_null(),
        )
    return convert(array, wanted)


def first_bad(array: pa.Array, convert: Callable[[pa.Array], object]) -> int | None:
    """Return the first row that `convert` refuses, by halves."""
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
    """Return where each list begins in the flattened array, and the end; a null has no values."""
    lengths = array.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    return pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
