"""A row as JSON, and rows of JSON as columns of a table."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, Final

import pyarrow as pa

from streamhouse.core.model.schema import type_name
from streamhouse.core.model.values.calendar import arrow_value
from streamhouse.core.model.values.decimals import as_decimal, as_integer
from streamhouse.core.model.values.json_values import (
    as_float,
    row_to_json,
)
from streamhouse.core.types.logical_type import LogicalType
from streamhouse.core.types.python_values import UnknownFieldError
from streamhouse.core.types.registry import type_of

__all__ = ["column_of", "row_of"]


_NO_VALUE: Final = (
    ValueError,
    TypeError,
    ArithmeticError,
    KeyError,
    AttributeError,
    pa.ArrowException,
)


_AS_JSON: Final = (bool, list, dict)


def row_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of Python values in the form of JSON."""
    return row_to_json(values)


def column_of(values: Sequence[Any], t: pa.DataType) -> tuple[pa.Array, dict[int, str]]:
    """Return Python or JSON values as an array, and a reason for each value which does not fit.

    A value which does not fit is null in the array.
    """
    logical = type_of(t)
    converted: list[Any] = []
    wrong: dict[int, str] = {}
    for position, value in enumerate(values):
        try:
            converted.append(_value(value, logical))
        except _NO_VALUE as error:
            wrong[position] = _reason(value, t, error)
            converted.append(None)
    try:
        return pa.array(converted, t), wrong
    except _NO_VALUE:
        # A value does not fit, or has a year beyond Python's: values are converted one by one.
        pass
    arrays = []
    for position, value in enumerate(converted):
        try:
            arrays.append(arrow_value(value, t))
        except _NO_VALUE as error:
            wrong[position] = _reason(values[position], t, error)
            arrays.append(pa.nulls(1, t))
    return pa.concat_arrays(arrays), wrong


def _reason(value: Any, t: pa.DataType, error: Exception) -> str:
    why = f": {error}" if isinstance(error, UnknownFieldError) else ""
    try:
        shown = json.dumps(value, default=str) if isinstance(value, _AS_JSON) else str(value)
    except (ValueError, TypeError):
        shown = str(value)
    return f"{shown[:100]!r} is no {type_name(t)}{why}"


def _value(value: Any, logical: LogicalType) -> Any:
    """Return a value for Arrow; raises one of `_NO_VALUE` for a value which does not fit.

    Values which Arrow would convert silently, as letters of a text, do not fit. JSON numbers with a
    point are decimals here; every number type which holds the decimal accepts the number.
    """
    if value is None:
        return None
    t = logical.arrow
    if pa.types.is_nested(t):
        return logical.with_parts(value, lambda part, _, part_type: _value(part, part_type))
    if str in logical.json_types:
        if not isinstance(value, str):
            raise TypeError
        return value
    if isinstance(value, str):
        text = value.strip().lower() if bool in logical.json_types else value
        return logical.value_of_text(text)
    if isinstance(value, bool) != (bool in logical.json_types):
        raise TypeError
    if pa.types.is_decimal(t) and isinstance(value, int | Decimal):
        return as_decimal(value, t)
    if pa.types.is_floating(t):
        is_infinite = isinstance(value, float) and not math.isfinite(value)
        return value if is_infinite else as_float(value, t)
    return as_integer(value) if isinstance(value, Decimal) else value
