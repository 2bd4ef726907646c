"""Casts of values to a table's type without a loss.

The type decides whether a value may fit; each value decides whether the value does fit: a bigint 5
is an int 5, a bigint 2^40 is not an int. Accepted are, for example, pandas' floats for integers
with gaps, polars' unsigned integers, nanoseconds equal to whole microseconds, and decimals with
trailing zeros. The first value with a loss is refused by its row.

No text is read as a number here, no wall clock time becomes a moment, and nothing is rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from streamhouse.core.errors import InvalidSchemaError, SchemaMismatchError
from streamhouse.core.model.casts.nested import converted, first_bad
from streamhouse.core.model.schema import Schema, canonical_type, type_name
from streamhouse.core.model.values.calendar import python_value

__all__ = ["castings", "fitted", "may_fit"]

_Kernel = Callable[[pa.Array], pa.Array]
# Holds every decimal and integer of a table, with every scale.
_WIDE_DIGITS: Final = 76


def castings(schema: pa.Schema, table_schema: Schema) -> dict[str, pa.DataType]:
    """Return the columns of `schema` to cast, with their target types.

    Left out are columns with the right type or one of its layouts, columns without a lossless cast,
    and columns missing from `table_schema`: the later schema check reports the last two.
    """
    types = {column.name: column.type for column in table_schema.columns}
    return {
        field.name: types[field.name]
        for field in schema
        if field.name in types
        and not _is_accepted(field.type, types[field.name])
        and may_fit(field.type, types[field.name])
    }


def may_fit(source: pa.DataType, target: pa.DataType) -> bool:
    """Whether values of type `source` may be values of the canonical type `target`."""
    source = _bare(source)
    if source == target:
        return True
    if pa.types.is_struct(source) and pa.types.is_struct(target):
        places = _places(source, target)
        return places is not None and all(
            may_fit(source.field(place).type, field.type)
            for place, field in zip(places, target, strict=True)
        )
    if pa.types.is_list(source) and pa.types.is_list(target):
        return may_fit(source.value_type, target.value_type)
    if pa.types.is_map(source) and pa.types.is_map(target):
        return may_fit(source.key_type, target.key_type) and may_fit(
            source.item_type, target.item_type
        )
    return _kernel(source, target) is not None


def fitted(
    rows: pa.Table | pa.RecordBatch, casts: Mapping[str, pa.DataType], *, table: str
) -> pa.Table | pa.RecordBatch:
    """Return rows with the columns of `casts` in these types, and all other columns unchanged.

    Raises `SchemaMismatchError` with table, column, row and value of the first lossy cast.
    """
    if not casts:
        return rows
    arrays, fields = [], []
    for field, array in zip(rows.schema, rows.columns, strict=True):
        t = casts.get(field.name)
        if t is not None:
            where = f"table '{table}', column '{field.name}'"
            array = _column(array, t, where=where)
            field = field.with_type(t)
        arrays.append(array)
        fields.append(field)
    return type(rows).from_arrays(arrays, schema=pa.schema(fields))


def _column(
    array: pa.Array | pa.ChunkedArray, t: pa.DataType, *, where: str
) -> pa.Array | pa.ChunkedArray:
    if not isinstance(array, pa.ChunkedArray):
        return _cast(array, t, where=where, first_row=0)
    chunks, first_row = [], 0
    for chunk in array.chunks:
        chunks.append(_cast(chunk, t, where=where, first_row=first_row))
        first_row += len(chunk)
    return pa.chunked_array(chunks, t)


def _cast(array: pa.Array, target: pa.DataType, *, where: str, first_row: int) -> pa.Array:
    def convert(part: pa.Array) -> pa.Array:
        return converted(_unwrapped(part), target, _convert_inner, places=_places)

    try:
        return convert(array)
    except pa.ArrowInvalid as error:
        row = first_bad(array, convert)
        if row is None:
            raise SchemaMismatchError(f"{where}: {error}") from error
        shown = str(python_value(array[row]))[:80]
        raise SchemaMismatchError(
            f"{where}: row {first_row + row} has {shown}, which is no {type_name(target)}"
            " without a loss; convert it first, or widen the column"
        ) from error


def _convert_inner(array: pa.Array, target: pa.DataType) -> pa.Array:
    array = _unwrapped(array)
    if array.type == target:
        return array
    if pa.types.is_nested(array.type):
        return converted(array, target, _convert_inner, places=_places)
    kernel = _kernel(array.type, target)
    assert kernel is not None, (array.type, target)
    return kernel(array)


def _is_accepted(source: pa.DataType, target: pa.DataType) -> bool:
    """Whether the checks of a write accept `source` for `target` without a cast."""
    if source == target or pa.types.is_null(source):
        return True
    if pa.types.is_nested(source):
        return False
    if pa.types.is_dictionary(source):
        return bool(source.value_type == target)
    try:
        return bool(canonical_type(source, where="value") == target)
    except InvalidSchemaError:
        return False


def _bare(t: pa.DataType) -> pa.DataType:
    """Return the type of `_unwrapped` values."""
    if pa.types.is_dictionary(t) or pa.types.is_run_end_encoded(t):
        return _bare(t.value_type)
    if pa.types.is_large_list(t) or pa.types.is_fixed_size_list(t):
        return pa.list_(t.value_field)
    if pa.types.is_string_view(t) or pa.types.is_large_string(t):
        return pa.string()
    if pa.types.is_binary_view(t) or pa.types.is_large_binary(t):
        return pa.binary()
    return t


def _unwrapped(array: pa.Array) -> pa.Array:
    """Return values without an encoding, in the standard layout of their type."""
    t = array.type
    if pa.types.is_dictionary(t):
        # Arrow decodes dictionaries of few value types; the types of tables are among them.
        values = _unwrapped(array.dictionary)
        return _unwrapped(pa.DictionaryArray.from_arrays(array.indices, values).dictionary_decode())
    if pa.types.is_run_end_encoded(t):
        return _unwrapped(pc.run_end_decode(array))
    bare = _bare(t)
    return array if bare == t else array.cast(bare)


def _places(source: pa.StructType, target: pa.StructType) -> Sequence[int] | None:
    """Return the position in `source` of each field of `target`; None if their names differ."""
    places = [source.get_field_index(field.name) for field in target]
    return places if -1 not in places and len(places) == source.num_fields else None


def _kernel(source: pa.DataType, target: pa.DataType) -> _Kernel | None:
    """Return a lossless cast of simple values from `source` to `target`; None if there is none."""
    if source == target or pa.types.is_null(source):
        return lambda array: array.cast(target)
    if pa.types.is_date32(target):
        if pa.types.is_date64(source):
            return lambda array: array.cast(target)
        is_local = pa.types.is_timestamp(source) and source.tz is None
        return (lambda array: _same(array, array.cast(target))) if is_local else None
    if pa.types.is_timestamp(target):
        is_kind = pa.types.is_timestamp(source) and (source.tz is None) == (target.tz is None)
        return (lambda array: array.cast(target)) if is_kind else None
    return _number_kernel(source, target)


def _number_kernel(source: pa.DataType, target: pa.DataType) -> _Kernel | None:
    from_int, from_float, from_decimal = (
        pa.types.is_integer(source),
        pa.types.is_floating(source),
        pa.types.is_decimal(source),
    )
    if pa.types.is_integer(target) and (from_int or from_float or from_decimal):
        return lambda array: array.cast(target)
    if pa.types.is_floating(target):
        if from_int:
            return lambda array: array.cast(target)
        if from_float:
            return lambda array: _same(array, array.cast(target, safe=False))
    if pa.types.is_decimal(target):
        if from_int:
            wide = pa.decimal256(_WIDE_DIGITS, target.scale)
            return lambda array: array.cast(wide).cast(target)
        if from_decimal:
            return lambda array: _in_digits(array, target)
    if pa.types.is_binary(target) and pa.types.is_fixed_size_binary(source):
        return lambda array: array.cast(target)
    return None


def _in_digits(array: pa.Array, target: pa.DataType) -> pa.Array:
    wide = pa.decimal256(_WIDE_DIGITS, array.type.scale)
    return array.cast(wide).cast(pa.decimal256(_WIDE_DIGITS, target.scale)).cast(target)


def _same(array: pa.Array, cast: pa.Array) -> pa.Array:
    """Return `cast` if a cast back gives the values of `array`."""
    back = cast.cast(array.type)
    is_same = pc.equal(array, back)
    if pa.types.is_floating(array.type):
        is_same = pc.or_(is_same, pc.is_nan(array))
    if pc.all(is_same).as_py() is False:
        raise pa.ArrowInvalid("a value would be another one")
    return cast
