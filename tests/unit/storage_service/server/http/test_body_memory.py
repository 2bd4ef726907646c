"""Bodies hold what has arrived, wait for room, and never for each other."""

from __future__ import annotations

import asyncio
import contextlib
import random

import pytest

from streamhouse.storage_service.server.http.body_memory import (
    PROGRESS_BYTES,
    SLOW_AFTER_S,
    BodyMemory,
    HeldBody,
)


async def _turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.parametrize("seed", range(20))
async def test_bodies_that_arrive_together_all_get_room_and_never_pass_the_limit(seed: int) -> None:
    """Far more than fits, piece by piece in any order; each is kept for a while and given back."""
    choice = random.Random(seed)
    bytes_max = choice.choice([1_000, 1_500, 4_000])
    memory = BodyMemory(bytes_max, body_bytes_max=1_000)
    peak = 0

    async def one() -> None:
        nonlocal peak
        left = choice.randrange(1, 1_001)
        with memory.body() as body:
            while left:
                piece = choice.randrange(1, left + 1)
                await body.add(piece)
                left -= piece
                peak = max(peak, memory.held)
                for _ in range(choice.randrange(3)):
                    await asyncio.sleep(0)
            body.end()
            for _ in range(choice.randrange(5)):
                await asyncio.sleep(0)

    tasks = [asyncio.ensure_future(one()) for _ in range(60)]
    for task in choice.sample(tasks, 10):
        await asyncio.sleep(0)
        # Clients go away, also while they wait.
        task.cancel()
    await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
    assert all(task.cancelled() or task.exception() is None for task in tasks)
    assert sum(task.cancelled() for task in tasks) <= 10
    assert peak <= bytes_max
    assert memory.held == 0


async def test_whole_bodies_that_fill_the_memory_still_get_room_for_their_rows() -> None:
    """Bodies that wait take what each answer frees: without a reserve no row was ever stored."""
    memory = BodyMemory(4_000, body_bytes_max=1_000)
    bodies = [memory.body() for _ in range(3)]
    for body in bodies:
        await body.add(1_000)
        body.end()
    with memory.body() as first, memory.body() as second:
        assert first.adds_at_once(1_000)
        bodies[0].__exit__()
        waiting = asyncio.ensure_future(second.add(1_000))
        await _turns()
        assert not waiting.done()

        assert bodies[1].adds_at_once(1_000)
        assert not bodies[2].adds_at_once(1)
        assert memory.held == 4_000

        bodies[1].__exit__()
        await waiting
        assert memory.held == 3_000
    bodies[2].__exit__()
    assert memory.held == 0


async def test_half_sent_bodies_that_stall_give_their_room_to_those_who_wait() -> None:
    now_s = 0.0
    memory = BodyMemory(12 * PROGRESS_BYTES, body_bytes_max=PROGRESS_BYTES, clock_s=lambda: now_s)
    ended: list[HeldBody] = []

    with (
        memory.body() as first,
        contextlib.ExitStack() as stack,
        memory.body() as sound,
    ):
        second = stack.enter_context(memory.body())
        for body in (first, second, sound):
            body.begin(lambda body=body: ended.append(body))
        await first.add(2 * PROGRESS_BYTES)
        await second.add(8 * PROGRESS_BYTES)
        with memory.body() as late:
            waiting = asyncio.ensure_future(late.add(2 * PROGRESS_BYTES))
            await _turns()
            memory.look_for_slow()
            assert not ended

            now_s = SLOW_AFTER_S
            await sound.add(PROGRESS_BYTES)
            memory.look_for_slow()

            # The largest of those that nearly stopped; what goes on arriving is let be.
            assert ended == [second]
            assert second.is_refused
            assert "bodies_bytes_max" in second.refusal().message
            assert not waiting.done()
            stack.close()
            await waiting
            late.end()
    assert memory.held == 0


async def test_a_caller_who_has_most_of_the_memory_gives_way_to_others_and_not_to_itself() -> None:
    now_s = 0.0
    memory = BodyMemory(10_000, body_bytes_max=4_000, clock_s=lambda: now_s)
    ended: list[str] = []

    with contextlib.ExitStack() as stack:

        def body(name: str, caller: str) -> HeldBody:
            made = stack.enter_context(memory.body(caller))
            made.begin(lambda: ended.append(name))
            return made

        small, large = body("small", "greedy"), body("large", "greedy")
        await small.add(2_000)
        await large.add(3_900)
        own = asyncio.ensure_future(body("own", "greedy").add(1_000))
        await _turns()
        memory.look_for_slow()
        assert not ended

        other = asyncio.ensure_future(body("other", "modest").add(1_000))
        await _turns()
        memory.look_for_slow()
        assert ended == ["large"]
        own.cancel()
        other.cancel()
        await asyncio.wait([own, other])
    assert memory.held == 0


async def test_nobody_gives_way_while_there_is_room_for_all() -> None:
    memory = BodyMemory(1_000, body_bytes_max=500, clock_s=lambda: 1e9)

    with memory.body() as body:
        body.begin(lambda: pytest.fail("it was refused"))
        await body.add(400)
        memory.look_for_slow()
        assert not body.is_refused
