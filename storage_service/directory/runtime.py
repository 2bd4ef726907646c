"""The shared parts of all modules that work on a service's tables; made once, at the start.

A clock, a thread pool for blocking work, an observer, and a lock, held while the set of tables, or
of table files, changes.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

__all__ = ["Observer", "RunBlocking", "Runtime", "clock_us"]

_T = TypeVar("_T")


def clock_us() -> int:
    """Return the time in microseconds since the epoch, UTC. No other code reads the wall clock."""
    return time.time_ns() // 1_000


class Observer(Protocol):
    """Receives events of background work, on the event loop."""

    def committed(self, *, units: int, seconds: float) -> None:
        """Count one group commit: the number of appends, the seconds of writing and syncing."""

    def segments_deleted(self, count: int) -> None:
        """Count log segments that retention deleted."""

    def unread_rows_deleted(self, count: int) -> None:
        """Count rows deleted from the log before a consumer's reading."""

    def rows_expired(self, count: int) -> None:
        """Count rows that were deleted for their age."""

    def transaction_ended(self, how: str, *, row_count: int, seconds: float) -> None:
        """Count a transaction that was committed, skipped, aborted or timed out."""


class RunBlocking(Protocol):
    """Runs `function(*args)` on a worker thread."""

    def __call__(self, function: Callable[..., _T], *args: Any) -> Awaitable[_T]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """See the module. `monotonic_s` measures durations.

    `thread_s` measures the processor time of the calling thread.
    """

    executor: Executor
    observer: Observer
    clock_us: Callable[[], int] = clock_us
    monotonic_s: Callable[[], float] = time.monotonic
    thread_s: Callable[[], float] = time.thread_time
    changing_files: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def run(self, function: Callable[..., _T], *args: Any) -> _T:
        """Run the blocking `function` on a thread of the pool; called on the event loop."""
        work = functools.partial(contextvars.copy_context().run, function, *args)
        return await asyncio.get_running_loop().run_in_executor(self.executor, work)
