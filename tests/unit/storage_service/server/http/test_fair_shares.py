"""Turns on worker threads: one caller's many calls do not keep another one's waiting."""

from __future__ import annotations

import asyncio

from streamhouse.storage_service.server.http.fair_shares import SHARE, FairTurns


async def _call(turns: FairTurns, share: str, done: list[str], ends: asyncio.Event) -> None:
    SHARE.set(share)
    async with turns.turn():
        await ends.wait()
        done.append(share)


async def test_a_caller_leaves_one_place_and_callers_take_turns() -> None:
    turns, done, ends = FairTurns(3), [], asyncio.Event()
    greedy = [asyncio.ensure_future(_call(turns, "a", done, ends)) for _ in range(20)]
    await asyncio.sleep(0)

    free = asyncio.Event()
    free.set()
    await asyncio.wait_for(_call(turns, "b", done, free), 60)
    assert done == ["b"], "there is a place left for another caller"
    others = [asyncio.ensure_future(_call(turns, "c", done, ends)) for _ in range(2)]
    await asyncio.sleep(0)
    ends.set()
    await asyncio.gather(*greedy, *others)

    assert done.index("c") < 5
    assert len(done) == 23


async def test_a_place_that_is_free_while_the_next_one_goes_is_given_to_the_one_after_it() -> None:
    turns, done, ends = FairTurns(1), [], asyncio.Event()
    tasks = [asyncio.ensure_future(_call(turns, "a", done, ends)) for _ in range(3)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    # It is called before it has left the line.
    tasks[1].cancel()
    await asyncio.wait(tasks[:2])
    ends.set()
    await asyncio.wait_for(tasks[2], 60)

    assert all(task.cancelled() for task in tasks[:2])
    assert done == ["a"]


async def test_who_is_cancelled_leaves_no_place_taken() -> None:
    turns, done, ends = FairTurns(1), [], asyncio.Event()
    tasks = [asyncio.ensure_future(_call(turns, "a", done, ends)) for _ in range(3)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    tasks[0].cancel()
    await asyncio.sleep(0)
    ends.set()
    await asyncio.wait_for(tasks[2], 60)

    assert done == ["a"]
    await asyncio.wait_for(_call(turns, "b", done, ends), 60)
