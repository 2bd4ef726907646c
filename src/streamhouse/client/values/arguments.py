"""Arguments of calls as the rest of the client wants them, or one sentence why they are not.

What has only one meaning is taken: a name alone for a list of one, numbers of numpy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from streamhouse.core.errors import InvalidRequestError
from streamhouse.core.model.values.numbers import whole_number

__all__ = ["choice", "names", "property_texts", "seconds", "whole"]


def names(value: Any, *, what: str) -> tuple[str, ...]:
    """Return names; a text is one name, not its letters."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, Iterable) and not isinstance(value, bytes | Mapping):
        found = tuple(value)
        if all(isinstance(name, str) for name in found):
            return found
        value = next(name for name in found if not isinstance(name, str))
    raise InvalidRequestError(f"{what} is a list of names, as ['id'], not {value!r:.80}")


def whole(value: Any, *, what: str, least: int = 0) -> int:
    """Return a whole number from `least` on."""
    number = whole_number(value, least=least)
    if number is None:
        raise InvalidRequestError(f"{what} is a whole number from {least} on, not {value!r:.80}")
    return number


def seconds(value: Any, *, what: str) -> float:
    """Return a number of seconds above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise InvalidRequestError(f"{what} is a number of seconds above 0, not {value!r:.80}")
    return float(value)


def property_texts(value: Any, *, what: str) -> dict[str, str]:
    """Return properties; numbers and booleans are written as texts have them."""
    if not isinstance(value, Mapping):
        raise InvalidRequestError(
            f"{what} is property -> value, as {{'table.log.ttl': '7d'}}, not {value!r:.80}"
        )
    found = {}
    for name, text in value.items():
        if isinstance(text, bool):
            text = str(text).lower()
        elif isinstance(text, int):
            text = str(text)
        if not isinstance(name, str) or not isinstance(text, str):
            raise InvalidRequestError(f"{what}: {name!r:.80} is {text!r:.80}, which is no text")
        found[name] = text
    return found


def choice(value: Any, known: Iterable[str], *, what: str) -> str:
    """Return one of the known words."""
    words = list(known)
    if not isinstance(value, str) or value not in words:
        raise InvalidRequestError(f"{what} is one of {', '.join(words)}, not {value!r:.80}")
    return value
