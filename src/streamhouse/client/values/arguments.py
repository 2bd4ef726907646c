"""Arguments of calls, checked and converted, or refused by a clear sentence.

A value with only one possible meaning is taken: a single name for a list, numbers of numpy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from streamhouse.core.errors import InvalidRequestError
from streamhouse.core.model.values.numbers import whole_number

__all__ = ["choice", "names", "property_texts", "seconds", "sql_condition", "whole"]


def names(value: Any, *, argument: str) -> tuple[str, ...]:
    """Return names; a text is one name, not its letters."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, Iterable) and not isinstance(value, bytes | Mapping):
        names_in = tuple(value)
        if all(isinstance(name, str) for name in names_in):
            return names_in
        value = next(name for name in names_in if not isinstance(name, str))
    raise InvalidRequestError(f"{argument} is a list of names, as ['id'], not {value!r:.80}")


def sql_condition(value: Any, *, argument: str) -> str:
    """Return a condition, which is SQL; a list of triples or an expression of a library is not."""
    if not isinstance(value, str):
        raise InvalidRequestError(
            f"{argument} is a condition in SQL, as \"item = 'tea' AND price > 3\","
            f" not {value!r:.80}"
        )
    return value


def whole(value: Any, *, argument: str, least: int = 0) -> int:
    """Return a whole number from `least` on."""
    number = whole_number(value, least=least)
    if number is None:
        raise InvalidRequestError(
            f"{argument} is a whole number from {least} on, not {value!r:.80}"
        )
    return number


def seconds(value: Any, *, argument: str) -> float:
    """Return a number of seconds above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise InvalidRequestError(f"{argument} is a number of seconds above 0, not {value!r:.80}")
    return float(value)


def property_texts(value: Any, *, argument: str) -> dict[str, str]:
    """Return properties as texts; numbers and booleans are converted."""
    if not isinstance(value, Mapping):
        raise InvalidRequestError(
            f"{argument} is property -> value, as {{'table.log.ttl': '7d'}}, not {value!r:.80}"
        )
    texts = {}
    for name, text in value.items():
        if isinstance(text, bool):
            text = str(text).lower()
        elif isinstance(text, int):
            text = str(text)
        if not isinstance(name, str) or not isinstance(text, str):
            raise InvalidRequestError(f"{argument}: {name!r:.80} is {text!r:.80}, which is no text")
        texts[name] = text
    return texts


def choice(value: Any, words_allowed: Iterable[str], *, argument: str) -> str:
    """Return a word if it is allowed."""
    words = list(words_allowed)
    if not isinstance(value, str) or value not in words:
        raise InvalidRequestError(f"{argument} is one of {', '.join(words)}, not {value!r:.80}")
    return value
