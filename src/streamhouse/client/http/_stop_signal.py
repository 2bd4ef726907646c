"""StopSignal: ends who waits for the service, from any thread."""

from __future__ import annotations

import threading
import time
from contextvars import ContextVar
from typing import Final

from streamhouse.client.http._http_connection import Connection

__all__ = ["STOP", "StopSignal", "pause"]


class StopSignal:
    """Tells one caller to end. Thread-safe; it is set once and stays so.

    The caller's pauses end at once, and so does its wait for bytes: its connection is shut down.
    """

    def __init__(self) -> None:
        self._is_set = threading.Event()
        self._lock = threading.Lock()
        self._connection: Connection | None = None

    def is_set(self) -> bool:
        """Whether the caller is to end."""
        return self._is_set.is_set()

    def set(self) -> None:
        """End the caller; twice is harmless."""
        with self._lock:
            self._is_set.set()
            if self._connection is not None:
                self._connection.interrupt()

    def ends(self, connection: Connection) -> None:
        """End this connection, in place of the one before, when the signal is set, or now."""
        with self._lock:
            self._connection = connection
            if self._is_set.is_set():
                connection.interrupt()

    def spares(self, connection: Connection) -> bool:
        """Let go of the connection; return whether it is as it was."""
        with self._lock:
            if self._connection is connection:
                self._connection = None
            return not self._is_set.is_set()

    def wait(self, seconds: float) -> None:
        """Return after a pause, or when the signal is set."""
        if seconds:
            self._is_set.wait(seconds)


STOP: Final[ContextVar[StopSignal | None]] = ContextVar("STOP", default=None)
"""What may end the calls made in this context; mostly nothing does."""


def pause(seconds: float) -> None:
    """Wait in between two requests of a call, unless the call is ended."""
    stop = STOP.get()
    if stop is not None:
        stop.wait(seconds)
    elif seconds:
        time.sleep(seconds)
