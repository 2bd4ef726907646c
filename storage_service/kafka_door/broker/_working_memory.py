"""The working memory for decoding records, shared by all requests.

A request without room waits, first come, first served. A request with room never waits for more
room, so every request gets room in the end. A request above the limit gets room when nothing else
is held. Event loop only.
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
        """Hold `byte_count` bytes, once there is room."""
        await self._acquire(byte_count)
        try:
            yield
        finally:
            self._release(byte_count)

    async def _acquire(self, byte_count: int) -> None:
        if not self._waiting and self._has_room(byte_count):
            self.bytes_held += byte_count
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((byte_count, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._release(byte_count)
            else:
                with contextlib.suppress(ValueError):
                    self._waiting.remove((byte_count, turn))
                self._wake()
            raise

    def _has_room(self, byte_count: int) -> bool:
        return not self.bytes_held or self.bytes_held + byte_count <= self._bytes_max

    def _release(self, byte_count: int) -> None:
        self.bytes_held -= byte_count
        self._wake()

    def _wake(self) -> None:
        while self._waiting and self._has_room(self._waiting[0][0]):
            byte_count, turn = self._waiting.popleft()
            if not turn.done():
                self.bytes_held += byte_count
                turn.set_result(None)
