"""Who waits for new rows of a table, and waking them. Event loop only; nothing ever polls."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from streamhouse.storage_service.errors import OverloadedError

__all__ = ["ANY_BUCKET", "WaiterLimit", "Wakeups", "joint_waiter"]

ANY_BUCKET: Final = -1
"""Waits for every bucket of the table."""


@dataclass
class WaiterLimit:
    """How many may wait in the whole service, and how many do."""

    waiters_max: int
    count: int = 0


class Wakeups:
    """The waiters of one table.

    A caller checks its condition and calls `waiter` without awaiting in between, so no wakeup is
    lost; a woken caller checks again.
    """

    def __init__(self, limit: WaiterLimit) -> None:
        self._limit = limit
        self.count = 0
        """How many wait."""
        self._waiters: dict[int, set[asyncio.Future[None]]] = {}

    def waiter(self, bucket: int, *, timeout_s: float | None) -> asyncio.Future[None]:
        """Return a future that is done when `bucket` changed, the time is up, or all are woken.

        Raises `OverloadedError` when too many wait. Awaiting or cancelling it frees its place.
        """
        return joint_waiter(self._limit, {self: (bucket,)}, timeout_s=timeout_s)

    def waiting(self, bucket: int) -> set[asyncio.Future[None]]:
        """Return those who wait for `bucket`, to be added to and taken from."""
        return self._waiters.setdefault(bucket, set())

    def wake(self, buckets: Iterable[int]) -> None:
        """Wake who waits for one of `buckets` or for any."""
        for bucket in (*buckets, ANY_BUCKET):
            for future in tuple(self._waiters.get(bucket, ())):
                _finish(future)

    def wake_all(self) -> None:
        """Wake everybody: the table is gone, or the service stops."""
        for waiting in tuple(self._waiters.values()):
            for future in tuple(waiting):
                _finish(future)


def joint_waiter(
    limit: WaiterLimit, buckets: Mapping[Wakeups, Iterable[int]], *, timeout_s: float | None
) -> asyncio.Future[None]:
    """Return one future for buckets of several tables, as `Wakeups.waiter` does.

    All tables of a service share `limit`. Without any bucket only the time wakes it.
    """
    if limit.count >= limit.waiters_max:
        raise OverloadedError(
            f"{limit.waiters_max} requests are already waiting for new rows"
            " (waiting_fetches_max); try again later"
        )
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()
    timer = None if timeout_s is None else loop.call_later(timeout_s, _finish, future)
    places = [wakeups.waiting(bucket) for wakeups, own in buckets.items() for bucket in own]
    for waiting in places:
        waiting.add(future)
    for wakeups in buckets:
        wakeups.count += 1
    limit.count += 1

    def forget(_: asyncio.Future[None]) -> None:
        limit.count -= 1
        for wakeups in buckets:
            wakeups.count -= 1
        for waiting in places:
            waiting.discard(future)
        if timer is not None:
            timer.cancel()

    future.add_done_callback(forget)
    return future


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
