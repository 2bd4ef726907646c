"""The judge of lookups across takeovers: it finds what brute force finds, and fast enough."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.linearizability import Call, find_contradiction


def call(
    kind: Literal["read", "write"], value: int | None, start: int, end: int | None, *, key: int = 0
) -> Call:
    return Call(key=key, kind=kind, value=value, started_ns=start, answered_ns=end)


LINEARIZABLE = {
    "nothing": [],
    "a key that was never written": [call("read", None, 0, 1)],
    "one call after the other": [call("write", 1, 0, 1), call("read", 1, 2, 3)],
    "a read during a write finds the old value, or the new one": [
        call("write", 1, 0, 10),
        call("read", None, 1, 2),
        call("read", 1, 3, 4),
    ],
    "two writes at once, in the order that the reads say": [
        call("write", 1, 0, 10),
        call("write", 2, 0, 10),
        call("read", 2, 11, 12),
        call("read", 2, 13, 14),
    ],
    "an unknown write never happened": [call("write", 1, 0, None), call("read", None, 5, 6)],
    "an unknown write happens late": [
        call("write", 1, 0, None),
        call("read", None, 5, 6),
        call("write", 2, 7, 8),
        call("read", 2, 9, 10),
        call("read", 1, 11, 12),
    ],
    "a delete": [call("write", 1, 0, 1), call("write", None, 2, 3), call("read", None, 4, 5)],
    "a read without an answer": [call("write", 1, 0, 1), call("read", 7, 2, None)],
    "calls of one instant are in any order": [call("read", 1, 5, 5), call("write", 1, 5, 6)],
}

NOT_LINEARIZABLE = {
    "an acknowledged write is lost": [call("write", 1, 0, 1), call("read", None, 2, 3)],
    "a value nobody wrote": [call("read", 7, 0, 1)],
    "a stale read after another has found the new value": [
        call("write", 1, 0, 1),
        call("write", 2, 2, 20),
        call("read", 2, 3, 4),
        call("read", 1, 5, 6),
    ],
    "two readers see two orders": [
        call("write", 1, 0, 10),
        call("write", 2, 0, 10),
        call("read", 1, 11, 12),
        call("read", 2, 13, 14),
    ],
    "an unknown write happens twice": [
        call("write", 1, 0, None),
        call("read", 1, 1, 2),
        call("write", 2, 3, 4),
        call("read", 1, 5, 6),
    ],
    "an unknown write is undone": [
        call("write", 1, 0, 1),
        call("write", 2, 2, None),
        call("read", 2, 3, 4),
        call("read", 1, 5, 6),
    ],
    "an unknown write happens before it started": [
        call("read", 1, 0, 1),
        call("write", 1, 2, None),
    ],
}


@pytest.mark.parametrize("name", LINEARIZABLE)
def test_a_history_that_fits_an_order_is_let_through(name: str) -> None:
    assert find_contradiction(LINEARIZABLE[name]) is None


@pytest.mark.parametrize("name", NOT_LINEARIZABLE)
def test_a_history_that_fits_no_order_is_found(name: str) -> None:
    found = find_contradiction(NOT_LINEARIZABLE[name])

    assert found is not None
    assert "key 0" in found


def test_each_key_is_judged_by_itself() -> None:
    calls = [call("write", 1, 0, 1, key=1), call("read", None, 2, 3, key=2)]

    assert find_contradiction(calls) is None
    assert "key 1" in str(find_contradiction([*calls, call("read", None, 2, 3, key=1)]))


def test_the_value_at_first_may_be_given() -> None:
    assert find_contradiction([call("read", 5, 0, 1)], initial=5) is None


def test_a_long_history_with_many_unknown_writes_is_judged() -> None:
    """Each unknown write stays possible for ever; states must not double with each."""
    calls = []
    for i in range(0, 4_000, 4):
        answered = None if i % 40 == 0 else 10 * i + 25
        calls.append(call("write", i, 10 * i, answered))
        calls += [call("write", i + n, 10 * i + n, 10 * i + 20 + n) for n in (1, 2)]
        calls += [call("read", i + 2, 10 * i + 30 + n, 10 * i + 33 + n) for n in (0, 1, 2)]

    assert find_contradiction(calls) is None
    assert find_contradiction([*calls, call("read", 1, 50_000, 50_001)]) is not None


@st.composite
def histories(draw: st.DrawFn) -> list[Call]:
    calls = []
    for _ in range(draw(st.integers(0, 6))):
        start = draw(st.integers(0, 8))
        lasts = draw(st.one_of(st.none(), st.integers(0, 6)))
        calls.append(
            call(
                draw(st.sampled_from(("read", "write"))),
                draw(st.sampled_from((None, 1, 2, 3))),
                start,
                None if lasts is None else start + lasts,
            )
        )
    return calls


@given(histories())
def test_it_finds_what_trying_every_order_finds(calls: list[Call]) -> None:
    assert (find_contradiction(calls) is None) == any(map(fits, orders(calls)))


def orders(calls: list[Call]) -> Iterator[tuple[Call, ...]]:
    """Yield every order of the answered calls, with any of the unanswered writes."""
    answered = [one for one in calls if one.answered_ns is not None]
    unknown = [one for one in calls if one.answered_ns is None and one.kind == "write"]
    for count in range(len(unknown) + 1):
        for happened in itertools.combinations(unknown, count):
            yield from itertools.permutations([*answered, *happened])


def fits(order: tuple[Call, ...]) -> bool:
    """Whether an order agrees with the time of the calls, and each read with the write before."""
    value = None
    for i, one in enumerate(order):
        if any(
            later.answered_ns is not None and later.answered_ns < one.started_ns
            for later in order[i:]
        ):
            return False
        if one.kind == "write":
            value = one.value
        elif one.value != value:
            return False
    return True
