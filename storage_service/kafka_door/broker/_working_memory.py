"""The memory that records take while they are read, of all requests together.

Who finds no room waits; first come, first served. Who has room waits for no more of it, so all get
theirs in the end: one that wants more than there is gets it when nobody else has any. Event loop
only.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from typing import Final

__all__ = ["WorkingMemory"]


class WorkingMemory:
    """See the module."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max: Final = bytes_max
        self.bytes_held = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @contextlib.asynccontextmanager
    async def room(self, byte_count: int) -> AsyncIterator[None]:
        """Hold so much, as soon as there is room for it."""
        await self._take(byte_count)
        try:
            yield
        finally:
            self._give(byte_count)

    async def _take(self, byte_count: int) -> None:
        if not self._waiting and self._has_room(byte_count):
            self.bytes_held += byte_count
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((byte_count, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._give(byte_count)
            else:
                with contextlib.suppress(ValueError):
                    self._waiting.remove((byte_count, turn))
                self._wake()
            raise

    def _has_room(self, byte_count: int) -> bool:
        return not self.bytes_held or self.bytes_held + byte_count <= self._bytes_max

    def _give(self, byte_count: int) -> None:
        self.bytes_held -= byte_count
        self._wake()

    def _wake(self) -> None:
        while self._waiting and self._has_room(self._waiting[0][0]):
            byte_count, turn = self._waiting.popleft()
            if not turn.done():
                self.bytes_held += byte_count
                turn.set_result(None)
