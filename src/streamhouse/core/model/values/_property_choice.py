"""A property of a table whose value is one of a few words."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final, TypeVar

from streamhouse.core.errors import UnknownOptionError, suggestion

__all__ = ["property_choice"]

_SHOWN_CHARACTERS_MAX: Final = 80

_Choice = TypeVar("_Choice", bound=StrEnum)


def property_choice(
    kind: type[_Choice], given: Mapping[str, str], key: str, default: _Choice, *, table: str
) -> _Choice:
    """Return what `given` says for property `key`, in any case; `default` if it says nothing.

    Raises UnknownOptionError, which names the words that are known.
    """
    text = given.get(key, default.value).strip().lower()
    try:
        return kind(text)
    except ValueError:
        known = [choice.value for choice in kind]
        raise UnknownOptionError(
            f"table '{table}': property {key} = '{given[key][:_SHOWN_CHARACTERS_MAX]}' is not one"
            f" of {', '.join(known)}{suggestion(text, known)}"
        ) from None
