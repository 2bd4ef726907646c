"""What callers share: each has a part of it, and who has to wait does so in fair turns.

However much one caller waits for, another one's waits for little of it at most. The service itself
is one of the callers. Event loop only.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

__all__ = ["SHARE", "FairShares", "FairTurns"]

SHARE: Final[contextvars.ContextVar[str]] = contextvars.ContextVar("share", default="the service")
"""Whose share of what is shared the running request uses; see `AccessControl`."""


class FairShares(ABC):
    """Something of which there is `most`, and what each caller has of it."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: Counter[str] = Counter()
        # In the order in which callers have their turn; of each, in the order of its requests.
        self._waiting: dict[str, dict[asyncio.Future[None], int]] = {}
        self.held = 0
        """What all callers have."""
        self.held_ever = 0
        """All that they ever had, added up."""

    @property
    def waiting_count(self) -> int:
        """How many requests wait."""
        return sum(map(len, self._waiting.values()))

    @abstractmethod
    def fits(self, share: str, amount: int) -> bool:
        """Whether the caller may take so much more now."""

    def take(self, share: str, amount: int) -> None:
        """Count what the caller has more, whether it fits or not."""
        self._held[share] += amount
        self.held += amount
        self.held_ever += amount

    def take_at_once(self, share: str, amount: int) -> bool:
        """Take so much if it fits and nothing else of the caller waits."""
        if share in self._waiting or not self.fits(share, amount):
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
        """Take so much once it fits and others have had their turn; False after `wait_s`.

        `wait` awaits what it is given; when it raises, the place in the line is given up.
        """
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        self._waiting.setdefault(share, {})[future] = amount
        given_up = None if wait_s is None else loop.call_later(wait_s, _resolve, future)
        is_taken = False
        try:
            await wait(future)
            is_taken = future not in self._waiting.get(share, ())
        finally:
            if given_up is not None:
                given_up.cancel()
            if not is_taken:
                self._leave(share, future, amount)
        return is_taken

    def give_back(self, share: str, amount: int) -> None:
        """Count what the caller has no more."""
        self.held -= amount
        self._held[share] -= amount
        if not self._held[share]:
            del self._held[share]
        if self._waiting:
            self._admit()

    def _leave(self, share: str, future: asyncio.Future[None], amount: int) -> None:
        """Take back what was given to one that goes, or its place."""
        line = self._waiting.get(share, {})
        if future not in line:
            return self.give_back(share, amount)
        del line[future]
        if not line:
            del self._waiting[share]
        self._admit()

    def _admit(self) -> None:
        """Give those who wait what fits: one of each caller in turn, until none does."""
        is_any = True
        while is_any:
            is_any = False
            for share in list(self._waiting):
                line = self._waiting[share]
                future, amount = next(iter(line.items()))
                if not self.fits(share, amount):
                    continue
                is_any = True
                # The caller's next one has its turn after those of the others.
                del self._waiting[share], line[future]
                if line:
                    self._waiting[share] = line
                self.take(share, amount)
                # One that is just going gives it back.
                _resolve(future)


class FairTurns(FairShares):
    """Places, such as threads; one caller has all but one of them at most."""

    def fits(self, share: str, amount: int) -> bool:
        of_one_max = max(self._most - 1, 1)
        return self.held + amount <= self._most and self._held[share] + amount <= of_one_max

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for a place, and keep it."""
        share = SHARE.get()
        if not self.take_at_once(share, 1):
            await self.take_in_turn(share, 1, _awaited)
        try:
            yield
        finally:
            self.give_back(share, 1)


async def _awaited(future: asyncio.Future[None]) -> None:
    await future


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
