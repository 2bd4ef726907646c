"""The memory of request bodies, counted by the bytes that have arrived.

Guarantees:
- All bodies being received or handled hold at most `bytes_max` bytes.
- An announced body without any bytes sent holds no memory and delays no request.
- A body waits while memory is short. The body that began first always gets memory in the end, so
  two partly received bodies never wait for each other.
- Waiting callers take turns (`fair_shares.py`).
- While a body waits, a body with a nearly stopped sender gives up its memory. If a caller has more
  than half of the memory and another caller waits, the largest body of the first caller gives up.
- While the service stops, a body with a nearly stopped sender is given up.
Event loop only.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

from streamhouse.core.errors import OverloadedError, UnavailableError
from streamhouse.storage_service.server.http.fair_shares import FairShares

__all__ = ["BodyMemory", "HeldBody"]

# A sender that takes longer for so many bytes gives way to waiting bodies.
PROGRESS_BYTES: Final = 256 << 10
SLOW_AFTER_S: Final = 2.0
_LOOK_INTERVAL_S: Final = 0.25
# Slow bodies free at most about an eighth of the memory at once: a look must not refuse them all.
_FREED_SHARE: Final = 8


class BodyMemory(FairShares):
    """The memory of all bodies; a single body has up to `body_bytes_max` bytes."""

    def __init__(
        self,
        bytes_max: int,
        *,
        body_bytes_max: int,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        # The remaining bytes are reserved for the body that began first, which always fits in the
        # end, and for the rows of whole bodies: these are soon stored, and wait for no memory.
        super().__init__(max(0, bytes_max - body_bytes_max))
        self.bytes_max = bytes_max
        self.now_s = clock_s
        """The clock that measures the speed of senders."""
        # The bodies still being received, in the order of their beginnings.
        self._receiving: dict[HeldBody, None] = {}
        self._look: asyncio.TimerHandle | None = None
        self.is_stopping = False

    def fits(self, share: str, amount: int) -> bool:  # noqa: ARG002
        return self.held + amount <= self._capacity

    def body(self, share: str = "") -> HeldBody:
        """Return a context manager with the memory of a caller's body."""
        body = HeldBody(self, share)
        self._receiving[body] = None
        return body

    def end(self, body: HeldBody) -> None:
        """Release a body's memory."""
        byte_count, body.bytes_held = body.bytes_held, 0
        self._receiving.pop(body, None)
        self.give_back(body.share, byte_count)

    def add(self, body: HeldBody, byte_count: int) -> bool:
        """Count bytes that have arrived, or the rows of a whole body.

        Returns False, and counts nothing, if memory is short.
        """
        may_use_all = body is next(iter(self._receiving), None) or body not in self._receiving
        if self.held + byte_count > (self.bytes_max if may_use_all else self._capacity):
            return False
        self.take(body.share, byte_count)
        body.bytes_held += byte_count
        return True

    async def wait_and_add(self, body: HeldBody, byte_count: int) -> None:
        """Count bytes that have arrived as soon as memory is free."""

        async def wait(turn: asyncio.Future[None]) -> None:
            body.turn = turn
            if self._look is None:
                self.look_for_slow()
            await turn

        body.waiting_bytes = byte_count
        try:
            await self.take_in_turn(body.share, byte_count, wait)
        except asyncio.CancelledError:
            body.is_refused = True
            raise
        finally:
            body.turn, body.waiting_bytes = None, 0
        body.bytes_held += byte_count
        body.mark_progress()

    def end_receiving(self, body: HeldBody) -> None:
        """Mark the body as received; the next body becomes the first."""
        self._receiving.pop(body, None)
        if self._waiting:
            self._admit()

    def stop(self) -> None:
        """From now on slow bodies give up even if no body waits: the service stops."""
        self.is_stopping = True
        self.look_for_slow()

    def look_for_slow(self) -> None:
        """End slow bodies, largest first, while a body waits or the service stops."""
        if self._look is not None:
            self._look.cancel()
            self._look = None
        if not (self._waiting or (self.is_stopping and self._receiving)):
            return
        now_s = self.now_s()
        slow = [b for b in self._receiving if b.turn is None and b.is_slow(now_s)]
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
        bytes_by_share: Counter[str] = Counter()
        for body in self._receiving:
            bytes_by_share[body.share] += body.bytes_held
        share, bytes_held = bytes_by_share.most_common(1)[0]
        if bytes_held * 2 <= self.bytes_max or self._waiting.keys() <= {share}:
            return []
        bodies = [b for b in self._receiving if b.share == share and not b.is_refused]
        return sorted(bodies, key=lambda body: -body.bytes_held)[:1]

    def _admit(self) -> None:
        """Give memory to the body that began first, then to the callers in turn."""
        first = next(iter(self._receiving), None)
        turn = None if first is None else first.turn
        if (
            first is not None
            and turn is not None
            and turn in self._waiting.get(first.share, ())
            and self.held + first.waiting_bytes <= self.bytes_max
        ):
            self._grant(first.share, turn)
        super()._admit()


class HeldBody:
    """One body: the bytes in memory, and the speed of the sender."""

    __slots__ = (
        "_end_reading",
        "_memory",
        "_progress_bytes",
        "_progress_s",
        "bytes_held",
        "is_refused",
        "share",
        "turn",
        "waiting_bytes",
    )

    def __init__(self, memory: BodyMemory, share: str) -> None:
        self._memory = memory
        self.share = share
        """The caller's key in `FairShares`."""
        self.turn: asyncio.Future[None] | None = None
        """The place in the caller's queue while the body waits."""
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
        """Count bytes that have arrived, or the rows of a whole body, if memory is free now."""
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

    def refusal(self) -> OverloadedError | UnavailableError:
        """Return the error for the sender of a refused body."""
        if self._memory.is_stopping:
            return UnavailableError(
                "the service is stopping, and the request body arrives too slowly; try again later"
                " or on its successor"
            )
        return OverloadedError(
            f"request bodies hold {self._memory.held} of {self._memory.bytes_max} bytes"
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
