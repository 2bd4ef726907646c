"""Values of a DataFrame's columns as values of a table's, assigned as by Spark's INSERT INTO.

Spark's store assignment (ANSI) converts values of the same kind: numbers into numbers, dates and
timestamps into each other, and every value without nested parts into a string. A string never
becomes a number, nor a number a boolean. Decimals are rounded half up. A float loses the fraction
in an integer column, and becomes the decimal of the float's text in a decimal column; infinity and
NaN become null. A value that does not fit is an error with the number of the row. Fields of structs
are matched by name, without case.

A column of a primary key takes a value exactly or not at all: two different keys of the data must
never become one key of the table.

Spark itself adds no casts to a write to a Python data source, whose table takes any columns. The
rows arrive as Arrow batches in the workers and are converted here by Arrow's kernels. Rows are
searched singly only after a kernel has failed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from streamhouse.core.errors import SchemaMismatchError
from streamhouse.core.model.casts.nested import converted, first_bad
from streamhouse.core.model.schema import canonical_type, type_name
from streamhouse.core.model.values.calendar import DAY_US
from streamhouse.core.model.values.zone import UTC, Zone
from streamhouse.core.rows.shown_value import shown_value
from streamhouse.core.types.registry import type_of

__all__ = ["assigned", "assigned_key", "can_assign"]

_Kernel = Callable[[pa.Array], pa.Array]

# A decimal of this size holds every decimal and integer of a table, with every scale.
_WIDE_DIGITS: Final = 76
_TIMESTAMP_END_DAY: Final = (1 << 63) // DAY_US
_DECIMAL_FIRST, _DECIMAL_END = 1e-39, 1e38
_LARGE_DIGITS, _SMALL_DIGITS = 17, 57


def can_assign(
    source: pa.DataType, target: pa.DataType, *, zone: Zone | None, fills: bool = False
) -> bool:
    """Whether values of type `source` can be assigned to a column of the canonical type `target`.

    Without a `zone` moments are not assigned to dates or wall clock times, nor the other way round.
    With `fills` the fields that structs lack are null.
    """
    source = canonical_type(source, where="value")
    if source == target:
        return True
    assigns = functools.partial(can_assign, zone=zone, fills=fills)
    if pa.types.is_struct(source) and pa.types.is_struct(target):
        places = _places(source, target)
        return places is not None and all(
            (fills and field.nullable)
            if place < 0
            else assigns(source.field(place).type, field.type)
            for place, field in zip(places, target, strict=True)
        )
    if pa.types.is_list(source) and pa.types.is_list(target):
        return assigns(source.value_type, target.value_type)
    if pa.types.is_map(source) and pa.types.is_map(target):
        # The keys of a map have all their fields.
        return can_assign(source.key_type, target.key_type, zone=zone) and assigns(
            source.item_type, target.item_type
        )
    return _kernel(source, target, zone) is not None


def assigned(array: pa.Array, target: pa.DataType, *, column: str, zone: Zone | None) -> pa.Array:
    """Return the values as values of `target`, to which `can_assign`; name the first misfit.

    Timestamps arrive labelled with the session's time zone; the moments are right, and the label
    becomes the table's.
    """
    if array.type == target:
        return array

    def convert(part: pa.Array) -> pa.Array:
        return converted(part, target, leaf, places=_places)

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
        raise SchemaMismatchError(
            f"column '{column}': row {row} has {shown_value(array[row])}, which does not fit"
            f" {type_name(target)}; convert it with try_cast, or widen the column"
        ) from error


def assigned_key(
    array: pa.Array, target: pa.DataType, *, column: str, zone: Zone | None
) -> pa.Array:
    """Do the work of `assigned` for a primary key's column; raise also if a value would change."""
    key = assigned(array, target, column=column, zone=zone)
    plain = _plain(array.type)
    if plain == target or pa.types.is_null(plain):
        return key
    if pa.types.is_integer(plain) and pa.types.is_integer(target):
        return key
    source = key
    if pa.types.is_string(target):
        if not (pa.types.is_timestamp(plain) and plain.tz is not None):
            return key
        # When the clock is put back, two moments have one text.
        source = assigned(array, pa.timestamp("us"), column=column, zone=zone)
    values = array.cast(plain)
    back = assigned(source, plain, column=column, zone=zone)
    is_lost = pc.and_(values.is_valid(), pc.invert(pc.equal(back, values).fill_null(False)))
    row = pc.index(is_lost, True).as_py()
    if row < 0:
        return key
    raise SchemaMismatchError(
        f"column '{column}': row {row} has {shown_value(values[row])}, which {type_name(target)}"
        " cannot hold without loss, and the column is of the primary key; convert it first"
    )


