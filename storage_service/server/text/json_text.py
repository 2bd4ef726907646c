"""Rows as JSON texts, by whole columns: values are those that `row_to_json` has."""

from __future__ import annotations

import json
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from streamhouse.storage_service.model.values.calendar import python_value
from streamhouse.storage_service.model.values.json_values import json_value

__all__ = ["joined", "row_texts"]

_ESCAPED: Final = r'[\x00-\x1f"\\\x7f]'
# Days of the years 1 to 9999: others have texts of their own.
_FIRST_DAY: Final = -719_162
_LAST_DAY: Final = 2_932_896
_DAY_US: Final = 86_400_000_000


def row_texts(rows: pa.RecordBatch) -> pa.LargeStringArray:
    """Return every row as a JSON object."""
    if not rows.num_columns:
        return pa.array(["{}"] * rows.num_rows, pa.large_string())
    parts: list[pa.Array | pa.Scalar] = []
    for position, (name, column) in enumerate(zip(rows.schema.names, rows.columns, strict=True)):
        parts.append(_text("{" if position == 0 else ", "))
        parts.append(_text(f"{json.dumps(name)}: "))
        parts.append(column_texts(column).fill_null("null"))
    parts.append(_text("}"))
    return pc.binary_join_element_wise(*parts, _text(""))


def joined(texts: pa.Array, *, separator: str) -> pa.Buffer:
    """Return texts as one, with a separator between two."""
    if not len(texts):
        return pa.py_buffer(b"")
    lists = pa.LargeListArray.from_arrays(pa.array([0, len(texts)], pa.int64()), texts)
    return pc.binary_join(lists, _text(separator))[0].as_buffer()


def column_texts(column: pa.Array) -> pa.Array:
    """Return every value as JSON; null where it is null."""
    t = column.type
    if pa.types.is_integer(t) or pa.types.is_boolean(t):
        return column.cast(pa.large_string())
    if pa.types.is_string(t) or pa.types.is_large_string(t):
        return _one_by_one(column) if _is_any(column, _ESCAPED) else _quoted(column)
    if pa.types.is_floating(t):
        # A zero keeps its sign only as a number with a point.
        texts = pc.replace_substring_regex(column.cast(pa.large_string()), r"^(-?\d+)$", r"\1.0")
        is_plain = pc.fill_null(pc.is_finite(column), True)
        return texts if pc.all(is_plain).as_py() in (True, None) else _one_by_one(column)
    if pa.types.is_date32(t) and _is_within(column.cast(pa.int32()), _FIRST_DAY, _LAST_DAY):
        return _quoted(column.cast(pa.string()))
    if pa.types.is_timestamp(t) and t.unit == "us":
        us = column.cast(pa.int64())
        if _is_within(us, _FIRST_DAY * _DAY_US, (_LAST_DAY + 1) * _DAY_US - 1):
            return _timestamps(us, is_utc=t.tz is not None)
    return _one_by_one(column)


def _timestamps(us: pa.Array, *, is_utc: bool) -> pa.Array:
    texts = pc.strftime(us.cast(pa.timestamp("us")), format="%Y-%m-%dT%H:%M:%S")
    texts = pc.replace_substring_regex(texts, r"\.000000$", "")
    return _quoted(texts, "+00:00" if is_utc else "")


def _one_by_one(column: pa.Array) -> pa.Array:
    texts = [
        None if (value := python_value(scalar)) is None else json.dumps(json_value(value))
        for scalar in column
    ]
    return pa.array(texts, pa.large_string())


def _quoted(texts: pa.Array, suffix: str = "") -> pa.Array:
    texts = texts.cast(pa.large_string())
    return pc.binary_join_element_wise(_text('"'), texts, _text(suffix + '"'), _text(""))


def _is_any(column: pa.Array, pattern: str) -> bool:
    return pc.any(pc.match_substring_regex(column, pattern)).as_py() is True


def _is_within(numbers: pa.Array, least: int, most: int) -> bool:
    ends = pc.min_max(numbers).as_py()
    return ends["min"] is None or (least <= ends["min"] and ends["max"] <= most)


def _text(text: str) -> pa.Scalar:
    return pa.scalar(text, pa.large_string())
