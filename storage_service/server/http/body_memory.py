"""How many bytes request bodies hold together: what has arrived counts, not what was announced.

Guarantees:
- bodies being received or handled never hold more than `bytes_max` together
- a body announced and not sent holds nothing, so it keeps nobody waiting
- where there is no room a body waits; the one that began first always gets room in the end, so
  bodies that have arrived by halves never wait for each other
- while others wait, a body whose sender has nearly stopped gives its room up, and so does the
  largest one of a caller who has more than half of the memory when another caller waits
Event loop only.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

from streamhouse.core.errors import OverloadedError

__all__ = ["BodyMemory", "HeldBody"]

# A sender that takes longer for so many bytes gives way to those who wait.
PROGRESS_BYTES: Final = 256 << 10
SLOW_AFTER_S: Final = 2.0
_LOOK_INTERVAL_S: Final = 0.25
# What slow bodies free at once, as a share of all: one look must not refuse all of them.
_FREED_SHARE: Final = 8


class BodyMemory:
    """The memory of all bodies, of which one may have up to `body_bytes_max` bytes."""

    def __init__(
        self,
        bytes_max: int,
        *,
        body_bytes_max: int,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.bytes_max = bytes_max
        # The rest is for the body that began first: it can always be received as a whole.
        self._shared_max = max(0, bytes_max - body_bytes_max)
        self.now_s = clock_s
        """The time by which senders are judged."""
        self.bytes_held = 0
        # Those still being received, in the order in which they began.
        self._receiving: dict[HeldBody, None] = {}
        self._waiting: dict[HeldBody, asyncio.Future[None]] = {}
        self._look: asyncio.TimerHandle | None = None

    def body(self, caller: str = "") -> HeldBody:
        """Return the memory of a caller's body: a context manager that gives it back."""
        body = HeldBody(self, caller)
        self._receiving[body] = None
        return body

    def end(self, body: HeldBody) -> None:
        """Take a body's memory back."""
        self.bytes_held -= body.bytes_held
        body.bytes_held = 0
        self.end_receiving(body)

    def add(self, body: HeldBody, byte_count: int) -> bool:
        """Count bytes that have arrived; False if there is no room for them now."""
        held = self.bytes_held + byte_count
        is_first = body is next(iter(self._receiving), None)
        if held > (self.bytes_max if is_first else self._shared_max):
            return False
        self.bytes_held = held
        body.bytes_held += byte_count
        return True

    async def wait_and_add(self, body: HeldBody, byte_count: int) -> None:
        """Count bytes that have arrived as soon as there is room."""
        waiter = asyncio.get_running_loop().create_future()
        body.wanted_bytes = byte_count
        self._waiting[body] = waiter
        if self._look is None:
            self.look_for_slow()
        try:
            # Whoever makes room counts the bytes before it wakes this body.
            await waiter
        except asyncio.CancelledError:
            body.is_refused = True
            raise
        finally:
            self._waiting.pop(body, None)
            body.wanted_bytes = 0

    def end_receiving(self, body: HeldBody) -> None:
        """Say that the body is whole: it is the next one's turn to be the first."""
        self._receiving.pop(body, None)
        if self._waiting:
            self._wake()

    def look_for_slow(self) -> None:
        """While somebody waits, let bodies that hardly arrive give their room up, largest first."""
        if self._look is not None:
            self._look.cancel()
            self._look = None
        if not self._waiting:
            return
        now_s = self.now_s()
        slow = [b for b in self._receiving if b not in self._waiting and b.is_slow(now_s)]
        slow.sort(key=lambda body: -body.bytes_held)
        freed = 0
        for body in (*slow, *self._of_the_greedy()):
            if freed * _FREED_SHARE >= self.bytes_max:
                break
            freed += body.bytes_held
            body.give_way()
        self._look = asyncio.get_running_loop().call_later(_LOOK_INTERVAL_S, self.look_for_slow)

    def _of_the_greedy(self) -> list[HeldBody]:
        """Return the largest body of a caller who has most of the memory others wait for."""
        held: Counter[str] = Counter()
        for body in self._receiving:
            held[body.caller] += body.bytes_held
        caller, bytes_held = held.most_common(1)[0]
        if bytes_held * 2 <= self.bytes_max or all(b.caller == caller for b in self._waiting):
            return []
        bodies = [b for b in self._receiving if b.caller == caller and not b.is_refused]
        return sorted(bodies, key=lambda body: -body.bytes_held)[:1]

    def _wake(self) -> None:
        """Give room to the body that began first, then to those who wait longest."""
        for body in itertools.chain(itertools.islice(self._receiving, 1), self._waiting):
            waiter = self._waiting.get(body)
            if waiter is None or waiter.done():
                continue
            if not self.add(body, body.wanted_bytes):
                return
            body.mark_progress()
            waiter.set_result(None)


class HeldBody:
    """One body: what it holds, and how fast it arrives."""

    __slots__ = (
        "_end_reading",
        "_memory",
        "_progress_bytes",
        "_progress_s",
        "bytes_held",
        "caller",
        "is_refused",
        "wanted_bytes",
    )

    def __init__(self, memory: BodyMemory, caller: str) -> None:
        self._memory = memory
        self.caller = caller
        self.bytes_held = 0
        self.wanted_bytes = 0
        """What it waits for."""
        self.is_refused = False
        """Whether it was given up because there was no room for it."""
        self._progress_s = memory.now_s()
        self._progress_bytes = PROGRESS_BYTES
        self._end_reading: Callable[[], None] = _nothing

    def __enter__(self) -> HeldBody:
        return self

    def __exit__(self, *_: object) -> None:
        self._memory.end(self)

    def begin(self, end_reading: Callable[[], None]) -> None:
        """Say how to end the reading of this body at once."""
        self._end_reading = end_reading

    def adds_at_once(self, byte_count: int) -> bool:
        """Count bytes that have arrived if there is room for them now."""
        return self._memory.add(self, byte_count)

    async def add(self, byte_count: int) -> None:
        """Count bytes that have arrived; waits for room."""
        if not self._memory.add(self, byte_count):
            await self._memory.wait_and_add(self, byte_count)
        if self.bytes_held >= self._progress_bytes:
            self.mark_progress()

    def end(self) -> None:
        """Say that the body is whole."""
        self._end_reading = _nothing
        self._memory.end_receiving(self)

    def refusal(self) -> OverloadedError:
        """What its sender is told when it `is_refused`."""
        return OverloadedError(
            f"request bodies hold {self._memory.bytes_held} of {self._memory.bytes_max} bytes"
            " (bodies_bytes_max) and this one did not get room in time; try again later"
        )

    def mark_progress(self) -> None:
        """Its sender has done its part until now."""
        self._progress_s = self._memory.now_s()
        self._progress_bytes = self.bytes_held + PROGRESS_BYTES

    def is_slow(self, now_s: float) -> bool:
        """Whether its sender has not sent much for a while."""
        return not self.is_refused and now_s - self._progress_s >= SLOW_AFTER_S

    def give_way(self) -> None:
        """End its reading."""
        self.is_refused = True
        self._end_reading()


def _nothing() -> None:
    """Nobody reads this body."""
