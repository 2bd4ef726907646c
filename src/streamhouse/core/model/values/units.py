"""Values written as text by people: true or false, whole numbers, sizes, durations.

Table properties, options of the Spark format, and options of commands are read here. `name` is the
option's name; each error is one sentence with the name, the text, and the expected form. A size
counts by 1024, in any spelling: `64MiB`, `64mb` and `64m` are the same.
"""

from __future__ import annotations

import re
from typing import Final

from streamhouse.core.errors import InvalidRequestError

__all__ = [
    "duration_as_option",
    "parse_boolean",
    "parse_bytes",
    "parse_duration_ms",
    "parse_whole_number",
    "size_as_option",
]

_DURATION_UNIT_MS: Final = {
    "ms": 1,
    "s": 1_000,
    "sec": 1_000,
    "min": 60_000,
    "m": 60_000,
    "h": 3_600_000,
    "d": 86_400_000,
}
_SIZE_PREFIX_BYTES: Final = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_SIZE_UNIT_BYTES: Final = {"": 1, "b": 1} | {
    prefix + ending: size
    for prefix, size in _SIZE_PREFIX_BYTES.items()
    for ending in ("", "b", "ib")
}
# Larger values are cut to these, which in effect mean `for ever` and `unlimited`.
_NUMBER_MAX: Final = (1 << 63) - 1
_DURATION_MS_MAX: Final = 10_000 * 366 * 86_400_000
_SIZE_BYTES_MAX: Final = 1 << 60
_TEXT_MAX: Final = 100
_SHOWN_MAX: Final = 80
_NUMBER_AND_UNIT: Final = re.compile(r"\s*(\d{1,18})\s*([a-z]*)\s*")


def parse_boolean(text: str, *, name: str) -> bool:
    """Read `true` or `false`."""
    lowered = text.strip().lower()
    if lowered not in ("true", "false"):
        raise _not_a_value(text, name, "true or false")
    return lowered == "true"


def parse_whole_number(text: str, *, name: str, least: int = 1, most: int | None = None) -> int:
    """Read a whole number from `least` to `most`."""
    digits = text.strip().removeprefix("-")
    # `int` also accepts `1_000`, `+5` and digits of other scripts.
    is_plain = digits.isascii() and digits.isdecimal() and len(text) <= _TEXT_MAX
    number = int(text) if is_plain else None
    if number is None or number < least or (most is not None and number > most):
        bounds = f"from {least} on" if most is None else f"from {least} to {most}"
        raise _not_a_value(text, name, f"a whole number {bounds}")
    return min(number, _NUMBER_MAX)


def parse_bytes(text: str, *, name: str) -> int:
    """Read `128MiB`, `64kb` or plain bytes as bytes."""
    size = _product(text, _SIZE_UNIT_BYTES)
    if size is None:
        expected = (
            "a size: a positive whole number and one of B, KiB, MiB, GiB, TiB, as in '128MiB'"
        )
        raise _not_a_value(text, name, expected)
    return min(size, _SIZE_BYTES_MAX)


def parse_duration_ms(text: str, *, name: str) -> int:
    """Read `7d`, `12h`, `5m`, `90s` or `500ms` as milliseconds."""
    duration_ms = _product(text, _DURATION_UNIT_MS)
    if duration_ms is None:
        expected = "a duration: a positive whole number and one of ms, s, m, h, d, as in '90s'"
        raise _not_a_value(text, name, expected)
    return min(duration_ms, _DURATION_MS_MAX)


def size_as_option(size: int) -> str:
    """Return bytes in the largest unit without a fraction, as read by `parse_bytes`."""
    for prefix, unit in reversed(_SIZE_PREFIX_BYTES.items()):
        if size and size % unit == 0:
            return f"{size // unit}{prefix.upper()}iB"
    return f"{size}B"


def duration_as_option(duration_ms: int) -> str:
    """Return a duration in the largest unit without a fraction, as read by `parse_duration_ms`."""
    for unit in ("d", "h", "m", "s"):
        if duration_ms and duration_ms % _DURATION_UNIT_MS[unit] == 0:
            return f"{duration_ms // _DURATION_UNIT_MS[unit]}{unit}"
    return f"{duration_ms}ms"


def _product(text: str, units: dict[str, int]) -> int | None:
    """Return the number in `text` times its unit; None for a malformed text or zero."""
    match = _NUMBER_AND_UNIT.fullmatch(text[:_TEXT_MAX].lower())
    unit = units.get(match[2]) if match else None
    return int(match[1]) * unit or None if match and unit else None


def _not_a_value(text: str, name: str, expected: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name} = '{text[:_SHOWN_MAX]}' must be {expected}")
