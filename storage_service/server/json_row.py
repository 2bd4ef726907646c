"""One row as JSON, and one primary key from a URL; for people and for small programs."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from json.encoder import encode_basestring_ascii
from typing import Any
from urllib.parse import unquote

import pyarrow as pa

from streamhouse.storage_service.errors import InvalidRequestError
from streamhouse.storage_service.model.schema import Schema
from streamhouse.storage_service.model.table import TableInfo

__all__ = ["json_writers", "key_from_url", "row_to_json"]


def key_from_url(segments: Sequence[str], table: TableInfo) -> dict[str, Any]:
    """Return the key that percent-encoded path segments spell, one a key column.

    Numbers, dates and timestamps are written as ISO 8601 and SQL do; binary as hexadecimal digits.
    """
    key = table.descriptor.primary_key
    if len(segments) != len(key):
        raise InvalidRequestError(
            f"table '{table.path}': a row's URL needs one part for each key column"
            f" ({', '.join(key)}), not {len(segments)}"
        )
    found = {}
    for name, segment in zip(key, segments, strict=True):
        column = table.schema.column(name, table=str(table.path))
        try:
            text = unquote(segment, errors="strict")
            found[name] = _value(text, column.type)
        except (ValueError, ArithmeticError) as error:
            raise InvalidRequestError(
                f"table '{table.path}': '{segment[:80]}' is no value of key column '{name}', which"
                f" is {column.type}"
            ) from error
    return found


def _value(text: str, t: pa.DataType) -> Any:
    if pa.types.is_string(t):
        return text
    if pa.types.is_binary(t):
        return bytes.fromhex(text)
    if pa.types.is_boolean(t):
        if text not in ("true", "false"):
            raise ValueError
        return text == "true"
    if pa.types.is_decimal(t):
        return Decimal(text)
    if pa.types.is_date(t):
        return datetime.date.fromisoformat(text)
    if pa.types.is_timestamp(t):
        moment = datetime.datetime.fromisoformat(text)
        return moment.replace(tzinfo=datetime.UTC) if t.tz and moment.tzinfo is None else moment
    number = int(text)
    if number.bit_length() >= t.bit_width and number != -(1 << (t.bit_width - 1)):
        raise ValueError
    return number


def row_to_json(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of Python values as JSON has them.

    Decimals, dates and timestamps are strings, binary is hexadecimal, a map is a list of pairs, and
    a float that JSON does not have is a string (`NaN`, `Infinity`, `-Infinity`).
    """
    return {name: _json(value) for name, value in row.items()}


def json_writers(schema: Schema) -> list[tuple[str, Callable[[Any], str]]]:
    """Return, by column, `"name": ` and what writes a value as `row_to_json` has it."""
    return [(f"{json.dumps(c.name)}: ", _writer(c.type)) for c in schema.columns]


def _writer(t: pa.DataType) -> Callable[[Any], str]:
    if pa.types.is_integer(t):
        return lambda value: "null" if value is None else int.__repr__(value)
    if pa.types.is_string(t):
        return lambda value: "null" if value is None else encode_basestring_ascii(value)
    if pa.types.is_timestamp(t) or pa.types.is_date(t):
        return lambda value: "null" if value is None else f'"{value.isoformat()}"'
    if pa.types.is_floating(t):
        return lambda value: (
            float.__repr__(value)
            if value is not None and math.isfinite(value)
            else json.dumps(_json(value))
        )
    return lambda value: json.dumps(_json(value))


def _json(value: Any) -> Any:
    match value:
        case float() if math.isnan(value):
            return "NaN"
        case float() if math.isinf(value):
            return "Infinity" if value > 0 else "-Infinity"
        case Decimal():
            return str(value)
        case datetime.datetime() | datetime.date():
            return value.isoformat()
        case bytes():
            return value.hex()
        case list() | tuple():
            return [_json(item) for item in value]
        case dict():
            return {name: _json(item) for name, item in value.items()}
    return value
