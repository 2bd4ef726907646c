"""Stages follow one another without gaps, and no call keeps more than a bounded number."""

from __future__ import annotations

import contextvars
import itertools
import time

from streamhouse.core.traces.stages import STAGES, STAGES_MAX, Stages, stage_ended


def test_each_stage_begins_where_the_one_before_ended() -> None:
    stages = Stages()
    taken_s = time.perf_counter()

    stages.end("body")
    stages.end("before this call waited for it", taken_s)
    stages.end("sync")

    assert [stage.name for stage in stages.ended][::2] == ["body", "sync"]
    assert stages.ended[0].start_s == stages.start_s
    for one, next_one in itertools.pairwise(stages.ended):
        assert one.start_s <= one.end_s == next_one.start_s
    # What was over before the stage began lasted no time.
    assert stages.ended[1].start_s == stages.ended[1].end_s


def test_a_call_without_end_keeps_some() -> None:
    stages = Stages()

    for _ in range(STAGES_MAX + 7):
        stages.end("page")

    assert (len(stages.ended), stages.left_out) == (STAGES_MAX, 7)


def test_what_nobody_follows_is_not_kept() -> None:
    def followed() -> list[str]:
        stages = Stages()
        STAGES.set(stages)
        stage_ended("body")
        return [stage.name for stage in stages.ended]

    stage_ended("nobody's")

    assert contextvars.Context().run(followed) == ["body"]
    assert STAGES.get() is None
