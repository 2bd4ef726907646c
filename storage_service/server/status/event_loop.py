"""Walking over all tables on the event loop without holding it: others run in between."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from typing import Final, TypeVar

__all__ = ["in_slices"]

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
