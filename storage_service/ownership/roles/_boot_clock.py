"""The clock that leases are measured by."""

from __future__ import annotations

import time

__all__ = ["boot_clock_s"]


def boot_clock_s() -> float:
    """Return seconds of a clock that goes on while the machine sleeps, unlike `time.monotonic`.

    A lease that was measured without the sleep would still hold when another owner has long begun.
    """
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
