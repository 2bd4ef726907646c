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
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple, Protocol, TypeVar

from streamhouse.storage_service.errors import OverloadedError

__all__ = ["SMALL_ANSWER_BYTES", "AnswerHold", "AnswerMemory"]

_T = TypeVar("_T")

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
        ...

    async def wait(self, waiter: asyncio.Future[None]) -> None:
        """Await `waiter`; raises when the client goes away meanwhile."""
        ...


class AnswerHold:
    """The bytes of one answer of one caller."""

    def __init__(self, memory: AnswerMemory, caller: str, byte_count: int) -> None:
        self._memory = memory
        self._caller = caller
        self.byte_count = byte_count

    def resize(self, byte_count: int) -> bool:
        """Hold so much instead; False, and as before, if there is no room for more."""
        more = byte_count - self.byte_count
        if more > 0 and not self._memory.fits(self._caller, more):
            return False
        self.byte_count = byte_count
        self._memory.change(self._caller, more)
        return True

    def release(self) -> None:
        """Hold nothing more."""
        self.resize(0)


class _Waiter(NamedTuple):
    byte_count: int
    future: asyncio.Future[None]


class AnswerMemory:
    """What all answers hold."""

    def __init__(self, bytes_max: int, *, wait_s: float = _WAIT_S) -> None:
        self._bytes_max = bytes_max
        self._wait_s = wait_s
        self._held: Counter[str] = Counter()
        self._waiting: dict[str, deque[_Waiter]] = {}
        self.bytes_held = 0
        self.bytes_ever = 0
        """All that was ever held, added up."""

    @property
    def one_bytes_max(self) -> int:
        """The largest answer that may be built."""
        return self._bytes_max // 4

    @property
    def waiting_count(self) -> int:
        """How many answers wait for room."""
        return sum(map(len, self._waiting.values()))

    def fits(self, caller: str, byte_count: int) -> bool:
        """Whether `caller` may hold so much more now."""
        free = self._bytes_max - self.bytes_held
        own = self._held[caller]
        if own == 0:
            # However little is left: one that has nothing goes before those that have.
            return min(byte_count, self._bytes_max) <= free
        return own + byte_count <= free - byte_count

    async def build(
        self,
        exchange: Answered,
        byte_count: int,
        build: Callable[[int], Awaitable[tuple[_T, int]]],
    ) -> _T:
        """Return what `build` returns with its size; `exchange` holds that from now on.

        `byte_count` is how large it is expected to be, which `build` is given. What turns out
        larger than there is room for is dropped, and built again once there is.
        Raises `OverloadedError` when there is no room for too long.
        """
        while True:
            await self.hold(exchange, byte_count)
            value, size = await build(byte_count)
            hold = exchange.hold
            if size <= SMALL_ANSWER_BYTES:
                if hold is not None:
                    hold.release()
                return value
            if hold is None:
                hold = exchange.hold = AnswerHold(self, exchange.share, 0)
            if hold.resize(size):
                return value
            del value
            hold.release()
            byte_count = size

    def holds_at_once(self, exchange: Answered, byte_count: int) -> bool:
        """Hold so much if there is room and nobody of the caller waits; small ones always have."""
        if byte_count <= SMALL_ANSWER_BYTES:
            return True
        caller = exchange.share
        if caller in self._waiting or not self.fits(caller, byte_count):
            return False
        self.change(caller, byte_count)
        exchange.hold = AnswerHold(self, caller, byte_count)
        return True

    async def hold(self, exchange: Answered, byte_count: int) -> None:
        """Hold `byte_count` for the answer of `exchange`, waiting a moment for room."""
        if exchange.hold is not None:
            exchange.hold.release()
            exchange.hold = None
        if not self.holds_at_once(exchange, byte_count):
            await self._wait(exchange, exchange.share, byte_count)
            exchange.hold = AnswerHold(self, exchange.share, byte_count)

    def hold_built(self, exchange: Answered, byte_count: int, *, is_done: bool = False) -> None:
        """As `hold` for an answer that is built, for which waiting would make it worse.

        With `is_done` it tells of something that was done, and is never refused.
        """
        if exchange.hold is not None or byte_count <= SMALL_ANSWER_BYTES:
            return
        caller = exchange.share
        if not is_done and not self.fits(caller, byte_count):
            raise self._no_room(caller)
        self.change(caller, byte_count)
        exchange.hold = AnswerHold(self, caller, byte_count)

    def change(self, caller: str, more: int) -> None:
        """Count what `caller` holds more, or less; for `AnswerHold`."""
        self.bytes_held += more
        self._held[caller] += more
        if more > 0:
            self.bytes_ever += more
            return
        if not self._held[caller]:
            del self._held[caller]
        if self._waiting:
            self._admit()

    async def _wait(self, exchange: Answered, caller: str, byte_count: int) -> None:
        line = self._waiting.setdefault(caller, deque())
        if len(line) >= _WAITING_MAX:
            raise self._no_room(caller)
        loop = asyncio.get_running_loop()
        waiter = _Waiter(byte_count, loop.create_future())
        line.append(waiter)
        given_up = loop.call_later(self._wait_s, _resolve, waiter.future)
        is_admitted = False
        try:
            await exchange.wait(waiter.future)
            is_admitted = waiter not in line
        finally:
            given_up.cancel()
            if not is_admitted:
                self._leave(caller, waiter)
        if not is_admitted:
            raise self._no_room(caller)

    def _leave(self, caller: str, waiter: _Waiter) -> None:
        """Take back what a waiter that goes was given, or its place."""
        line = self._waiting.get(caller, ())
        if waiter in line:
            line.remove(waiter)  # type: ignore[union-attr]  # an empty tuple has nothing in it
            if not line:
                del self._waiting[caller]
            self._admit()
        else:
            self.change(caller, -waiter.byte_count)

    def _admit(self) -> None:
        """Give room to those waiting: one of each caller in turn, until none fits."""
        is_any = True
        while is_any:
            is_any = False
            for caller in list(self._waiting):
                line = self._waiting[caller]
                if not self.fits(caller, line[0].byte_count):
                    continue
                is_any = True
                waiter = line.popleft()
                # Its next one has its turn after those of the others.
                del self._waiting[caller]
                if line:
                    self._waiting[caller] = line
                self.change(caller, waiter.byte_count)
                _resolve(waiter.future)

    def _no_room(self, caller: str) -> OverloadedError:
        return OverloadedError(
            f"answers that are not read yet hold {self.bytes_held} of {self._bytes_max} bytes"
            f" (answers_bytes_max), {self._held[caller]} of them this caller's; read answers"
            " faster, or try again later"
        )


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
