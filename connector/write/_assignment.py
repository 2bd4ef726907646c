"""Values of a DataFrame's columns become values of a table's, as Spark's INSERT INTO assigns them.

Spark's store assignment (ANSI) converts what is of one kind, numbers into numbers, dates and
timestamps into each other, and all that is not nested into strings. A string never becomes a
number, nor a number a boolean. Decimals are rounded half up, and fractions of floats cut off where
the column is whole; a float becomes the decimal that its text names, and null if it is infinite or
no number. A value that does not fit is an error that names its row. Fields of structs are matched
by name, without case.

A column of a primary key takes a value exactly or not at all: two keys of the data must never
become one of the table.

Spark itself cannot do it: it puts no casts into the plan of a write to a Python data source, whose
table takes any columns, and the rows arrive as Arrow batches in the workers. So it is done there,
by Arrow's kernels; a row is looked for one by one only once it is known to be wrong.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from streamhouse.connector.write._texts import text_kernel
from streamhouse.core.errors import SchemaMismatchError
from streamhouse.core.model.casts.nested import converted, first_bad
from streamhouse.core.model.schema import canonical_type, type_name
from streamhouse.core.model.values.calendar import DAY_US
from streamhouse.core.model.values.zone import Zone

__all__ = ["assigned", "assigned_key", "can_assign"]

_Kernel = Callable[[pa.Array], pa.Array]

# Holds every decimal and integer of a table, with every scale.
_WIDE_DIGITS: Final = 76
_TIMESTAMP_END_DAY: Final = (1 << 63) // DAY_US
_DECIMAL_FIRST, _DECIMAL_END = 1e-39, 1e38
_LARGE_DIGITS, _SMALL_DIGITS = 17, 57


def can_assign(
    given: pa.DataType, wanted: pa.DataType, *, zone: Zone | None, fills: bool = False
) -> bool:
    """Whether values of type `given` are assigned to a column of the canonical type `wanted`.

    Without a `zone` moments are not assigned to what a clock or calendar shows, nor back.
    Fields that structs lack are null if it `fills` them.
    """
    given = canonical_type(given, where="value")
    if given == wanted:
        return True
    assigns = functools.partial(can_assign, zone=zone, fills=fills)
    if pa.types.is_struct(given) and pa.types.is_struct(wanted):
        places = _places(given, wanted)
        return places is not None and all(
            (fills and field.nullable)
            if place < 0
            else assigns(given.field(place).type, field.type)
            for place, field in zip(places, wanted, strict=True)
        )
    if pa.types.is_list(given) and pa.types.is_list(wanted):
        return assigns(given.value_type, wanted.value_type)
    if pa.types.is_map(given) and pa.types.is_map(wanted):
        # The keys of a map have all their fields.
        return can_assign(given.key_type, wanted.key_type, zone=zone) and assigns(
            given.item_type, wanted.item_type
        )
    return _kernel(given, wanted, zone) is not None


def assigned(array: pa.Array, wanted: pa.DataType, *, column: str, zone: Zone | None) -> pa.Array:
    """Return the values as values of `wanted`, to which `can_assign`; names the first that cannot.

    Timestamps arrive labelled with the session's time zone; the moments are right, and the label
    becomes the table's.
    """
    if array.type == wanted:
        return array

    def convert(part: pa.Array) -> pa.Array:
        return converted(part, wanted, leaf, places=_places)

    def leaf(part: pa.Array, t: pa.DataType) -> pa.Array:
        plain = _plain(part.type)
        kernel = _kernel(plain, t, zone)
        return part.cast(t) if kernel is None or plain == t else kernel(part.cast(plain))

    try:
        return convert(array)
    except pa.ArrowInvalid as error:
        row = first_bad(array, convert)
        if row is None:
            raise SchemaMismatchError(f"column '{column}': {error}") from error
        value = str(array[row])
        raise SchemaMismatchError(
            f"column '{column}': row {row} has {value[:80]}, which does not fit"
            f" {type_name(wanted)}; convert it with try_cast, or widen the column"
        ) from error


def assigned_key(
    array: pa.Array, wanted: pa.DataType, *, column: str, zone: Zone | None
) -> pa.Array:
    """As `assigned`, for a column of a primary key: raises also where a value would be another."""
    key = assigned(array, wanted, column=column, zone=zone)
    plain = _plain(array.type)
    if plain == wanted or pa.types.is_null(plain):
        return key
    if pa.types.is_integer(plain) and pa.types.is_integer(wanted):
        return key
    source = key
    if pa.types.is_string(wanted):
        if not (pa.types.is_timestamp(plain) and plain.tz is not None):
            return key
        # Two moments have one text where the clock is put back.
        source = assigned(array, pa.timestamp("us"), column=column, zone=zone)
    given = array.cast(plain)
    back = assigned(source, plain, column=column, zone=zone)
    is_lost = pc.and_(given.is_valid(), pc.invert(pc.equal(back, given).fill_null(False)))
    row = pc.index(is_lost, True).as_py()
    if row < 0:
        return key
    raise SchemaMismatchError(
        f"column '{column}': row {row} has {str(given[row])[:80]}, which {type_name(wanted)} cannot"
        " hold without loss, and the column is of the primary key; convert it first"
    )


def _plain(t: pa.DataType) -> pa.DataType:
    """Return the canonical type; a null's is its own, and all zones' labels are UTC's."""
    if pa.types.is_null(t):
        return t
    if pa.types.is_timestamp(t) and t.tz is not None:
        return pa.timestamp("us", tz="UTC")
    return canonical_type(t, where="value")


