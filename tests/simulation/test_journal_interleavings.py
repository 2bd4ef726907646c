"""Every order of the steps of two owners, and trimming, for short histories; wrong ones are found.

The store loses answers, writes late, answers conflicts and lists what was there before, as often
as a plan allows.
"""

from __future__ import annotations

import os

import pytest

from streamhouse.core.errors import CorruptDataError
from streamhouse.storage_service.ownership.journal.reader import TrimmedError
from tests.support.journal_model import Choice, Plan, World


def _explore(plan: Plan, *, states_max: int = 10**9) -> int:
    """Visit every state once; return how many. Raises what a broken promise raises."""
    seen = set()
    todo: list[tuple[Choice, ...]] = [()]
    while todo and len(seen) < states_max:
        path = todo.pop()
        world = World(plan)
        for choice in path:
            world.happen(choice)
        while (key := world.key()) not in seen:
            seen.add(key)
            world.check()
            choices = world.choices()
            if not choices:
                break
            todo.extend((*path, choice) for choice in choices[1:])
            path = (*path, choices[0])
            world.happen(choices[0])
    return len(seen)


_TWO_TRIM = frozenset((1,))
_ONE_ROLLS = frozenset((0,))
_QUICK = [
    Plan(operations=(3, 1)),
    Plan(operations=(3, 2), trims=_TWO_TRIM),
    Plan(operations=(3, 1), rolls=_ONE_ROLLS, trims=_ONE_ROLLS),
    Plan(operations=(2, 1), faults=1),
    Plan(operations=(1, 1, 1)),
]
_LONG = [
    Plan(operations=(1, 1), faults=2),
    Plan(operations=(3, 2), trims=_TWO_TRIM, faults=1),
    Plan(operations=(3, 1), rolls=_ONE_ROLLS, trims=_ONE_ROLLS, faults=1),
    Plan(operations=(2, 1, 1), trims=_TWO_TRIM),
]
_WRONG = (AssertionError, CorruptDataError, TrimmedError)


@pytest.mark.parametrize("plan", _QUICK)
def test_in_every_order_what_is_acknowledged_stays(plan: Plan) -> None:
    assert _explore(plan) > 300


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan", [*_LONG[:2], *(pytest.param(plan, marks=pytest.mark.long) for plan in _LONG[2:])]
)
def test_in_every_order_with_faults_what_is_acknowledged_stays(plan: Plan) -> None:
    # All of them take minutes: `make thorough` has that.
    is_whole = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
    assert _explore(plan, states_max=10**9 if is_whole else 3_000) > 1_000


def test_trimming_that_deletes_seals_is_found() -> None:
    """A stalled owner stores into the hole, and acknowledges what nobody reads."""
    with pytest.raises(AssertionError, match="lost"):
        _explore(Plan(operations=(2, 1), trims=_TWO_TRIM, trims_seals=True))


def test_trimming_in_the_newest_epoch_is_found() -> None:
    """A taker seals the hole, which the owner never meets."""
    with pytest.raises(_WRONG):
        _explore(Plan(operations=(4, 1), trims_newest=True))
