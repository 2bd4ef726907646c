"""Where a database is, and the secret for it, which is shown nowhere."""

from __future__ import annotations

import getpass
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import parse_qsl, unquote, urlsplit

from streamhouse.core.errors import InvalidRequestError

__all__ = ["SourceAddress", "hide_password"]

_SCHEMES: Final = ("postgres", "postgresql")
_PORT: Final = 5432
_SSL_MODES: Final = ("disable", "allow", "prefer", "require", "verify-ca", "verify-full")
_OPTIONS: Final = ("sslmode", "sslrootcert", "sslcert", "sslkey")
# Greedy: a password may have signs that do not belong into a URL.
_PASSWORD: Final = re.compile(r"^([a-z]+://[^/@:]*):.*@")
# Names the file descriptor from which a restarted command reads the password.
_DESCRIPTOR: Final = "STREAMHOUSE_CDC_PASSWORD_FD"


@dataclass(frozen=True, slots=True)
class SourceAddress:
    """A PostgreSQL database; its text leaves the password out."""

    host: str
    port: int
    user: str
    database: str
    password: str = field(default="", repr=False)
    options: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"postgres://{self.user}@{self.host}:{self.port}/{self.database}"

    @classmethod
    def parse(
        cls, text: str, *, password: str | None = None, environment: Mapping[str, str] = os.environ
    ) -> SourceAddress:
        """Read `postgres://user:secret@host:port/database?sslmode=...`.

        What is left out comes from PGHOST, PGPORT, PGUSER and PGPASSWORD, as with psql. Raises
        `InvalidRequestError`, which does not repeat a password.
        """
        shown = _PASSWORD.sub(r"\1@", text)
        parts = urlsplit(text)
        if parts.scheme not in _SCHEMES:
            raise InvalidRequestError(
                f"'{shown}' is not the URL of a PostgreSQL database, as in"
                " postgres://user@host:5432/database"
            )
        database = unquote(parts.path.lstrip("/")) or environment.get("PGDATABASE", "")
        if not database:
            raise InvalidRequestError(f"'{shown}' names no database: add it as in {shown}/shop")
        options = dict(parse_qsl(parts.query))
        for name in options:
            if name not in _OPTIONS:
                raise InvalidRequestError(f"'{shown}': option '{name}' is none of {_OPTIONS}")
        if options.get("sslmode", "prefer") not in _SSL_MODES:
            raise InvalidRequestError(f"'{shown}': sslmode must be one of {_SSL_MODES}")
        try:
            port = parts.port or int(environment.get("PGPORT", _PORT))
        except ValueError as error:
            raise InvalidRequestError(f"'{shown}': the port is not a number") from error
        return cls(
            host=parts.hostname or environment.get("PGHOST", "localhost"),
            port=port,
            user=unquote(parts.username or "") or environment.get("PGUSER") or getpass.getuser(),
            database=database,
            password=_password_from(password, parts.password, environment),
            options=options,
        )

    def jdbc_url(self) -> str:
        """Return the URL for Java's driver, without the user."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"jdbc:postgresql://{host}:{self.port}/{self.database}"

    def jdbc_properties(self) -> dict[str, str]:
        """Return the properties for Java's driver beside the URL."""
        return {
            "user": self.user,
            "password": self.password,
            "ApplicationName": "streamhouse cdc",
            "connectTimeout": "10",
            **self.options,
        }


def _password_from(given: str | None, in_url: str | None, environment: Mapping[str, str]) -> str:
    if given is not None:
        return given
    if in_url is not None:
        return unquote(in_url)
    return environment.get("PGPASSWORD", "")


def hide_password(arguments: Sequence[str] = tuple(sys.orig_argv)) -> str | None:
    """Return the password from a URL on this process's command line, and hide the password.

    If the command line has a password, the process restarts itself without the password, because
    every user of the machine sees command lines. The secret goes through a pipe, not the
    environment.
    """
    descriptor = os.environ.pop(_DESCRIPTOR, "")
    if descriptor:
        with os.fdopen(int(descriptor), "rb") as pipe:
            return pipe.read().decode()
    positions = [at for at, text in enumerate(arguments) if _PASSWORD.match(text)]
    if not positions:
        return None
    cleaned = list(arguments)
    for at in positions:
        cleaned[at] = _PASSWORD.sub(r"\1@", arguments[at])
    secret = unquote(urlsplit(arguments[positions[0]]).password or "").encode()
    reader, writer = os.pipe()
    with os.fdopen(writer, "wb") as pipe:
        pipe.write(secret)
    os.set_inheritable(reader, True)
    os.environ[_DESCRIPTOR] = str(reader)
    os.execv(sys.executable, cleaned)
