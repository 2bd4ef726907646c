"""The event loop: how late it is, and walks over all tables that do not hold it.

Everybody waits as long as it is late for whatever holds it up.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from typing import Final, TypeVar

from prometheus_client import Histogram

__all__ = ["LOOP_LAG_MS", "LoopLag", "in_slices"]

LOOP_LAG_MS: Final = 100

_T = TypeVar("_T")
_SLICE_S: Final = 0.003


async def in_slices(items: Iterable[_T]) -> AsyncIterator[_T]:
    """Yield `items`, letting others run in between; what is met may have changed meanwhile."""
    end = time.perf_counter() + _SLICE_S
    for item in items:
        yield item
        if time.perf_counter() > end:
            await asyncio.sleep(0)
            end = time.perf_counter() + _SLICE_S


class LoopLag:
    """Measures how much too late a timer is; looked at every `LOOP_LAG_MS`."""

    def __init__(self, lag_seconds: Histogram) -> None:
        self._lag_seconds = lag_seconds
        self._due = float("inf")

    async def look(self) -> None:
        """Observe how late this look is; the first one is never late."""
        self._lag_seconds.observe(max(0.0, time.perf_counter() - self._due))
        self._due = time.perf_counter() + LOOP_LAG_MS / 1000
