"""Dates, times and doubles from text, as Spark's ANSI casts read them.

A text that Spark may read in another way is refused: special words (`today`), zone names. Years may
have a sign and more than four digits. Spark string literals with their escapes are read here.
"""

from __future__ import annotations

import datetime
import re
from typing import Final

from streamhouse.core.errors import InvalidPredicateError
from streamhouse.core.model.values.calendar import days_of
from streamhouse.core.model.values.zone import Zone

__all__ = ["parse_date", "parse_double", "parse_timestamp", "refuse", "unescape"]

_DAY_S: Final = 86_400
_DATE_END: Final = 1 << 31
_TIMESTAMP_END: Final = 1 << 63
_DOUBLE_TEXT: Final = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)[df]?", re.ASCII | re.I)
_SPECIAL_DOUBLE_TEXT: Final = re.compile(r"nan|[+-]?inf(?:inity)?", re.I)
_DATE_TEXT: Final = re.compile(
    r"([+-]?\d{4,7})(?:-(\d{1,2})(?:-(\d{1,2})(?:[ T].*)?)?)?", re.ASCII | re.S
)
_TIMESTAMP_TEXT: Final = re.compile(
    r"([+-]?\d{4,6})(?:-(\d{1,2})(?:-(\d{1,2})"
    r"(?:[ T](\d{1,2}):(\d{1,2})(?::(\d{1,2})(?:\.(\d*))?)? *(Z|UTC|[+-]\d{2}:\d{2})?)?)?)?",
    re.ASCII,
)
_ESCAPE: Final = re.compile(
    r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([01][0-7]{2})|(.))", re.ASCII | re.S
)
# `\%` and `\_` keep their backslash, for LIKE.
_ESCAPED: Final = {
    "0": "\0",
    "b": "\b",
    "n": "\n",
    "r": "\r",
    "t": "\t",
    "Z": "\x1a",
    "%": "\\%",
    "_": "\\_",
}


def refuse(piece: str) -> InvalidPredicateError:
    """Return the error for a piece without pushdown."""
    return InvalidPredicateError(f"where: {piece}; filter the rows after the read")


def parse_date(text: str) -> int:
    """Return days since 1970 of a text as Spark casts it; raises `InvalidPredicateError`."""
    match = _DATE_TEXT.fullmatch(text.strip())
    try:
        if match:
            year, month, day = (int(part or 1) for part in match.groups())
            days = days_of(year, month, day)
            if -_DATE_END <= days < _DATE_END:
                return days
    except ValueError:
        pass
    raise refuse(f"'{text}' is not a date of the form 2024-12-31")


def parse_timestamp(text: str, *, zone: Zone | None) -> int:
    """Return microseconds since 1970 of a text as Spark casts it.

    A text without a zone is in `zone`; with None the text may name no zone, and the wall clock time
    itself is returned, as of a timestamp_ntz.
    """
    match = _TIMESTAMP_TEXT.fullmatch(text.strip())
    try:
        if match:
            *parts, fraction, named = match.groups()
            year, month, day = (int(part or 1) for part in parts[:3])
            hour, minute, second = (int(part or 0) for part in parts[3:])
            datetime.time(hour, minute, second)
            seconds = days_of(year, month, day) * _DAY_S + (hour * 60 + minute) * 60 + second
            micros = seconds * 1_000_000 + int((fraction or "").ljust(6, "0")[:6])
            if named and zone is None:
                raise refuse(f"'{text}' has a time zone but is compared with a timestamp_ntz")
            if named:
                micros -= _zone_us(named)
            elif zone is not None:
                micros = zone.moment_of(micros)
            if -_TIMESTAMP_END <= micros < _TIMESTAMP_END:
                return micros
    except ValueError:
        pass
    raise refuse(
        f"'{text}' is not a timestamp of the form 2024-12-31 23:59:59.999999,"
        " optionally with Z or an offset such as +01:00"
    )


def parse_double(text: str) -> float:
    """Return the double of a text as Spark casts it; raises `InvalidPredicateError`."""
    stripped = text.strip()
    match = _DOUBLE_TEXT.fullmatch(stripped)
    if match:
        return float(match[1])
    if _SPECIAL_DOUBLE_TEXT.fullmatch(stripped):
        return float(stripped)
    raise refuse(f"'{text}' is not a number")


def unescape(text: str) -> str:
    """Return the value of the inside of a Spark string literal, quotes already removed."""

    def replace(match: re.Match[str]) -> str:
        short, long, octal, character = match.groups()
        if character is not None:
            return _ESCAPED.get(character, character)
        return chr(int(octal, 8) if octal else int(short or long, 16))

    try:
        # A pair of \\u escapes is one character; half a pair is none that UTF-8 can store.
        return _ESCAPE.sub(replace, text).encode("utf-16", "surrogatepass").decode("utf-16")
    except (UnicodeError, ValueError, OverflowError):
        raise refuse("a string with an escape that is not a Unicode character") from None


def _zone_us(zone: str) -> int:
    if zone in ("Z", "UTC"):
        return 0
    hours, minutes = int(zone[1:3]), int(zone[4:6])
    if hours > 18 or minutes > 59:
        raise ValueError(zone)
    return (hours * 60 + minutes) * 60_000_000 * (-1 if zone[0] == "-" else 1)
