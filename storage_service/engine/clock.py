"""The one place that reads the wall clock."""

from __future__ import annotations

import time

__all__ = ["clock_us"]


def clock_us() -> int:
    """Return the time in microseconds since the epoch, UTC."""
    return time.time_ns() // 1_000
