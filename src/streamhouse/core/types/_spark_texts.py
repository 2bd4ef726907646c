"""Values as texts, as Spark's cast to a string writes them, whole columns at a time.

A float has the fewest identifying digits, and an exponent below 0.001 and from 10,000,000 on:
`1.0E10`. (Java before 19 writes a digit more of a few floats.) A decimal has all digits of its
scale, and never an exponent. A timestamp is the wall clock of the session's zone, without zeros at
the end of its fraction. Bytes are read as UTF-8.

Arrow's kernels do the work except for rare values: dates and timestamps outside of the years 0 to
9999, and the few smallest floats. Python writes these, each distinct value once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from streamhouse.core.model.values.calendar import (
    DAY_US,
    date_text,
    days_of,
    timestamp_text,
)
from streamhouse.core.model.values.zone import Zone

__all__ = ["dates_for_spark", "decimals_for_spark", "floats_for_spark", "times_for_spark"]

_Int64s = npt.NDArray[np.int64]

_DAY_FIRST: Final = days_of(0, 1, 1)
_DAY_END: Final = days_of(10_000, 1, 1)
_PLAIN_FIRST, _PLAIN_END = 1e-3, 1e7
_FLOAT: Final = r"^(?P<sign>-?)(?P<whole>\d+)(?:\.(?P<part>\d+))?(?:e\+?(?P<exponent>-?\d+))?$"
# Two digits identify each float below these limits. Java writes at least two digits, the nearest
# pair, even where a single different digit would do.
_TWO_DIGITS_BELOW: Final = {pa.float64(): 1e-322, pa.float32(): 1e-43}


def floats_for_spark(array: pa.Array, _: Zone) -> pa.Array:
    """Return floats as texts."""
    texts = array.cast(pa.string())
    size = pc.abs(array)
    has_point = pc.match_substring(texts, ".")
    texts = pc.if_else(has_point, texts, pc.binary_join_element_wise(texts, ".0", ""))
    is_plain = pc.and_(pc.greater_equal(size, _PLAIN_FIRST), pc.less(size, _PLAIN_END))
    # The mask: neither plain nor zero. Every comparison with NaN is false.
    has_exponent = pc.fill_null(pc.and_(pc.invert(is_plain), pc.not_equal(array, 0.0)), False)
    if pc.any(has_exponent).as_py() is not True:
        return texts
    return pc.replace_with_mask(texts, has_exponent, _exponent_texts(array.filter(has_exponent)))


def _exponent_texts(array: pa.Array) -> pa.Array:
    """Write floats with an exponent, or by their names."""
    parts = pc.extract_regex(array.cast(pa.string()), _FLOAT)
    sign, whole, part, exponent = (
        pc.struct_field(parts, name) for name in ("sign", "whole", "part", "exponent")
    )
    digits = pc.binary_join_element_wise(whole, part, "")
    significant = pc.utf8_ltrim(digits, "0")
    zeros = pc.subtract(pc.utf8_length(digits), pc.utf8_length(significant))
    exponent = pc.if_else(pc.equal(exponent, ""), "0", exponent).cast(pa.int32())
    exponent = pc.add(exponent, pc.subtract(pc.subtract(pc.utf8_length(whole), 1), zeros))
    significant = pc.utf8_rtrim(significant, "0")
    more_digits = pc.utf8_slice_codeunits(significant, 1)
    texts = pc.binary_join_element_wise(
        sign,
        pc.utf8_slice_codeunits(significant, 0, 1),
        ".",
        pc.if_else(pc.equal(more_digits, ""), "0", more_digits),
        "E",
        exponent.cast(pa.string()),
        "",
    )
    for value, name in ((np.nan, "NaN"), (np.inf, "Infinity"), (-np.inf, "-Infinity")):
        is_value = pc.is_nan(array) if name == "NaN" else pc.equal(array, value)
        texts = pc.if_else(is_value, name, texts)
    numbers = array.to_numpy()
    smallest = np.abs(numbers) < _TWO_DIGITS_BELOW[array.type]
    return _one_by_one(texts, smallest, numbers[smallest].tolist(), "{:.1E}".format)


def decimals_for_spark(array: pa.Array, _: Zone) -> pa.Array:
    """Return decimals as texts."""
    t = array.type
    digits = array.view(pa.decimal128(t.precision, 0)).cast(pa.string())
    if t.scale == 0:
        return digits
    sign = pc.if_else(pc.starts_with(digits, "-"), "-", "")
    digits = pc.utf8_lpad(pc.utf8_ltrim(digits, "-"), t.scale + 1, "0")
    whole = pc.utf8_slice_codeunits(digits, 0, -t.scale)
    part = pc.utf8_slice_codeunits(digits, -t.scale)
    return pc.binary_join_element_wise(sign, whole, ".", part, "")


def dates_for_spark(array: pa.Array, _: Zone) -> pa.Array:
    """Return dates as texts."""
    days: _Int64s = array.view(pa.int32()).cast(pa.int64()).fill_null(0).to_numpy()
    is_far = _far(days)
    near = pc.if_else(pa.array(is_far), pa.scalar(0, pa.date32()), array) if is_far.any() else array
    texts = near.cast(pa.string())
    return _one_by_one(texts, is_far, days[is_far].tolist(), date_text)


def times_for_spark(array: pa.Array, zone: Zone) -> pa.Array:
    """Return moments as wall clock times of a zone, or wall clock times in UTC."""
    days, day_us = zone.walls(array.view(pa.int64()).fill_null(0).to_numpy())
    is_far = _far(days)
    walls = np.where(is_far, 0, days) * DAY_US + day_us
    near_walls = pa.array(walls, mask=array.is_null().to_numpy(zero_copy_only=False))
    texts = near_walls.view(pa.timestamp("us")).cast(pa.string())
    texts = pc.utf8_rtrim(pc.utf8_rtrim(texts, "0"), ".")
    far = zip(days[is_far].tolist(), day_us[is_far].tolist(), strict=True)
    return _one_by_one(texts, is_far, list(far), _far_timestamp_text)


def _far_timestamp_text(wall: tuple[int, int]) -> str:
    days, day_us = wall
    text = timestamp_text(days * DAY_US + day_us, separator=" ")
    return text.rstrip("0") if "." in text else text


def _far(days: _Int64s) -> npt.NDArray[np.bool_]:
    return (days < _DAY_FIRST) | (days >= _DAY_END)


def _one_by_one(
    texts: pa.Array,
    where: npt.NDArray[np.bool_],
    values: Sequence[Hashable],
    write: Callable[[Any], str],
) -> pa.Array:
    """Return the texts, with the texts `where` replaced by the results of `write` for `values`."""
    if not values:
        return texts
    written = {value: write(value) for value in set(values)}
    return pc.replace_with_mask(texts, pa.array(where), pa.array([written[v] for v in values]))
