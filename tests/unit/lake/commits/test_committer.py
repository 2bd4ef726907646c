"""Commits that go wrong: whatever the catalog answers, the rows are in the lake once or never."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyiceberg.exceptions import ForbiddenError

from streamhouse.core.backoff import Backoff
from streamhouse.core.errors import (
    FencedError,
    HistoryDivergedError,
    UnavailableError,
    UnknownOutcomeError,
    UnsupportedError,
)
from streamhouse.core.model.lake.facts import LakeCatalog, LakeState
from streamhouse.lake.commits.committer import LakeCommit
from streamhouse.lake.lake_tables import IcebergLake
from tests.support.faulty_catalog import (
    Commit,
    FaultyCatalog,
    catalog_dies,
    faulty_lake_catalog,
    late,
    lost_answer,
    lost_request,
    refused,
)
from tests.support.held_step import lower
from tests.support.tiering_world import TieringWorld, rows

TEN = [(0, offset) for offset in range(10)]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TieringWorld]:
    lower(monkeypatch, "landing-backoff", Backoff(first_s=0.0, most_s=0.0))
    FaultyCatalog.reset()
    with TieringWorld(tmp_path, catalog=faulty_lake_catalog(tmp_path)) as opened:
        opened.create_table()
        # The lake table exists before the first fault: faults are those of commits.
        opened.lake().open_or_create(opened.service.describe_table("db.t"), LakeState())
        opened.service.append("db.t", 0, rows(0, 10))
        yield opened
    FaultyCatalog.reset()


def _metadata_files(world: TieringWorld) -> set[str]:
    folder = world.folder / "warehouse" / "db" / "t" / "metadata"
    return {file.name for file in folder.glob("*.avro")}


def _referred_metadata(world: TieringWorld) -> set[str]:
    table = world.lake_table()
    paths = [s.manifest_list for s in table.snapshots()]
    paths += [m.manifest_path for s in table.snapshots() for m in s.manifests(table.io)]
    return {Path(path).name for path in paths}


@pytest.mark.parametrize("fault", [refused, lost_answer, lost_request])
def test_the_rows_are_in_the_lake_once_whatever_was_answered(world: TieringWorld, fault) -> None:
    FaultyCatalog.faults = [fault]

    result = world.tier()

    assert world.addresses() == TEN
    assert [s.snapshot_id for s in world.lake_table().snapshots()] == [result.snapshot_id]
    assert world.service.table_state("db.t").lake.snapshot_id == result.snapshot_id


def test_metadata_of_attempts_that_lost_is_deleted(world: TieringWorld) -> None:
    FaultyCatalog.faults = [refused, refused]

    world.tier()

    assert _metadata_files(world) == _referred_metadata(world)


def test_a_commit_that_lands_late_does_not_land_beside_its_repetition(world: TieringWorld) -> None:
    FaultyCatalog.faults = [late]

    result = world.tier()
    with pytest.raises(Exception, match="branch main was created concurrently"):
        FaultyCatalog.late[0].land()

    assert world.addresses() == TEN
    assert len(world.lake_table().snapshots()) == 1
    assert result.row_count == 10


def test_a_commit_that_lands_between_looking_and_repeating_is_found(world: TieringWorld) -> None:
    FaultyCatalog.faults = [late, land_the_late_one_first]

    result = world.tier()

    assert world.addresses() == TEN
    assert [s.snapshot_id for s in world.lake_table().snapshots()] == [result.snapshot_id]


def land_the_late_one_first(_: FaultyCatalog, commit: Commit):
    FaultyCatalog.late[0].land()
    return commit.land()


def test_when_the_catalog_cannot_be_asked_the_files_stay_for_the_next_round(
    world: TieringWorld,
) -> None:
    FaultyCatalog.faults = [catalog_dies]

    with pytest.raises(UnknownOutcomeError, match="a commit may have landed"):
        world.tier()
    FaultyCatalog.load_error = None

    assert world.addresses() == TEN
    assert world.orphans() == []
    result = world.tier()
    assert (result.kind, result.tiered_offsets) == ("recovered", {0: 10})
    assert world.addresses() == TEN


def test_after_an_unknown_outcome_another_failure_does_not_delete_files(
    world: TieringWorld,
) -> None:
    """The first commit may still land: its files must stay though the second was refused."""

    def forbid(_: FaultyCatalog, commit: Commit):
        raise ForbiddenError("no longer allowed")

    FaultyCatalog.faults = [late, forbid]

    with pytest.raises(UnknownOutcomeError, match="may still land"):
        world.tier()
    FaultyCatalog.late[0].land()

    assert world.addresses() == TEN
    assert world.tier().kind == "recovered"


def test_a_refusal_fails_at_once_and_leaves_nothing(world: TieringWorld) -> None:
    def forbid(_: FaultyCatalog, commit: Commit):
        raise ForbiddenError("not allowed")

    FaultyCatalog.faults = [forbid]

    with pytest.raises(UnavailableError, match="ForbiddenError: not allowed"):
        world.tier()

    assert world.data_files() == []
    assert _metadata_files(world) == set()


def test_commits_that_always_lose_without_a_visible_reason_leave_their_files(
    world: TieringWorld,
) -> None:
    """Nobody else has changed the table: perhaps one landed, and the catalog shows old states."""
    FaultyCatalog.faults = [refused] * 5

    with pytest.raises(UnknownOutcomeError, match="5 commits failed"):
        world.tier()

    assert len(world.data_files()) == 1
    assert world.tier().row_count == 10


def test_another_workers_commit_fences_and_leaves_nothing(world: TieringWorld) -> None:
    def overtaken(_: FaultyCatalog, commit: Commit):
        world.service.release("db.t")
        world.tier()
        return commit.land()

    FaultyCatalog.faults = [overtaken]

    with pytest.raises(FencedError, match=r"\(epoch 2, this one has 1\)"):
        world.tier()

    assert world.addresses() == TEN
    assert world.orphans() == []
    assert _metadata_files(world) == _referred_metadata(world)


def test_a_twins_commit_is_not_taken_for_this_rounds_own(world: TieringWorld) -> None:
    """A copy of the service gives out the same epochs and offsets, for other rows."""

    def overtaken(_: FaultyCatalog, commit: Commit):
        table = world.service.describe_table("db.t")
        world.lake().open_or_create(table, LakeState()).commit(
            LakeCommit(
                files=(),
                base_offsets={0: 0},
                tiered_offsets={0: 10},
                epoch=1,
                fingerprints={0: "0" * 16},
            )
        )
        return commit.land()

    FaultyCatalog.faults = [overtaken]

    with pytest.raises(FencedError, match=r"advanced by another tiering worker"):
        world.tier()
    world.service.release("db.t")
    with pytest.raises(HistoryDivergedError):
        world.tier()

    assert world.service.table_state("db.t").lake.snapshot_id is None


def test_an_unreachable_catalog_is_named(world: TieringWorld) -> None:
    FaultyCatalog.load_error = ConnectionError("connection refused")

    with pytest.raises(UnavailableError, match=r"cannot open lake table 'db\.t': ConnectionError"):
        world.tier()

    assert world.service.failures("db.t")


def test_an_unknown_kind_of_catalog_is_one_clear_sentence(world: TieringWorld) -> None:
    lake = IcebergLake(LakeCatalog(name="lake", properties={"type": "no-such-type"}))

    with pytest.raises(UnsupportedError, match="no-such-type"):
        lake.open_or_create(world.service.describe_table("db.t"), LakeState())
