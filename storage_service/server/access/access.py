"""Who sent a request, and whether they may do what it needs.

What each route needs is in `routes.py`. A refusal comes before anything of the table is looked at:
it does not say whether the table exists.
"""

from __future__ import annotations

import hmac
import logging
import time

from streamhouse.storage_service.config import ServiceConfig
from streamhouse.storage_service.errors import ForbiddenError, UnauthorizedError
from streamhouse.storage_service.server.access.grants import Grants
from streamhouse.storage_service.server.caller import (
    OWNER,
    Caller,
    Level,
    Need,
)
from streamhouse.storage_service.server.http.fair_turns import SHARE
from streamhouse.storage_service.server.http.http_exchange import HttpExchange

__all__ = ["AccessControl"]

_audit = logging.getLogger("streamhouse.audit")


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
        need = exchange.need()
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
