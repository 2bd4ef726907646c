"""Who may do what: tokens and their grants, from a file that may change while the service runs.

The file is TOML and holds no token, only SHA-256 hashes of tokens:

    [[token]]
    name = "reporting"
    sha256 = "9f86d081884c7d65..."
    grants = ["read:sales.*", "write:sales.orders", "read:service"]

A grant is `LEVEL:SCOPE`. Levels: read < write < admin, each includes the ones before it. Scopes:
`database.table`, `database.*` (the database and all its tables), `service` (metrics, tiering,
backups), `lake` (the secrets of the lake's catalog and object store) and `*` (all of these).
"""

from __future__ import annotations

import enum
import hashlib
import logging
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from streamhouse.storage_service.errors import InvalidRequestError, StreamhouseError
from streamhouse.storage_service.model.secret_sources import read_private

__all__ = ["OWNER", "Caller", "Grant", "Grants", "Level", "load_grants", "token_hash"]

_logger = logging.getLogger(__name__)

_FILE_BYTES_MAX: Final = 1 << 20
_GRANT: Final = re.compile(r"(read|write|admin):(\*|service|lake|\w+\.(?:\*|\w+))", re.A)
_HASH: Final = re.compile(r"[0-9a-f]{64}")
_FIELDS: Final = {"name", "sha256", "grants"}
SERVICE: Final = "service"
LAKE: Final = "lake"
EVERYTHING: Final = "*"


class Level(enum.IntEnum):
    """What a grant allows; each level includes those below it."""

    READ = 1
    WRITE = 2
    ADMIN = 3


@dataclass(frozen=True, slots=True)
class Grant:
    """One level on one scope, as written in the grants file."""

    level: Level
    scope: str

    @classmethod
    def parse(cls, text: object) -> Grant:
        """Read `write:sales.orders`."""
        found = _GRANT.fullmatch(text) if isinstance(text, str) else None
        if found is None:
            raise InvalidRequestError(
                f"grant {text!r} is not LEVEL:SCOPE with a level read, write or admin and a scope"
                " database.table, database.*, service, lake or *"
            )
        return cls(Level[found[1].upper()], found[2])

    def covers(self, scope: str) -> bool:
        """Whether `scope` (`db.table`, `db.*`, `service` or `lake`) lies within this grant's."""
        if self.scope in (EVERYTHING, scope):
            return True
        database, _, table = self.scope.partition(".")
        # A namespace of the lake may have a dot in it: it is nobody's database then.
        return table == "*" and scope.partition(".")[0] == database and scope.count(".") == 1


@dataclass(frozen=True, slots=True)
class Caller:
    """Whoever sent a request, by the name its token has in the grants file."""

    name: str
    grants: tuple[Grant, ...]

    def may(self, level: Level, scope: str) -> bool:
        """Whether some grant allows `level` on `scope`."""
        return any(grant.level >= level and grant.covers(scope) for grant in self.grants)

    def may_read_secrets(self) -> bool:
        """Whether some grant hands out the secrets of the lake's catalog."""
        return self.may(Level.READ, LAKE)

    def has_tables(self) -> bool:
        """Whether some grant is about tables or the lake."""
        return any(grant.scope != SERVICE for grant in self.grants)

    def sees_database(self, database: str) -> bool:
        """Whether some grant is about the database or one of its tables."""
        return any(
            grant.scope == EVERYTHING or grant.scope.partition(".")[0] == database
            for grant in self.grants
            if grant.scope not in (SERVICE, LAKE)
        )


OWNER: Final = Caller("owner", (Grant(Level.ADMIN, EVERYTHING),))
"""The holder of the service's own token, and everybody where no token is asked for."""

UNKNOWN: Final = Caller("-", ())
"""Who has not shown a token yet."""


def token_hash(token: bytes) -> str:
    """Return what the grants file holds of a token."""
    return hashlib.sha256(token).hexdigest()


def load_grants(path: Path) -> Mapping[str, Caller]:
    """Return token hash -> caller; raises `InvalidRequestError` that says what is wrong where."""
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
            # Not repeated here: somebody may have put the token itself.
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


class Grants:
    """The grants of a file, read again when it changes; a broken file changes nothing.

    Raises `InvalidRequestError` if the file is broken at the start.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._signature = self._signature_now()
        self._callers = load_grants(path)
        self.reload_failures = 0

    def caller(self, token: bytes) -> Caller | None:
        """Return whose token this is, or None."""
        # Looked up by its hash: the time taken says nothing about the tokens there are.
        return self._callers.get(token_hash(token))

    def refresh(self) -> None:
        """Read the file if it has changed since the last look."""
        signature = self._signature_now()
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

    def _signature_now(self) -> tuple[int, ...] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