def _places(given: pa.StructType, wanted: pa.StructType) -> list[int] | None:
    """Return where `given` has each field of `wanted`, -1 for nowhere; None if it has others."""
    by_name = {field.name.lower(): place for place, field in enumerate(given)}
    places = [by_name.get(field.name.lower(), -1) for field in wanted]
    return places if len({*places} - {-1}) == given.num_fields else None


def _kernel(given: pa.DataType, wanted: pa.DataType, zone: Zone | None) -> _Kernel | None:
    """Return what converts values of one simple type; None if they are not assigned."""
    if pa.types.is_string(wanted):
        return text_kernel(given, zone)
    if pa.types.is_timestamp(given) and given.tz is not None:
        return _clock_kernel(wanted, zone)
    if pa.types.is_timestamp(wanted):
        return _time_kernel(given, wanted, zone)
    if pa.types.is_date32(wanted) and pa.types.is_timestamp(given):
        return lambda array: pc.floor_temporal(array, unit="day").cast(wanted)
    return _number_kernel(given, wanted)


def _number_kernel(given: pa.DataType, wanted: pa.DataType) -> _Kernel | None:
    from_int, from_float, from_decimal = (
        pa.types.is_signed_integer(given),
        pa.types.is_floating(given),
        pa.types.is_decimal(given),
    )
    if pa.types.is_signed_integer(wanted):
        if from_int:
            return lambda array: array.cast(wanted)
        if from_float:
            return lambda array: _cut_off(array, wanted)
        if from_decimal:
            whole = pa.decimal256(_WIDE_DIGITS, 0)
            return lambda array: pc.trunc(_wide(array)).cast(whole).cast(wanted)
    if pa.types.is_floating(wanted):
        if from_int or from_float:
            return lambda array: array.cast(wanted, safe=False)
        if from_decimal:
            # By its text a decimal becomes the nearest float, which Arrow's own cast may miss.
            return lambda array: array.cast(pa.string()).cast(wanted)
    if pa.types.is_decimal(wanted) and (from_int or from_decimal):
        return lambda array: _in_digits(array, wanted)
    if pa.types.is_decimal(wanted) and from_float:
        return lambda array: _named_by_floats(array, wanted)
    return None


def _clock_kernel(wanted: pa.DataType, zone: Zone | None) -> _Kernel | None:
    """Return what makes moments the dates, or wall clock times, of a zone."""
    if zone is None:
        return None
    if pa.types.is_date32(wanted):
        return lambda array: _dates(array, zone)
    if pa.types.is_timestamp(wanted) and wanted.tz is None:
        return lambda array: _walls(array, zone)
    return None


def _time_kernel(given: pa.DataType, wanted: pa.DataType, zone: Zone | None) -> _Kernel | None:
    is_date = pa.types.is_date32(given)
    if is_date and wanted.tz is None:
        return lambda array: array.cast(wanted)
    is_local = pa.types.is_timestamp(given) and given.tz is None
    if zone is None or wanted.tz is None or not (is_date or is_local):
        return None
    return lambda array: _moments(array, wanted, zone)


