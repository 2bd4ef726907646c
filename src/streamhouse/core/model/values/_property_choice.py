"""A table property whose value is one of a few words."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final, TypeVar

from streamhouse.core.errors import UnknownOptionError, suggestion

__all__ = ["property_choice"]

_SHOWN_MAX: Final = 80

_Choice = TypeVar("_Choice", bound=StrEnum)


def property_choice(
    kind: type[_Choice], settings: Mapping[str, str], key: str, default: _Choice, *, table: str
) -> _Choice:
    """Return the value of property `key` in `settings`, in any case; `default` without the key.

    Raises UnknownOptionError, which lists the allowed words.
    """
    text = settings.get(key, default.value).strip().lower()
    try:
        return kind(text)
    except ValueError:
        words = [choice.value for choice in kind]
        raise UnknownOptionError(
            f"table '{table}': property {key} = '{settings[key][:_SHOWN_MAX]}' is not one"
            f" of {', '.join(words)}{suggestion(text, words)}"
        ) from None
