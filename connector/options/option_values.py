"""Reading the text of single options: names, numbers, sizes; each error names option and text."""

from __future__ import annotations

from typing import Final

from streamhouse.storage_service.errors import InvalidRequestError
from streamhouse.storage_service.model.properties import parse_bytes

__all__ = [
    "parse_boolean",
    "parse_expressions",
    "parse_long_poll_ms",
    "parse_names",
    "parse_positive",
    "parse_size",
    "parse_snapshot_id",
    "parse_version",
]

LONG_POLL_MS_MAX: Final = 10_000


def parse_boolean(text: str, *, key: str) -> bool:
    """Read `true` or `false`."""
    if text.strip().lower() not in ("true", "false"):
        raise InvalidRequestError(f"option '{key}' = '{text}' must be true or false")
    return text.strip().lower() == "true"


def _integer(text: str, *, key: str, low: int, high: int) -> int:
    try:
        number = int(text)
    except ValueError:
        number = low - 1
    if not low <= number <= high:
        raise InvalidRequestError(
            f"option '{key}' = '{text}' must be a whole number from {low} to {high}"
        )
    return number


def parse_positive(text: str, *, key: str) -> int:
    """Read a number of something."""
    return _integer(text, key=key, low=1, high=2**62)


def parse_snapshot_id(text: str, *, key: str) -> int:
    """Read the id of a lake snapshot."""
    return _integer(text, key=key, low=0, high=2**63 - 1)


def parse_version(text: str, *, key: str) -> int:
    """Read the number of a write of an application."""
    return _integer(text, key=key, low=0, high=2**63 - 1)


def parse_long_poll_ms(text: str, *, key: str) -> int:
    """Read how long to wait, in milliseconds; 0 does not wait."""
    return _integer(text, key=key, low=0, high=LONG_POLL_MS_MAX)


def parse_size(text: str, *, key: str) -> int:
    """Read `128mb` or plain bytes as bytes."""
    return parse_bytes(text, name=f"option '{key}'")


def parse_names(text: str, *, key: str) -> tuple[str, ...]:
    """Read `a, b, `c,d`` as column names."""
    names = tuple(part.strip("`") for part in _split(text, quote="`", key=key))
    if not all(names) or len(set(names)) != len(names):
        raise InvalidRequestError(
            f"option '{key}' = '{text}' must name columns, each once, as in 'a,b'"
        )
    return names


def parse_expressions(text: str, *, key: str) -> tuple[str, ...]:
    """Read `region, bucket(16, id)` as its expressions."""
    return tuple(_split(text, quote="`", key=key))


def _split(text: str, *, quote: str, key: str) -> list[str]:
    """Split at commas outside quotes and parentheses."""
    parts, depth, is_quoted = [""], 0, False
    for character in text:
        is_quoted ^= character == quote
        depth += {"(": 1, ")": -1}.get(character, 0) if not is_quoted else 0
        if character == "," and not is_quoted and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    if is_quoted:
        raise InvalidRequestError(f"option '{key}' = '{text}' has an open backtick")
    return [part.strip() for part in parts]
