"""Commits whose outcome is unknown, and what must not be deleted then."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.table import CommitTableResponse

from streamhouse.core.errors import StreamhouseError, UnknownOutcomeError
from streamhouse.core.model.table_state import TieringAssignment
from streamhouse.tiering.maintain._maintenance_policy import Claim, MaintenancePolicy
from tests.support.faulty_catalog import (
    Commit,
    FaultyCatalog,
    conflict_after_landed,
    faulty_key_table,
    late,
    late_by,
    lost_answer,
    missing_files,
    refused,
    server_error_after_landed,
    well,
)
from tests.support.key_table_world import KeyTableWorld

PROPERTIES = {
    "table.datalake.snapshot.max-age": "1ms",
    "table.datalake.snapshot.min-count": "1",
}


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KeyTableWorld]:
    yield from faulty_key_table(tmp_path, monkeypatch, PROPERTIES)


def _fill(world: KeyTableWorld) -> None:
    """Rounds that leave files to rewrite, and rows for another round."""
    for number in range(3):
        _write(world, number)
        world.tiering.round(world.tiering.claim()).run()
    _write(world, 7)


def _maintain(world: KeyTableWorld) -> None:
    """Maintain under a claim of its own: first a rewrite is committed, then expiry."""
    claimed = world.tiering.service.claim_tiering("test", force=True, include_idle=True)
    assert isinstance(claimed, TieringAssignment)
    state = claimed.state
    policy = replace(MaintenancePolicy.of(state.table).on_demand(), orphan_age_ms_min=0)
    lake_table = world.tiering.lake().open_or_create(state.table, state.lake)
    claim = Claim(epoch=claimed.epoch, snapshot_id=state.lake.snapshot_id)
    try:
        world.tiering.maintainer().maintain(lake_table, state.table, claim, policy=policy)
    finally:
        world.tiering.service.release(world.PATH)


def _write(world: KeyTableWorld, number: int) -> None:
    world.upsert(*({"id": key, "region": "eu", "amount": float(number)} for key in range(8)))


def _judge(world: KeyTableWorld) -> None:
    FaultyCatalog.settle()
    assert missing_files(world.tiering.lake_table(world.PATH)) == []
    with contextlib.suppress(StreamhouseError):
        world.tiering.service.release(world.PATH)
    for number in range(20, 22):
        _write(world, number)
        while world.lag:
            world.tiering.round(world.tiering.claim()).run()
        _maintain(world)
        assert missing_files(world.tiering.lake_table(world.PATH)) == []
        assert world.in_lake() == world.live


def land_the_late_one_first(_: FaultyCatalog, commit: Commit) -> CommitTableResponse:
    FaultyCatalog.late.pop(0).land()
    return commit.land()


def test_a_rewrite_that_lands_before_its_repetition_is_judged_keeps_its_files(
    world: KeyTableWorld,
) -> None:
    """The second attempt is refused because of the first; the third finds nothing to replace."""
    _fill(world)
    FaultyCatalog.faults = [late, land_the_late_one_first]

    _maintain(world)

    assert FaultyCatalog.faults == []
    _judge(world)


@pytest.mark.one_of(3)
@pytest.mark.parametrize("calls", range(12))
def test_a_rewrite_that_lands_late_at_any_moment_keeps_its_files(
    world: KeyTableWorld, calls: int
) -> None:
    """Where it has not landed before the worker gives up, the next one looks for orphans."""
    _fill(world)
    FaultyCatalog.faults = [late_by(calls), *[refused] * 4]

    with contextlib.suppress(StreamhouseError):
        _maintain(world)
    FaultyCatalog.faults = []
    with contextlib.suppress(StreamhouseError):
        _maintain(world)

    _judge(world)


@pytest.mark.one_of(3)
@pytest.mark.parametrize("stale", [[], [1], [1] * 9], ids=str)
@pytest.mark.parametrize(
    "fault",
    [conflict_after_landed, lost_answer, server_error_after_landed],
    ids=lambda fault: fault.__name__,
)
@pytest.mark.parametrize("before", range(3))
def test_stale_looks_after_a_commit_that_landed_prove_nothing(
    world: KeyTableWorld, fault: Any, stale: list[int], before: int
) -> None:
    """The round's commit is the first, the rewrite's the second, that of expiry the third."""
    _fill(world)

    def then_stale(catalog: FaultyCatalog, commit: Commit) -> CommitTableResponse:
        FaultyCatalog.stale = list(stale)
        return fault(catalog, commit)

    FaultyCatalog.faults = [*[well] * before, then_stale]
    with contextlib.suppress(UnknownOutcomeError):
        world.tiering.round(world.tiering.claim()).run()
    world.tiering.service.release(world.PATH)
    with contextlib.suppress(StreamhouseError):
        _maintain(world)

    _judge(world)


def test_a_round_that_landed_and_was_expired_since_keeps_its_files(world: KeyTableWorld) -> None:
    """Its worker looks when another has gone on from its snapshot and expired that."""
    _fill(world)

    def overtaken(_: FaultyCatalog, commit: Commit) -> CommitTableResponse:
        commit.land()
        world.tiering.service.release(world.PATH)
        _write(world, 8)
        while world.lag:
            world.tiering.round(world.tiering.claim()).run()
        _maintain(world)
        raise TimeoutError("no answer")

    FaultyCatalog.faults = [overtaken]
    with pytest.raises(UnknownOutcomeError, match="may have landed"):
        world.tiering.round(world.tiering.claim()).run()

    _judge(world)
