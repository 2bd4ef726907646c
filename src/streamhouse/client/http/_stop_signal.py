"""StopSignal: ends a caller's waits for the service, from any thread."""

from __future__ import annotations

import threading
import time
from contextvars import ContextVar
from typing import Final

from streamhouse.client.http._http_connection import Connection

__all__ = ["STOP", "StopSignal", "pause"]


class StopSignal:
    """Tells one caller to end. Thread-safe; once set, the signal stays set.

    The caller's pauses and waits for bytes end at once: the caller's connection is shut down.
    """

    def __init__(self) -> None:
        self._is_set = threading.Event()
        self._lock = threading.Lock()
        self._connection: Connection | None = None

    def is_set(self) -> bool:
        """Return whether the caller is to end."""
        return self._is_set.is_set()

    def set(self) -> None:
        """End the caller; a second call is harmless."""
        with self._lock:
            self._is_set.set()
            if self._connection is not None:
                self._connection.interrupt()

    def attach(self, connection: Connection) -> None:
        """Interrupt this connection when the signal is set, and no longer the previous one."""
        with self._lock:
            self._connection = connection
            if self._is_set.is_set():
                connection.interrupt()

    def detach(self, connection: Connection) -> bool:
        """Release the connection; return whether it was left uninterrupted."""
        with self._lock:
            if self._connection is connection:
                self._connection = None
            return not self._is_set.is_set()

    def wait(self, seconds: float) -> None:
        """Return after a pause, or when the signal is set."""
        if seconds:
            self._is_set.wait(seconds)


STOP: Final[ContextVar[StopSignal | None]] = ContextVar("STOP", default=None)
"""The signal that may end the calls of this context; most contexts have none."""


def pause(seconds: float) -> None:
    """Pause between two requests of a call, until the signal ends the call."""
    stop = STOP.get()
    if stop is not None:
        stop.wait(seconds)
    elif seconds:
        time.sleep(seconds)
