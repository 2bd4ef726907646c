"""The memory of request bodies, counted by the bytes that have arrived.

Guarantees:
- All bodies being received or handled hold at most `bytes_max` bytes.
- An announced body without any bytes sent holds no memory and delays no request.
- A body waits while memory is short. The body that began first always gets memory in the end, so
  two partly received bodies never wait for each other.
- While a body waits, a body with a nearly stopped sender gives up its memory. If a caller has more
  than half of the memory and another caller waits, the largest body of the first caller gives up.
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

# A sender that takes longer for so many bytes gives way to waiting bodies.
PROGRESS_BYTES: Final = 256 << 10
SLOW_AFTER_S: Final = 2.0
_LOOK_INTERVAL_S: Final = 0.25
# Slow bodies free at most about an eighth of the memory at once: a look must not refuse them all.
_FREED_SHARE: Final = 8


class BodyMemory:
    """The memory of all bodies; a single body has up to `body_bytes_max` bytes."""

    def __init__(
        self,
        bytes_max: int,
        *,
        body_bytes_max: int,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.bytes_max = bytes_max
        # The remaining bytes are reserved for the body that began first, which always fits.
        self._shared_max = max(0, bytes_max - body_bytes_max)
        self.now_s = clock_s
        """The clock that measures the speed of senders."""
        self.bytes_held = 0
        # The bodies still being received, in the order of their beginnings.
        self._receiving: dict[HeldBody, None] = {}
        self._waiting: dict[HeldBody, asyncio.Future[None]] = {}
        self._look: asyncio.TimerHandle | None = None

    def body(self, caller: str = "") -> HeldBody:
        """Return a context manager with the memory of a caller's body."""
        body = HeldBody(self, caller)
        self._receiving[body] = None
        return body

    def end(self, body: HeldBody) -> None:
        """Release a body's memory."""
        self.bytes_held -= body.bytes_held
        body.bytes_held = 0
        self.end_receiving(body)

    def add(self, body: HeldBody, byte_count: int) -> bool:
        """Count bytes that have arrived; return False, and count nothing, if memory is short."""
        total_bytes = self.bytes_held + byte_count
        is_first = body is next(iter(self._receiving), None)
        if total_bytes > (self.bytes_max if is_first else self._shared_max):
            return False
        self.bytes_held = total_bytes
        body.bytes_held += byte_count
        return True

    async def wait_and_add(self, body: HeldBody, byte_count: int) -> None:
        """Count bytes that have arrived as soon as memory is free."""
        waiter = asyncio.get_running_loop().create_future()
        body.waiting_bytes = byte_count
        self._waiting[body] = waiter
        if self._look is None:
            self.look_for_slow()
        try:
            # `_wake` counts the bytes before it wakes this body.
            await waiter
        except asyncio.CancelledError:
            body.is_refused = True
            raise
        finally:
            self._waiting.pop(body, None)
            body.waiting_bytes = 0

    def end_receiving(self, body: HeldBody) -> None:
        """Mark the body as received; the next body becomes the first."""
        self._receiving.pop(body, None)
        if self._waiting:
            self._wake()

    def look_for_slow(self) -> None:
        """While a body waits, end the reading of slow bodies, largest first."""
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
        """Return the largest body of a caller with over half of the memory while a caller waits."""
        bytes_by_caller: Counter[str] = Counter()
        for body in self._receiving:
            bytes_by_caller[body.caller] += body.bytes_held
        caller, bytes_held = bytes_by_caller.most_common(1)[0]
        if bytes_held * 2 <= self.bytes_max or all(b.caller == caller for b in self._waiting):
            return []
        bodies = [b for b in self._receiving if b.caller == caller and not b.is_refused]
        return sorted(bodies, key=lambda body: -body.bytes_held)[:1]

    def _wake(self) -> None:
        """Give memory to the body that began first, then to the bodies in the order of waiting."""
        for body in itertools.chain(itertools.islice(self._receiving, 1), self._waiting):
            waiter = self._waiting.get(body)
            if waiter is None or waiter.done():
                continue
            if not self.add(body, body.waiting_bytes):
                return
            body.mark_progress()
            waiter.set_result(None)


class HeldBody:
    """One body: the bytes in memory, and the speed of the sender."""

    __slots__ = (
        "_end_reading",
        "_memory",
        "_progress_bytes",
        "_progress_s",
        "bytes_held",
        "caller",
        "is_refused",
        "waiting_bytes",
    )

    def __init__(self, memory: BodyMemory, caller: str) -> None:
        self._memory = memory
        self.caller = caller
        self.bytes_held = 0
        self.waiting_bytes = 0
        """The bytes that the body waits for."""
        self.is_refused = False
        """Whether the body was given up for lack of memory."""
        self._progress_s = memory.now_s()
        self._progress_bytes = PROGRESS_BYTES
        self._end_reading: Callable[[], None] = _nothing

    def __enter__(self) -> HeldBody:
        return self

    def __exit__(self, *_: object) -> None:
        self._memory.end(self)

    def begin(self, end_reading: Callable[[], None]) -> None:
        """Register the function that ends the reading of this body at once."""
        self._end_reading = end_reading

    def adds_at_once(self, byte_count: int) -> bool:
        """Count bytes that have arrived if memory is free now."""
        return self._memory.add(self, byte_count)

    async def add(self, byte_count: int) -> None:
        """Count bytes that have arrived; waits for free memory."""
        if not self._memory.add(self, byte_count):
            await self._memory.wait_and_add(self, byte_count)
        if self.bytes_held >= self._progress_bytes:
            self.mark_progress()

    def end(self) -> None:
        """Mark the body as received."""
        self._end_reading = _nothing
        self._memory.end_receiving(self)

    def refusal(self) -> OverloadedError:
        """Return the error for the sender of a refused body."""
        return OverloadedError(
            f"request bodies hold {self._memory.bytes_held} of {self._memory.bytes_max} bytes"
            " (bodies_bytes_max) and this one did not get room in time; try again later"
        )

    def mark_progress(self) -> None:
        """Start a new measurement of the sender's speed."""
        self._progress_s = self._memory.now_s()
        self._progress_bytes = self.bytes_held + PROGRESS_BYTES

    def is_slow(self, now_s: float) -> bool:
        """Whether the sender has sent less than `PROGRESS_BYTES` within `SLOW_AFTER_S`."""
        return not self.is_refused and now_s - self._progress_s >= SLOW_AFTER_S

    def give_way(self) -> None:
        """Refuse the body and end the reading."""
        self.is_refused = True
        self._end_reading()


def _nothing() -> None:
    """Do nothing: no reading is in progress."""
