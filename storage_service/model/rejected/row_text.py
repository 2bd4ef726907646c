"""A row as JSON, and rows of JSON as a table's columns have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import pyarrow as pa

from streamhouse.storage_service.model.values.calendar import arrow_value
from streamhouse.storage_service.model.values.json_values import row_to_json, text_reader

__all__ = ["column_of", "row_of"]


_NO_VALUE: Final = (
    ValueError,
    TypeError,
    ArithmeticError,
    KeyError,
    AttributeError,
    pa.ArrowException,
)


def row_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of Python values as JSON has it."""
    return row_to_json(values)


def column_of(values: Sequence[Any], t: pa.DataType) -> tuple[pa.Array, dict[int, str]]:
    """Return values, Python's own or those of JSON, as an array, and why some are no values of it.

    Those are null in the array.
    """
    arrays, wrong = [], {}
    for position, value in enumerate(values):
        try:
            arrays.append(arrow_value(_value(value, t), t))
        except _NO_VALUE:
            wrong[position] = f"{str(value)[:100]!r} is no {t}"
            arrays.append(pa.nulls(1, t))
    return pa.concat_arrays(arrays) if arrays else pa.array([], t), wrong


def _value(value: Any, t: pa.DataType) -> Any:
    """Return a value for Arrow; raises ValueError, TypeError or ArithmeticError for no such."""
    if value is None:
        return None
    if pa.types.is_string(t):
        return str(value)
    if isinstance(value, str) and not pa.types.is_nested(t):
        text = value.strip().lower() if pa.types.is_boolean(t) else value
        return text_reader(t)(text)
    if pa.types.is_list(t):
        return [_value(item, t.value_type) for item in value]
    if pa.types.is_map(t):
        pairs = value.items() if isinstance(value, Mapping) else value
        return [(_value(k, t.key_type), _value(v, t.item_type)) for k, v in pairs]
    if pa.types.is_struct(t):
        return {field.name: _value(value.get(field.name), field.type) for field in t}
    return value
