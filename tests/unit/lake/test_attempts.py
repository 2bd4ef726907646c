"""The judgement of what became of a commit, against a catalog that does all that catalogs may do.

Every order of up to `EVENTS_MAX` events is gone through: commits are sent, answered in every way,
arrive late or twice; others commit, roll back and expire; the worker sees old states. Whatever is
judged dead must never exist, nor anything that comes from it; what is judged landed has landed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from streamhouse.lake._attempts import (
    Answer,
    Fate,
    Seen,
    Sent,
    Verdict,
    fate_of,
    judge,
)

EVENTS_MAX = 4
SENT_MAX = 2
Snapshots = tuple[tuple[int, int | None, int], ...]
"""(id, parent, sequence number); the parent of an expired one may be forgotten."""


@dataclass(frozen=True, slots=True)
class State:
    """A catalog's table, and what its worker knows and has sent."""

    head: int | None = None
    last: int = 0
    snapshots: Snapshots = ()
    # For the truth: who really came from whom; never forgotten.
    lineage: tuple[tuple[int, int | None], ...] = ()
    known: Seen | None = None
    history: tuple[Seen, ...] = ()
    sent: tuple[Sent, ...] = ()
    pending: tuple[int, ...] = ()
    dead: frozenset[int] = frozenset()

    def seen(self) -> Seen:
        by_id = {i: (parent, number) for i, parent, number in self.snapshots}
        return Seen(current_id=self.head, last_sequence_number=self.last, snapshots=by_id)

    def key(self) -> object:
        return repr(self)


def _added(state: State, snapshot_id: int, number: int) -> State:
    return replace(
        state,
        head=snapshot_id,
        last=number,
        snapshots=(*state.snapshots, (snapshot_id, state.head, number)),
        lineage=(*state.lineage, (snapshot_id, state.head)),
    )


def _arrived(state: State, sent: Sent) -> State | None:
    """The catalog's rule: None where it refuses."""
    assert sent.snapshot_id is not None
    is_new = all(i != sent.snapshot_id for i, _, _ in state.snapshots)
    is_later = sent.parent_id is None or sent.sequence_number > state.last
    if not (is_new and is_later and state.head == sent.parent_id):
        return None
    return _added(state, sent.snapshot_id, sent.sequence_number)


def _sendings(state: State) -> Iterator[State]:
    known = state.known
    if known is None or len(state.sent) == SENT_MAX:
        return
    sent = Sent(
        snapshot_id=100 + len(state.sent),
        parent_id=known.current_id,
        sequence_number=known.last_sequence_number + 1,
        answer=Answer.UNKNOWN,
    )

    def answered(after: State, answer: Answer, *, is_pending: bool = False) -> State:
        number = len(after.sent)
        pending = (*after.pending, number) if is_pending else after.pending
        return replace(after, sent=(*after.sent, replace(sent, answer=answer)), pending=pending)

    landed = _arrived(state, sent)
    yield answered(state, Answer.REFUSED)
    # Lost; late; a second copy of it still on its way.
    yield answered(state, Answer.UNKNOWN)
    yield answered(state, Answer.UNKNOWN, is_pending=True)
    yield answered(state, Answer.CONFLICT, is_pending=True)
    if landed is None:
        yield answered(state, Answer.CONFLICT)
    else:
        yield answered(landed, Answer.UNKNOWN)
        yield answered(landed, Answer.CONFLICT)


def _events(state: State) -> Iterator[State]:
    yield from _sendings(state)
    for number in state.pending:
        left = tuple(n for n in state.pending if n != number)
        yield replace(_arrived(state, state.sent[number]) or state, pending=left)
    yield _added(state, 200 + len(state.lineage), state.last + 1)
    parents = {i: parent for i, parent, _ in state.snapshots}
    for head in parents:
        if head != state.head:
            yield replace(state, head=head)
    if state.sent and all(sent.answer is Answer.UNKNOWN for sent in state.sent):
        # The main branch is removed. A table whose first commit was refused has none to remove.
        yield replace(state, head=None, known=None)
    for gone in parents:
        if gone != state.head:
            left = tuple(s for s in state.snapshots if s[0] != gone)
            yield replace(state, snapshots=left)
            yield replace(
                state, snapshots=tuple((i, None if p == gone else p, n) for i, p, n in left)
            )


