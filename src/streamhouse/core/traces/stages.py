"""The stages of a call, recorded only if the call is traced.

The stages of a call follow each other: a stage begins at the end of the stage before. Code reports
the end and the name of a stage, whether or not the call is traced.
"""

from __future__ import annotations

import time
from contextvars import ContextVar
from typing import Final, NamedTuple

__all__ = ["STAGES", "STAGES_MAX", "Stage", "Stages", "stage_ended"]

STAGES_MAX: Final = 64
"""The most stages recorded for one call: a subscription has an unlimited number of stages."""


class Stage(NamedTuple):
    """One stage, with times of `time.perf_counter`."""

    name: str
    start_s: float
    end_s: float


class Stages:
    """The stages of one call, in order. Not thread-safe."""

    __slots__ = ("ended", "last_s", "left_out", "start_s")

    def __init__(self) -> None:
        self.start_s = self.last_s = time.perf_counter()
        self.ended: list[Stage] = []
        self.left_out = 0
        """The number of stages beyond the recorded stages."""

    def end(self, name: str, at_s: float | None = None) -> None:
        """End the current stage, now or at the time `at_s`."""
        # A time taken by work shared with other calls may lie before the end of the last stage.
        end_s = max(self.last_s, time.perf_counter() if at_s is None else at_s)
        if len(self.ended) < STAGES_MAX:
            self.ended.append(Stage(name, self.last_s, end_s))
        else:
            self.left_out += 1
        self.last_s = end_s


STAGES: Final[ContextVar[Stages | None]] = ContextVar("stages", default=None)
"""The stages of the current call, if the call is traced."""


def stage_ended(name: str) -> None:
    """End a stage of the current call, if the call is traced."""
    stages = STAGES.get()
    if stages is not None:
        stages.end(name)
