"""Which grant each route needs, and whether the caller of a request has it.

Every route is listed in `need_of`; one that is not needs `admin:*`, so a forgotten route is closed
rather than open. A refusal comes before anything of the table is looked at: it does not say whether
the table exists.
"""

from __future__ import annotations

import hmac
import logging
import time
from dataclasses import dataclass
from typing import Final

from streamhouse.storage_service.config import ServiceConfig
from streamhouse.storage_service.errors import ForbiddenError, UnauthorizedError
from streamhouse.storage_service.model.lake import REST_CATALOG_PATH
from streamhouse.storage_service.model.table import TablePath
from streamhouse.storage_service.server.access.grants import (
    EVERYTHING,
    LAKE,
    OWNER,
    SERVICE,
    Caller,
    Grants,
    Level,
)
from streamhouse.storage_service.server.http.fair_turns import SHARE
from streamhouse.storage_service.server.http.http_exchange import HttpExchange

__all__ = ["AccessControl", "Need", "database_scope", "is_about_service", "need_of"]

_audit = logging.getLogger("streamhouse.audit")

# Routes below /v1/tables/{path}/ that only read though they are no GET.
_READS: Final = {"lookup", "prefix_lookup", "lake"}
_WRITES: Final = {"append", "upsert", "delete", "transactions"}
_SEEN_BY_ALL: Final = {
    "/ready",
    "/docs",
    "/docs/oauth2-redirect",
    "/openapi.json",
    "/redoc",
    # What is answered, listed or created is checked where that is known.
    "/v1/lake/catalog",
    "/v1/databases",
    "/v1/tables",
}
_SERVICE_STATE: Final = {"/metrics", "/v1/status"}
_ABOUT_SERVICE: Final = _SERVICE_STATE | {"/ready", "/v1/tiering"}


@dataclass(frozen=True, slots=True)
class Need:
    """What a route asks of its caller; scope None: any right token, whatever its grants."""

    level: Level
    scope: str | None

    def __str__(self) -> str:
        return f"{self.level.name.lower()}:{self.scope}"


_UNLISTED: Final = Need(Level.ADMIN, EVERYTHING)
_ANY: Final = Need(Level.READ, None)


def database_scope(database: str) -> str:
    """The scope of a database itself."""
    return f"{database}.*"


def is_about_service(path: str) -> bool:
    """Whether a request looks after the service itself, which is let in when others are not."""
    return path in _ABOUT_SERVICE or path.startswith("/v1/admin/")


def need_of(method: str, path: str) -> Need:
    """Return what a request needs; `/health` and `/`, which need nothing, never come here.

    Raises `InvalidNameError` for a path that can be no table's.
    """
    is_reading = method in ("GET", "HEAD")
    if path in _SEEN_BY_ALL:
        return _ANY
    if path in _SERVICE_STATE:
        return Need(Level.READ, SERVICE)
    if path.startswith(f"{REST_CATALOG_PATH}/v1/"):
        return _need_of_catalog(method, path.removeprefix(f"{REST_CATALOG_PATH}/v1/").split("/"))
    match path.removeprefix("/v1/").split("/") if path.startswith("/v1/") else []:
        case ["databases", name]:
            return Need(Level.READ if is_reading else Level.ADMIN, database_scope(name))
        case ["tables", table, *rest]:
            scope = str(TablePath.parse(table))
            return Need(_table_level(is_reading=is_reading, rest=rest), scope)
        case ["tiering", *_]:
            return Need(Level.READ if is_reading else Level.WRITE, SERVICE)
        case ["admin", *_]:
            return Need(Level.ADMIN, SERVICE)
    return _UNLISTED