def _moments(array: pa.Array, wanted: pa.DataType, zone: Zone) -> pa.Array:
    """Return dates at their midnight, and wall clock times, as moments."""
    if pa.types.is_date32(array.type):
        numbers = array.view(pa.int32()).cast(pa.int64()).fill_null(0)
        days, rest = zone.midnights(_numbers(numbers))
    else:
        days, rest = zone.moments(_numbers(array.view(pa.int64()).fill_null(0)))
    return _timestamps(days, rest, wanted, mask=_mask(array))


def _dates(array: pa.Array, zone: Zone) -> pa.Array:
    """Return moments as the dates on which they are."""
    days, _ = zone.walls(_numbers(array.view(pa.int64()).fill_null(0)))
    return pa.array(days, pa.int32(), mask=_mask(array)).view(pa.date32())


def _walls(array: pa.Array, zone: Zone) -> pa.Array:
    """Return moments as what the wall clock shows."""
    days, rest = zone.walls(_numbers(array.view(pa.int64()).fill_null(0)))
    return _timestamps(days, rest, pa.timestamp("us"), mask=_mask(array))


def _timestamps(
    days: npt.NDArray[np.int64],
    rest: npt.NDArray[np.int64],
    wanted: pa.DataType,
    *,
    mask: npt.NDArray[np.bool_],
) -> pa.Array:
    if len(days) and (days.max() >= _TIMESTAMP_END_DAY or days.min() < -_TIMESTAMP_END_DAY):
        raise pa.ArrowInvalid("out of range of timestamp")
    return pa.array(days * DAY_US + rest, mask=mask).view(wanted)


def _numbers(array: pa.Array) -> npt.NDArray[np.int64]:
    numbers: npt.NDArray[np.int64] = array.to_numpy()
    return numbers


def _mask(array: pa.Array) -> npt.NDArray[np.bool_]:
    mask: npt.NDArray[np.bool_] = array.is_null().to_numpy(zero_copy_only=False)
    return mask


def _cut_off(array: pa.Array, wanted: pa.DataType) -> pa.Array:
    """Return floats without their fractions as integers."""
    whole = pc.trunc(array.cast(pa.float64()))
    end = float(1 << (wanted.bit_width - 1))
    fits = pc.and_(pc.greater_equal(whole, -end), pc.less(whole, end))
    if pc.all(fits).as_py() is False:
        raise pa.ArrowInvalid("out of range")
    return whole.cast(wanted)


def _wide(array: pa.Array) -> pa.Array:
    return array.cast(pa.decimal256(_WIDE_DIGITS, array.type.scale))


def _in_digits(array: pa.Array, wanted: pa.DataType) -> pa.Array:
    """Return integers or decimals rounded half up to the scale of `wanted`."""
    return _in_scale(array, wanted).cast(wanted)


def _in_scale(array: pa.Array, wanted: pa.DataType) -> pa.Array:
    wide = pa.decimal256(_WIDE_DIGITS, wanted.scale)
    if pa.types.is_decimal(array.type):
        array = _wide(array)
        if wanted.scale < array.type.scale:
            array = pc.round(array, wanted.scale, round_mode="half_towards_infinity")
    return array.cast(wide)


def _named_by_floats(array: pa.Array, wanted: pa.DataType) -> pa.Array:
    """Return the decimals that the shortest texts of floats name, rounded half up.

    What is no number or infinite becomes null, as in Spark.

    A float has at most 17 digits: those of 1 or more have up to 16 behind the point, and of smaller
    ones none is behind the 55th, since those below 1e-39 are rounded to zero.
    """
    numbers = array.cast(pa.float64())
    numbers = pc.if_else(pc.is_finite(numbers), numbers, None)
    size = pc.abs(numbers)
    if pc.any(pc.greater_equal(size, _DECIMAL_END)).as_py():
        raise pa.ArrowInvalid("out of range of decimal")
    is_small = pc.less(size, 1.0)
    large = _named(pc.if_else(is_small, 0.0, numbers), _LARGE_DIGITS, wanted)
    if not pc.any(is_small).as_py():
        return large.cast(wanted)
    is_small = pc.and_(is_small, pc.greater_equal(size, _DECIMAL_FIRST))
    small = _named(pc.if_else(is_small, numbers, 0.0), _SMALL_DIGITS, wanted)
    return pc.if_else(is_small, small, large).cast(wanted)


def _named(numbers: pa.Array, digits: int, wanted: pa.DataType) -> pa.Array:
    exact = numbers.cast(pa.string()).cast(pa.decimal256(_WIDE_DIGITS, digits))
    return _in_scale(exact, wanted)
