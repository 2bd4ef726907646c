"""Access for writes to a table: any number of writes together, or a single commit alone.

Event loop only. First come, first served: a commit waits for the writes under way, and later writes
wait for the commit. Each table has a separate gate.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from typing import NamedTuple

from streamhouse.core.errors import StreamhouseError

__all__ = ["WriteGate"]


class _Waiting(NamedTuple):
    granted: asyncio.Future[None]
    is_alone: bool


class WriteGate:
    """The gate of one table."""

    def __init__(self) -> None:
        self._writes = 0
        self._is_held = False
        self._waiting: deque[_Waiting] = deque()
        self._refusal: StreamhouseError | None = None
        self._stop: StreamhouseError | None = None

    async def enter(self) -> None:
        """Begin a write; `leave` ends the write. Raises the error of `refuse` or `stop`."""
        self.check_open()
        self._check()
        if self._is_held or self._waiting:
            await self._wait(is_alone=False)
        else:
            self._writes += 1

    def leave(self) -> None:
        """End a write with visible or refused rows."""
        self._writes -= 1
        assert self._writes >= 0
        self._grant()

    @contextlib.asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Hold the table: no write is under way within the context."""
        await self._wait(is_alone=True)
        try:
            yield
        finally:
            self._release()

    def refuse(self, error: StreamhouseError) -> None:
        """Refuse all waiting and later callers with `error`."""
        self._refusal = error
        while self._waiting:
            granted = self._waiting.popleft().granted
            if not granted.done():
                granted.set_exception(_again(error))

    def allow(self) -> None:
        """Undo `refuse`."""
        self._refusal = None

    def stop(self, error: StreamhouseError) -> None:
        """Refuse all waiting and later writes for good, with `error`.

        Callers that hold the table alone without new writes, such as a backup, continue.
        """
        self._stop = error
        for waiting in [waiting for waiting in self._waiting if not waiting.is_alone]:
            self._waiting.remove(waiting)
            if not waiting.granted.done():
                waiting.granted.set_exception(_again(error))

    def resume(self) -> None:
        """Undo `stop`."""
        self._stop = None

    @property
    def is_stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stop is not None

    def check_open(self) -> None:
        """Raise the error of `stop`."""
        if self._stop is not None:
            raise _again(self._stop)

    def _check(self) -> None:
        if self._refusal is not None:
            raise _again(self._refusal)

    async def _wait(self, *, is_alone: bool) -> None:
        self._check()
        waiting = _Waiting(asyncio.get_running_loop().create_future(), is_alone)
        self._waiting.append(waiting)
        self._grant()
        try:
            await waiting.granted
        except asyncio.CancelledError:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
                self._grant()
            elif not waiting.granted.cancelled() and waiting.granted.exception() is None:
                # Granted and cancelled in the same moment: hand it on.
                if is_alone:
                    self._release()
                else:
                    self.leave()
            raise

    def _release(self) -> None:
        self._is_held = False
        self._grant()

    def _grant(self) -> None:
        while self._waiting and not self._is_held:
            first = self._waiting[0]
            if first.is_alone and self._writes:
                return
            self._waiting.popleft()
            if first.granted.done():
                continue
            if first.is_alone:
                self._is_held = True
            else:
                self._writes += 1
            first.granted.set_result(None)


def _again(error: StreamhouseError) -> StreamhouseError:
    # One instance raised in several tasks would collect all their traces.
    return type(error)(error.message)
