"""PostgreSQL's texts of arrays, `{1,NULL,"a b"}`, and the values of their elements.

Debezium passes arrays on as texts, because it reads some arrays wrongly: elements of arrays in
arrays as nulls, `NaN` as no array at all, dates before Christ as after.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import date
from typing import Any, Final

import pyarrow as pa

from streamhouse.core.model.values.calendar import DAY_US
from streamhouse.core.types.registry import type_of

__all__ = ["BIT_TYPES", "array_items", "bits", "element_decoder"]

BIT_TYPES: Final = ("bit", "varbit")
"""Types whose values are texts of 0 and 1."""
# An element in quotes, in which a backslash stands before a sign that means itself, or without.
_ELEMENT: Final = re.compile(r'"((?:[^"\\]|\\.)*)"|([^",{}\\]+)', re.DOTALL)
# Boxes have commas, and semicolons between them.
_BOX: Final = re.compile(r"()([^;]+)")
_ESCAPED: Final = re.compile(r"\\(.)", re.DOTALL)
_MOMENT: Final = re.compile(
    r"(\d{4,})-(\d\d)-(\d\d)"
    r"(?: (\d\d):(\d\d):(\d\d)(?:\.(\d{1,6}))?)?"
    r"(?:([+-])(\d\d)(?::(\d\d))?(?::(\d\d))?)?( BC)?"
)
_EPOCH: Final = date(1970, 1, 1).toordinal()
_YEAR_MAX: Final = 9_999
_MICROS: Final = 1_000_000
# Beyond all times that have a form here.
_FAR: Final = 1 << 62


def array_items(text: str, type_name: str = "") -> Iterator[str | None]:
    """Yield the elements of an array, of type `type_name`, as texts, None for NULL.

    Raises ValueError for an array of arrays, which has no form here.
    """
    body = text[text.index("{") + 1 : -1]
    form = _BOX if type_name == "_box" else _ELEMENT
    at = 0
    while at < len(body):
        element = form.match(body, at)
        if element is None:
            raise ValueError("an array of arrays, or no array")
        inside, plain = element.groups()
        if inside:
            yield _ESCAPED.sub(r"\1", inside)
        else:
            yield None if plain == "NULL" else plain or ""
        at = element.end() + 1


def bits(text: str) -> bytes:
    """Return the bytes of a text of 0 and 1, the lowest first."""
    return int(text, 2).to_bytes((len(text) + 7) // 8, "little") if text else b""


def element_decoder(
    t: pa.DataType, type_name: str, fit: Callable[[int], int]
) -> Callable[[str], Any]:
    """Return a converter from an element of type `type_name` to a value for the Arrow type `t`.

    `fit` replaces microseconds since 1970 outside the target's calendar.
    """
    logical = type_of(t)
    if (day := logical.day) is not None:
        return lambda text: fit(_micros(text)) * day // DAY_US
    if pa.types.is_boolean(t):
        return _BOOLEANS.__getitem__
    if pa.types.is_binary(t):
        return bits if type_name in BIT_TYPES else _bytea
    return logical.value_of_text


_BOOLEANS: Final = {"t": True, "f": False}


def _bytea(text: str) -> bytes:
    if not text.startswith("\\x"):
        raise ValueError("bytes that are not in hexadecimal digits: bytea_output is not hex")
    return bytes.fromhex(text[2:])


def _micros(text: str) -> int:
    """Return a date or timestamp as microseconds since 1970; far beyond for one of no calendar."""
    if text in ("infinity", "-infinity"):
        return -_FAR if text.startswith("-") else _FAR
    moment = _MOMENT.fullmatch(text)
    if moment is None:
        raise ValueError("no date and no timestamp")
    *parts, fraction, sign, hours, minutes, seconds, era = moment.groups()
    year, month, day, hour, minute, second = (int(part or 0) for part in parts)
    if era or year > _YEAR_MAX:
        return -_FAR if era else _FAR
    days = date(year, month, day).toordinal() - _EPOCH
    away = int(hours or 0) * 3_600 + int(minutes or 0) * 60 + int(seconds or 0)
    within = hour * 3_600 + minute * 60 + second - (-away if sign == "-" else away)
    return days * DAY_US + within * _MICROS + int((fraction or "").ljust(6, "0"))
