"""A request begins where it arrives, without a task, and gets one before it waits.

Most requests never wait: their task would cost more than their answer. Whoever is about to wait for
a future, a timer or the client says so by `await own_task()`; the connection then makes the task,
in which the same coroutine goes on.
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import Coroutine, Generator
from typing import Any

__all__ = ["go_on", "own_task"]


@types.coroutine
def own_task() -> Generator[None, None, None]:
    """Return in a task: at once if this is one."""
    if asyncio.current_task() is None:
        yield


@types.coroutine
def go_on(begun: Coroutine[Any, None, None]) -> Generator[Any, None, None]:
    """Run what waits in `own_task` to its end; `await` refuses a coroutine that has begun."""
    yield from begun
