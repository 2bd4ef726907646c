"""Python values in the form of JSON and of texts, for people and small programs."""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, Final

import numpy as np
import pyarrow as pa

from streamhouse.core.model.values.calendar import (
    FarDate,
    FarTimestamp,
)

__all__ = ["as_float", "json_value", "row_to_json"]

_FLOAT32_BITS: Final = 32


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