def _looks(state: State) -> Iterator[State]:
    """The worker sees the table as it is, or as it was, but nothing older than it knows."""
    start = len(state.history) - 1 if state.known is None else state.history.index(state.known)
    for seen in state.history[start:]:
        dead = {
            sent.snapshot_id
            for sent in state.sent
            if sent.snapshot_id is not None and fate_of(sent, seen) is Fate.DEAD
        }
        yield replace(state, known=seen, dead=state.dead | dead)


def _check(state: State) -> None:
    parents = dict(state.lineage)
    for snapshot_id, _, _ in state.snapshots:
        found: int | None = snapshot_id
        while found is not None:
            assert found not in state.dead, f"{found} was judged dead: {state}"
            found = parents.get(found)
    for sent in state.sent:
        if state.known is not None and fate_of(sent, state.known) is Fate.LANDED:
            assert sent.snapshot_id in parents


def _with_history(state: State) -> State:
    seen = state.seen()
    if state.history and state.history[-1] == seen:
        return state
    return replace(state, history=(*state.history, seen))


@pytest.mark.parametrize("snapshots", [0, 1])
def test_nothing_that_is_judged_dead_ever_exists(snapshots: int) -> None:
    first = State()
    for number in range(snapshots):
        first = _added(first, 1 + number, 1 + number)
    first = _with_history(first)
    frontier, known = [replace(first, known=first.seen())], set[object]()
    judged_dead = 0
    for _ in range(EVENTS_MAX):
        following = []
        for state in frontier:
            for event in _events(state):
                for after in (event, *_looks(_with_history(event))):
                    after = _with_history(after)
                    if (key := after.key()) in known:
                        continue
                    known.add(key)
                    _check(after)
                    judged_dead += bool(after.dead)
                    following.append(after)
        frontier = following

    assert judged_dead > 1_000


def _sent(answer: Answer, *, snapshot_id: int = 9, parent_id: int = 1, number: int = 2) -> Sent:
    return Sent(snapshot_id=snapshot_id, parent_id=parent_id, sequence_number=number, answer=answer)


UNTOUCHED = Seen(current_id=1, last_sequence_number=1, snapshots={1: (None, 1)})
OVERTAKEN = Seen(current_id=2, last_sequence_number=2, snapshots={1: (None, 1), 2: (1, 2)})
EXPIRED = Seen(current_id=3, last_sequence_number=3, snapshots={3: (2, 3)})
LANDED = Seen(current_id=9, last_sequence_number=2, snapshots={1: (None, 1), 9: (1, 2)})


@pytest.mark.parametrize(
    ("seen", "answers", "is_last", "verdict"),
    [
        (UNTOUCHED, (Answer.UNKNOWN,), False, Verdict.RETRY),
        (UNTOUCHED, (Answer.UNKNOWN,), True, Verdict.UNKNOWN),
        (UNTOUCHED, (Answer.CONFLICT,), True, Verdict.UNKNOWN),
        (UNTOUCHED, (Answer.REFUSED,), False, Verdict.REFUSED),
        (UNTOUCHED, (Answer.UNKNOWN, Answer.REFUSED), False, Verdict.UNKNOWN),
        (OVERTAKEN, (Answer.UNKNOWN,), False, Verdict.RETRY),
        (OVERTAKEN, (Answer.UNKNOWN, Answer.CONFLICT), True, Verdict.REFUSED),
        (OVERTAKEN, (Answer.UNKNOWN, Answer.REFUSED), False, Verdict.REFUSED),
        (EXPIRED, (Answer.UNKNOWN,), True, Verdict.UNKNOWN),
        (LANDED, (Answer.CONFLICT, Answer.UNKNOWN), True, Verdict.LANDED),
    ],
)
def test_what_is_done_after_a_look(
    seen: Seen, answers: tuple[Answer, ...], is_last: bool, verdict: Verdict
) -> None:
    sent = [_sent(answer, snapshot_id=9 + n) for n, answer in enumerate(answers)]

    found, snapshot_id = judge(sent, seen, is_last=is_last)

    assert found is verdict
    assert snapshot_id == (9 if verdict is Verdict.LANDED else None)
