"""Ports for servers that must know theirs before they start, or have it again after a kill.

They are below those that systems give to whoever asks for any: while a server is not there, no
connection of a test beside this one gets its port.
"""

from __future__ import annotations

import random
import socket
from collections import deque
from typing import Final

__all__ = ["free_port"]

_PORTS: Final = range(10_000, 20_000)
# Processes that test at the same time may have begun as copies of one.
_chance: Final = random.SystemRandom()
# So far above its port the store of tests listens for gRPC, too.
_GRPC_ABOVE: Final = 10_000
_given: Final = deque[int](maxlen=1_000)


def free_port(*, with_grpc: bool = False) -> int:
    """Return a port that is free now, not one of the last; `with_grpc`, so is the one above."""
    while True:
        port = _chance.choice(_PORTS)
        if port not in _given and _is_free(port):
            if with_grpc and not _is_free(port + _GRPC_ABOVE):
                continue
            _given.append(port)
            return port


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
