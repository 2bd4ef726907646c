"""The part of the catalog's properties for clients: access to files, without secrets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import unquote, urlsplit

__all__ = ["FileAccess", "HiddenValues"]

_SECRETS: Final = ("s3.access-key-id", "s3.secret-access-key", "s3.session-token")
_PUBLIC: Final = (
    "s3.endpoint",
    "s3.region",
    "s3.path-style-access",
    "s3.force-virtual-addressing",
    "client.region",
)
_SECRET_ENDINGS: Final = ("token", "credential", "password", "secret", "key", "authorization")
_NO_SECRETS: Final = ("true", "false")
_SCHEMES: Final = ("Basic", "Bearer")
_CHARACTERS_MIN: Final = 4
_HIDDEN: Final = "***"


class FileAccess:
    """The catalog's `s3.*` properties, with which clients open the files of tables.

    Following the protocol, only clients that ask for credentials get the secrets.
    """

    def __init__(self, properties: Mapping[str, str]) -> None:
        settings = {}
        for key in (*_PUBLIC, *_SECRETS):
            text = properties.get(key, properties.get(key.replace("s3.", "client.", 1)))
            if text is not None:
                settings[key] = text
        if "s3.endpoint" in settings:
            # A store with a custom endpoint rarely has a host name per bucket.
            settings.setdefault("s3.path-style-access", "true")
        if "s3.region" in settings:
            settings.setdefault("client.region", settings["s3.region"])
        self._settings = settings

    def config(self, *, with_secrets: bool) -> dict[str, str]:
        """Return the configuration in the answer about a table."""
        return {k: v for k, v in self._settings.items() if with_secrets or k not in _SECRETS}

    def storage_credentials(self, location: str) -> list[dict[str, Any]]:
        """Return the credentials for the bucket of a table; empty for local files."""
        if not any(key in self._settings for key in _SECRETS):
            return []
        url = urlsplit(location)
        prefix = f"{url.scheme}://{url.netloc}"
        return [{"prefix": prefix, "config": self.config(with_secrets=True)}]


class HiddenValues:
    """The values of `properties` that error messages must not repeat.

    Errors of catalogs, HTTP clients and databases may contain a malformed header or a connection
    string.
    """

    def __init__(self, properties: Mapping[str, str]) -> None:
        secrets = {text for pair in properties.items() for text in _secrets_of(*pair)}
        # Longest first: a secret may contain a shorter secret.
        self._texts = sorted(
            (text for text in secrets if len(text) >= _CHARACTERS_MIN), key=len, reverse=True
        )

    def without(self, message: str) -> str:
        """Return `message` with `***` in place of each secret."""
        for text in self._texts:
            message = message.replace(text, _HIDDEN)
        return message


def _secrets_of(key: str, value: str) -> Iterator[str]:
    if key.lower().endswith(_SECRET_ENDINGS) and value.lower() not in _NO_SECRETS:
        yield value
        # The secret of `Bearer secret`, of `id:secret`, and of a value with a line end.
        yield from (part for part in value.split() if part not in _SCHEMES)
        yield value.partition(":")[2]
    if "://" in value:
        password = urlsplit(value).password
        if password is not None:
            yield from (password, unquote(password))
