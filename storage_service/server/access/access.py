"""Access control: the caller of a request, and the check of the caller's grants.

`routes.py` lists the grant that each route needs. A request is refused before any read of the
table, so a refusal does not reveal whether the table exists.

An earlier check refuses requests that a browser sends on behalf of a foreign web page.

Any page may make a browser send requests to this machine, or to a DNS name that the owner of the
page points to this machine (DNS rebinding). The browser reports the page in headers that the page
cannot change: `Host` is the requested name, `Origin` and `Sec-Fetch-Site` describe the page.

The service accepts these hosts: IP addresses, which no DNS record can redirect, `localhost`, the
machine's name, the listening address, and the names of `--allowed-host`. Programs send no `Origin`:
all checks except the check of `Host` concern browsers only.
"""

from __future__ import annotations

import base64
import hmac
import ipaddress
import logging
import math
import re
import socket
import time
from collections.abc import Iterable
from typing import Final

from streamhouse.core.errors import ForbiddenError, UnauthorizedError
from streamhouse.storage_service.config import ANY_HOST, ServiceConfig
from streamhouse.storage_service.server.access._grants import Grants, LastGrants
from streamhouse.storage_service.server.caller import OWNER, Caller, Level, Need
from streamhouse.storage_service.server.exchange import Exchange
from streamhouse.storage_service.server.http.fair_shares import SHARE
from streamhouse.storage_service.server.http.http_exchange import HttpExchange

__all__ = ["AccessControl", "ForeignRequests", "LastGrants", "token_of"]

_audit = logging.getLogger("streamhouse.audit")

_LOOKED_AT: Final = frozenset((b"host", b"origin", b"sec-fetch-site", b"sec-fetch-mode"))
_FOREIGN_SITES: Final = frozenset((b"cross-site", b"same-site"))
_HOST: Final = re.compile(r"(\[[0-9a-f:.]+\]|[^:\[\]/@\s]+)(?::\d{1,5})?", re.ASCII)
_SEEN_MAX: Final = 1_000


class AccessControl:
    """Finds the caller of a request and checks the caller's grants. Event loop only."""

    def __init__(self, config: ServiceConfig, *, last_grants: LastGrants | None = None) -> None:
        """Read the grants file, or start with the grants that another process has read."""
        self._token = None if config.token is None else config.token.encode()
        file = config.grants_file
        self._grants = None if file is None else Grants(file, last=last_grants)
        self._check_interval_s = config.grants_check_interval_ms / 1000
        # The other process may have looked long ago: a token may be revoked since.
        self._checked_at = time.monotonic() if last_grants is None else -math.inf

    @property
    def reload_failures(self) -> int:
        """How often a changed grants file was broken, so that the old grants stayed in use."""
        return 0 if self._grants is None else self._grants.reload_failures

    @property
    def last_grants(self) -> LastGrants | None:
        """The grants in use; None without a grants file."""
        return None if self._grants is None else self._grants.last

    @property
    def is_open(self) -> bool:
        """Whether the service trusts every caller and needs no token."""
        return self._token is None and self._grants is None

    def admit(self, exchange: HttpExchange) -> None:
        """Set the exchange's caller; raises `UnauthorizedError` or `ForbiddenError`."""
        exchange.caller = self._caller(exchange)
        exchange.share = self.share_of(exchange.caller, exchange.client_address)
        SHARE.set(exchange.share)
        if exchange.caller is OWNER:
            return
        need = exchange.need()
        if need.scope is not None:
            self.require(exchange, need.level, need.scope)

    def is_probe(self, exchange: HttpExchange) -> bool:
        """Whether a request to `/ready` has no token, as from a load balancer.

        A probe gets only the readiness, and may use any host name, as for `/health`.
        """
        return (
            exchange.method in ("GET", "HEAD")
            and not self.is_open
            and exchange.header(b"authorization") is None
        )

    def share_of(self, caller: Caller, address: str) -> str:
        """Return the caller's key in `FairShares`: the token's name, else the address."""
        return f"client {address}" if self.is_open else f"token {caller.name}"

    def is_still_admitted(self, exchange: HttpExchange) -> bool:
        """Whether a long-running request would be admitted now."""
        try:
            self.admit(exchange)
        except (UnauthorizedError, ForbiddenError):
            return False
        return True

    def require(self, exchange: Exchange, level: Level, scope: str) -> None:
        """Raise `ForbiddenError` unless the exchange's caller has `level` on `scope`."""
        if not exchange.caller.may(level, scope):
            raise ForbiddenError(
                f"token '{exchange.caller.name}' has no grant '{Need(level, scope)}'"
            )

    def record_refusal(self, exchange: Exchange, code: str) -> None:
        """Write the audit line of a refused call."""
        _audit.warning(
            "event=refused code=%s client=%s token_name=%s method=%s path=%r",
            code,
            exchange.client_address,
            exchange.caller.name,
            exchange.method,
            exchange.path[:300],
        )

    def _caller(self, exchange: HttpExchange) -> Caller:
        if self.is_open:
            return OWNER
        token = token_of(exchange)
        caller = self.caller_of(token) if token else None
        if caller is not None:
            return caller
        raise UnauthorizedError(
            "the bearer token is wrong"
            if exchange.header(b"authorization")
            else "this service needs a bearer token: send 'Authorization: Bearer TOKEN', or set"
            " STREAMHOUSE_TOKEN; commands take --token-file"
        )

    def caller_of(self, token: bytes) -> Caller | None:
        """Return the caller of a token, or None. An open service does not check the token.

        Tokens are compared as bytes in constant time, so the time reveals nothing about the token.
        """
        if self.is_open:
            return OWNER
        if not token:
            return None
        if self._token is not None and hmac.compare_digest(token, self._token):
            return OWNER
        if self._grants is None:
            return None
        self._refresh(self._grants)
        return self._grants.caller(token)

    def _refresh(self, grants: Grants) -> None:
        now_s = time.monotonic()
        if now_s - self._checked_at >= self._check_interval_s:
            self._checked_at = now_s
            grants.refresh()


