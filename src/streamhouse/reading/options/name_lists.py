"""Reading the text of single options: names and numbers; each error names option and text."""

from __future__ import annotations

import re
from typing import Final

from streamhouse.core.errors import InvalidRequestError
from streamhouse.core.model.values.units import parse_whole_number

__all__ = [
    "parse_consumer",
    "parse_expressions",
    "parse_long_poll_ms",
    "parse_names",
    "parse_snapshot_id",
    "parse_version",
]

LONG_POLL_MS_MAX: Final = 10_000
_CONSUMER: Final = re.compile(r"[A-Za-z0-9._:@-]{1,200}")


def parse_snapshot_id(text: str, *, name: str) -> int:
    """Read the id of a lake snapshot."""
    return parse_whole_number(text, name=name, least=0, most=2**63 - 1)


def parse_version(text: str, *, name: str) -> int:
    """Read the number of a write of an application."""
    return parse_whole_number(text, name=name, least=0, most=2**63 - 1)


def parse_consumer(text: str, *, name: str) -> str:
    """Read the name of a consumer."""
    if not _CONSUMER.fullmatch(text.strip()):
        raise InvalidRequestError(
            f"{name} = '{text[:80]}' must be 1 to 200 letters, digits, '.', '_', ':', '@' and '-'"
        )
    return text.strip()


def parse_long_poll_ms(text: str, *, name: str) -> int:
    """Read how long to wait, in milliseconds; 0 does not wait."""
    return parse_whole_number(text, name=name, least=0, most=LONG_POLL_MS_MAX)


def parse_names(text: str, *, name: str) -> tuple[str, ...]:
    """Read `a, b, `c,d`` as column names; two backticks in a quoted name are one backtick."""
    names = tuple(_name(part) for part in _split(text, quote="`", name=name))
    if not all(names) or len(set(names)) != len(names):
        raise InvalidRequestError(f"{name} = '{text}' must name columns, each once, as in 'a,b'")
    return names


def _name(part: str) -> str:
    if len(part) > 1 and part[0] == part[-1] == "`":
        return part[1:-1].replace("``", "`")
    return part


def parse_expressions(text: str, *, name: str) -> tuple[str, ...]:
    """Read `region, bucket(16, id)` as its expressions."""
    return tuple(_split(text, quote="`", name=name))


def _split(text: str, *, quote: str, name: str) -> list[str]:
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
        raise InvalidRequestError(f"{name} = '{text}' has an open backtick")
    return [part.strip() for part in parts]
