"""Who sends a request, what they may do, and what a request asks of them.

A grant is `LEVEL:SCOPE`. Levels: read < write < admin, each includes the ones before it. Scopes:
`database.table`, `database.*` (the database and all its tables), `service` (metrics, tiering,
backups), `lake` (the secrets of the lake's catalog and object store) and `*` (all of these).
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
        """Whether `scope` (`db.table`, `db.*`, `service` or `lake`) lies within this grant's.

        Rejected rows of a table are within what concerns the table.
        """
        if self.scope in (EVERYTHING, scope, scope.removesuffix(REJECTED_SUFFIX)):
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

    def reads_tables(self) -> bool:
        """Whether some grant lets it read a table; each level does."""
        return any(grant.scope not in (SERVICE, LAKE) for grant in self.grants)

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


@dataclass(frozen=True, slots=True)
class Need:
    """What a request asks of its caller; scope None: any right token, whatever its grants."""

    level: Level
    scope: str | None

    def __str__(self) -> str:
        return f"{self.level.name.lower()}:{self.scope}"


def database_scope(database: str) -> str:
    """The scope of a database itself."""
    return f"{database}.*"
