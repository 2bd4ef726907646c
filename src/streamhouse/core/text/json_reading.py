"""JSON texts read one by one, restricted to UTF-8 and a bounded depth.

A number with a point or an exponent is read as a decimal, so the number keeps all digits until the
type of its column is known.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any, Final

import pyarrow as pa

from streamhouse.core.text.utf8 import NOT_UTF8

__all__ = ["JSON_DEPTH_MAX", "is_of", "json_object", "plain_values", "read_json"]

JSON_DEPTH_MAX: Final = 64
"""The most nested objects and lists; a column's type has half as many levels."""
_TOO_DEEP: Final = f"is nested deeper than {JSON_DEPTH_MAX} objects and lists"
# Beyond the numbers of any column, and within the limits of a decimal.
_EXPONENT_MAX: Final = 10**9
_DIGITS_MAX: Final = 4_000


def read_json(text: bytes) -> Any:
    """Return the value of a text; raises ValueError with a predicate, as `is no JSON: ...`."""
    try:
        decoded = text.decode("utf-8-sig")
        try:
            value = _READER.decode(decoded)
        except (ValueError, ArithmeticError) as error:
            if isinstance(error, json.JSONDecodeError | _ConstantError):
                raise
            # A number has more digits, or a longer exponent, than Python reads.
            value = _PATIENT_READER.decode(decoded)
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error
    except UnicodeDecodeError as error:
        raise ValueError(NOT_UTF8) from error
    except ValueError as error:
        raise ValueError(f"is no JSON: {error}") from error
    if text.count(b"{") + text.count(b"[") > JSON_DEPTH_MAX and _is_too_deep(value):
        raise ValueError(_TOO_DEEP)
    return value


def json_object(text: bytes) -> Mapping[str, Any]:
    """Return the object of a text; raises ValueError like `read_json`, or for another value."""
    row = read_json(text)
    if not isinstance(row, dict):
        raise ValueError("is no JSON object of column to value")
    return row


class _ConstantError(ValueError):
    """The name of a number outside of JSON, as NaN."""


def _no_constant(text: str) -> Any:
    raise _ConstantError(f'{text} is none; write "{text}"')


def _any_number(text: str) -> int | Decimal:
    """Return a number; a number far beyond all columns becomes another number beyond."""
    digits, mark, exponent = text.lower().partition("e")
    if not mark and "." not in digits and len(digits) < _DIGITS_MAX:
        return int(digits)
    try:
        return Decimal(text)
    except InvalidOperation:
        far = -_EXPONENT_MAX if exponent.startswith("-") else _EXPONENT_MAX
        return Decimal(f"{digits}e{far}")


_READER: Final = json.JSONDecoder(parse_float=Decimal, parse_constant=_no_constant)
_PATIENT_READER: Final = json.JSONDecoder(
    parse_float=_any_number, parse_int=_any_number, parse_constant=_no_constant
)


def _is_too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(JSON_DEPTH_MAX):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return False
    return any(isinstance(inner, dict | list) for inner in level)


def plain_values(row: Mapping[str, Any], types: Mapping[str, pa.DataType]) -> dict[str, Any]:
    """Return a row with floats in place of equal decimals, outside of decimal columns."""
    return {
        name: value if name in types and is_of(types[name], pa.types.is_decimal) else _plain(value)
        for name, value in row.items()
    }


def is_of(t: pa.DataType, is_kind: Callable[[pa.DataType], bool]) -> bool:
    """Whether a type, or a type nested inside, is of a kind."""
    inside = [t.field(i).type for i in range(t.num_fields)]
    return bool(is_kind(t)) or any(is_of(part, is_kind) for part in inside)


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, Decimal):
        number = float(value)
        return number if Decimal(repr(number)) == value else value
    return value
