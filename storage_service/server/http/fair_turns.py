"""Whose call is the next on a worker thread: callers take turns, and none has all threads.

However many calls one caller has waiting, another one's waits for few of them at most. The service
itself is one of the callers. Event loop only.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections import Counter, deque
from collections.abc import AsyncIterator
from typing import Final

__all__ = ["SHARE", "FairTurns"]

SHARE: Final[contextvars.ContextVar[str]] = contextvars.ContextVar("share", default="the service")
"""Whose share of what is shared the running request uses; see `AccessControl`."""


class FairTurns:
    """Hands out `count` places; one caller has all but one of them at most."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._of_one_max = max(count - 1, 1)
        self._taken: Counter[str] = Counter()
        # In the order in which callers have their turn.
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for a place, and keep it."""
        share = SHARE.get()
        if self._may_take(share):
            self._take(share)
        else:
            await self._wait(share)
        try:
            yield
        finally:
            self._give_back(share)

    def _may_take(self, share: str) -> bool:
        return self._free > 0 and self._taken[share] < self._of_one_max

    def _take(self, share: str) -> None:
        self._free -= 1
        self._taken[share] += 1

    def _give_back(self, share: str) -> None:
        self._free += 1
        self._taken[share] -= 1
        if not self._taken[share]:
            del self._taken[share]
        for waiting in list(self._waiting):
            if self._free and self._may_take(waiting):
                self._call(waiting)

    def _call(self, share: str) -> None:
        """Give the first call of `share` a place; its caller goes to the end of the line."""
        line = self._waiting.pop(share)
        future = line.popleft()
        if line:
            self._waiting[share] = line
        self._take(share)
        future.set_result(None)

    async def _wait(self, share: str) -> None:
        future = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(share, deque()).append(future)
        try:
            await future
        except asyncio.CancelledError:
            line = self._waiting.get(share)
            if line is not None and future in line:
                line.remove(future)
                if not line:
                    del self._waiting[share]
            else:
                self._give_back(share)
            raise
