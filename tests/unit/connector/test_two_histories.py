"""A read of both tiers asks once more only if the lake is not as registered, and says why not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from streamhouse.core.errors import HistoryDivergedError
from streamhouse.core.model.lake.facts import LakeState
from streamhouse.lake.commits.committer import LakeCommit
from tests.support.tiering_world import rows
from tests.support.union_world import UnionWorld


@pytest.fixture
def world(tmp_path: Path) -> Iterator[UnionWorld]:
    with UnionWorld(tmp_path) as opened:
        opened.tiering.create_table()
        opened.append(0, rows(0, 10))
        opened.tiering.tier()
        opened.append(0, rows(10, 5))
        yield opened


def _commit(world: UnionWorld, end: int, fingerprint: str) -> None:
    """Commit a round of some other worker: no new files, only what it says."""
    table = world.tiering.lake().open_or_create(
        world.tiering.service.describe_table("db.t"), LakeState()
    )
    table.commit(
        LakeCommit(
            files=(),
            base_offsets={0: 10},
            tiered_offsets={0: end},
            epoch=2,
            fingerprints={0: fingerprint},
        )
    )


def test_a_lake_as_registered_is_not_asked_about(world: UnionWorld) -> None:
    assert world.read().num_rows == 15

    assert world.tiering.service.questions == 0


def test_a_round_that_was_not_reported_yet_is_no_other_history(world: UnionWorld) -> None:
    _commit(
        world, 15, world.tiering.service.compare_history("db.t", table_id=1, offsets={0: 15})[0]
    )

    assert world.read().num_rows == 15
    assert world.tiering.service.questions == 1


def test_a_twins_round_is_refused_where_both_tiers_are_read(world: UnionWorld) -> None:
    _commit(world, 15, "0" * 16)

    with pytest.raises(HistoryDivergedError):
        world.read()
    assert world.read("db.t$lake").num_rows == 10
    assert world.read("db.t$log").num_rows == 15


def test_what_the_service_knows_of_two_histories_is_said(world: UnionWorld) -> None:
    table = world.tiering.service._table("db.t")
    table.lake = replace(table.lake, diverged="the lake has other rows")

    with pytest.raises(HistoryDivergedError, match=r"'db\.t\$lake' and 'db\.t\$log' can be read"):
        world.read()
    assert world.read("db.t$lake").num_rows == 10
    assert world.read("db.t$log").num_rows == 15
