"""How code on the event loop hands work that blocks to another thread."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

__all__ = ["RunBlocking"]

_T = TypeVar("_T")


class RunBlocking(Protocol):
    """Runs `function(*args)` on a worker thread."""

    def __call__(self, function: Callable[..., _T], *args: Any) -> Awaitable[_T]: ...
