"""The clock for leases."""

from __future__ import annotations

import time

__all__ = ["boot_clock_s"]


def boot_clock_s() -> float:
    """Return seconds of a clock running during a machine's sleep, unlike `time.monotonic`.

    A lease measured without the sleep would still hold long after a takeover.
    """
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
