"""The event loop: the measurement of its lag, and walks over all tables in short slices.

A task that blocks the event loop delays all requests by the same time.
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
    """Yield `items`, running other tasks in between; an item may have changed meanwhile."""
    end = time.perf_counter() + _SLICE_S
    for item in items:
        yield item
        if time.perf_counter() > end:
            await asyncio.sleep(0)
            end = time.perf_counter() + _SLICE_S


class LoopLag:
    """Measures the lateness of a timer; `look` runs every `LOOP_LAG_MS`."""

    def __init__(self, lag_seconds: Histogram) -> None:
        self._lag_seconds = lag_seconds
        self._due = float("inf")

    async def look(self) -> None:
        """Observe the lateness of this look; the first look is never late."""
        self._lag_seconds.observe(max(0.0, time.perf_counter() - self._due))
        self._due = time.perf_counter() + LOOP_LAG_MS / 1000
