"""The event loop: how late it is, and walks over all tables that do not hold it.

Everybody waits as long as it is late for whatever holds it up.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from typing import Final, TypeVar

from prometheus_client import Histogram

__all__ = ["in_slices", "measure_loop_lag"]

_T = TypeVar("_T")
_SLICE_S: Final = 0.003
_LAG_INTERVAL_S: Final = 0.1


async def in_slices(items: Iterable[_T]) -> AsyncIterator[_T]:
    """Yield `items`, letting others run in between; what is met may have changed meanwhile."""
    end = time.perf_counter() + _SLICE_S
    for item in items:
        yield item
        if time.perf_counter() > end:
            await asyncio.sleep(0)
            end = time.perf_counter() + _SLICE_S


async def measure_loop_lag(lag_seconds: Histogram) -> None:
    """Observe ten times a second how much too late a timer is, for ever."""
    while True:
        due = time.perf_counter() + _LAG_INTERVAL_S
        await asyncio.sleep(_LAG_INTERVAL_S)
        lag_seconds.observe(max(0.0, time.perf_counter() - due))
