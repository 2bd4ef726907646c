"""Clients that send request after request and read no answer."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Sequence

__all__ = ["send_without_reading"]

_PACKET_BYTES_MIN = 256 << 10
_PACKETS = 60


def send_without_reading(
    address: tuple[str, int],
    requests: Sequence[bytes],
    *,
    between: Callable[[], object],
) -> None:
    """Send each of `requests` again and again over a connection of its own, and close them all.

    A connection sends up to 15 MiB, as far as the service reads it. `between` is called after each
    packet: a call of somebody who does read.
    """
    with contextlib.ExitStack() as stack:
        connections = []
        for request in requests:
            connection = stack.enter_context(socket.create_connection(address))
            connection.setblocking(False)
            packet = request * (_PACKET_BYTES_MIN // len(request) + 1)
            connections.append((connection, packet))
        for _ in range(_PACKETS):
            for connection, packet in connections:
                # A full socket, or a connection that the service has closed, takes nothing.
                with contextlib.suppress(OSError):
                    connection.send(packet)
            between()
