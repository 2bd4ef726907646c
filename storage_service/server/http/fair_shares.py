"""Fair shares of a limited resource, such as memory or threads, between callers.

Each caller has a queue of waiting requests, and the callers take turns. A caller with many waiting
requests delays the requests of another caller only a little. The service itself is also a caller.
Event loop only.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import ClassVar, Final

__all__ = ["SHARE", "FairShares", "FairTurns", "WorkingMemory"]

SHARE: Final[contextvars.ContextVar[str]] = contextvars.ContextVar("share", default="the service")
"""The caller's key of the running request; see `AccessControl`."""


class FairShares(ABC):
    """A resource of size `capacity`, and the amount that each caller holds."""

    passes_over: ClassVar = True
    """Whether a request that fits may go before a waiting request that does not fit yet."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._held: Counter[str] = Counter()
        # Callers in the order of their turns; requests of a caller in the order of their arrival.
        self._waiting: dict[str, dict[asyncio.Future[None], int]] = {}
        self.held = 0
        """The amount that all callers hold."""
        self.held_ever = 0
        """The sum of all amounts ever taken."""

    @property
    def waiting_count(self) -> int:
        """The number of waiting requests."""
        return sum(map(len, self._waiting.values()))

    @abstractmethod
    def fits(self, share: str, amount: int) -> bool:
        """Whether the caller may take a further `amount` now."""

    def take(self, share: str, amount: int) -> None:
        """Add an amount to the caller's share, whether the amount fits or not."""
        self._held[share] += amount
        self.held += amount
        self.held_ever += amount

    def take_at_once(self, share: str, amount: int) -> bool:
        """Take an amount if the amount fits and no request of the caller waits."""
        is_behind = share in self._waiting or (self._waiting and not self.passes_over)
        if is_behind or not self.fits(share, amount):
            return False
        self.take(share, amount)
        return True

    async def take_in_turn(
        self,
        share: str,
        amount: int,
        wait: Callable[[asyncio.Future[None]], Awaitable[None]],
        *,
        wait_s: float | None = None,
    ) -> bool:
        """Take an amount in the caller's turn, once the amount fits; return False after `wait_s`.

        `wait` awaits the future of the turn. If `wait` raises, the request leaves the queue.
        """
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        self._waiting.setdefault(share, {})[future] = amount
        timer = None if wait_s is None else loop.call_later(wait_s, _resolve, future)
        is_taken = False
        try:
            await wait(future)
            is_taken = future not in self._waiting.get(share, ())
        finally:
            if timer is not None:
                timer.cancel()
            if not is_taken:
                self._leave(share, future, amount)
        return is_taken

    @contextlib.asynccontextmanager
    async def room(self, share: str, amount: int) -> AsyncIterator[None]:
        """Wait for an amount, and hold the amount within the context."""
        if not self.take_at_once(share, amount):
            await self.take_in_turn(share, amount, _awaited)
        try:
            yield
        finally:
            self.give_back(share, amount)

    def give_back(self, share: str, amount: int) -> None:
        """Release an amount of the caller's share."""
        self.held -= amount
        self._held[share] -= amount
        if not self._held[share]:
            del self._held[share]
        if self._waiting:
            self._admit()

    def _leave(self, share: str, future: asyncio.Future[None], amount: int) -> None:
        """Release a departing request's amount, or the request's place in the queue."""
        queue = self._waiting.get(share, {})
        if future not in queue:
            return self.give_back(share, amount)
        del queue[future]
        if not queue:
            del self._waiting[share]
        self._admit()

    def _admit(self) -> None:
        """Admit waiting requests, one of each caller in turn, until no request fits."""
        is_any = True
        while is_any:
            is_any = False
            for share in list(self._waiting):
                queue = self._waiting[share]
                future, amount = next(iter(queue.items()))
                if self.fits(share, amount):
                    is_any = True
                    self._grant(share, future)
                elif not self.passes_over:
                    return

    def _grant(self, share: str, future: asyncio.Future[None]) -> None:
        # The caller's next request waits for the turns of the other callers.
        queue = self._waiting.pop(share)
        amount = queue.pop(future)
        if queue:
            self._waiting[share] = queue
        self.take(share, amount)
        # A request that is just leaving releases the amount in `_leave`.
        _resolve(future)


class FairTurns(FairShares):
    """Places, such as threads; a single caller gets at most all places but one."""

    def fits(self, share: str, amount: int) -> bool:
        caller_max = max(self._capacity - 1, 1)
        return self.held + amount <= self._capacity and self._held[share] + amount <= caller_max

    def turn(self) -> AbstractAsyncContextManager[None]:
        """Wait for a place, and hold the place within the context."""
        return self.room(SHARE.get(), 1)


class WorkingMemory(FairShares):
    """The memory for decoding records.

    A request above the capacity gets memory when nothing else is held. Requests hold their memory
    while they work and never ask for more, so every request gets memory in the end.
    """

    passes_over = False

    def fits(self, share: str, amount: int) -> bool:  # noqa: ARG002
        return not self.held or self.held + amount <= self._capacity


async def _awaited(future: asyncio.Future[None]) -> None:
    await future


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
