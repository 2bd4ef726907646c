"""A world of discrete events: programs that sleep, ask a store, and die with their machine.

A program is a generator. It yields `Sleep(seconds)` or a `Request`, and is sent what came of it.
Nothing runs at the same time, and chance comes from one seed: a run can be repeated exactly.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

__all__ = ["Lost", "Program", "Request", "Sleep", "StoreModel", "World"]


@dataclass(frozen=True, slots=True)
class Sleep:
    """Go on after so many seconds."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Request:
    """One request to the store; `effect` is what it does there, in one step, and its answer."""

    kind: str
    effect: Callable[[], Any]
    count: int = 1  # so many alike, one after the other


class Lost:
    """What a request is answered when the store did not answer in time."""


LOST: Final = Lost()
Program: TypeAlias = Generator[Sleep | Request, Any, None]


@dataclass(slots=True)
class StoreModel:
    """How long the store takes, when it is away, and who asked it when."""

    median_s: float = 0.03
    spread: float = 0.5  # of the logarithm: p99 is some three times the median
    timeout_s: float = 5.0
    away: tuple[float, float] = (0.0, 0.0)
    asked: Counter[int] = field(default_factory=Counter)
    by_kind: Counter[str] = field(default_factory=Counter)

    def seconds(self, chance: random.Random) -> float:
        """Return how long one answer takes."""
        return self.median_s * chance.lognormvariate(0.0, self.spread)

    def is_away(self, at: float) -> bool:
        """Whether nobody is answered at that time."""
        return self.away[0] <= at < self.away[1]


class World:
    """The clock, the queue of events, and the store."""

    def __init__(self, *, seed: int, store: StoreModel) -> None:
        self.now = 0.0
        self.chance = random.Random(seed)
        self.store = store
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def at(self, time: float, then: Callable[[], None]) -> None:
        """Call `then` at that time."""
        heapq.heappush(self._queue, (time, next(self._order), then))

    def start(self, program: Program, is_alive: Callable[[], bool]) -> None:
        """Run a program until it returns, or its machine is no more."""
        self._step(program, None, is_alive)

    def run(self, until: float) -> None:
        """Let things happen up to that time."""
        while self._queue and self._queue[0][0] <= until:
            self.now, _, then = heapq.heappop(self._queue)
            then()
        self.now = until

    def _step(self, program: Program, answer: Any, is_alive: Callable[[], bool]) -> None:
        if not is_alive():
            program.close()
            return
        try:
            wanted = program.send(answer)
        except StopIteration:
            return
        if isinstance(wanted, Sleep):
            self.at(self.now + wanted.seconds, lambda: self._step(program, None, is_alive))
        else:
            self._ask(program, wanted, is_alive, left=wanted.count)

    def _ask(
        self, program: Program, wanted: Request, is_alive: Callable[[], bool], *, left: int
    ) -> None:
        self.store.asked[int(self.now)] += 1
        self.store.by_kind[wanted.kind] += 1
        if self.store.is_away(self.now):
            after = self.now + self.store.timeout_s
            self.at(after, lambda: self._step(program, LOST, is_alive))
            return
        # What a request does happens half way; whoever asked may be dead by the time of its answer.
        took = self.store.seconds(self.chance)
        answers: list[Any] = []
        self.at(self.now + took / 2, lambda: answers.append(wanted.effect()))

        def answered() -> None:
            if left > 1 and is_alive():
                self._ask(program, wanted, is_alive, left=left - 1)
            else:
                self._step(program, answers[0], is_alive)

        self.at(self.now + took, answered)