def _need_of_catalog(method: str, parts: list[str]) -> Need:
    """Return what a request to the Iceberg REST catalog needs; namespaces are databases."""
    is_reading = method in ("GET", "HEAD")
    match parts:
        case ["config"] | ["oauth", "tokens"]:
            return _ANY
        case ["namespaces"] if is_reading:
            # Which are listed depends on the grants.
            return _ANY
        case ["namespaces"] | ["transactions", "commit"]:
            return Need(Level.WRITE, EVERYTHING)
        case ["namespaces", name, "tables"]:
            return Need(Level.READ if is_reading else Level.WRITE, database_scope(name))
        case ["namespaces", _, "tables", _, "credentials"]:
            return Need(Level.READ, LAKE)
        case ["namespaces", name, "tables", table, *rest]:
            level = Level.READ if is_reading or rest == ["metrics"] else Level.WRITE
            return Need(Level.ADMIN if method == "DELETE" else level, f"{name}.{table}")
        case ["namespaces", name, *_]:
            return Need(Level.READ if is_reading else Level.ADMIN, database_scope(name))
    return _UNLISTED


def _table_level(*, is_reading: bool, rest: list[str]) -> Level:
    if is_reading or (rest and rest[0] in _READS):
        return Level.READ
    if rest and rest[0] in _WRITES:
        return Level.WRITE
    return Level.ADMIN


class AccessControl:
    """Decides who sent a request and what they may do. Event loop only."""

    def __init__(self, config: ServiceConfig) -> None:
        self._token = None if config.token is None else config.token.encode()
        self._grants = None if config.grants_file is None else Grants(config.grants_file)
        self._check_interval_s = config.grants_check_interval_ms / 1000
        self._checked_at = time.monotonic()

    @property
    def reload_failures(self) -> int:
        """How often a changed grants file was broken and the one before it kept."""
        return 0 if self._grants is None else self._grants.reload_failures

    def admit(self, exchange: HttpExchange) -> None:
        """Set the exchange's caller; raises `UnauthorizedError` or `ForbiddenError`."""
        exchange.caller = self._caller(exchange)
        exchange.share = self._share(exchange)
        SHARE.set(exchange.share)
        if exchange.caller is OWNER:
            return
        need = need_of(exchange.method, exchange.path)
        if need.scope is not None:
            self.require(exchange, need.level, need.scope)

    def _share(self, exchange: HttpExchange) -> str:
        """Whose share of what all callers share a request uses: its token's, else its address's."""
        if self._token is None and self._grants is None:
            client = exchange.scope.get("client") or ("unknown",)
            return f"client {client[0]}"
        return f"token {exchange.caller.name}"

    def is_still_admitted(self, exchange: HttpExchange) -> bool:
        """Whether a request that goes on for long would be admitted now."""
        try:
            self.admit(exchange)
        except (UnauthorizedError, ForbiddenError):
            return False
        return True

    def require(self, exchange: HttpExchange, level: Level, scope: str) -> None:
        """Raise `ForbiddenError` unless the exchange's caller has `level` on `scope`."""
        if not exchange.caller.may(level, scope):
            raise ForbiddenError(
                f"token '{exchange.caller.name}' has no grant '{Need(level, scope)}'"
            )

    def record_refusal(self, exchange: HttpExchange, code: str) -> None:
        """Write the audit line of a refused call."""
        client = exchange.scope.get("client") or ("unknown",)
        _audit.warning(
            "event=refused code=%s client=%s token_name=%s method=%s path=%r",
            code,
            client[0],
            exchange.caller.name,
            exchange.method,
            exchange.path[:300],
        )

    def _caller(self, exchange: HttpExchange) -> Caller:
        if self._token is None and self._grants is None:
            return OWNER
        given = exchange.header(b"authorization") or b""
        kind, _, token = given.partition(b" ")
        token = token.strip()
        if kind.lower() == b"bearer" and token:
            # Compared as bytes and in full, so that the time taken says nothing about the token.
            if self._token is not None and hmac.compare_digest(token, self._token):
                return OWNER
            if self._grants is not None:
                self._refresh(self._grants)
                caller = self._grants.caller(token)
                if caller is not None:
                    return caller
        raise UnauthorizedError(
            "the bearer token is wrong"
            if given
            else "this service needs a bearer token: send 'Authorization: Bearer TOKEN', or set"
            " STREAMHOUSE_TOKEN"
        )

    def _refresh(self, grants: Grants) -> None:
        now = time.monotonic()
        if now - self._checked_at >= self._check_interval_s:
            self._checked_at = now
            grants.refresh()
