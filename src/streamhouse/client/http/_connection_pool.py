"""The nodes of a service, and the connections kept to each node between requests.

No proxy is used, whatever the environment says. TLS is the `ssl` module's, with one context for all
nodes of equal trust: making a context reads the machine's CAs, which takes milliseconds.

A node learnt from an answer, not configured, may belong to another process by now, also of another
service. Before a connection to such a node is used, the node states its service; only then the node
gets a token. A stranger at the address gets none; TLS protects against an impostor.
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
"""Of one node; more are open while more requests are under way."""

_NODES_KEPT_MAX: Final = 64
_CONNECT_TIMEOUT_S: Final = 5.0
_HEALTH: Final = "/health"
_OK: Final = 200
# A machine that vanishes resets no connection: after 14 s of silence the system ends the wait. No
# TCP_USER_TIMEOUT: it would end connections whose service waits for memory.
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
# The characters that a request line has unencoded. All others are encoded, and so end no line.
_RESERVED: Final = "/?:@!$&'()*+,;=~%"
_PLAIN_TARGET: Final = re.compile(rf"[\w.\-{re.escape(_RESERVED)}]*", re.ASCII)
_WITHOUT_BODY: Final = ("GET", "DELETE")


class ReachingError(OSError):
    """No connection was made: nothing of the request was sent."""


class StrangerError(ReachingError):
    """The node at a learnt address is not proven to be of the service."""


class ConnectionPool:
    """The nodes of a service, each with its idle connections. Thread-safe, safe to fork with.

    A closed pool refuses requests by `InvalidRequestError`.

    Args:
        endpoints: their trust settings apply to the certificates of nodes.
        headers: the common header lines of all requests.

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
        """Return the node at `url`; raises `ReachingError` for an invalid URL."""
        self.check_open()
        if self._process_id != os.getpid():
            # In a forked process: the parent process goes on using the idle connections.
            _close_all(self._nodes)
            self._process_id = os.getpid()
        node = self._nodes.get(url)
        if node is None:
            try:
                endpoint = self._endpoints.at(url)
                is_learnt = endpoint not in self._endpoints.listed
                new_node = Node(endpoint, headers=self._headers, is_learnt=is_learnt)
            except ValueError as error:
                raise ReachingError(f"'{url}' is no URL of a service: {error}") from error
            node = self._nodes.setdefault(url, new_node)
            while len(self._nodes) > _NODES_KEPT_MAX:
                self._nodes.pop(next(iter(self._nodes))).close()
        return node

    def check_open(self) -> None:
        """Raise `InvalidRequestError` if the pool was closed."""
        if self._is_closed:
            raise InvalidRequestError(
                f"the client of {', '.join(self._endpoints.urls)} is closed; make another one"
            )

    def close(self) -> None:
        """Close the idle connections, and refuse further requests.

        Connections under way are closed after their answers.
        """
        self._is_closed = True
        _close_all(self._nodes)

    def take(self, node: Node) -> Connection:
        """Return a connection for a request, if possible an idle connection.

        Raises `ReachingError`, or `ssl.SSLError` for an untrusted node.
        """
        idle = node.take_idle()
        if idle is not None:
            return idle
        connection = Connection(self._connected(node))
        if node.is_learnt:
            try:
                self._check_service(node, connection)
            except BaseException:
                connection.close()
                raise
        return connection

    def _check_service(self, node: Node, connection: Connection) -> None:
        """Raise `StrangerError` unless a node is of the configured endpoints' service."""
        if self._service_id is None:
            self._service_id = self._service_of_listed()
        if self._service_id is None:
            raise StrangerError("no configured endpoint says now which service it is of")
        try:
            service_id = _service_over(connection, node)
        except ssl.SSLError:
            raise
        except OSError as error:
            raise StrangerError(f"it did not say which service it belongs to: {error}") from error
        if service_id != self._service_id:
            raise StrangerError("the process there belongs to another service")
        # An exchange that breaks from now on was not on an old connection.
        connection.is_kept = False

    def _service_of_listed(self) -> str | None:
        """Return the service id from the first configured endpoint that answers."""
        for url in self._endpoints.urls:
            with contextlib.suppress(OSError):
                connection = Connection(self._connected(self.node(url)))
                with contextlib.closing(connection):
                    service_id = _service_over(connection, self.node(url))
                if service_id is not None:
                    return service_id
        return None

    def _connected(self, node: Node) -> socket.socket:
        try:
            opened = socket.create_connection((node.host, node.port), _CONNECT_TIMEOUT_S)
        except (OSError, UnicodeError) as error:
            raise ReachingError(_why_unreached(error, node)) from error
        try:
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for option in _SILENT_MACHINE:
                opened.setsockopt(*option)
            return self._with_tls(opened, node) if node.endpoint.is_tls else opened
        except BaseException:
            opened.close()
            raise

    def _context_of(self, endpoint: Endpoint) -> ssl.SSLContext:
        """Return the TLS context for all nodes with the same trust settings."""
        trust = replace(endpoint, url="")
        if trust not in self._tls:
            self._tls[trust] = endpoint.tls_context()
        return self._tls[trust]

    def _with_tls(self, opened: socket.socket, node: Node) -> ssl.SSLSocket:
        # No certificate has the zone of a link-local address.
        name = node.host.partition("%")[0].rstrip(".")
        try:
            tls_socket = self._context_of(node.endpoint).wrap_socket(opened, server_hostname=name)
        except ssl.SSLError:
            raise
        except OSError as error:
            raise ReachingError(str(error)) from error
        expected = node.endpoint.fingerprint
        if expected is not None:
            fingerprint = hashlib.sha256(
                tls_socket.getpeercert(binary_form=True) or b""
            ).hexdigest()
            if expected == OWN_CERTIFICATE and is_own_certificate(fingerprint):
                return tls_socket
            # As bytes: the configured fingerprint may have characters beyond ASCII.
            if not hmac.compare_digest(
                fingerprint.encode(), expected.replace(":", "").lower().encode("utf-8", "replace")
            ):
                tls_socket.close()
                raise ssl.SSLCertVerificationError(
                    f"fingerprints did not match: expected {expected}, got {fingerprint}"
                )
        return tls_socket


