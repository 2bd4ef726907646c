"""One Python value converted for Arrow, where Arrow itself would change or cut the value."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any, Final

import numpy as np
import pyarrow as pa

from streamhouse.core.model.schema import type_name
from streamhouse.core.model.values.decimals import as_decimal

__all__ = ["UnfitError", "python_value_of"]

_NO_VALUES: Final = frozenset(("NAType", "NaTType"))
_FLOAT32_MAX: Final = float(np.finfo(np.float32).max)


class UnfitError(ValueError):
    """A value that its column cannot hold; the message names the value and what to give instead."""


def python_value_of(value: Any, t: pa.DataType) -> Any:
    """Return a value for a column of type `t`, for `pa.array`; raises `UnfitError`.

    `pa.array` alone would silently cut off a fraction, take bytes for a text, a wall clock time for
    a moment, or a text for a list of letters.
    """
    value = _python(value)
    if value is None:
        return None
    if pa.types.is_nested(t):
        return _nested(value, t)
    for is_type, read in _READERS:
        if is_type(t):
            return read(value, t)
    raise UnfitError(f"a column of type {t} takes no Python value")


def _python(value: Any) -> Any:
    """Return a value wrapped by numpy, pandas or Arrow as a plain Python value."""
    if isinstance(value, pa.Scalar):
        return value.as_py()
    if type(value).__name__ in _NO_VALUES:
        return None
    if isinstance(value, np.datetime64):
        if np.isnat(value):
            return None
        exact = value.astype("datetime64[us]")
        if exact != value:
            raise UnfitError(f"{value} has parts of a microsecond, which no table keeps")
        return exact.item()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, datetime.datetime) and getattr(value, "nanosecond", False):
        raise UnfitError(f"{value} has parts of a microsecond, which no table keeps")
    return value


def _wrong_type(value: Any, t: pa.DataType, instead: str = "") -> UnfitError:
    if isinstance(value, list | tuple | np.ndarray):
        instead = "; a dict is one row: whole columns are written as pa.table({...})"
    shown = repr(value)
    if len(shown) > 80:
        shown = shown[:77] + "..."
    return UnfitError(f"{shown} is a {type(value).__name__}, no {type_name(t)}{instead}")


def _boolean(value: Any, t: pa.DataType) -> Any:
    if not isinstance(value, bool):
        raise _wrong_type(value, t, "; give True or False")
    return value


def _integer(value: Any, t: pa.DataType) -> Any:
    if isinstance(value, float) and not isinstance(value, bool):
        if math.isnan(value):
            raise UnfitError(f"NaN is no {type_name(t)}; give None where there is no value")
        if not value.is_integer():
            raise UnfitError(f"{value!r} is no {type_name(t)} without a loss; round it first")
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise _wrong_type(value, t, "; convert it with int()" if isinstance(value, str) else "")
    bound = 1 << (t.bit_width - 1)
    if not -bound <= value < bound:
        raise UnfitError(f"{str(value)[:80]} does not fit {type_name(t)}; widen the column")
    return int(value)


def _float(value: Any, t: pa.DataType) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong_type(value, t, "; convert it with float()")
    try:
        number = float(value)
    except OverflowError:
        number = math.nan
    if isinstance(value, int) and number != value:
        raise UnfitError(f"{str(value)[:80]} is no {type_name(t)} without a loss")
    if pa.types.is_float32(t) and _FLOAT32_MAX < abs(number) < math.inf:
        raise UnfitError(f"{value!r} does not fit float; use a double")
    return number


def _decimal(value: Any, t: pa.DataType) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | Decimal):
        instead = f"; give Decimal('{value}')" if isinstance(value, int | float | str) else ""
        raise _wrong_type(value, t, instead)
    number = Decimal(value)
    if not number.is_finite():
        raise UnfitError(f"{number} is no {type_name(t)}; give None where there is no value")
    try:
        return as_decimal(number, t)
    except (ValueError, ArithmeticError):
        raise UnfitError(f"{str(value)[:80]!r} does not fit {type_name(t)}") from None


def _text(value: Any, t: pa.DataType) -> Any:
    if isinstance(value, bytes | bytearray):
        raise _wrong_type(value, t, "; decode it first, as value.decode() does")
    if not isinstance(value, str):
        raise _wrong_type(value, t, "; convert it with str()")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UnfitError(f"a text with half of a surrogate pair is no {type_name(t)}") from error
    return str(value)


def _binary(value: Any, t: pa.DataType) -> Any:
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    instead = "; encode it first, as value.encode() does" if isinstance(value, str) else ""
    raise _wrong_type(value, t, instead)


def _date(value: Any, t: pa.DataType) -> Any:
    if isinstance(value, datetime.datetime):
        midnight = datetime.time()
        if value.tzinfo is not None or value.time() != midnight:
            raise UnfitError(f"{value} has a time of day, which a date has not; give its .date()")
        return value.date()
    if not isinstance(value, datetime.date):
        raise _wrong_type(value, t, "; give a datetime.date")
    return value


def _timestamp(value: Any, t: pa.DataType) -> Any:
    if not isinstance(value, datetime.datetime):
        raise _wrong_type(value, t, "; give a datetime.datetime")
    if t.tz is not None and value.tzinfo is None:
        raise UnfitError(
            f"{value} has no time zone, so it is no moment; give it one, as in"
            " value.replace(tzinfo=datetime.UTC), or make the column timestamp_ntz"
        )
    if t.tz is None and value.tzinfo is not None:
        raise UnfitError(
            f"{value} has a time zone, which the column's type timestamp_ntz has not; remove it"
            " with value.replace(tzinfo=None)"
        )
    return value


_READERS: Final[
    tuple[tuple[Callable[[pa.DataType], bool], Callable[[Any, pa.DataType], Any]], ...]
] = (
    (pa.types.is_boolean, _boolean),
    (pa.types.is_integer, _integer),
    (pa.types.is_floating, _float),
    (pa.types.is_decimal, _decimal),
    (pa.types.is_string, _text),
    (pa.types.is_binary, _binary),
    (pa.types.is_date, _date),
    (pa.types.is_timestamp, _timestamp),
)


def _nested(value: Any, t: pa.DataType) -> Any:
    if isinstance(value, np.ndarray):
        value = list(value)
    if pa.types.is_list(t):
        if not isinstance(value, list | tuple):
            raise _wrong_type(value, t, "; give a list")
        return [_inside(item, t.value_field) for item in value]
    if pa.types.is_map(t):
        pairs = list(value.items()) if isinstance(value, Mapping) else value
        if not isinstance(pairs, list | tuple) or not all(
            isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs
        ):
            raise _wrong_type(value, t, "; give a dict, or a list of pairs")
        return [(_inside(k, t.key_field), _inside(v, t.item_field)) for k, v in pairs]
    if not isinstance(value, Mapping):
        raise _wrong_type(value, t, "; give a dict")
    names = [field.name for field in t]
    unknown = next((name for name in value if name not in names), None)
    if unknown is not None:
        raise UnfitError(f"the struct has no field {unknown!r:.80} (fields: {', '.join(names)})")
    return {field.name: _inside(value.get(field.name), field) for field in t}


def _inside(value: Any, field: pa.Field) -> Any:
    converted = python_value_of(value, field.type)
    if converted is None and not field.nullable:
        raise UnfitError(f"'{field.name}' inside of it must not be null")
    return converted
