"""The nodes of a service, and the connections to each that are kept between requests.

No proxy is asked, whatever the environment says. TLS is the `ssl` module's, with one context for
all nodes that are trusted alike: making one reads the machine's CAs, which takes milliseconds.

A node that was not given but learnt from an answer may be another process's by now, also of another
service. Before a connection to it is used, it says of which service it is, and is shown no token
until then. That keeps tokens from whoever listens there by chance; who pretends on purpose is kept
out by TLS.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import re
import socket
import ssl
import weakref
from dataclasses import replace
from typing import Final
from urllib.parse import quote, urlsplit

from streamhouse.client.http._http_connection import Connection
from streamhouse.client.http.endpoint import Endpoint, Endpoints
from streamhouse.client.http.own_certificate import (
    OWN_CERTIFICATE,
    is_own_certificate,
)
from streamhouse.core.errors import InvalidRequestError
from streamhouse.core.traces.carried import carried_headers

__all__ = ["CONNECTIONS_KEPT_MAX", "ConnectionPool", "Node", "ReachingError", "StrangerError"]

CONNECTIONS_KEPT_MAX: Final = 16
"""To one node; more may be open while more requests are under way."""

_NODES_KEPT_MAX: Final = 64
_CONNECT_TIMEOUT_S: Final = 5.0
_HEALTH: Final = "/health"
_OK: Final = 200
# A machine that vanishes resets nothing: who waits for its answer learns it from its system's
# silence, in 14 s. No TCP_USER_TIMEOUT: it would end connections whose service waits for memory.
_SILENT_MACHINE: Final = tuple(
    (level, getattr(socket, name), value)
    for level, name, value in (
        (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
        (socket.IPPROTO_TCP, "TCP_KEEPIDLE", 5),
        (socket.IPPROTO_TCP, "TCP_KEEPINTVL", 3),
        (socket.IPPROTO_TCP, "TCP_KEEPCNT", 3),
    )
    if hasattr(socket, name)
)
# What a request line may have as it is. All else is encoded, and so ends no line.
_RESERVED: Final = "/?:@!$&'()*+,;=~%"
_PLAIN_TARGET: Final = re.compile(rf"[\w.\-{re.escape(_RESERVED)}]*", re.ASCII)
_WITHOUT_BODY: Final = ("GET", "DELETE")


class ReachingError(OSError):
    """No connection was made: nothing of the request was sent."""


class StrangerError(ReachingError):
    """Who answers at an address that was learnt is not known to be of the service."""


class ConnectionPool:
    """The nodes that were asked, each with its kept connections. Thread-safe, safe to fork with.

    A closed one refuses requests by `InvalidRequestError`.

    Args:
        endpoints: say what must vouch for the certificate of a node.
        headers: lines that every request has.

    Raises `InvalidRequestError` for a bad CA file.
    """

    def __init__(self, endpoints: Endpoints, *, headers: str) -> None:
        self._endpoints = endpoints
        self._headers = headers
        self._tls: dict[Endpoint, ssl.SSLContext] = {}
        for endpoint in endpoints.listed:
            if endpoint.is_tls:
                self._context_of(endpoint)
        self._nodes: dict[str, Node] = {}
        self._service_id: str | None = None
        self._is_closed = False
        self._process_id = os.getpid()
        weakref.finalize(self, _close_all, self._nodes)

    def node(self, url: str) -> Node:
        """Return the node at `url`; raises `ReachingError` for what is no URL."""
        self.check_open()
        if self._process_id != os.getpid():
            # A forked process: its parent goes on using the connections that it has kept.
            _close_all(self._nodes)
            self._process_id = os.getpid()
        node = self._nodes.get(url)
        if node is None:
            try:
                endpoint = self._endpoints.at(url)
                is_learnt = endpoint not in self._endpoints.listed
                made = Node(endpoint, headers=self._headers, is_learnt=is_learnt)
            except ValueError as error:
                raise ReachingError(f"'{url}' is no URL of a service: {error}") from error
            node = self._nodes.setdefault(url, made)
            while len(self._nodes) > _NODES_KEPT_MAX:
                self._nodes.pop(next(iter(self._nodes))).close()
        return node

    def check_open(self) -> None:
        """Raise `InvalidRequestError` if it was closed."""
        if self._is_closed:
            raise InvalidRequestError(
                f"the client of {', '.join(self._endpoints.urls)} is closed; make another one"
            )

    def close(self) -> None:
        """Close the kept connections, and refuse further requests.

        Connections under way are closed when their answer has come.
        """
        self._is_closed = True
        _close_all(self._nodes)

    def take(self, node: Node) -> Connection:
        """Return a connection for one request, a kept one if there is one.

        Raises `ReachingError`, or `ssl.SSLError` for a node that is not to be trusted.
        """
        kept = node.kept()
        if kept is not None:
            return kept
        connection = Connection(self._connected(node))
        if node.is_learnt:
            try:
                self._check_service(node, connection)
            except BaseException:
                connection.close()
                raise
        return connection

    def _check_service(self, node: Node, connection: Connection) -> None:
        """Raise `StrangerError` unless a node is of the service whose endpoints were given."""
        if self._service_id is None:
            self._service_id = self._service_of_listed()
        if self._service_id is None:
            raise StrangerError("none of the given endpoints says now of which service they are")
        try:
            found = _service_over(connection, node)
        except ssl.SSLError:
            raise
        except OSError as error:
            raise StrangerError(f"it did not say of which service it is: {error}") from error
        if found != self._service_id:
            raise StrangerError("who answers there is not of this service")
        # What breaks it from now on is not the age of a connection.
        connection.is_kept = False

    def _service_of_listed(self) -> str | None:
        """Return the service of the first of the given endpoints that knows it."""
        for url in self._endpoints.urls:
            with contextlib.suppress(OSError):
                connection = Connection(self._connected(self.node(url)))
                with contextlib.closing(connection):
                    found = _service_over(connection, self.node(url))
                if found is not None:
                    return found
        return None

    def _connected(self, node: Node) -> socket.socket:
        try:
            opened = socket.create_connection((node.host, node.port), _CONNECT_TIMEOUT_S)
        except (OSError, UnicodeError) as error:
            raise ReachingError(str(error)) from error
        try:
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for option in _SILENT_MACHINE:
                opened.setsockopt(*option)
            return self._secured(opened, node) if node.endpoint.is_tls else opened
        except BaseException:
            opened.close()
            raise

    def _context_of(self, endpoint: Endpoint) -> ssl.SSLContext:
        """Return what TLS connections to all that are trusted so are made with."""
        trust = replace(endpoint, url="")
        if trust not in self._tls:
            self._tls[trust] = endpoint.tls_context()
        return self._tls[trust]

    def _secured(self, opened: socket.socket, node: Node) -> ssl.SSLSocket:
        # The zone of a link-local address is nothing a certificate knows.
        name = node.host.partition("%")[0].rstrip(".")
        try:
            secured = self._context_of(node.endpoint).wrap_socket(opened, server_hostname=name)
        except ssl.SSLError:
            raise
        except OSError as error:
            raise ReachingError(str(error)) from error
        expected = node.endpoint.fingerprint
        if expected is not None:
            found = hashlib.sha256(secured.getpeercert(binary_form=True) or b"").hexdigest()
            if expected == OWN_CERTIFICATE and is_own_certificate(found):
                return secured
            # As bytes: what is compared may be no ASCII.
            if not hmac.compare_digest(
                found.encode(), expected.replace(":", "").lower().encode("utf-8", "replace")
            ):
                secured.close()
                raise ssl.SSLCertVerificationError(
                    f"fingerprints did not match: expected {expected}, got {found}"
                )
        return secured


class Node:
    """One node of a service: where it is, and the connections to it that are kept.

    More are opened than are kept when more requests are under way; nobody waits for one.
    """

    def __init__(self, endpoint: Endpoint, *, headers: str, is_learnt: bool = False) -> None:
        self.endpoint: Final = endpoint
        self.is_learnt: Final = is_learnt
        parts = urlsplit(endpoint.url)
        self.host, self.port, _ = endpoint.place
        self._prefix = quote(parts.path, safe=_RESERVED)
        open_headers = f"Host: {_host_of(parts.netloc)}\r\nAccept-Encoding: identity\r\n"
        self._headers = open_headers + headers
        self.health_head: Final = (
            f"GET {self._prefix}{_HEALTH} HTTP/1.1\r\n{open_headers}\r\n".encode("latin-1")
        )
        """The head of a request that shows no token."""
        self._is_open = True
        # Taking from its end and giving to it is one step each: no lock.
        self._kept: list[Connection] = []

    def kept(self) -> Connection | None:
        """Return a kept connection that is usable, if there is one; it is kept no more."""
        while self._kept:
            try:
                connection = self._kept.pop()
            except IndexError:
                break
            if connection.is_usable():
                return connection
            connection.close()
        return None

    def give_back(self, connection: Connection) -> None:
        """Keep a connection whose answer has come."""
        if self._is_open and len(self._kept) < CONNECTIONS_KEPT_MAX:
            self._kept.append(connection)
        else:
            connection.close()

    def request_head(
        self, method: str, path: str, *, content_type: str, length: int | None
    ) -> bytes:
        """Return the head of a request, whose body has this length; None means there is none."""
        if _PLAIN_TARGET.fullmatch(path) is None:
            path = quote(path, safe=_RESERVED)
        said = ""
        if length is not None:
            said = f"Content-Type: {content_type}\r\nContent-Length: {length}\r\n"
        elif method not in _WITHOUT_BODY:
            said = "Content-Length: 0\r\n"
        said += carried_headers()
        return f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._headers}{said}\r\n".encode(
            "latin-1"
        )

    def close(self) -> None:
        """Close the kept connections, and keep no more."""
        self._is_open = False
        with contextlib.suppress(IndexError):
            while True:
                self._kept.pop().close()


def _service_over(connection: Connection, node: Node) -> str | None:
    """Return of which service a node says that it is; None if it does not say. No token is sent."""
    answer, is_kept = connection.exchange(node.health_head, None, timeout_s=_CONNECT_TIMEOUT_S)
    if answer.status != _OK or not is_kept:
        return None
    try:
        found = json.loads(answer.data)["service_id"]
    except (ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, str) else None


def _host_of(netloc: str) -> str:
    """Return a host, and its port if there is one, as a header has them."""
    if netloc.isascii():
        return netloc
    host, colon, port = netloc.partition(":")
    return f"{host.encode('idna').decode()}{colon}{port}"


def _close_all(nodes: dict[str, Node]) -> None:
    # Another thread may close them as well.
    with contextlib.suppress(KeyError):
        while True:
            nodes.popitem()[1].close()
