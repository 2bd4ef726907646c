"""A worker that makes spans makes a trace of each round, with its steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.trace import StatusCode

from streamhouse.tiering.round._round import ROUND_STEPS
from tests.support.span_world import KeptSpans, names
from tests.support.tiering_world import TieringWorld, rows


@pytest.fixture
def world(tmp_path: Path) -> Iterator[TieringWorld]:
    with TieringWorld(tmp_path) as opened:
        yield opened


def test_a_round_is_a_span_with_its_steps(world: TieringWorld) -> None:
    kept = KeptSpans()
    world.create_table()
    world.service.append("db.t", 0, rows(0, 10))

    (summary,) = world.worker(spans=kept.spans).run_once()

    assert summary.row_count == 10
    span, steps = kept.taken()
    assert (span.name, span.parent) == ("tiering round", None)
    assert dict(span.attributes or {}) == {"streamhouse.table": "db.t"}
    assert names(steps) == list(ROUND_STEPS)


def test_a_round_that_fails_says_why(world: TieringWorld) -> None:
    kept = KeptSpans()
    world.create_table()
    world.service.append("db.t", 0, rows(0, 10))

    def fail(step: str) -> None:
        if step == "planned":
            raise OSError("the disk is away")

    with pytest.raises(OSError, match="the disk is away"):
        world.worker(spans=kept.spans, checkpoint=fail).run_once()

    span, steps = kept.taken()
    assert span.status.status_code is StatusCode.ERROR
    assert span.status.description == "OSError: the disk is away"
    assert names(steps) == ["claimed", "lake-opened", "planned"]
