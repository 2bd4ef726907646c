"""A request begins without a task, in the callback of the connection, and gets a task to wait.

Most requests never wait, and a task would cost more than the answer. Code that is about to wait for
a future, a timer or the client calls `await own_task()` first. The connection then makes a task
that continues the coroutine.
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import Callable, Coroutine, Generator
from typing import Any

__all__ = ["continued", "own_task"]


@types.coroutine
def own_task() -> Generator[None, None, None]:
    """Return inside a task: at once if the caller already runs in a task."""
    if asyncio.current_task() is None:
        yield


def continued(begun: Coroutine[Any, None, None]) -> Callable[..., Any]:
    """Return the ASGI application that runs a coroutine waiting in `own_task` to its end."""
    return lambda *_: _go_on(begun)


@types.coroutine
def _go_on(begun: Coroutine[Any, None, None]) -> Generator[Any, None, None]:
    # `await` refuses a started coroutine.
    yield from begun
