"""Waiting for what another process does, which tells nobody."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

__all__ = ["wait_until"]

_PATIENCE_S: Final = 120.0


def wait_until(is_so: Callable[[], object], what: str | Callable[[], object]) -> None:
    """Return once it is; fail with `what`, or with what it says then, if it never is."""
    deadline_s, pause = time.monotonic() + _PATIENCE_S, threading.Event()
    while not is_so():
        if time.monotonic() > deadline_s:
            raise AssertionError(f"never seen: {what() if callable(what) else what}")
        pause.wait(0.02)
