"""Values that are the same ones in a table's type, though the data has them in another.

What a type says is that a value may fit; whether it does, each value says: 5 of a bigint is 5 of an
int, 2^40 is none. So pandas' floats for integers with gaps, polars' unsigned integers, nanoseconds
that are whole microseconds and decimals with zeros at their end are taken, and the first value that
would be another one is refused by its row.

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


def castings(given: pa.Schema, wanted: Schema) -> dict[str, pa.DataType]:
    """Return the columns of `given` whose values are to be made another type, and which.

    Columns that have their type, or one of its layouts, are left as they are; so are those that no
    value of theirs would fit, and those that `wanted` has not: who checks them says so.
    """
    types = {column.name: column.type for column in wanted.columns}
    return {
        field.name: types[field.name]
        for field in given
        if field.name in types
        and not _is_left(field.type, types[field.name])
        and may_fit(field.type, types[field.name])
    }


def may_fit(given: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether values of type `given` may be values of the canonical type `wanted`."""
    given = _bare(given)
    if given == wanted:
        return True
    if pa.types.is_struct(given) and pa.types.is_struct(wanted):
        places = _places(given, wanted)
        return places is not None and all(
            may_fit(given.field(place).type, field.type)
            for place, field in zip(places, wanted, strict=True)
        )
    if pa.types.is_list(given) and pa.types.is_list(wanted):
        return may_fit(given.value_type, wanted.value_type)
    if pa.types.is_map(given) and pa.types.is_map(wanted):
        return may_fit(given.key_type, wanted.key_type) and may_fit(
            given.item_type, wanted.item_type
        )
    return _kernel(given, wanted) is not None


def fitted(
    rows: pa.Table | pa.RecordBatch, casts: Mapping[str, pa.DataType], *, table: str
) -> pa.Table | pa.RecordBatch:
    """Return rows with the columns of `casts` as these types, and the others as they are.

    Raises `SchemaMismatchError` naming table, column, row and value of the first that would be
    another one.
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


def _cast(array: pa.Array, wanted: pa.DataType, *, where: str, first_row: int) -> pa.Array:
    def convert(part: pa.Array) -> pa.Array:
        return converted(_unwrapped(part), wanted, _convert_inner, places=_places)

    try:
        return convert(array)
    except pa.ArrowInvalid as error:
        row = first_bad(array, convert)
        if row is None:
            raise SchemaMismatchError(f"{where}: {error}") from error
        shown = str(python_value(array[row]))[:80]
        raise SchemaMismatchError(
            f"{where}: row {first_row + row} has {shown}, which is no {type_name(wanted)}"
            " without a loss; convert it first, or widen the column"
        ) from error


def _convert_inner(array: pa.Array, wanted: pa.DataType) -> pa.Array:
    array = _unwrapped(array)
    if array.type == wanted:
        return array
    if pa.types.is_nested(array.type):
        return converted(array, wanted, _convert_inner, places=_places)
    kernel = _kernel(array.type, wanted)
    assert kernel is not None, (array.type, wanted)
    return kernel(array)


def _is_left(given: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether the checks of a write take `given` for `wanted` as it is."""
    if given == wanted or pa.types.is_null(given):
        return True
    if pa.types.is_nested(given):
        return False
    if pa.types.is_dictionary(given):
        return bool(given.value_type == wanted)
    try:
        return bool(canonical_type(given, where="value") == wanted)
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
    """Return values without an encoding, and in the one layout of their type."""
    t = array.type
    if pa.types.is_dictionary(t):
        # Arrow takes from few kinds of values: those of a table's types among them.
        values = _unwrapped(array.dictionary)
        return _unwrapped(pa.DictionaryArray.from_arrays(array.indices, values).dictionary_decode())
    if pa.types.is_run_end_encoded(t):
        return _unwrapped(pc.run_end_decode(array))
    bare = _bare(t)
    return array if bare == t else array.cast(bare)


def _places(given: pa.StructType, wanted: pa.StructType) -> Sequence[int] | None:
    """Return where `given` has each field of `wanted`; None if it has others, or not all."""
    places = [given.get_field_index(field.name) for field in wanted]
    return places if -1 not in places and len(places) == given.num_fields else None


def _kernel(given: pa.DataType, wanted: pa.DataType) -> _Kernel | None:
    """Return what makes values that are not nested the same of `wanted`; None if they are none."""
    if given == wanted or pa.types.is_null(given):
        return lambda array: array.cast(wanted)
    if pa.types.is_date32(wanted):
        if pa.types.is_date64(given):
            return lambda array: array.cast(wanted)
        is_local = pa.types.is_timestamp(given) and given.tz is None
        return (lambda array: _same(array, array.cast(wanted))) if is_local else None
    if pa.types.is_timestamp(wanted):
        is_kind = pa.types.is_timestamp(given) and (given.tz is None) == (wanted.tz is None)
        return (lambda array: array.cast(wanted)) if is_kind else None
    return _number_kernel(given, wanted)


def _number_kernel(given: pa.DataType, wanted: pa.DataType) -> _Kernel | None:
    from_int, from_float, from_decimal = (
        pa.types.is_integer(given),
        pa.types.is_floating(given),
        pa.types.is_decimal(given),
    )
    if pa.types.is_integer(wanted) and (from_int or from_float or from_decimal):
        return lambda array: array.cast(wanted)
    if pa.types.is_floating(wanted):
        if from_int:
            return lambda array: array.cast(wanted)
        if from_float:
            return lambda array: _same(array, array.cast(wanted, safe=False))
    if pa.types.is_decimal(wanted):
        if from_int:
            wide = pa.decimal256(_WIDE_DIGITS, wanted.scale)
            return lambda array: array.cast(wide).cast(wanted)
        if from_decimal:
            return lambda array: _in_digits(array, wanted)
    if pa.types.is_binary(wanted) and pa.types.is_fixed_size_binary(given):
        return lambda array: array.cast(wanted)
    return None


def _in_digits(array: pa.Array, wanted: pa.DataType) -> pa.Array:
    wide = pa.decimal256(_WIDE_DIGITS, array.type.scale)
    return array.cast(wide).cast(pa.decimal256(_WIDE_DIGITS, wanted.scale)).cast(wanted)


def _same(array: pa.Array, cast: pa.Array) -> pa.Array:
    """Return `cast` if it has the values of `array`."""
    back = cast.cast(array.type)
    is_same = pc.equal(array, back)
    if pa.types.is_floating(array.type):
        is_same = pc.or_(is_same, pc.is_nan(array))
    if pc.all(is_same).as_py() is False:
        raise pa.ArrowInvalid("a value would be another one")
    return cast
