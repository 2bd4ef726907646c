"""Which requests a browser sends on behalf of a web page that is not this service's own.

Any page may make its reader's browser send requests to this machine, or to a name that the page's
owner lets lead here (DNS rebinding). The browser says so in the request, and a page cannot change
that: `Host` is the name that the page used, `Origin` and `Sec-Fetch-Site` are whose page it is.

Own names are IP addresses, which nobody can let lead elsewhere, `localhost`, this machine's name,
the address listened on, and what the operator named. Programs send no `Origin`: all but `Host`
concerns browsers only.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable
from typing import Final

from streamhouse.storage_service.config import ANY_HOST, ServiceConfig
from streamhouse.storage_service.errors import ForbiddenError

__all__ = ["ForeignRequests"]

_LOOKED_AT: Final = frozenset((b"host", b"origin", b"sec-fetch-site", b"sec-fetch-mode"))
_FOREIGN_SITES: Final = frozenset((b"cross-site", b"same-site"))
_HOST: Final = re.compile(r"(\[[0-9a-f:.]+\]|[^:\[\]/@\s]+)(?::\d{1,5})?", re.ASCII)
_SEEN_MAX: Final = 1_000


class ForeignRequests:
    """Refuses the requests of other pages, by their headers."""

    def __init__(self, config: ServiceConfig) -> None:
        self._named = frozenset(name.lower() for name in config.allowed_hosts)
        machine = socket.gethostname().lower()
        own = {"localhost", machine, machine.partition(".")[0], config.host.lower()}
        self._own = self._named | own
        # With a certificate the browser has checked the name before it sent anything.
        self._is_any_host = ANY_HOST in self._named or config.tls_certificate_file is not None
        # Values of `Host` that were right, as they were sent: most requests need one look.
        self._seen: set[bytes] = set()

    def check(self, method: str, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Raise `ForbiddenError` for the request of another page."""
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
        if not self._is_any_host and (name is None or not self._is_own(name)):
            shown = value.decode("latin-1")[:200]
            raise ForbiddenError(
                f"the request is for host '{shown}', which is no name of this service; if it is"
                f" one, start the service with --allowed-host {name or 'NAME'}"
            )
        if len(self._seen) < _SEEN_MAX:
            self._seen.add(value)

    def _is_own(self, name: str) -> bool:
        return name in self._own or _is_address(name)

    def _check_origin(self, origin: bytes, host: bytes | None) -> None:
        """Accept a page of this very host and port, or of a host that the operator named."""
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
    """Return the name in `name:port`, or None if it is none."""
    found = _HOST.fullmatch(text)
    return None if found is None else found[1].strip("[]").rstrip(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
