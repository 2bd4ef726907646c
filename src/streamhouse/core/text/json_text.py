"""Rows as JSON texts, by whole columns, with the values of `row_to_json`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from streamhouse.core.model.casts.nested import entries_of, offsets_of
from streamhouse.core.model.values.calendar import python_value
from streamhouse.core.model.values.json_values import json_value

__all__ = ["joined", "row_texts"]

_ESCAPED: Final = r'[\x00-\x1f"\\]'
# The backslash comes first, because the other escapes add backslashes.
_ESCAPES: Final = (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n"), ("\r", "\\r"), ("\t", "\\t"))
_CONTROL: Final = r"[\x00-\x1f]"
_CONTROLS: Final = tuple((chr(code), f"\\u{code:04x}") for code in range(ord(" ")))
# Days of the years 1 to 9999; texts of other years have a sign.
_FIRST_DAY: Final = -719_162
_LAST_DAY: Final = 2_932_896
_DAY_US: Final = 86_400_000_000


def row_texts(rows: pa.RecordBatch) -> pa.LargeStringArray:
    """Return every row as a JSON object."""
    if not rows.num_columns:
        return pa.array(["{}"] * rows.num_rows, pa.large_string())
    return _object_texts(rows.schema.names, rows.columns)


def _object_texts(names: Sequence[str], columns: Sequence[pa.Array]) -> pa.LargeStringArray:
    parts: list[pa.Array | pa.Scalar] = []
    for position, (name, column) in enumerate(zip(names, columns, strict=True)):
        parts.append(_text(("{" if position == 0 else ", ") + f"{json.dumps(name)}: "))
        parts.append(column_texts(column).fill_null("null"))
    return pc.binary_join_element_wise(*parts, _text("}"), _text(""))


def joined(texts: pa.Array, *, separator: str) -> pa.Buffer:
    """Return all texts as one text, with a separator between two."""
    if not len(texts):
        return pa.py_buffer(b"")
    lists = pa.LargeListArray.from_arrays(pa.array([0, len(texts)], pa.int64()), texts)
    return pc.binary_join(lists, _text(separator))[0].as_buffer()


def column_texts(column: pa.Array) -> pa.LargeStringArray:
    """Return every value as JSON; a null stays null."""
    t = column.type
    if pa.types.is_integer(t) or pa.types.is_boolean(t):
        return column.cast(pa.large_string())
    if pa.types.is_string(t) or pa.types.is_large_string(t):
        return _quoted(_escaped(column.cast(pa.large_string())))
    if pa.types.is_floating(t):
        return _float_texts(column)
    if pa.types.is_decimal(t):
        return _quoted(column.cast(pa.string()))
    if pa.types.is_binary(t):
        return _quoted(_hexed(column))
    if pa.types.is_date32(t) and _is_within(column.cast(pa.int32()), _FIRST_DAY, _LAST_DAY):
        return _quoted(column.cast(pa.string()))
    if pa.types.is_timestamp(t) and t.unit == "us":
        us = column.cast(pa.int64())
        if _is_within(us, _FIRST_DAY * _DAY_US, (_LAST_DAY + 1) * _DAY_US - 1):
            return _timestamps(us, is_utc=t.tz is not None)
    if pa.types.is_nested(t):
        return pc.if_else(column.is_valid(), _nested_texts(column), None)
    return _one_by_one(column)


def _escaped(texts: pa.LargeStringArray) -> pa.LargeStringArray:
    if not _is_any(texts, _ESCAPED):
        return texts
    for raw, escape in _ESCAPES:
        texts = pc.replace_substring(texts, pattern=raw, replacement=escape)
    if _is_any(texts, _CONTROL):
        for raw, escape in _CONTROLS:
            texts = pc.replace_substring(texts, pattern=raw, replacement=escape)
    return texts


def _float_texts(column: pa.Array) -> pa.LargeStringArray:
    # A zero keeps its sign only as a number with a point.
    texts = pc.replace_substring_regex(column.cast(pa.large_string()), r"^(-?\d+)$", r"\1.0")
    if pc.all(pc.is_finite(column)).as_py() in (True, None):
        return texts
    infinite = pc.if_else(pc.greater(column, 0), _text('"Infinity"'), _text('"-Infinity"'))
    texts = pc.if_else(pc.is_inf(column), infinite, texts)
    return pc.if_else(pc.is_nan(column), _text('"NaN"'), texts)


def _hexed(column: pa.BinaryArray) -> pa.LargeStringArray:
    """Return bytes as hexadecimal digits."""
    if not len(column):
        return column.cast(pa.large_string())
    plain = column.fill_null(b"") if column.null_count else column
    _, ends, data = plain.buffers()
    places = np.frombuffer(ends, np.int32)[plain.offset : plain.offset + len(plain) + 1]
    first, last = int(places[0]), int(places[-1])
    digits = b"" if data is None else memoryview(data)[first:last].hex().encode()
    starts = pa.py_buffer((places.astype(np.int64) - first) * 2)
    buffers = [None, starts, pa.py_buffer(digits)]
    texts = pa.Array.from_buffers(pa.large_string(), len(plain), buffers)
    return pc.if_else(column.is_valid(), texts, None) if column.null_count else texts


def _nested_texts(column: pa.Array) -> pa.LargeStringArray:
    """Return values as lists and objects of JSON; the result for a null is undefined."""
    t = column.type
    if pa.types.is_struct(t):
        return _object_texts([field.name for field in t], column.flatten())
    if pa.types.is_map(t):
        column = entries_of(column)
        keys, items = (column_texts(part).fill_null("null") for part in column.flatten().flatten())
        texts = pc.binary_join_element_wise(
            _text("["), keys, _text(", "), items, _text("]"), _text("")
        )
    else:
        texts = column_texts(column.flatten()).fill_null("null")
    lists = pa.LargeListArray.from_arrays(offsets_of(column).cast(pa.int64()), texts)
    inside = pc.binary_join(lists, _text(", "))
    return pc.binary_join_element_wise(_text("["), inside, _text("]"), _text(""))


def _timestamps(us: pa.Array, *, is_utc: bool) -> pa.Array:
    # As `2026-01-02 03:04:05.000000`; `strftime` takes many times as long.
    texts = us.cast(pa.timestamp("us")).cast(pa.large_string())
    texts = pc.binary_replace_slice(texts, start=10, stop=11, replacement="T")
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


def _is_within(numbers: pa.Array, least: int, greatest: int) -> bool:
    ends = pc.min_max(numbers).as_py()
    return ends["min"] is None or (least <= ends["min"] and ends["max"] <= greatest)


def _text(text: str) -> pa.Scalar:
    return pa.scalar(text, pa.large_string())
