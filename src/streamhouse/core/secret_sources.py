"""Where secrets come from, and what is left of catalog properties for who may not have them.

A secret on the command line shows in the process list. So options that take one name a file, and
catalog properties may be `KEY=@file:PATH` or `KEY=@env:NAME`.
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
from streamhouse.core.model.lake.facts import parse_catalog_properties

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
"""Names the catalog properties that were left out, for who reads the rest."""
_FROM_FILE: Final = "@file:"
_FROM_ENVIRONMENT: Final = "@env:"
_SECRET_BYTES_MAX: Final = 64 << 10
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO
# Of a name's words: `s3.secret-access-key`, `gcs.oauth2.token`, `adls.connection-string`.
_SECRET_WORDS: Final = frozenset(
    {"auth", "authorization", "connection", "cookie", "header", "key", "pw", "pwd", "sas", "signer"}
)
# Anywhere in a name.
_SECRET_STEMS: Final = ("apikey", "credential", "passphrase", "passw", "secret", "token")
# The name of a key that the store keeps: whoever writes without it writes unencrypted.
_NAMES_OF_KEYS: Final = frozenset({"s3.sse-kms-key-id"})
_WORDS: Final = re.compile(r"[a-z]+")
_NO_SECRETS: Final = frozenset({"true", "false", ""})


def read_private(path: Path, *, kind: str, bytes_max: int = _SECRET_BYTES_MAX) -> bytes:
    """Return the content of a file that only its owner may read or write.

    Raises `InvalidRequestError` that names the file and its `kind`.
    """
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            if not is_private(found.st_mode, owner=found.st_uid, user=os.geteuid()):
                raise InvalidRequestError(
                    f"{kind} file {path} may be read or written by others than its owner (mode"
                    f" {stat.S_IMODE(found.st_mode):03o}); chmod 600 it"
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
    """Whether nobody but the owner may use a file with these rights, for a process of `user`.

    As PostgreSQL has it, a group may read what root owns: so are secrets mounted for a service of
    another user.
    """
    allowed = stat.S_IRGRP if owner == 0 != user else 0
    return not mode & _OTHERS & ~allowed


def file_signature(path: Path) -> tuple[int, ...] | None:
    """Return what tells a file from what it was before; None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def read_secret(path: Path, *, kind: str) -> str:
    """Return the one secret, without spaces, that a private file holds."""
    secret = _text(read_private(path, kind=kind), where=f"{kind} file {path}")
    if not secret or not secret.isprintable() or " " in secret:
        raise InvalidRequestError(f"{kind} file {path} must hold one {kind} without spaces")
    return secret


def catalog_properties_from(
    texts: Iterable[str], *, environ: Mapping[str, str] = os.environ, is_listed: bool = True
) -> dict[str, str]:
    """Read catalog properties as the command line takes them: `KEY=VALUE`, or where VALUE is.

    `is_listed` says that the list of processes shows them: then a secret is warned of.

    Raises `InvalidRequestError`, which never repeats a value.
    """
    found = parse_catalog_properties(texts)
    for key, value in found.items():
        where = f"--catalog-property {key}"
        if value.startswith(_FROM_FILE):
            path = Path(value.removeprefix(_FROM_FILE))
            content = read_private(path, kind=where)
            found[key] = _text(content, where=f"{where} file {path}")
        elif value.startswith(_FROM_ENVIRONMENT):
            name = value.removeprefix(_FROM_ENVIRONMENT)
            if not environ.get(name):
                raise InvalidRequestError(f"{where}: the environment has no variable {name}")
            found[key] = environ[name]
        elif is_listed and has_secret(key, value):
            _logger.warning(
                "event=secret_on_command_line property=%s advice='%s=@file:PATH or %s=@env:NAME;"
                " the process list shows this one'",
                key,
                key,
                key,
            )
    return found


def has_secret(key: str, value: str) -> bool:
    """Whether a catalog property is, or has in it, what must not be shown."""
    if value.lower() in _NO_SECRETS:
        return False
    return _is_secret_name(key) or ("://" in value and _uri_without_secrets(value) != value)


def without_secrets(properties: Mapping[str, str]) -> dict[str, str]:
    """Return catalog properties for somebody who may not have their secrets.

    Of a URI the password goes, the rest stays. What was left out is named in one more property.
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
    """Say of an error that is raised inside which secrets were withheld, and what to ask for."""
    try:
        yield
    except StreamhouseError as error:
        why = why_withheld(properties)
        if not why or why in error.message:
            raise
        raise type(error)(error.message + why) from error


def why_withheld(properties: Mapping[str, str]) -> str:
    """Return what to add to an error of catalog or files; empty if nothing was withheld."""
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
    """Return a URI without its password and secret parameters; None if nobody knows what it is."""
    try:
        parts = urlsplit(uri)
        parameters = parse_qsl(parts.query, keep_blank_values=True)
        has_password = parts.password is not None
    except ValueError:
        return None
    kept = [(name, value) for name, value in parameters if not _is_secret_name(name)]
    if not has_password and kept == parameters:
        return uri
    user, _, host = parts.netloc.rpartition("@")
    netloc = f"{user.partition(':')[0]}@{host}" if user else host
    return urlunsplit(parts._replace(netloc=netloc, query=urlencode(kept)))


def _text(content: bytes, *, where: str) -> str:
    try:
        return content.decode().strip()
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"{where} is no UTF-8 text") from error
