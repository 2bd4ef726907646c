"""How late the event loop is: everybody waits so long for whatever holds it up."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from prometheus_client import Histogram

__all__ = ["measure_loop_lag"]

INTERVAL_S: Final = 0.1


async def measure_loop_lag(lag_seconds: Histogram) -> None:
    """Observe ten times a second how much too late a timer is, for ever."""
    while True:
        due = time.perf_counter() + INTERVAL_S
        await asyncio.sleep(INTERVAL_S)
        lag_seconds.observe(max(0.0, time.perf_counter() - due))