def _plain(t: pa.DataType) -> pa.DataType:
    """Return the canonical type; a null type stays, and every zone label becomes UTC."""
    if pa.types.is_null(t):
        return t
    if pa.types.is_timestamp(t) and t.tz is not None:
        return pa.timestamp("us", tz="UTC")
    return canonical_type(t, where="value")


def _places(source: pa.StructType, target: pa.StructType) -> list[int] | None:
    """Return the places in `source` of `target`'s fields, -1 if missing; None for extra fields."""
    by_name = {field.name.lower(): place for place, field in enumerate(source)}
    places = [by_name.get(field.name.lower(), -1) for field in target]
    return places if len({*places} - {-1}) == source.num_fields else None


def _kernel(source: pa.DataType, target: pa.DataType, zone: Zone | None) -> _Kernel | None:
    """Return the converter of values of one simple type; None if the types are not assigned."""
    is_moment = pa.types.is_timestamp(source) and source.tz is not None
    clock = zone if is_moment else UTC
    if clock is None:
        return None
    if pa.types.is_string(target):
        texts = type_of(source).spark_texts
        return None if texts is None else lambda array: texts(array, clock)
    if is_moment:
        return _clock_kernel(target, clock)
    if pa.types.is_timestamp(target):
        return _time_kernel(source, target, zone)
    if pa.types.is_date32(target) and pa.types.is_timestamp(source):
        return lambda array: pc.floor_temporal(array, unit="day").cast(target)
    return _number_kernel(source, target)


def _number_kernel(source: pa.DataType, target: pa.DataType) -> _Kernel | None:
    from_int, from_float, from_decimal = (
        pa.types.is_signed_integer(source),
        pa.types.is_floating(source),
        pa.types.is_decimal(source),
    )
    if pa.types.is_signed_integer(target):
        if from_int:
            return lambda array: array.cast(target)
        if from_float:
            return lambda array: _cut_off(array, target)
        if from_decimal:
            whole = pa.decimal256(_WIDE_DIGITS, 0)
            return lambda array: pc.trunc(_wide(array)).cast(whole).cast(target)
    if pa.types.is_floating(target):
        if from_int or from_float:
            return lambda array: array.cast(target, safe=False)
        if from_decimal:
            # The text of a decimal gives the nearest float; Arrow's own cast may miss it.
            return lambda array: array.cast(pa.string()).cast(target)
    if pa.types.is_decimal(target) and (from_int or from_decimal):
        return lambda array: _in_digits(array, target)
    if pa.types.is_decimal(target) and from_float:
        return lambda array: _named_by_floats(array, target)
    return None


def _clock_kernel(target: pa.DataType, zone: Zone) -> _Kernel | None:
    """Return the converter of moments to the dates, or wall clock times, of a zone."""
    if pa.types.is_date32(target):
        return lambda array: _dates(array, zone)
    if pa.types.is_timestamp(target) and target.tz is None:
        return lambda array: _walls(array, zone)
    return None


def _time_kernel(source: pa.DataType, target: pa.DataType, zone: Zone | None) -> _Kernel | None:
    is_date = pa.types.is_date32(source)
    if is_date and target.tz is None:
        return lambda array: array.cast(target)
    is_local = pa.types.is_timestamp(source) and source.tz is None
    if zone is None or target.tz is None or not (is_date or is_local):
        return None
    return lambda array: _moments(array, target, zone)


def _moments(array: pa.Array, target: pa.DataType, zone: Zone) -> pa.Array:
    """Return dates, at their midnight, or wall clock times as moments."""
    if pa.types.is_date32(array.type):
        numbers = array.view(pa.int32()).cast(pa.int64()).fill_null(0)
        days, day_us = zone.midnights(_numbers(numbers))
    else:
        days, day_us = zone.moments(_numbers(array.view(pa.int64()).fill_null(0)))
    return _timestamps(days, day_us, target, mask=_mask(array))


