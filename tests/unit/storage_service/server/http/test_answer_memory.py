"""The memory of answers: bounded, shared fairly, given back."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamhouse.core.errors import OverloadedError
from streamhouse.storage_service.server.http._memory_return import MemoryReturn, give_back
from streamhouse.storage_service.server.http.answer_memory import (
    SMALL_ANSWER_BYTES,
    AnswerHold,
    AnswerMemory,
)

KIB = 1 << 10
ALL = 1_024 * KIB


class Built(NamedTuple):
    byte_count: int


class Request:
    """A request of one caller; `leave` makes its client go away."""

    def __init__(self, share: str) -> None:
        self.share = share
        self.hold: AnswerHold | None = None

    async def wait(self, waiter: asyncio.Future[None]) -> None:
        await waiter

    def done(self) -> None:
        if self.hold is not None:
            self.hold.release()
            self.hold = None


async def _hold_until_refused(memory: AnswerMemory, share: str, size: int) -> list[Request]:
    requests = []
    while True:
        request = Request(share)
        try:
            await memory.hold(request, size)
        except OverloadedError:
            return requests
        requests.append(request)


async def test_one_caller_gets_half_and_each_other_one_as_much_as_is_left_after_it() -> None:
    memory = AnswerMemory(ALL, wait_s=0.001)
    greedy = await _hold_until_refused(memory, "a", 100 * KIB)
    assert memory.held == 500 * KIB

    await _hold_until_refused(memory, "b", 100 * KIB)
    assert memory.held == 700 * KIB
    # However many there are: who holds nothing gets what it needs, if it is there.
    await memory.hold(Request("c"), 300 * KIB)
    assert memory.held == 1_000 * KIB
    for request in greedy:
        request.done()
    assert memory.held == 500 * KIB


async def test_who_waits_gets_room_in_order_and_callers_take_turns() -> None:
    memory = AnswerMemory(ALL)
    first = Request("a")
    await memory.hold(first, ALL)
    came: list[str] = []

    async def one(share: str, name: str) -> None:
        request = Request(share)
        await memory.hold(request, 600 * KIB)
        came.append(name)
        request.done()

    tasks = []
    for share, name in (("a", "a1"), ("a", "a2"), ("b", "b1")):
        tasks.append(asyncio.ensure_future(one(share, name)))
        await asyncio.sleep(0)
    assert memory.waiting_count == 3
    first.done()
    await asyncio.gather(*tasks)

    assert came.index("a1") < came.index("a2")
    assert came.index("b1") < came.index("a2")
    assert (memory.held, memory.waiting_count) == (0, 0)


async def test_a_client_that_goes_away_while_it_waits_holds_nothing_and_no_place() -> None:
    memory = AnswerMemory(ALL)
    first = Request("a")
    await memory.hold(first, ALL)
    for is_granted in (False, True):
        waiting = asyncio.ensure_future(memory.hold(Request("b"), ALL))
        await asyncio.sleep(0)
        if is_granted:
            first.done()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert memory.waiting_count == 0
    assert memory.held == 0


async def test_what_turns_out_larger_is_built_again_once_there_is_room() -> None:
    memory = AnswerMemory(ALL)
    other, request = Request("a"), Request("b")
    await memory.hold(other, ALL // 2)
    expected: list[int] = []

    async def build(size: int) -> Built:
        expected.append(size)
        return Built(ALL)

    building = asyncio.ensure_future(memory.build(request, 1, build))
    while not memory.waiting_count:
        await asyncio.sleep(0)
    assert memory.held == ALL // 2
    other.done()

    assert await building == Built(ALL)
    assert expected == [1, ALL]
    assert memory.held == ALL


async def test_too_many_that_wait_are_refused_at_once_and_told_why() -> None:
    memory = AnswerMemory(ALL)
    await memory.hold(Request("a"), ALL)
    waiting = [asyncio.ensure_future(memory.hold(Request("a"), ALL)) for _ in range(100)]
    await asyncio.sleep(0)

    with pytest.raises(OverloadedError, match=r"\(answers_bytes_max\).*this caller's"):
        await memory.hold(Request("a"), ALL)
    for task in waiting:
        task.cancel()


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2 * ALL), st.booleans()), max_size=30)
)
async def test_what_is_held_is_what_requests_hold_and_never_too_much(
    steps: list[tuple[str, int, bool]],
) -> None:
    memory = AnswerMemory(ALL, wait_s=0)
    held: list[Request] = []
    for share, size, is_first_done in steps:
        request = Request(share)
        try:
            await memory.hold(request, size)
            held.append(request)
        except OverloadedError:
            assert memory.waiting_count == 0
        assert memory.held == sum(r.hold.byte_count for r in held if r.hold)
        # One answer alone may be larger than all: it could never be had otherwise.
        assert memory.held <= max([ALL, *(r.hold.byte_count for r in held if r.hold)])
        if is_first_done and held:
            held.pop(0).done()
    for request in held:
        request.done()
    assert memory.held == 0


async def test_small_answers_are_not_counted() -> None:
    memory = AnswerMemory(ALL)
    request = Request("a")
    await memory.hold(request, SMALL_ANSWER_BYTES)
    memory.hold_built(request, SMALL_ANSWER_BYTES)
    assert (request.hold, memory.held) == (None, 0)


def test_memory_goes_back_once_after_a_burst_and_not_while_it_lasts() -> None:
    held, ever = 0, 0

    returning = MemoryReturn(held_bytes=lambda: held, total_bytes=lambda: ever)
    assert [returning.is_due() for _ in range(3)] == [False] * 3
    held, ever = 100 << 20, 500 << 20
    assert [returning.is_due() for _ in range(3)] == [False] * 3
    held = 0
    assert [returning.is_due() for _ in range(4)] == [False, True, False, False]
    give_back()
