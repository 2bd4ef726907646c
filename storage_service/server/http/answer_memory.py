"""How much memory answers hold, in all and by caller: from before one is built until it has left.

Guarantees:
- all answers together hold at most `answers_bytes_max`, and what is just being built beyond it
- a caller never holds more than is left free after it: one that reads nothing gets half, ten such
  get an eleventh each, and there is always room for the next one
- whoever has no room waits in the order of its own requests for a moment, callers taking turns, and
  is then refused with retriable `overloaded`; nothing is built meanwhile
Small answers are not counted: of these a connection holds one, in what its socket has not taken.
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
    """What is asked of a request that is answered."""

    hold: AnswerHold | None
    """What its answer holds; whoever answers releases it once the answer has left."""

    @property
    def share(self) -> str:
        """Whose share of the memory it uses: the caller's."""

    async def wait(self, waiter: asyncio.Future[None]) -> None:
        """Await `waiter`; raises when the client goes away meanwhile."""


class Built(Protocol):
    """What an answer is made of."""

    @property
    def byte_count(self) -> int:
        """How many bytes it has."""


_Built = TypeVar("_Built", bound=Built)


class AnswerHold:
    """The bytes of one answer of one caller."""

    def __init__(self, memory: AnswerMemory, share: str, byte_count: int) -> None:
        self._memory = memory
        self._share = share
        self.byte_count = byte_count

    def resize(self, byte_count: int) -> bool:
        """Hold so much instead; False, and as before, if there is no room for more."""
        more = byte_count - self.byte_count
        if more > 0:
            if not self._memory.fits(self._share, more):
                return False
            self._memory.take(self._share, more)
        else:
            self._memory.give_back(self._share, -more)
        self.byte_count = byte_count
        return True

    def release(self) -> None:
        """Hold nothing more."""
        self.resize(0)


class AnswerMemory(FairShares):
    """What all answers hold."""

    def __init__(self, bytes_max: int, *, wait_s: float = _WAIT_S) -> None:
        super().__init__(bytes_max)
        self._wait_s = wait_s

    @property
    def one_bytes_max(self) -> int:
        """The largest answer that may be built."""
        return self._most // 4

    def fits(self, share: str, amount: int) -> bool:
        """Whether a caller may hold so many bytes more now."""
        free = self._most - self.held
        own = self._held[share]
        if own == 0:
            # However little is left: one that has nothing goes before those that have.
            return min(amount, self._most) <= free
        return own + amount <= free - amount

    async def build(
        self,
        exchange: Answered,
        byte_count: int,
        build: Callable[[int], Awaitable[_Built]],
    ) -> _Built:
        """Return what `build` returns; `exchange` holds its bytes from now on.

        `byte_count` is how large it is expected to be, which `build` is given. What turns out
        larger than there is room for is dropped, and built again once there is.
        Raises `OverloadedError` when there is no room for too long.
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
        """Hold so much if there is room and nobody of the caller waits; small ones always have."""
        if byte_count <= SMALL_ANSWER_BYTES:
            return True
        if not self.take_at_once(exchange.share, byte_count):
            return False
        exchange.hold = AnswerHold(self, exchange.share, byte_count)
        return True

    async def hold(self, exchange: Answered, byte_count: int) -> None:
        """Hold `byte_count` for the answer of `exchange`, waiting a moment for room."""
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
        """As `hold` for an answer that is built, for which waiting would make it worse.

        With `is_done` it tells of something that was done, and is never refused.
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
            f"answers that are not read yet hold {self.held} of {self._most} bytes"
            f" (answers_bytes_max), {self._held[share]} of them this caller's; read answers"
            " faster, or try again later"
        )
