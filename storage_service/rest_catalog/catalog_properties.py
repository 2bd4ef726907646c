"""Keeps the secrets of a catalog's properties out of what clients are told.

Catalogs, HTTP clients and databases put into their errors what they like: a malformed header, a
connection string.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final
from urllib.parse import unquote, urlsplit

__all__ = ["HiddenValues"]

_SECRET_ENDINGS: Final = ("token", "credential", "password", "secret", "key", "authorization")
_NO_SECRETS: Final = ("true", "false")
_SCHEMES: Final = ("Basic", "Bearer")
_CHARACTERS_MIN: Final = 4
_HIDDEN: Final = "***"


class HiddenValues:
    """The values of `properties` that must not be repeated."""

    def __init__(self, properties: Mapping[str, str]) -> None:
        found = {text for pair in properties.items() for text in _secrets_of(*pair)}
        # A longer one may have a shorter one in it.
        self._texts = sorted(
            (text for text in found if len(text) >= _CHARACTERS_MIN), key=len, reverse=True
        )

    def without(self, message: str) -> str:
        """Return `message` with `***` in place of each."""
        for text in self._texts:
            message = message.replace(text, _HIDDEN)
        return message


def _secrets_of(key: str, value: str) -> Iterator[str]:
    if key.lower().endswith(_SECRET_ENDINGS) and value.lower() not in _NO_SECRETS:
        yield value
        # The secret of `Bearer secret`, of `id:secret`, and of one with a line end.
        yield from (part for part in value.split() if part not in _SCHEMES)
        yield value.partition(":")[2]
    if "://" in value:
        password = urlsplit(value).password
        if password is not None:
            yield from (password, unquote(password))
