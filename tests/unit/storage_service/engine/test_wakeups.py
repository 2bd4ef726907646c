"""Who is woken by what."""

from __future__ import annotations

import asyncio

import pytest

from streamhouse.core.errors import OverloadedError
from streamhouse.storage_service.engine.wakeups import (
    ANY_BUCKET,
    WaiterLimit,
    Wakeups,
    Watch,
)


async def test_a_change_wakes_who_waits_for_that_bucket_or_for_any() -> None:
    wakeups = Wakeups(WaiterLimit(10))
    first, second, any_bucket = (
        wakeups.waiter(bucket, timeout_s=None) for bucket in (0, 1, ANY_BUCKET)
    )

    wakeups.wake([1])

    assert (first.done(), second.done(), any_bucket.done()) == (False, True, True)
    first.cancel()


async def test_waking_all_wakes_everybody() -> None:
    wakeups = Wakeups(WaiterLimit(10))
    waiters = [wakeups.waiter(bucket, timeout_s=None) for bucket in (0, 1, ANY_BUCKET)]

    wakeups.wake_all()

    assert all(waiter.done() for waiter in waiters)


async def test_a_waiter_is_done_when_its_time_is_up() -> None:
    await Wakeups(WaiterLimit(1)).waiter(0, timeout_s=0.001)


async def test_places_are_limited_and_freed_by_waking_and_cancelling() -> None:
    limit = WaiterLimit(2)
    wakeups = Wakeups(limit)
    woken, cancelled = wakeups.waiter(0, timeout_s=9), wakeups.waiter(1, timeout_s=9)

    with pytest.raises(OverloadedError, match="2 requests are already waiting"):
        wakeups.waiter(0, timeout_s=None)
    wakeups.wake([0])
    cancelled.cancel()
    await woken
    await asyncio.sleep(0)

    assert limit.count == 0


async def test_one_may_wait_for_buckets_of_several_tables() -> None:
    limit = WaiterLimit(1)
    first, second = Wakeups(limit), Wakeups(limit)
    watch = Watch(limit, {first: (0, 1), second: (3,)})
    waiter = watch.waiter(timeout_s=None)
    assert (limit.count, first.count, second.count) == (1, 1, 1)
    with pytest.raises(OverloadedError):
        second.waiter(0, timeout_s=None)

    first.wake([2])
    second.wake([0, 1])
    assert not waiter.done()
    second.wake([3])
    await waiter
    assert watch.take_woken() == {(second, 3)}
    # It waits on, and what is woken meanwhile is not missed.
    again = watch.waiter(timeout_s=None)
    assert not again.done()
    first.wake([0, 1])
    await again
    second.wake([3])
    assert watch.waiter(timeout_s=None).done()
    assert watch.take_woken() == {(first, 0), (first, 1), (second, 3)}
    watch.close()

    assert (limit.count, first.count, second.count) == (0, 0, 0)
    # Nothing of it is left where nothing changed.
    assert not first.waiting(0)
    assert not first.waiting(1)


async def test_one_may_wait_for_no_more_than_the_time() -> None:
    limit = WaiterLimit(1)
    watch = Watch(limit, {})
    assert limit.count == 1
    await watch.waiter(timeout_s=0.001)
    assert not watch.take_woken()
    watch.close()
    assert limit.count == 0