def _why_unreached(error: OSError | UnicodeError, node: Node) -> str:
    if isinstance(error, socket.gaierror | UnicodeError):
        return f"the name '{node.host}' has no address ({error})"
    if isinstance(error, ConnectionRefusedError):
        return f"nobody listens at port {node.port} (connection refused)"
    if isinstance(error, TimeoutError):
        return f"{node.host} did not answer within {_CONNECT_TIMEOUT_S:g} s"
    return str(error)


class Node:
    """One node of a service: its address, and its idle connections.

    More connections are opened than kept when more requests are under way; no request waits for
    one.
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
        """The head of a request without a token."""
        self._is_open = True
        # Append and pop at the list's end are single steps: no lock.
        self._idle: list[Connection] = []

    def take_idle(self) -> Connection | None:
        """Take a usable idle connection, or None."""
        while self._idle:
            try:
                connection = self._idle.pop()
            except IndexError:
                break
            if connection.is_usable():
                return connection
            connection.close()
        return None

    def give_back(self, connection: Connection) -> None:
        """Keep a connection after its answer."""
        if self._is_open and len(self._idle) < CONNECTIONS_KEPT_MAX:
            self._idle.append(connection)
        else:
            connection.close()

    def request_head(
        self, method: str, path: str, *, content_type: str, length: int | None
    ) -> bytes:
        """Return the head of a request with a body of this length; None means no body."""
        if _PLAIN_TARGET.fullmatch(path) is None:
            path = quote(path, safe=_RESERVED)
        body_headers = ""
        if length is not None:
            body_headers = f"Content-Type: {content_type}\r\nContent-Length: {length}\r\n"
        elif method not in _WITHOUT_BODY:
            body_headers = "Content-Length: 0\r\n"
        body_headers += carried_headers()
        return (
            f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._headers}{body_headers}\r\n".encode(
                "latin-1"
            )
        )

    def close(self) -> None:
        """Close the idle connections, and keep no more."""
        self._is_open = False
        with contextlib.suppress(IndexError):
            while True:
                self._idle.pop().close()


def _service_over(connection: Connection, node: Node) -> str | None:
    """Return a node's service id, or None. The request has no token."""
    answer, is_kept = connection.exchange(node.health_head, None, timeout_s=_CONNECT_TIMEOUT_S)
    if answer.status != _OK or not is_kept:
        return None
    try:
        service_id = json.loads(answer.data)["service_id"]
    except (ValueError, KeyError, TypeError):
        return None
    return service_id if isinstance(service_id, str) else None


def _host_of(netloc: str) -> str:
    """Return a host, and the port if any, in a header's form."""
    if netloc.isascii():
        return netloc
    host, colon, port = netloc.partition(":")
    return f"{host.encode('idna').decode()}{colon}{port}"


def _close_all(nodes: dict[str, Node]) -> None:
    # Another thread may remove nodes at the same time.
    with contextlib.suppress(KeyError):
        while True:
            nodes.popitem()[1].close()
