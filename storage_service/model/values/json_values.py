"""Python values as JSON and texts have them, for rows that people and small programs read."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import partial
from typing import Any

import pyarrow as pa

from streamhouse.storage_service.model.values.calendar import (
    FarDate,
    FarTimestamp,
    date_of_text,
    timestamp_of_text,
)

__all__ = ["json_value", "row_to_json", "text_reader"]


def row_to_json(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of Python values as JSON has them.

    Decimals, dates and timestamps are strings, binary is hexadecimal, a map is a list of pairs, and
    a float that JSON does not have is a string (`NaN`, `Infinity`, `-Infinity`).
    """
    return {name: json_value(value) for name, value in row.items()}


def json_value(value: Any) -> Any:
    """Return one such value."""
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
    """Return what reads a value of `t`, which is not nested, from a text as `json_value` has it.

    It raises ValueError or ArithmeticError for a text that is no such value.
    """
    if pa.types.is_string(t):
        return str
    if pa.types.is_binary(t):
        return bytes.fromhex
    if pa.types.is_boolean(t):
        return _boolean
    if pa.types.is_floating(t):
        return float
    if pa.types.is_decimal(t):
        return Decimal
    if pa.types.is_date(t):
        return date_of_text
    if pa.types.is_timestamp(t):
        return partial(timestamp_of_text, is_utc=t.tz is not None)
    bound = 1 << (t.bit_width - 1)

    def integer(text: str) -> int:
        number = int(text)
        if not -bound <= number < bound:
            raise ValueError
        return number

    return integer


def _boolean(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError
    return text == "true"
