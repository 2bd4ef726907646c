"""The relations in a statement's text, and their options by `WITH (...)`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from streamhouse.connector.names._table_statement import Token, name_at, tokens_of, unquoted

__all__ = ["Use", "is_defined_in", "named_at", "pairs", "plain_uses", "uses_with_options"]

_RELATION_FOLLOWS: Final = ("FROM", "JOIN", "STREAM", ",", "(")
_WRITES: Final = ("INTO", "OVERWRITE")


class Use(NamedTuple):
    """A use of a name as a relation, and the options in `WITH (...)`."""

    name: tuple[str, ...]
    options: Mapping[str, str]


def uses_with_options(text: str) -> Iterator[Use]:
    """Yield the reading uses `name WITH (...)`, in a statement or a script."""
    if not re.search(r"\bWITH\s*\(", text, re.IGNORECASE):
        return
    tokens = tokens_of(text)
    for start, name, end in named_at(tokens):
        words = [token.word for token in tokens[end : end + 2]]
        preceding = [token.word for token in tokens[max(start - 2, 0) : start]]
        is_write = any(word in preceding for word in _WRITES)
        if words == ["WITH", "("] and not is_write:
            yield Use(name, dict(pairs(tokens[end + 2 :])))


def plain_uses(text: str) -> Iterator[tuple[str, ...]]:
    """Yield the names without options at the place of a relation; some are columns."""
    tokens = tokens_of(text)
    for start, name, end in named_at(tokens):
        follows = tokens[end].word if end < len(tokens) else ""
        if start and tokens[start - 1].word in _RELATION_FOLLOWS and follows != "WITH":
            yield name


def named_at(tokens: Sequence[Token]) -> Iterator[tuple[int, tuple[str, ...], int]]:
    """Yield the start, the parts and the end of each dotted name."""
    at = 0
    while at < len(tokens):
        name, end = ((), at) if tokens[at].is_string else name_at(tokens, at)
        if name:
            yield at, name, end
        at = max(end, at + 1)


def pairs(tokens: Sequence[Token]) -> Iterator[tuple[str, str]]:
    """Yield the options up to the closing parenthesis: `key = value`, or `key value`."""
    part: list[Token] = []
    for token in tokens:
        if token.text not in (",", ")") or token.is_string:
            part.append(token)
            continue
        if part:
            signs = [place for place, each in enumerate(part) if each.text == "="]
            split = signs[0] if signs else len(part) - 1
            key = "".join(map(unquoted, part[:split])).lower()
            yield key, " ".join(unquoted(each) for each in part[split:] if each.text != "=")
        part = []
        if token.text == ")":
            return


def is_defined_in(name: Sequence[str], text: str) -> bool:
    """Whether the statement has a common table expression of this name."""
    pattern = (
        rf"(?:\bWITH\s+(?:RECURSIVE\s+)?|,\s*)`?{re.escape(name[0])}`?\s*(?:\([^)]*\)\s*)?AS\s*\("
    )
    return len(name) == 1 and re.search(pattern, text, re.IGNORECASE) is not None
