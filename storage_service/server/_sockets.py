"""The sockets that a service listens on."""

from __future__ import annotations

import os
import socket

from streamhouse.core.errors import InvalidRequestError
from streamhouse.storage_service.config import SHARED_SOCKET_VARIABLE, ServiceConfig

__all__ = ["bound_socket", "endpoint_of", "shared_sockets"]


def bound_socket(host: str, port: int, *, option: str) -> socket.socket:
    """Return a bound socket that does not listen yet; raises `InvalidRequestError`.

    `option` is the command line option of the port, for the error message.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        # Without the protocol, asyncio would not set TCP_NODELAY: 44 ms for every answer.
        bound = socket.socket(family, kind, socket.IPPROTO_TCP)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        raise InvalidRequestError(
            f"cannot listen on {host} port {port}: {error.strerror}; choose another {option} (0"
            " picks a free one)"
        ) from error
    return bound


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
