"""The stages of a call, kept only while somebody follows it.

A call has one stage after the other: each lasts from the end of the one before. Code says when a
stage has ended and what it was, and needs not know whether anybody listens.
"""

from __future__ import annotations

import time
from contextvars import ContextVar
from typing import Final, NamedTuple

__all__ = ["STAGES", "STAGES_MAX", "Stage", "Stages", "stage_ended"]

STAGES_MAX: Final = 64
"""What is kept of one call: a subscription, or a commit of many pieces, has no end of them."""


class Stage(NamedTuple):
    """One stage; times are those of `time.perf_counter`."""

    name: str
    start_s: float
    end_s: float


class Stages:
    """The stages of one call, in order. One thread at a time."""

    __slots__ = ("ended", "last_s", "left_out", "start_s")

    def __init__(self) -> None:
        self.start_s = self.last_s = time.perf_counter()
        self.ended: list[Stage] = []
        self.left_out = 0
        """How many more there were than are kept."""

    def end(self, name: str, at_s: float | None = None) -> None:
        """End the stage that has lasted since the last one: now, or at a time that was taken."""
        # What is shared with other calls may have begun before this one waited for it.
        end_s = max(self.last_s, time.perf_counter() if at_s is None else at_s)
        if len(self.ended) < STAGES_MAX:
            self.ended.append(Stage(name, self.last_s, end_s))
        else:
            self.left_out += 1
        self.last_s = end_s


STAGES: Final[ContextVar[Stages | None]] = ContextVar("stages", default=None)
"""Those of the call that is being answered, if somebody follows it."""


def stage_ended(name: str) -> None:
    """End a stage of the call that is being answered, if somebody follows it."""
    stages = STAGES.get()
    if stages is not None:
        stages.end(name)
