"""Callers, their grants, and the grants that requests need.

A grant is `LEVEL:SCOPE`. The levels are read < write < admin; each level includes the lower levels.
Scopes: `database.table`, `database.*` (the database and all tables of the database), `service`
(metrics, tiering, backups), `lake` (the secrets of the lake's catalog and object store) and `*`
(all scopes).
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import Final

from streamhouse.core.errors import InvalidRequestError
from streamhouse.core.model.table import REJECTED_SUFFIX

__all__ = [
    "EVERYTHING",
    "LAKE",
    "OWNER",
    "SERVICE",
    "UNKNOWN",
    "Caller",
    "Grant",
    "Level",
    "Need",
    "database_scope",
]

_GRANT: Final = re.compile(r"(read|write|admin):(\*|service|lake|\w+\.(?:\*|\w+))", re.A)
SERVICE: Final = "service"
LAKE: Final = "lake"
EVERYTHING: Final = "*"


class Level(enum.IntEnum):
    """The level of a grant; each level includes the lower levels."""

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
        match = _GRANT.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise InvalidRequestError(
                f"grant {text!r} is not LEVEL:SCOPE with a level read, write or admin and a scope"
                " database.table, database.*, service, lake or *"
            )
        return cls(Level[match[1].upper()], match[2])

    def covers(self, scope: str) -> bool:
        """Whether this grant's scope includes `scope` (`db.table`, `db.*`, `service` or `lake`).

        The scope of a table includes the table of rejected rows.
        """
        if self.scope in (EVERYTHING, scope, scope.removesuffix(REJECTED_SUFFIX)):
            return True
        database, _, table = self.scope.partition(".")
        # A lake namespace with a dot in its name is no database, so no database grant covers it.
        return table == "*" and scope.partition(".")[0] == database and scope.count(".") == 1


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request; `name` is the token's name in the grants file."""

    name: str
    grants: tuple[Grant, ...]

    def may(self, level: Level, scope: str) -> bool:
        """Whether some grant allows `level` on `scope`."""
        return any(grant.level >= level and grant.covers(scope) for grant in self.grants)

    def may_read_secrets(self) -> bool:
        """Whether some grant includes the secrets of the lake's catalog."""
        return self.may(Level.READ, LAKE)

    def may_see_owners(self) -> bool:
        """Whether some grant shows who owns the pins and consumers of other tokens."""
        return self.may(Level.ADMIN, SERVICE)

    def has_tables(self) -> bool:
        """Whether some grant is about tables or the lake."""
        return any(grant.scope != SERVICE for grant in self.grants)

    def reads_tables(self) -> bool:
        """Whether some grant allows to read a table; every level does."""
        return any(grant.scope not in (SERVICE, LAKE) for grant in self.grants)

    def sees_database(self, database: str) -> bool:
        """Whether some grant is about the database or one of its tables."""
        return any(
            grant.scope == EVERYTHING or grant.scope.partition(".")[0] == database
            for grant in self.grants
            if grant.scope not in (SERVICE, LAKE)
        )


OWNER: Final = Caller("owner", (Grant(Level.ADMIN, EVERYTHING),))
"""The holder of the service's own token; every caller of a service without tokens."""

UNKNOWN: Final = Caller("-", ())
"""A caller before the check of the token."""


@dataclass(frozen=True, slots=True)
class Need:
    """The grant that a request needs; scope None: any valid token, with any grants."""

    level: Level
    scope: str | None

    def __str__(self) -> str:
        return f"{self.level.name.lower()}:{self.scope}"


def database_scope(database: str) -> str:
    """The scope of a database itself."""
    return f"{database}.*"
