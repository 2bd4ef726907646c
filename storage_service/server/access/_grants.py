"""Tokens and their grants, from a file that may change while the service runs.

The file is TOML and holds no token, only SHA-256 hashes of tokens:

    [[token]]
    name = "reporting"
    sha256 = "9f86d081884c7d65..."
    grants = ["read:sales.*", "write:sales.orders", "read:service"]

`caller.py` defines grants.
"""

from __future__ import annotations

import hashlib
import logging
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from streamhouse.core.errors import InvalidRequestError, StreamhouseError
from streamhouse.core.secret_sources import file_signature, read_private
from streamhouse.storage_service.server.caller import OWNER, UNKNOWN, Caller, Grant

__all__ = ["Grants", "LastGrants", "load_grants", "token_hash"]

_logger = logging.getLogger(__name__)

_FILE_BYTES_MAX: Final = 1 << 20
_HASH: Final = re.compile(r"[0-9a-f]{64}")
_FIELDS: Final = {"name", "sha256", "grants"}


def token_hash(token: bytes) -> str:
    """Return the hash of a token for the grants file."""
    return hashlib.sha256(token).hexdigest()


def load_grants(path: Path) -> Mapping[str, Caller]:
    """Return token hash -> caller; raises `InvalidRequestError` with the place of the mistake."""
    content = read_private(path, kind="grants", bytes_max=_FILE_BYTES_MAX)
    try:
        return _callers(tomllib.loads(content.decode()))
    except ValueError as error:
        raise InvalidRequestError(f"grants file {path}: {error}") from error
    except InvalidRequestError as error:
        raise InvalidRequestError(f"grants file {path}: {error.message}") from error


def _callers(document: dict[str, Any]) -> dict[str, Caller]:
    entries = document.pop("token", [])
    if document:
        raise InvalidRequestError(f"unknown key '{min(document)}'; it has [[token]] entries only")
    callers: dict[str, Caller] = {}
    names: set[str] = set()
    for number, entry in enumerate(entries, 1):
        where = f"token {number}"
        if not isinstance(entry, dict) or set(entry) != _FIELDS:
            raise InvalidRequestError(f"{where} must have name, sha256 and grants, nothing else")
        name, digest, grants = entry["name"], entry["sha256"], entry["grants"]
        if not isinstance(name, str) or not re.fullmatch(r"[\w.@-]{1,100}", name):
            raise InvalidRequestError(f"{where}: name must be 1 to 100 letters, digits, . _ @ -")
        if name in names or name in (OWNER.name, UNKNOWN.name):
            raise InvalidRequestError(f"{where}: the name '{name}' is taken")
        if not isinstance(digest, str) or not _HASH.fullmatch(digest):
            # The message does not quote the value, which may be a token by mistake.
            raise InvalidRequestError(
                f"{where} ('{name}'): sha256 must be 64 lower case hex digits"
            )
        if digest in callers:
            raise InvalidRequestError(f"{where} ('{name}'): another entry has the same sha256")
        if not isinstance(grants, list):
            raise InvalidRequestError(f"{where} ('{name}'): grants must be a list")
        names.add(name)
        callers[digest] = Caller(name, tuple(Grant.parse(grant) for grant in grants))
    return callers


class LastGrants(NamedTuple):
    """The grants in use, and the state of the file at the last look, which may be a broken one."""

    signature: tuple[int, ...] | None
    callers: Mapping[str, Caller]


class Grants:
    """The grants of a file, read again when it changes; a broken file changes nothing.

    Raises `InvalidRequestError` if the file is broken at the start. A process beside another one
    starts with the `last` grants of the other process, even if the file has been broken since.
    """

    def __init__(self, path: Path, *, last: LastGrants | None = None) -> None:
        self._path = path
        self._signature, self._callers = last or LastGrants(file_signature(path), load_grants(path))
        self.reload_failures = 0

    @property
    def last(self) -> LastGrants:
        """The grants in use."""
        return LastGrants(self._signature, self._callers)

    def caller(self, token: bytes) -> Caller | None:
        """Return the caller of a token, or None."""
        # A lookup by hash: the time of the lookup reveals nothing about valid tokens.
        return self._callers.get(token_hash(token))

    def refresh(self) -> None:
        """Read the file if it has changed since the last look."""
        signature = file_signature(self._path)
        if signature == self._signature:
            return
        self._signature = signature
        try:
            self._callers = load_grants(self._path)
        except StreamhouseError as error:
            self.reload_failures += 1
            _logger.error(
                "event=grants_not_reloaded message=%r kept_tokens=%d",
                error.message,
                len(self._callers),
            )
        else:
            _logger.info("event=grants_reloaded tokens=%d", len(self._callers))