def _dates(array: pa.Array, zone: Zone) -> pa.Array:
    """Return the dates of moments."""
    days, _ = zone.walls(_numbers(array.view(pa.int64()).fill_null(0)))
    return pa.array(days, pa.int32(), mask=_mask(array)).view(pa.date32())


def _walls(array: pa.Array, zone: Zone) -> pa.Array:
    """Return the wall clock times of moments."""
    days, day_us = zone.walls(_numbers(array.view(pa.int64()).fill_null(0)))
    return _timestamps(days, day_us, pa.timestamp("us"), mask=_mask(array))


def _timestamps(
    days: npt.NDArray[np.int64],
    day_us: npt.NDArray[np.int64],
    target: pa.DataType,
    *,
    mask: npt.NDArray[np.bool_],
) -> pa.Array:
    if len(days) and (days.max() >= _TIMESTAMP_END_DAY or days.min() < -_TIMESTAMP_END_DAY):
        raise pa.ArrowInvalid("out of range of timestamp")
    return pa.array(days * DAY_US + day_us, mask=mask).view(target)


def _numbers(array: pa.Array) -> npt.NDArray[np.int64]:
    numbers: npt.NDArray[np.int64] = array.to_numpy()
    return numbers


def _mask(array: pa.Array) -> npt.NDArray[np.bool_]:
    mask: npt.NDArray[np.bool_] = array.is_null().to_numpy(zero_copy_only=False)
    return mask


def _cut_off(array: pa.Array, target: pa.DataType) -> pa.Array:
    """Return floats without their fractions as integers."""
    whole = pc.trunc(array.cast(pa.float64()))
    end = float(1 << (target.bit_width - 1))
    fits = pc.and_(pc.greater_equal(whole, -end), pc.less(whole, end))
    if pc.all(fits).as_py() is False:
        raise pa.ArrowInvalid("out of range")
    return whole.cast(target)


def _wide(array: pa.Array) -> pa.Array:
    return array.cast(pa.decimal256(_WIDE_DIGITS, array.type.scale))


def _in_digits(array: pa.Array, target: pa.DataType) -> pa.Array:
    """Return integers or decimals rounded half up to the scale of `target`."""
    return _in_scale(array, target).cast(target)


def _in_scale(array: pa.Array, target: pa.DataType) -> pa.Array:
    wide = pa.decimal256(_WIDE_DIGITS, target.scale)
    if pa.types.is_decimal(array.type):
        array = _wide(array)
        if target.scale < array.type.scale:
            array = pc.round(array, target.scale, round_mode="half_towards_infinity")
    return array.cast(wide)


def _named_by_floats(array: pa.Array, target: pa.DataType) -> pa.Array:
    """Return the decimals of the shortest texts of floats, rounded half up.

    NaN and infinity become null, as in Spark.

    A float has at most 17 digits. A float of 1 or more has up to 16 digits behind the point. Floats
    below 1e-39 are rounded to zero, so a smaller float has no digit behind the 55th.
    """
    numbers = array.cast(pa.float64())
    numbers = pc.if_else(pc.is_finite(numbers), numbers, None)
    size = pc.abs(numbers)
    if pc.any(pc.greater_equal(size, _DECIMAL_END)).as_py():
        raise pa.ArrowInvalid("out of range of decimal")
    is_small = pc.less(size, 1.0)
    large = _named(pc.if_else(is_small, 0.0, numbers), _LARGE_DIGITS, target)
    if not pc.any(is_small).as_py():
        return large.cast(target)
    is_small = pc.and_(is_small, pc.greater_equal(size, _DECIMAL_FIRST))
    small = _named(pc.if_else(is_small, numbers, 0.0), _SMALL_DIGITS, target)
    return pc.if_else(is_small, small, large).cast(target)


def _named(numbers: pa.Array, digits: int, target: pa.DataType) -> pa.Array:
    exact = numbers.cast(pa.string()).cast(pa.decimal256(_WIDE_DIGITS, digits))
    return _in_scale(exact, target)
