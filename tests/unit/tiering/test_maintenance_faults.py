"""Maintenance and rounds with a catalog that goes wrong, and with another worker beside them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streamhouse.core.errors import StreamhouseError
from streamhouse.tiering.maintain._maintenance import Maintainer
from tests.support.faulty_catalog import (
    Commit,
    FaultyCatalog,
    catalog_dies,
    faulty_key_table,
    late,
    lost_answer,
    lost_request,
    refused,
)
from tests.support.key_table_world import KeyTableWorld

FAULTS = (refused, lost_answer, lost_request, late, catalog_dies)
PROPERTIES = {
    "table.datalake.changelog": "true",
    "table.datalake.snapshot.max-age": "1ms",
    "table.datalake.snapshot.min-count": "1",
}
STEPS = (
    "rewrite-planned",
    "files-rewritten",
    "rewrite-staged",
    "rewrite-committed",
)


pytestmark = pytest.mark.slow


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KeyTableWorld]:
    yield from faulty_key_table(tmp_path, monkeypatch, PROPERTIES)


def _write(world: KeyTableWorld, number: int) -> None:
    world.upsert(*({"id": key, "region": "eu", "amount": float(number)} for key in range(8)))
    world.delete({"id": number % 8, "region": None, "amount": None})


def _round(world: KeyTableWorld, maintainer: Maintainer) -> None:
    """One round of a worker that does not outlive its errors."""
    with contextlib.suppress(StreamhouseError):
        world.tiering.round(world.tiering.claim(), maintainer=maintainer).run()
    FaultyCatalog.load_error = None
    world.tiering.service.release(world.PATH)


def _settle(world: KeyTableWorld) -> None:
    """Let late commits land, and a new worker do the rest."""
    FaultyCatalog.faults.clear()
    for commit in FaultyCatalog.late:
        with contextlib.suppress(Exception):
            commit.land()
    for number in range(100, 110):
        _write(world, number)
        maintainer = world.tiering.maintainer()
        while world.lag:
            world.tiering.round(world.tiering.claim(), maintainer=maintainer).run()
    assert world.in_lake() == world.live
    assert world.history() == world.changes
    for path in (world.PATH, f"{world.PATH}$changelog"):
        assert len(world.tiering.lake_table(path).inspect.data_files()) <= 16


def well(_: FaultyCatalog, commit: Commit) -> Any:
    """Nothing goes wrong with this one."""
    return commit.land()


@pytest.mark.one_of(2)
@pytest.mark.parametrize("before", range(2))
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_rounds_of_upserts(world: KeyTableWorld, fault: Any, before: int) -> None:
    """`before` commits of the round go well: the history is committed first, then the rows."""
    _write(world, 0)
    _round(world, world.tiering.maintainer())
    for number in range(1, 4):
        _write(world, number)
        FaultyCatalog.faults[:] = [*[well] * before, fault]
        _round(world, world.tiering.maintainer())
    _settle(world)


@pytest.mark.one_of(2)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_maintenance(world: KeyTableWorld, fault: Any) -> None:
    """Both commits of the round go well; that of the rewrite does not."""
    maintainer = world.tiering.maintainer()
    for number in range(7):
        _write(world, number)
        _round(world, maintainer)
    _write(world, 7)
    FaultyCatalog.faults[:] = [well, well, fault]

    _round(world, maintainer)

    assert FaultyCatalog.faults == []
    assert world.lag == 0
    _settle(world)


@pytest.mark.one_of(2)
@pytest.mark.parametrize("step", STEPS)
def test_a_worker_that_lost_its_claim_in_maintenance_harms_nobody(
    world: KeyTableWorld, step: str
) -> None:
    """It stalls at `step`; another worker takes the table, tiers and maintains it; it wakes up."""
    met: list[str] = []

    def overtaken(reached: str) -> None:
        if reached == step and not met:
            met.append(step)
            world.tiering.service.release(world.PATH)
            _write(world, 50)
            other = world.tiering.maintainer()
            world.tiering.round(world.tiering.claim(), maintainer=other).run()

    slow = world.tiering.maintainer(checkpoint=overtaken)
    for number in range(8):
        _write(world, number)
        _round(world, slow)

    assert met == [step]
    assert world.in_lake() == world.live
    _settle(world)
