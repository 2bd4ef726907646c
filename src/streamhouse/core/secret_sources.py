"""Sources of secrets, and catalog properties without secrets for unprivileged readers.

A secret on the command line shows in the process list. Options with a secret therefore name a file,
and catalog properties may be `KEY=@file:PATH` or `KEY=@env:NAME`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from streamhouse.core.errors import InvalidRequestError, StreamhouseError
from streamhouse.core.model.lake.facts import parse_properties

__all__ = [
    "WITHHELD_PROPERTY",
    "catalog_properties_from",
    "file_signature",
    "has_secret",
    "is_private",
    "read_private",
    "read_secret",
    "why_withheld",
    "withheld_explained",
    "without_secrets",
]

_logger = logging.getLogger(__name__)

WITHHELD_PROPERTY: Final = "streamhouse.withheld-secrets"
"""The property that names the withheld catalog properties."""
_FROM_FILE: Final = "@file:"
_FROM_ENVIRONMENT: Final = "@env:"
_SECRET_BYTES_MAX: Final = 64 << 10
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO
# Words of names with secrets: `s3.secret-access-key`, `gcs.oauth2.token`, `adls.connection-string`.
_SECRET_WORDS: Final = frozenset(
    {"auth", "authorization", "connection", "cookie", "header", "key", "pw", "pwd", "sas", "signer"}
)
# Parts of such words.
_SECRET_STEMS: Final = ("apikey", "credential", "passphrase", "passw", "secret", "token")
# The name of a key in the object store is not a secret; a writer without it writes unencrypted.
_NAMES_OF_KEYS: Final = frozenset({"s3.sse-kms-key-id"})
_WORDS: Final = re.compile(r"[a-z]+")
_NO_SECRETS: Final = frozenset({"true", "false", ""})


def read_private(path: Path, *, kind: str, bytes_max: int = _SECRET_BYTES_MAX) -> bytes:
    """Return the content of a file that only its owner may read or write.

    Raises `InvalidRequestError`, which names the file and its `kind`.
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if not is_private(status.st_mode, owner=status.st_uid, user=os.geteuid()):
                raise InvalidRequestError(
                    f"{kind} file {path} may be read or written by others than its owner (mode"
                    f" {stat.S_IMODE(status.st_mode):03o}); chmod 600 it"
                )
            content = file.read(bytes_max + 1)
    except OSError as error:
        raise InvalidRequestError(
            f"{kind} file {path} cannot be read: {error.strerror or error}"
        ) from error
    if len(content) > bytes_max:
        raise InvalidRequestError(f"{kind} file {path} has more than {bytes_max} bytes")
    return content


def is_private(mode: int, *, owner: int, user: int) -> bool:
    """Whether only the owner may use a file with this mode, for a process of `user`.

    As in PostgreSQL, a group may read a file of root: secrets mounted for a service of another user
    have this mode.
    """
    allowed = stat.S_IRGRP if owner == 0 != user else 0
    return not mode & _OTHERS & ~allowed


def file_signature(path: Path) -> tuple[int, ...] | None:
    """Return numbers that change whenever the file changes; None without a file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def read_secret(path: Path, *, kind: str) -> str:
    """Return the secret in a private file, one text without spaces."""
    secret = _text(read_private(path, kind=kind), where=f"{kind} file {path}")
    if not secret or not secret.isprintable() or " " in secret:
        raise InvalidRequestError(f"{kind} file {path} must hold one {kind} without spaces")
    return secret


def catalog_properties_from(
    texts: Iterable[str], *, environ: Mapping[str, str] = os.environ, is_listed: bool = True
) -> dict[str, str]:
    """Read catalog properties of the command line: `KEY=VALUE`, or a reference to the VALUE.

    `is_listed` says that the process list shows the texts: a secret in a text then logs a warning.

    Raises `InvalidRequestError`, which never repeats a value.
    """
    properties = parse_properties(texts, name="--catalog-property")
    for key, value in properties.items():
        where = f"--catalog-property {key}"
        if value.startswith(_FROM_FILE):
            path = Path(value.removeprefix(_FROM_FILE))
            content = read_private(path, kind=where)
            properties[key] = _text(content, where=f"{where} file {path}")
        elif value.startswith(_FROM_ENVIRONMENT):
            name = value.removeprefix(_FROM_ENVIRONMENT)
            if not environ.get(name):
                raise InvalidRequestError(f"{where}: the environment has no variable {name}")
            properties[key] = environ[name]
        elif is_listed and has_secret(key, value):
            _logger.warning(
                "event=secret_on_command_line property=%s advice='%s=@file:PATH or %s=@env:NAME;"
                " the process list shows this one'",
                key,
                key,
                key,
            )
    return properties


def has_secret(key: str, value: str) -> bool:
    """Whether a catalog property is a secret or contains one."""
    if value.lower() in _NO_SECRETS:
        return False
    return _is_secret_name(key) or ("://" in value and _uri_without_secrets(value) != value)


def without_secrets(properties: Mapping[str, str]) -> dict[str, str]:
    """Return catalog properties without their secrets.

    A URI loses its password and keeps its other parts. One more property names the withheld
    properties.
    """
    shown, withheld = {}, []
    for key, value in properties.items():
        if not has_secret(key, value):
            shown[key] = value
            continue
        withheld.append(key)
        uri = None if _is_secret_name(key) else _uri_without_secrets(value)
        if uri is not None:
            shown[key] = uri
    if withheld:
        shown[WITHHELD_PROPERTY] = ", ".join(sorted(withheld))
    return shown


@contextlib.contextmanager
def withheld_explained(properties: Mapping[str, str]) -> Iterator[None]:
    """Add to an error raised inside which secrets were withheld, and which grant would help."""
    try:
        yield
    except StreamhouseError as error:
        why = why_withheld(properties)
        if not why or why in error.message:
            raise
        raise type(error)(error.message + why) from error


def why_withheld(properties: Mapping[str, str]) -> str:
    """Return an explanation for an error of catalog or files; empty if nothing was withheld."""
    names = properties.get(WITHHELD_PROPERTY)
    if names is None:
        return ""
    return (
        f"; the service keeps secrets of the lake ({names}) from this token: ask its operator for"
        " the grant 'read:lake', or give this process credentials of its own"
    )


def _is_secret_name(key: str) -> bool:
    name = key.lower()
    words = _WORDS.findall(name)
    if name in _NAMES_OF_KEYS:
        return False
    return not _SECRET_WORDS.isdisjoint(words) or any(stem in name for stem in _SECRET_STEMS)


def _uri_without_secrets(uri: str) -> str | None:
    """Return a URI without its password and secret parameters; None for a malformed URI."""
    try:
        parts = urlsplit(uri)
        parameters = parse_qsl(parts.query, keep_blank_values=True)
        has_password = parts.password is not None
    except ValueError:
        return None
    shown_parameters = [(name, value) for name, value in parameters if not _is_secret_name(name)]
    if not has_password and shown_parameters == parameters:
        return uri
    user, _, host = parts.netloc.rpartition("@")
    netloc = f"{user.partition(':')[0]}@{host}" if user else host
    return urlunsplit(parts._replace(netloc=netloc, query=urlencode(shown_parameters)))


def _text(content: bytes, *, where: str) -> str:
    try:
        return content.decode().strip()
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"{where} is no UTF-8 text") from error
