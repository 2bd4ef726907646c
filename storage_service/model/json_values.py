"""Python values as JSON has them, for rows that people and small programs read."""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from streamhouse.storage_service.model.calendar import FarDate, FarTimestamp

__all__ = ["json_value", "row_to_json"]


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
