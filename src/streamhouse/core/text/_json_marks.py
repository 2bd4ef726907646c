"""Searches in the bytes of JSON texts, before or after Arrow reads the texts as a whole.

Arrow's reader accepts more than JSON: `Infinity` for a number, any bytes in skipped fields, any
depth. Arrow also misreads decimals with far exponents (`model.values.decimals`). The searches here
find candidates in the bytes of many texts at once, without parsing.
"""

from __future__ import annotations

import codecs
import re
from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["has_far_exponents", "is_strict_json"]

Bytes = npt.NDArray[np.uint8]
_Places = npt.NDArray[np.int64]

_SCALE_MAX: Final = 38
"""The most digits behind the point with which Arrow reads a decimal exactly or refuses."""
_WINDOW: Final = 64
_FLOAT_DIGITS: Final = 17
"""The digits of a float; with an exponent above -20 the scale is at most `_SCALE_MAX`."""
_BEFORE: Final = re.compile(rb"(?:^|[^0-9A-Za-z_.+-])[+-]?([0-9.]+)$")
_LONG: Final = re.compile(rb"[0-9]{%d}" % (_SCALE_MAX + 1))
_AFTER: Final = re.compile(rb"[0-9]+")
# A digit, a letter e, a point or a sign, written as an escape in a text.
_ESCAPED: Final = re.compile(rb"\\u00(?:2[BbDdEe]|3[0-9]|[46]5)")
_CASE: Final = ord("a") - ord("A")
_ESCAPES_MAX: Final = 64
_CLOSING: Final = 2
"""The difference between the bytes of a closing and an opening bracket."""


def has_far_exponents(data: Bytes) -> bool:
    """Whether a number, or a text, may have more digits behind the point than any type.

    A true result may be wrong: similar digits in an identifier count, too.
    """
    points = np.flatnonzero(data == ord("."))
    points = points[_is_digit(data, points + 1) & _is_digit(data, points + _SCALE_MAX + 1)]
    for at in points.tolist():
        if _LONG.match(data[at + 1 : at + 1 + _WINDOW].tobytes()):
            return True
    dashes = np.flatnonzero(data == ord("-"))
    marked = dashes[data.take(dashes - 1, mode="clip") | _CASE == ord("e")]
    for at in marked[~_is_near(data, marked)].tolist():
        if _is_far(data[max(at - 1 - _WINDOW, 0) : at - 1], data[at + 1 : at + 1 + _WINDOW]):
            return True
    return bool((data == ord("\\")).any()) and _ESCAPED.search(data.data) is not None


def _is_digit(data: Bytes, places: _Places) -> npt.NDArray[np.bool_]:
    return np.asarray(data.take(places, mode="clip") - ord("0") < len("0123456789"))


def _is_near(data: Bytes, dashes: _Places) -> npt.NDArray[np.bool_]:
    """Return which exponents are in the range of common floats near 1."""
    is_below_20 = (data.take(dashes + 1, mode="clip") < ord("2")) & ~_is_digit(data, dashes + 3)
    is_near = is_below_20 | ~_is_digit(data, dashes + 2)
    has_many = np.ones(len(dashes), np.bool_)
    for back in range(2, _FLOAT_DIGITS + 2):
        has_many &= _is_digit(data, dashes - back)
    return np.asarray(is_near & ~has_many)


def _is_far(number: Bytes, exponent_text: Bytes) -> bool:
    digits = _BEFORE.search(number.tobytes())
    exponent = _AFTER.match(exponent_text.tobytes())
    if digits is None or exponent is None:
        return False
    if len(digits[1]) >= _WINDOW - 2 or len(exponent[0]) >= _WINDOW:
        return True
    return int(exponent[0]) + len(digits[1].partition(b".")[2]) > _SCALE_MAX


def is_strict_json(data: Bytes, starts: _Places, *, depth_max: int) -> bool:
    """Whether texts read by Arrow are JSON: UTF-8, without `Infinity` and `NaN`, not too deep.

    False may also mean that the proof would take too long.
    """
    if not _is_utf8(data):
        return False
    names = np.flatnonzero(data & _H_TO_O == ord("H"))
    names = names[_is_text(data, names, b"Inf") | _is_text(data, names, b"NaN")]
    # Inside a text, the letter is usually behind a quote or another letter.
    names = names[np.isin(data.take(names - 1, mode="clip"), _AROUND)]
    opens = np.flatnonzero(data & ~_BRACKETS == _OPEN)
    counts = np.diff(np.searchsorted(opens, starts), append=len(opens))
    is_flat = not len(counts) or int(counts.max()) <= depth_max
    if is_flat and not len(names):
        return True
    quotes = _quotes(data)
    if quotes is None or _outside(names, quotes).any():
        return False
    if is_flat:
        return True
    closes = np.flatnonzero(data & ~_BRACKETS == _OPEN + _CLOSING)
    opens = opens[_outside(opens, quotes)]
    closes = closes[_outside(closes, quotes)]
    return bool((np.arange(1, len(opens) + 1) - np.searchsorted(closes, opens)).max() <= depth_max)


_AROUND: Final = np.frombuffer(b":[, \t\r\n-+", np.uint8)
# `[` and `{`, `]` and `}` differ in one bit.
_BRACKETS: Final = np.uint8(ord("[") ^ ord("{"))
_OPEN: Final = ord("[") & ~int(_BRACKETS)
# `I` and `N` are among these eight letters.
_H_TO_O: Final = np.uint8(~7 & 255)
_ASCII_MAX: Final = 127


def _is_utf8(data: Bytes) -> bool:
    if not len(data) or int(data.max()) <= _ASCII_MAX:
        return True
    try:
        codecs.utf_8_decode(data, "strict", True)  # type: ignore[arg-type]
    except UnicodeDecodeError:
        return False
    return True


def _is_text(data: Bytes, places: _Places, text: bytes) -> npt.NDArray[np.bool_]:
    matches = np.ones(len(places), np.bool_)
    for at, letter in enumerate(text):
        matches &= data.take(places + at, mode="clip") == letter
    return matches


def _quotes(data: Bytes) -> _Places | None:
    """Return the positions of quotes; None for too many backslashes before a quote."""
    quotes = np.flatnonzero(data == ord('"'))
    escaped = np.zeros(len(quotes), np.bool_)
    undecided = np.arange(len(quotes))
    for back in range(1, _ESCAPES_MAX):
        undecided = undecided[data.take(quotes[undecided] - back, mode="clip") == ord("\\")]
        if not len(undecided):
            return quotes[~escaped]
        escaped[undecided] ^= True
    return None


def _outside(places: _Places, quotes: _Places) -> npt.NDArray[np.bool_]:
    return np.asarray(np.searchsorted(quotes, places) % 2 == 0)
