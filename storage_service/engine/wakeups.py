"""Readers waiting for new rows of a table, and their wakeups. Event loop only, without polling."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from streamhouse.core.errors import OverloadedError

__all__ = ["ANY_BUCKET", "WaiterLimit", "Wakeups", "Watch"]

ANY_BUCKET: Final = -1
"""Waits for every bucket of the table."""


@dataclass
class WaiterLimit:
    """The limit and the number of waiting requests of the whole service."""

    waiters_max: int
    count: int = 0


class Wakeups:
    """The waiting readers of one table.

    A caller checks its condition and calls `waiter` without an await in between, so no wakeup is
    lost; a woken caller checks again.
    """

    def __init__(self, limit: WaiterLimit) -> None:
        self._limit = limit
        self.count = 0
        """How many wait."""
        self.on_wake: Callable[[], None] | None = None
        """Called before the waiters wake; rows are visible by then, and no writer is answered."""
        self._waiting: dict[int, set[Watch]] = {}

    def waiter(self, bucket: int, *, timeout_s: float | None) -> asyncio.Future[None]:
        """Return a future done when `bucket` changes, the time is up, or all waiters are woken.

        Raises `OverloadedError` for too many waiting requests. The end of the future frees the
        place.
        """
        watch = Watch(self._limit, {self: (bucket,)})
        future = watch.waiter(timeout_s=timeout_s)
        future.add_done_callback(lambda _: watch.close())
        return future

    def waiting(self, bucket: int) -> set[Watch]:
        """Return the mutable set of watches of `bucket`."""
        return self._waiting.setdefault(bucket, set())

    def wake(self, buckets: Iterable[int]) -> None:
        """Wake the waiters of `buckets` and the waiters of any bucket."""
        buckets = tuple(buckets)
        if self.on_wake is not None:
            self.on_wake()
        for bucket in (*buckets, ANY_BUCKET):
            self._wake(bucket)

    def wake_all(self) -> None:
        """Wake all waiters: the table is gone, or the service stops."""
        for bucket in tuple(self._waiting):
            self._wake(bucket)

    def _wake(self, bucket: int) -> None:
        for watch in tuple(self._waiting.get(bucket, ())):
            watch.wake(self, bucket)


class Watch:
    """A repeated wait for buckets of several tables, until `close`.

    A wakeup between two waits is not lost: the next `waiter` is done at once.
    """

    def __init__(self, limit: WaiterLimit, buckets: Mapping[Wakeups, Iterable[int]]) -> None:
        """Raises `OverloadedError` for too many waiting requests; all tables share `limit`.

        Without any bucket only the time wakes.
        """
        if limit.count >= limit.waiters_max:
            raise OverloadedError(
                f"{limit.waiters_max} requests are already waiting for new rows"
                " (waiting_fetches_max); try again later"
            )
        self._limit = limit
        self._tables = tuple(buckets)
        self._places = [
            wakeups.waiting(bucket) for wakeups, numbers in buckets.items() for bucket in numbers
        ]
        self._woken: set[tuple[Wakeups, int]] = set()
        self._future: asyncio.Future[None] | None = None
        for waiting in self._places:
            waiting.add(self)
        for wakeups in self._tables:
            wakeups.count += 1
        limit.count += 1

    def waiter(self, *, timeout_s: float | None) -> asyncio.Future[None]:
        """Return a future done when a bucket is woken, or the time is up."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        if self._woken:
            future.set_result(None)
        elif timeout_s is not None:
            timer = loop.call_later(timeout_s, _finish, future)
            future.add_done_callback(lambda _: timer.cancel())
        self._future = future
        return future

    def wake(self, wakeups: Wakeups, bucket: int) -> None:
        """Note a changed bucket."""
        self._woken.add((wakeups, bucket))
        if self._future is not None:
            _finish(self._future)

    def take_woken(self) -> set[tuple[Wakeups, int]]:
        """Return the buckets that were woken since the last call."""
        woken, self._woken = self._woken, set()
        return woken

    def close(self) -> None:
        """Free the place. Call once."""
        self._limit.count -= 1
        for wakeups in self._tables:
            wakeups.count -= 1
        for waiting in self._places:
            waiting.discard(self)


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
