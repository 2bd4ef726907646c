"""The sockets that a service listens on."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

from streamhouse.core.errors import InvalidRequestError
from streamhouse.storage_service.config import SHARED_SOCKET_VARIABLE, ServiceConfig
from streamhouse.storage_service.server.http.open_connections import BACKLOG

__all__ = ["bound_socket", "endpoint_of", "listen_on", "shared_sockets"]


def bound_socket(host: str, port: int, *, option: str) -> socket.socket:
    """Return a bound socket that does not listen yet; raises `InvalidRequestError`.

    `option` is the command line option of the port, for the error message.
    """
    with _named_port(host, port, option):
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        # Without the protocol, asyncio would not set TCP_NODELAY: 44 ms for every answer.
        bound = socket.socket(family, kind, socket.IPPROTO_TCP)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    return bound


def listen_on(bound: socket.socket, *, option: str) -> None:
    """Begin to listen; raises `InvalidRequestError` if another process listens on the port by now.

    Two processes may bind a port, as long as neither of them listens.
    """
    host, port = bound.getsockname()[:2]
    with _named_port(host, port, option):
        bound.listen(BACKLOG)


@contextlib.contextmanager
def _named_port(host: str, port: int, option: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InvalidRequestError(
            f"cannot listen on {host} port {port}: {error.strerror}; choose another {option} (0"
            " picks a free one)"
        ) from error


def shared_sockets() -> list[socket.socket]:
    """Return the socket that a supervisor passed to all shards, or an empty list."""
    descriptor = os.environ.pop(SHARED_SOCKET_VARIABLE, None)
    if descriptor is None:
        return []
    shared = socket.socket(fileno=int(descriptor))
    # All shards accept from this socket, and each connection goes to a single shard.
    shared.setblocking(False)
    return [shared]


def endpoint_of(listening: socket.socket, config: ServiceConfig) -> str:
    """Return the URL of a bound socket."""
    scheme = "http" if config.tls_certificate_file is None else "https"
    host, port = listening.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
