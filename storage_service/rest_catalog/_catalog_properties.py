"""What clients learn of the catalog's properties: how files are opened, and none of the secrets."""

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
    """How clients open the files of tables: the catalog's `s3.*` properties.

    Secrets are among them only for clients that ask for credentials, as the protocol has it.
    """

    def __init__(self, properties: Mapping[str, str]) -> None:
        found = {}
        for key in (*_PUBLIC, *_SECRETS):
            text = properties.get(key, properties.get(key.replace("s3.", "client.", 1)))
            if text is not None:
                found[key] = text
        if "s3.endpoint" in found:
            # A store with an address of its own rarely has one name a bucket.
            found.setdefault("s3.path-style-access", "true")
        if "s3.region" in found:
            found.setdefault("client.region", found["s3.region"])
        self._found = found

    def config(self, *, with_secrets: bool) -> dict[str, str]:
        """Return the configuration that goes with a table."""
        return {k: v for k, v in self._found.items() if with_secrets or k not in _SECRETS}

    def storage_credentials(self, location: str) -> list[dict[str, Any]]:
        """Return the credentials for the bucket that a table lies in; none for local files."""
        if not any(key in self._found for key in _SECRETS):
            return []
        url = urlsplit(location)
        prefix = f"{url.scheme}://{url.netloc}"
        return [{"prefix": prefix, "config": self.config(with_secrets=True)}]


class HiddenValues:
    """The values of `properties` that must not be repeated.

    Catalogs, HTTP clients and databases put into their errors what they like: a malformed header, a
    connection string.
    """

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
