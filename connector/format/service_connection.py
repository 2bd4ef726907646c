"""One client a process and service: Spark's workers are reused, and so are their connections."""

from __future__ import annotations

import os
import threading
from typing import Final

from streamhouse.storage_service.client import StorageClient

__all__ = ["client_for"]

_lock: Final = threading.Lock()
_clients: Final[dict[tuple[int, str, str | None], StorageClient]] = {}


def client_for(endpoint: str, token: str | None) -> StorageClient:
    """Return this process's client of the service; it stays open and is shared."""
    # Spark forks its workers: a connection must never be used by two processes.
    key = (os.getpid(), endpoint, token)
    with _lock:
        if key not in _clients:
            _clients[key] = StorageClient(endpoint, token=token)
        return _clients[key]
