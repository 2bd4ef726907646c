"""Python values in the form of JSON and of texts, for people and small programs."""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import partial
from typing import Any, Final

import numpy as np
import pyarrow as pa

from streamhouse.core.model.values.calendar import (
    FarDate,
    FarTimestamp,
    date_of_text,
    timestamp_of_text,
)
from streamhouse.core.model.values.decimals import NUMBER, decimal_of_text

__all__ = ["as_float", "json_value", "row_to_json", "text_reader"]

_FLOAT32_BITS: Final = 32
_INTEGER: Final = re.compile(r"[+-]?[0-9]+")
_NO_NUMBER: Final = re.compile(r"[+-]?(?:nan|inf|infinity)", re.IGNORECASE)


def row_to_json(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of Python values in the form of JSON.

    Decimals, dates and timestamps are strings, binary is hexadecimal, a map is a list of pairs, and
    a float unknown to JSON is a string (`NaN`, `Infinity`, `-Infinity`).
    """
    return {name: json_value(value) for name, value in row.items()}


def json_value(value: Any) -> Any:
    """Return one value in the form of `row_to_json`."""
    match value:
        case float() if math.isnan(value):
            return "NaN"
        case float() if math.isinf(value):
            return "Infinity" if value > 0 else "-Infinity"
        case Decimal():
            return str(value)
        case datetime.datetime() | datetime.date() | FarDate() | FarTimestamp():
            return value.isoformat()
        case bytes():
            return value.hex()
        case list() | tuple():
            return [json_value(item) for item in value]
        case dict():
            return {name: json_value(item) for name, item in value.items()}
    return value


def text_reader(t: pa.DataType) -> Callable[[str], Any]:
    """Return a function which reads a value of the simple type `t` from a text of `json_value`.

    The function raises ValueError or ArithmeticError for any other text.
    """
    if pa.types.is_string(t):
        return str
    if pa.types.is_binary(t):
        return bytes.fromhex
    if pa.types.is_boolean(t):
        return _boolean
    if pa.types.is_floating(t):
        return partial(_float, t=t)
    if pa.types.is_decimal(t):
        return partial(decimal_of_text, t=t)
    if pa.types.is_date(t):
        return date_of_text
    if pa.types.is_timestamp(t):
        return partial(timestamp_of_text, is_utc=t.tz is not None)
    bound = 1 << (t.bit_width - 1)

    def integer(text: str) -> int:
        if _INTEGER.fullmatch(text := text.strip()) is None:
            raise ValueError
        number = int(text)
        if not -bound <= number < bound:
            raise ValueError
        return number

    return integer


def _boolean(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError
    return text == "true"


def _float(text: str, t: pa.DataType) -> float:
    text = text.strip()
    if _NO_NUMBER.fullmatch(text):
        return float(text)
    if NUMBER.fullmatch(text) is None:
        raise ValueError
    return as_float(text, t)


def as_float(number: int | float | Decimal | str, t: pa.DataType) -> float:
    """Return the value of the floating type `t` nearest to a number.

    Raises ValueError or OverflowError if the nearest value is infinite.
    """
    nearest = float(number)
    if math.isinf(nearest if t.bit_width > _FLOAT32_BITS else _as_float32(nearest)):
        raise ValueError("it is too large")
    return nearest


def _as_float32(number: float) -> float:
    with np.errstate(over="ignore"):
        return float(np.float32(number))
