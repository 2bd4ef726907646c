"""Owners, zombies, takeovers, rolls and trimming, in any order: a state machine of the protocol."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.support.journal_model import Plan, World

_OWNERS = 4


class Owners(RuleBasedStateMachine):
    """What happens next is drawn; an owner may be killed at any time, or go on as a zombie."""

    def __init__(self) -> None:
        super().__init__()
        self.world: World | None = None

    @initialize(
        operations=st.lists(st.integers(1, 8), min_size=_OWNERS, max_size=_OWNERS),
        window=st.integers(1, 5),
        rolls=st.frozensets(st.integers(0, _OWNERS - 1)),
        trims=st.frozensets(st.integers(0, _OWNERS - 1)),
        faults=st.integers(0, 10),
    )
    def begin(
        self,
        operations: list[int],
        window: int,
        rolls: frozenset[int],
        trims: frozenset[int],
        faults: int,
    ) -> None:
        plan = Plan(
            operations=tuple(operations), window=window, rolls=rolls, trims=trims, faults=faults
        )
        self.world = World(plan)

    @rule(draws=st.lists(st.integers(0, 1 << 16), min_size=1, max_size=20))
    def happen(self, draws: list[int]) -> None:
        assert self.world is not None
        for draw in draws:
            if choices := self.world.choices():
                self.world.happen(choices[draw % len(choices)])

    @rule(owner=st.integers(0, _OWNERS - 1), count=st.integers(1, 15))
    def run_one(self, owner: int, count: int) -> None:
        """One goes on alone, the others are stopped for a time."""
        assert self.world is not None
        for _ in range(count):
            own = [choice for choice in self.world.choices() if choice[:2] == ("step", owner)]
            if own:
                self.world.happen(own[0])

    @rule(owner=st.integers(0, _OWNERS - 1))
    def kill(self, owner: int) -> None:
        assert self.world is not None
        self.world.happen(("stop", owner, 0, ""))

    @invariant()
    def what_is_acknowledged_is_there_once_and_in_order(self) -> None:
        if self.world is not None:
            self.world.check()


TestOwners = Owners.TestCase
