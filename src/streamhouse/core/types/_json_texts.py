"""Whole columns as JSON texts, with the values of `json_values.json_value`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from streamhouse.core.model.casts.nested import offsets_of
from streamhouse.core.model.values.calendar import DAYS, MICROSECONDS, python_value
from streamhouse.core.model.values.json_values import json_value

__all__ = [
    "date_texts",
    "escaped",
    "float_texts",
    "hexed",
    "list_texts",
    "one_by_one",
    "pair_texts",
    "quoted",
    "struct_texts",
    "timestamp_texts",
]

_ESCAPED: Final = r'[\x00-\x1f"\\]'
# The backslash comes first, because the other escapes add backslashes.
_ESCAPES: Final = (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n"), ("\r", "\\r"), ("\t", "\\t"))
_CONTROL: Final = r"[\x00-\x1f]"
_CONTROLS: Final = tuple((chr(code), f"\\u{code:04x}") for code in range(ord(" ")))


def struct_texts(
    names: Sequence[str], columns: Sequence[pa.LargeStringArray]
) -> pa.LargeStringArray:
    """Return objects of the JSON texts of their fields; the result for a null is undefined."""
    parts: list[pa.Array | pa.Scalar] = []
    for position, (name, texts) in enumerate(zip(names, columns, strict=True)):
        parts.append(_text(("{" if position == 0 else ", ") + f"{json.dumps(name)}: "))
        parts.append(texts.fill_null("null"))
    return pc.binary_join_element_wise(*parts, _text("}"), _text(""))


def list_texts(column: pa.Array, texts: pa.LargeStringArray) -> pa.LargeStringArray:
    """Return the lists of a column, whose elements have the JSON `texts`."""
    offsets = offsets_of(column).cast(pa.int64())
    lists = pa.LargeListArray.from_arrays(offsets, texts.fill_null("null"))
    inside = pc.binary_join(lists, _text(", "))
    texts = pc.binary_join_element_wise(_text("["), inside, _text("]"), _text(""))
    return pc.if_else(column.is_valid(), texts, None)


def pair_texts(keys: pa.LargeStringArray, items: pa.LargeStringArray) -> pa.LargeStringArray:
    """Return pairs of JSON texts."""
    items = items.fill_null("null")
    return pc.binary_join_element_wise(_text("["), keys, _text(", "), items, _text("]"), _text(""))


def date_texts(column: pa.Array) -> pa.LargeStringArray:
    """Return dates as ISO 8601."""
    # Texts of other years have a sign.
    if not _is_within(column.cast(pa.int32()), *DAYS):
        return one_by_one(column)
    return quoted(column.cast(pa.string()))


def timestamp_texts(column: pa.Array, *, is_utc: bool) -> pa.LargeStringArray:
    """Return timestamps as ISO 8601."""
    if not _is_within(column.cast(pa.int64()), *MICROSECONDS):
        return one_by_one(column)
    # As `2026-01-02 03:04:05.000000`; `strftime` takes many times as long.
    texts = column.cast(pa.timestamp("us")).cast(pa.large_string())
    texts = pc.binary_replace_slice(texts, start=10, stop=11, replacement="T")
    texts = pc.replace_substring_regex(texts, r"\.000000$", "")
    return quoted(texts, "+00:00" if is_utc else "")


def escaped(texts: pa.LargeStringArray) -> pa.LargeStringArray:
    """Return texts with the escapes of JSON."""
    if not _is_any(texts, _ESCAPED):
        return texts
    for raw, escape in _ESCAPES:
        texts = pc.replace_substring(texts, pattern=raw, replacement=escape)
    if _is_any(texts, _CONTROL):
        for raw, escape in _CONTROLS:
            texts = pc.replace_substring(texts, pattern=raw, replacement=escape)
    return texts


def float_texts(column: pa.Array) -> pa.LargeStringArray:
    """Return floats as numbers, or as the names of those that JSON has not."""
    # A zero keeps its sign only as a number with a point.
    texts = pc.replace_substring_regex(column.cast(pa.large_string()), r"^(-?\d+)$", r"\1.0")
    if pc.all(pc.is_finite(column)).as_py() in (True, None):
        return texts
    infinite = pc.if_else(pc.greater(column, 0), _text('"Infinity"'), _text('"-Infinity"'))
    texts = pc.if_else(pc.is_inf(column), infinite, texts)
    return pc.if_else(pc.is_nan(column), _text('"NaN"'), texts)


def hexed(column: pa.BinaryArray) -> pa.LargeStringArray:
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


def one_by_one(column: pa.Array) -> pa.LargeStringArray:
    """Return values of any type as JSON, by Python."""
    texts = [
        None if (value := python_value(scalar)) is None else json.dumps(json_value(value))
        for scalar in column
    ]
    return pa.array(texts, pa.large_string())


def quoted(texts: pa.Array, suffix: str = "") -> pa.LargeStringArray:
    """Return texts in quotes, with a suffix before the closing quote."""
    texts = texts.cast(pa.large_string())
    return pc.binary_join_element_wise(_text('"'), texts, _text(suffix + '"'), _text(""))


def _is_any(column: pa.Array, pattern: str) -> bool:
    return pc.any(pc.match_substring_regex(column, pattern)).as_py() is True


def _is_within(numbers: pa.Array, least: int, greatest: int) -> bool:
    ends = pc.min_max(numbers).as_py()
    return ends["min"] is None or (least <= ends["min"] and ends["max"] <= greatest)


def _text(text: str) -> pa.Scalar:
    return pa.scalar(text, pa.large_string())
