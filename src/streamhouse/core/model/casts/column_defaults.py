"""The default of an added column: the value of rows that were written without the column.

A default is fixed when the column is added, as Iceberg's `initial-default`. It is kept as a text,
in the form of a value in `where` (`model.values.json_values`).
"""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any, Final

import pyarrow as pa

from streamhouse.core.errors import InvalidSchemaError
from streamhouse.core.model.schema import Column, canonical_type, type_name
from streamhouse.core.model.values.json_values import json_value
from streamhouse.core.types.registry import type_of

__all__ = ["default_text", "default_value", "missing_values", "repeated_default"]

DEFAULT_CHARACTERS_MAX: Final = 1_000

_NO_VALUE: Final = (ValueError, TypeError, ArithmeticError, pa.ArrowException)


def default_text(value: Any, t: pa.DataType, *, where: str) -> str:
    """Return a default of JSON or of Python as the text to keep.

    Raises `InvalidSchemaError`, beginning with `where`, for a value that is none of type `t`.
    """
    if pa.types.is_nested(t):
        raise InvalidSchemaError(
            f"{where}: a column of type {type_name(t)} cannot have a default, only columns with"
            " plain values can; leave it out, and earlier rows have null"
        )
    text = str(json_value(value))
    if isinstance(value, bool):
        text = text.lower()
    if len(text) > DEFAULT_CHARACTERS_MAX:
        raise InvalidSchemaError(
            f"{where}: the default has {len(text)} characters; at most {DEFAULT_CHARACTERS_MAX}"
        )
    try:
        read = _value(text, t)
        if isinstance(read, float | Decimal) and not math.isfinite(read):
            raise ValueError
        pa.scalar(read, t)
    except _NO_VALUE as error:
        raise InvalidSchemaError(
            f"{where}: the default {text[:100]!r} is no {type_name(t)}"
        ) from error
    canonical = str(json_value(read))
    return canonical.lower() if isinstance(read, bool) else canonical


def default_value(column: Column) -> Any:
    """Return the default as a Python value; None for a column without one."""
    return None if column.default is None else _value(column.default, column.type)


def missing_values(column: Column, count: int) -> pa.Array:
    """Return the values of rows that lack the column: its default, else nulls."""
    return repeated_default(column.default, column.type, count)


def repeated_default(text: str | None, t: pa.DataType, count: int) -> pa.Array:
    """Return the default with this text `count` times; nulls for None."""
    return pa.nulls(count, t) if text is None else pa.repeat(pa.scalar(_value(text, t), t), count)


def _value(text: str, t: pa.DataType) -> Any:
    # The types of a lake's schema have other layouts, such as large_binary.
    value = type_of(canonical_type(t, where="default")).value_of_text(text)
    # A float of fewer bits is the value that rows get.
    return pa.scalar(value, t).as_py() if pa.types.is_floating(t) else value
