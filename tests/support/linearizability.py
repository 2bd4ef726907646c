"""Whether what was read and written of some keys fits one order of all calls, key by key.

A history is linearizable if every call can be put at one moment between its start and its answer so
that each read has what the write before it wrote. That is judged for each key by itself: all keys
together are linearizable if each is (Herlihy and Wing, 1990). The search is Lowe's just-in-time
linearization of the one of Wing and Gong (1993): calls start and are answered in the order of
time, and all states are kept that the register may be in. A call is put in order only when an
answer asks for it, so that few states are kept however long the history is.

A write without an answer may take effect at any moment after it started, or never. A read without
one says nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

__all__ = ["Call", "History", "find_contradiction"]

Value = int | str | None
"""What a register has; None: the key is not there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A read that found `value`, or a write of it; times are of one clock.

    `answered_ns` is None where the outcome is unknown.
    """

    key: int
    kind: Literal["read", "write"]
    value: Value
    started_ns: int
    answered_ns: int | None

    def __post_init__(self) -> None:
        assert self.answered_ns is None or self.started_ns <= self.answered_ns, self


class _State(NamedTuple):
    """A state the register may be in: its value, and the open calls that have taken effect."""

    value: Value
    done: frozenset[int]


class History:
    """Calls as they end, by many threads; each thread appends to a list of its own."""

    def __init__(self) -> None:
        self._parts: list[list[Call]] = []

    def part(self) -> list[Call]:
        """Return a list for one thread to append its calls to."""
        part: list[Call] = []
        self._parts.append(part)
        return part

    def calls(self) -> list[Call]:
        """Return every call so far."""
        return [call for part in self._parts for call in list(part)]


def find_contradiction(calls: Iterable[Call], *, initial: Value = None) -> str | None:
    """Return what is wrong with a history, None if it is linearizable.

    Every key has the value `initial` at first.
    """
    by_key: defaultdict[int, list[Call]] = defaultdict(list)
    for call in calls:
        if call.kind == "write" or call.answered_ns is not None:
            by_key[call.key].append(call)
    for key in sorted(by_key):
        found = _find_of_key(by_key[key], initial)
        if found is not None:
            return f"key {key}: {found}"
    return None


def _find_of_key(calls: list[Call], initial: Value) -> str | None:
    states = {_State(initial, frozenset())}
    is_open: set[int] = set()
    # Writes that may still take effect, or never: those that will have no answer.
    may_come: set[int] = set()
    for number, is_answer in _in_order_of_time(calls):
        if calls[number].answered_ns is None:
            may_come.add(number)
        elif not is_answer:
            is_open.add(number)
        else:
            reached = {
                _State(state.value, state.done - {number})
                for state in _reachable(states, calls, is_open, may_come)
                if number in state.done
            }
            if not reached:
                return _describe(calls, number, states, is_open | may_come)
            is_open.remove(number)
            states = set(_least(reached, may_come))
    return None


def _describe(calls: list[Call], number: int, states: set[_State], is_open: set[int]) -> str:
    values = sorted({str(state.value) for state in states})
    beside = [calls[i] for i in sorted(is_open - {number})]
    return f"{calls[number]} fits no order: it had one of {values} before, open were {beside}"


def _in_order_of_time(calls: list[Call]) -> Iterator[tuple[int, bool]]:
    """Yield starts and answers; at one instant starts come first, so that both orders are open."""
    moments = [(call.started_ns, False, i) for i, call in enumerate(calls)]
    moments += [(c.answered_ns, True, i) for i, c in enumerate(calls) if c.answered_ns is not None]
    for _, is_answer, number in sorted(moments):
        yield number, is_answer


def _reachable(
    states: set[_State], calls: list[Call], is_open: set[int], may_come: set[int]
) -> set[_State]:
    """Return the states that any of the open calls lead to, in any order.

    A write that may come takes effect just before a read that finds it. At any other place it would
    be overwritten unseen, which is no different from never.
    """
    found, news = set(states), list(states)
    while news:
        value, done = news.pop()
        for number in is_open - done:
            call = calls[number]
            spent: list[frozenset[int]] = [frozenset()]
            if call.kind == "read" and call.value != value:
                spent = [frozenset({i}) for i in may_come - done if calls[i].value == call.value]
            for also in spent:
                following = _State(call.value, done | also | {number})
                if following not in found:
                    found.add(following)
                    news.append(following)
    return found


def _least(states: set[_State], may_come: set[int]) -> Iterator[_State]:
    """Leave out states that can do no more than another: it has spent more of what may come."""
    by_rest: defaultdict[tuple[Value, frozenset[int]], list[frozenset[int]]] = defaultdict(list)
    for value, done in states:
        by_rest[value, done - may_come].append(done & may_come)
    for (value, rest), spent in by_rest.items():
        for one in spent:
            if not any(other < one for other in spent):
                yield _State(value, rest | one)
