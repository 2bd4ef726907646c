"""The memory of answers, in total and by caller, from before the build until the answer is sent.

Guarantees:
- All answers hold at most `answers_bytes_max`, plus the answers just being built.
- A caller never holds more than the memory that stays free. A caller that reads no answers gets
  half of the memory, ten such callers get an eleventh each, and the next caller always gets memory.
- A request without memory waits a moment in its caller's queue; callers take turns. After the wait
  the request is refused with the retriable error `overloaded`. Nothing is built during the wait.
Small answers are not counted: a connection holds one small answer, in the buffer of its socket.
Event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, Protocol, TypeVar

from streamhouse.core.errors import OverloadedError
from streamhouse.storage_service.server.http.fair_shares import FairShares

__all__ = ["SMALL_ANSWER_BYTES", "AnswerHold", "AnswerMemory"]

SMALL_ANSWER_BYTES: Final = 64 << 10
"""Answers up to this size are not counted."""
_WAITING_MAX: Final = 100
_WAIT_S: Final = 5.0


class Answered(Protocol):
    """The parts of an `HttpExchange` that `AnswerMemory` needs."""

    hold: AnswerHold | None
    """The memory of the answer, released once the answer is sent."""

    @property
    def share(self) -> str:
        """The caller's key in `FairShares`."""

    async def wait(self, waiter: asyncio.Future[None]) -> None:
        """Await `waiter`; raises when the client disconnects meanwhile."""


class Built(Protocol):
    """A built answer."""

    @property
    def byte_count(self) -> int:
        """The number of bytes."""


_Built = TypeVar("_Built", bound=Built)


class AnswerHold:
    """The bytes of one answer."""

    def __init__(self, memory: AnswerMemory, share: str, byte_count: int) -> None:
        self._memory = memory
        self._share = share
        self.byte_count = byte_count

    def resize(self, byte_count: int) -> bool:
        """Change the size; return False, and change nothing, if memory is short."""
        growth = byte_count - self.byte_count
        if growth > 0:
            if not self._memory.fits(self._share, growth):
                return False
            self._memory.take(self._share, growth)
        else:
            self._memory.give_back(self._share, -growth)
        self.byte_count = byte_count
        return True

    def release(self) -> None:
        """Release all bytes."""
        self.resize(0)


class AnswerMemory(FairShares):
    """The memory of all answers."""

    def __init__(self, bytes_max: int, *, wait_s: float = _WAIT_S) -> None:
        super().__init__(bytes_max)
        self._wait_s = wait_s

    @property
    def answer_bytes_max(self) -> int:
        """The largest answer that may be built."""
        return self._capacity // 4

    def fits(self, share: str, amount: int) -> bool:
        """Whether a caller may hold a further `amount` of bytes now."""
        free = self._capacity - self.held
        held_by_caller = self._held[share]
        if held_by_caller == 0:
            # A caller without memory may take all free memory.
            return min(amount, self._capacity) <= free
        return held_by_caller + amount <= free - amount

    async def build(
        self,
        exchange: Answered,
        byte_count: int,
        build: Callable[[int], Awaitable[_Built]],
    ) -> _Built:
        """Return the result of `build`; `exchange` holds the bytes of the result from now on.

        `byte_count` is the expected size, which `build` gets as its argument. A result larger than
        the free memory is dropped, and built again once memory is free.
        Raises `OverloadedError` when memory is short for too long.
        """
        while True:
            await self.hold(exchange, byte_count)
            built = await build(byte_count)
            byte_count = built.byte_count
            hold = exchange.hold = exchange.hold or AnswerHold(self, exchange.share, 0)
            if hold.resize(0 if byte_count <= SMALL_ANSWER_BYTES else byte_count):
                return built
            del built

    def holds_at_once(self, exchange: Answered, byte_count: int) -> bool:
        """Hold `byte_count` if memory is free and no request of the caller waits.

        Small answers need no memory.
        """
        if byte_count <= SMALL_ANSWER_BYTES:
            return True
        if not self.take_at_once(exchange.share, byte_count):
            return False
        exchange.hold = AnswerHold(self, exchange.share, byte_count)
        return True

    async def hold(self, exchange: Answered, byte_count: int) -> None:
        """Hold `byte_count` for the answer of `exchange`; waits a moment for free memory."""
        if exchange.hold is not None:
            exchange.hold.release()
            exchange.hold = None
        if self.holds_at_once(exchange, byte_count):
            return
        share = exchange.share
        if len(self._waiting.get(share, ())) >= _WAITING_MAX:
            raise self._no_room(share)
        if not await self.take_in_turn(share, byte_count, exchange.wait, wait_s=self._wait_s):
            raise self._no_room(share)
        exchange.hold = AnswerHold(self, share, byte_count)

    def hold_built(self, exchange: Answered, byte_count: int, *, is_done: bool = False) -> None:
        """Hold `byte_count` for an answer that is already built, without waiting.

        With `is_done` the answer reports a finished change and is never refused.
        """
        if exchange.hold is not None or byte_count <= SMALL_ANSWER_BYTES:
            return
        share = exchange.share
        if not is_done and not self.fits(share, byte_count):
            raise self._no_room(share)
        self.take(share, byte_count)
        exchange.hold = AnswerHold(self, share, byte_count)

    def _no_room(self, share: str) -> OverloadedError:
        return OverloadedError(
            f"answers that are not read yet hold {self.held} of {self._capacity} bytes"
            f" (answers_bytes_max), {self._held[share]} of them this caller's; read answers"
            " faster, or try again later"
        )
