"""What everything that works on the tables of one service shares; made once, when it starts.

One clock, one pool of threads for what waits for the disk, one observer, and one lock that is held
while the set of tables, or of their files, changes.
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
    """Return the time in microseconds since the epoch, UTC. Nothing else reads the wall clock."""
    return time.time_ns() // 1_000


class Observer(Protocol):
    """Told of what happens in the background, on the event loop."""

    def committed(self, *, units: int, seconds: float) -> None:
        """Count one group commit: how many appends, how long writing and syncing took."""

    def segments_deleted(self, count: int) -> None:
        """Count log segments that retention deleted."""

    def unread_rows_deleted(self, count: int) -> None:
        """Count rows that left the log before a consumer had read them."""

    def rows_expired(self, count: int) -> None:
        """Count rows that were deleted because of their age."""

    def transaction_ended(self, how: str, *, row_count: int, seconds: float) -> None:
        """Count one that was committed, skipped, aborted or timed out."""


class RunBlocking(Protocol):
    """Runs `function(*args)` on a worker thread."""

    def __call__(self, function: Callable[..., _T], *args: Any) -> Awaitable[_T]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """See the module. `monotonic_s` measures how long something takes, or took.

    `thread_s` measures what the calling thread takes of the processor.
    """

    executor: Executor
    observer: Observer
    clock_us: Callable[[], int] = clock_us
    monotonic_s: Callable[[], float] = time.monotonic
    thread_s: Callable[[], float] = time.thread_time
    changing_files: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def run(self, function: Callable[..., _T], *args: Any) -> _T:
        """Run `function`, which blocks, on a thread of the pool; called on the event loop."""
        work = functools.partial(contextvars.copy_context().run, function, *args)
        return await asyncio.get_running_loop().run_in_executor(self.executor, work)