def token_of(exchange: HttpExchange) -> bytes:
    """Return the token of a request, empty without a token."""
    kind, _, token = (exchange.header(b"authorization") or b"").partition(b" ")
    token = token.strip()
    if kind.lower() == b"basic" and exchange.takes_password:
        return _password(token)
    return token if kind.lower() == b"bearer" else b""


def _password(credentials: bytes) -> bytes:
    """Return the password of Basic authentication, empty if invalid; the user name is ignored."""
    try:
        return base64.b64decode(credentials, validate=True).partition(b":")[2]
    except ValueError:
        return b""


class ForeignRequests:
    """Refuses the requests of foreign web pages, by the headers."""

    def __init__(self, config: ServiceConfig) -> None:
        self._named = frozenset(name.lower() for name in config.allowed_hosts)
        machine = socket.gethostname().lower()
        machine_names = {"localhost", machine, machine.partition(".")[0], config.host.lower()}
        self._hosts = self._named | machine_names
        # With a certificate the browser has checked the name before the request.
        self._is_any_host = ANY_HOST in self._named or config.tls_certificate_file is not None
        # Accepted values of `Host`, byte by byte: most requests need a single lookup.
        self._seen: set[bytes] = set()

    def check(self, method: str, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Raise `ForbiddenError` for the request of a foreign page."""
        host = origin = site = mode = None
        for name, value in headers:
            if name not in _LOOKED_AT:
                continue
            if name == b"host":
                host = value
                if value not in self._seen:
                    self._check_host(value)
            elif name == b"origin":
                origin = value
            elif name == b"sec-fetch-site":
                site = value
            else:
                mode = value
        if origin is not None:
            self._check_origin(origin, host)
        elif site in _FOREIGN_SITES and (mode != b"navigate" or method != "GET"):
            raise ForbiddenError(
                "the request comes from a web page of another site, which may not use this service"
            )

    def _check_host(self, value: bytes) -> None:
        name = _host_name(value.decode("latin-1").lower())
        is_accepted = name is not None and (name in self._hosts or _is_address(name))
        if not (self._is_any_host or is_accepted):
            shown = value.decode("latin-1")[:200]
            raise ForbiddenError(
                f"the request is for host '{shown}', which is no name of this service; if it is"
                f" one, start the service with --allowed-host {name or 'NAME'}"
            )
        if len(self._seen) < _SEEN_MAX:
            self._seen.add(value)

    def _check_origin(self, origin: bytes, host: bytes | None) -> None:
        """Accept a page of the same host and port, or of a host in `--allowed-host`."""
        text = origin.decode("latin-1").lower()
        name = _host_name(text.partition("://")[2])
        if name is not None:
            if host is not None and text.partition("://")[2] == host.decode("latin-1").lower():
                return
            if ANY_HOST in self._named or name in self._named:
                return
        raise ForbiddenError(
            f"the request comes from a web page of '{text[:200]}', which may not use this service;"
            " if it may, start the service with --allowed-host and that page's host name"
        )


def _host_name(text: str) -> str | None:
    """Return the name in `name:port`, or None for other text."""
    match = _HOST.fullmatch(text)
    return None if match is None else match[1].strip("[]").rstrip(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
