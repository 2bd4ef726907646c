"""A round: its steps, what it refuses, what it leaves behind when it fails."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.table.snapshots import Operation

from streamhouse.client import LogBatch
from streamhouse.core.errors import (
    CorruptDataError,
    FencedError,
    StorageFailedError,
    TableNotFoundError,
    UnavailableError,
)
from streamhouse.core.model.lake.coverage import offsets_of_properties
from streamhouse.reading.tail.round_planner import PlanLimits
from streamhouse.tiering.round._round import ROUND_STEPS
from streamhouse.tiering.worker.thread_runner import ThreadRunner
from tests.support.tiering_world import Killed, TieringWorld, dying_at, rows

_GOLDEN_FOLDER = Path(__file__).parents[3] / "golden"
GOLDEN = _GOLDEN_FOLDER / "lake_snapshot_summary_v2.json"
# From before a snapshot said which log its rows came from.
GOLDEN_OF_FIRST_RELEASE = _GOLDEN_FOLDER / "lake_snapshot_summary.json"


def _filled(world: TieringWorld, *, buckets: int = 2, rows_each: int = 10) -> None:
    world.create_table(bucket_count=buckets)
    for bucket in range(buckets):
        world.service.append("db.t", bucket, rows(bucket * 1_000, rows_each))


def _addresses(*ends: int) -> list[tuple[int, int]]:
    return [(bucket, offset) for bucket, end in enumerate(ends) for offset in range(end)]


def test_a_round_moves_every_row_and_the_service_knows(world: TieringWorld) -> None:
    _filled(world)

    result = world.tier()

    assert (result.kind, result.row_count, result.file_count) == ("tiered", 20, 2)
    assert world.addresses() == _addresses(10, 10)
    state = world.service.table_state("db.t")
    assert state.lake.tiered_offsets == {0: 10, 1: 10} == result.tiered_offsets
    assert state.lake.snapshot_id == result.snapshot_id
    assert state.lake.table_uuid == str(world.lake_table().metadata.table_uuid)


def test_the_next_round_adds_only_what_came_since(world: TieringWorld) -> None:
    _filled(world)
    world.tier()
    world.service.append("db.t", 1, rows(50, 5))

    result = world.tier()

    assert result.row_count == 5
    assert world.addresses() == _addresses(10, 15)
    assert [s.summary.operation for s in world.lake_table().snapshots() if s.summary] == [
        Operation.APPEND,
        Operation.APPEND,
    ]


def test_values_come_back_as_they_were_written(world: TieringWorld) -> None:
    _filled(world, buckets=1)

    world.tier()

    found = world.lake_table().scan(selected_fields=("id", "name")).to_arrow()
    assert found.to_pylist() == rows(0, 10).to_pylist()


def test_a_round_takes_no_more_rows_than_its_limit(world: TieringWorld) -> None:
    _filled(world)

    result = world.round(limits=PlanLimits(rows_max=6)).run()

    assert result.tiered_offsets == {0: 3, 1: 3}
    assert world.addresses() == _addresses(3, 3)


def test_steps_are_passed_in_order(world: TieringWorld) -> None:
    _filled(world)
    passed: list[str] = []

    world.round(checkpoint=passed.append).run()

    assert tuple(passed) == ROUND_STEPS


def test_the_snapshot_says_what_it_covers(world: TieringWorld) -> None:
    """The keys and their form are read by other versions: a change needs a reader of both."""
    _filled(world)
    world.service.append("db.t", 0, rows(500, 1))

    world.tier()

    snapshot = world.lake_table().current_snapshot()
    assert snapshot is not None
    assert snapshot.summary is not None
    summary = {"operation": snapshot.summary.operation.value}
    for key, value in snapshot.summary.additional_properties.items():
        summary[key] = "<bytes>" if key.endswith("files-size") else value
    assert summary == json.loads(GOLDEN.read_text())


def test_what_an_earlier_release_wrote_is_understood() -> None:
    said = offsets_of_properties(json.loads(GOLDEN_OF_FIRST_RELEASE.read_text()))

    assert said is not None
    assert (said.tiered_offsets, said.fingerprints) == ({0: 11, 1: 10}, {})


@pytest.mark.parametrize("step", ROUND_STEPS)
def test_a_worker_may_die_after_any_step(world: TieringWorld, step: str) -> None:
    _filled(world)

    with pytest.raises(Killed):
        world.round(checkpoint=dying_at(step)).run()
    world.service.release("db.t")
    world.worker().run_once()

    assert world.addresses() == _addresses(10, 10)
    assert world.service.table_state("db.t").lake.tiered_offsets == {0: 10, 1: 10}
    covered_first = step in ("committed", "completed")
    assert len(world.lake_table().snapshots()) == 1
    assert bool(world.orphans()) == (step in ("files-written", "manifests-written"))
    assert covered_first == (not world.orphans() and step not in ROUND_STEPS[:3])


def test_a_lake_ahead_of_the_service_is_registered_before_anything_else(
    world: TieringWorld,
) -> None:
    _filled(world)

    with pytest.raises(Killed):
        world.round(checkpoint=dying_at("committed")).run()
    world.service.release("db.t")
    world.service.append("db.t", 0, rows(70, 2))

    first, second = world.tier(), world.tier()

    assert (first.kind, first.row_count) == ("recovered", 0)
    assert first.tiered_offsets == {0: 10, 1: 10}
    assert (second.kind, second.row_count) == ("tiered", 2)
    assert world.addresses() == _addresses(12, 10)


def test_of_two_workers_on_one_base_one_wins_and_the_other_leaves_nothing(
    world: TieringWorld,
) -> None:
    _filled(world)
    slow = world.round(world.claim(), checkpoint=lambda step: overtake(step))

    def overtake(step: str) -> None:
        if step == "manifests-written":
            world.service.release("db.t")
            world.tier()

    with pytest.raises(FencedError, match="was advanced by another tiering worker"):
        slow.run()

    assert world.addresses() == _addresses(10, 10)
    assert len(world.lake_table().snapshots()) == 1
    assert world.orphans() == []
    assert world.service.failures("db.t") == []


def test_a_worker_with_a_stale_epoch_stops_as_soon_as_it_sees_the_lake(
    world: TieringWorld,
) -> None:
    _filled(world)
    stale = world.claim()
    world.service.release("db.t")
    world.service.append("db.t", 0, rows(70, 2))
    world.tier()

    with pytest.raises(FencedError, match="advanced by tiering epoch 2; this worker has epoch 1"):
        world.round(stale).run()

    assert world.data_files() == [f for f in world.data_files() if f not in world.orphans()]


def test_a_round_whose_lease_is_lost_commits_nothing(world: TieringWorld) -> None:
    _filled(world)
    assignment = world.claim()

    def lose(step: str) -> None:
        if step == "files-written":
            raise FencedError("the claim is lost")

    with pytest.raises(FencedError):
        world.round(assignment, checkpoint=lose).run()

    assert world.lake_table().current_snapshot() is None
    assert world.data_files() == []


def test_a_failed_task_leaves_no_file_and_gives_the_claim_back(world: TieringWorld) -> None:
    _filled(world)

    def break_bucket_1(bucket: int, pages: Iterator[LogBatch]) -> Iterator[LogBatch]:
        yield from pages
        if bucket == 1:
            raise UnavailableError("the connection broke")

    world.service.on_read = break_bucket_1

    with pytest.raises(UnavailableError, match="the connection broke"):
        world.tier()

    assert world.data_files() == []
    assert world.service.failures("db.t") == ["unavailable: the connection broke"]
    world.service.on_read = None
    world.tier()
    assert world.addresses() == _addresses(10, 10)


@pytest.mark.parametrize("loss", ["missing batch", "repeated batch", "short range"])
def test_rows_that_are_not_those_planned_never_reach_the_lake(
    world: TieringWorld, loss: str
) -> None:
    world.create_table()
    for start in range(0, 30, 10):
        world.service.append("db.t", 0, rows(start, 10))

    def lose(_: int, pages: Iterator[LogBatch]) -> Iterator[LogBatch]:
        batches = list(pages)
        return iter(
            {
                "missing batch": [batches[0], batches[2]],
                "repeated batch": [batches[0], batches[0], batches[1], batches[2]],
                "short range": batches[:2],
            }[loss]
        )

    world.service.on_read = lose

    with pytest.raises(CorruptDataError, match=r"'db\.t', bucket 0"):
        world.tier()

    assert world.data_files() == []


def test_a_table_dropped_and_made_again_while_it_is_read_is_noticed(world: TieringWorld) -> None:
    _filled(world, buckets=1)

    def replace_table(_: int, pages: Iterator[LogBatch]) -> Iterator[LogBatch]:
        world.service.drop_table("db.t")
        _filled(world, buckets=1, rows_each=12)
        return pages

    world.service.on_read = replace_table

    with pytest.raises(TableNotFoundError, match="dropped and created again"):
        world.tier()


def test_a_full_disk_fails_the_round_and_leaves_the_lake_as_it_was(
    world: TieringWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    _filled(world)
    world.tier()
    world.service.append("db.t", 0, rows(70, 2))
    open_output: Callable[..., Any] = pa.OSFile

    def full(path: str, mode: str) -> Any:
        if mode == "wb":
            raise OSError(28, "No space left on device")
        return open_output(path, mode)

    monkeypatch.setattr(pa, "OSFile", full)

    with pytest.raises(StorageFailedError, match="No space left on device"):
        world.tier()

    assert world.addresses() == _addresses(10, 10)


def test_files_of_attempts_that_did_not_count_are_deleted(world: TieringWorld) -> None:
    """A speculative or repeated Spark task leaves files beside those of the attempt that counts."""
    _filled(world)

    class Twice(ThreadRunner):
        def run(self, *arguments: Any, **more: Any) -> Any:
            super().run(*arguments, **more)
            return super().run(*arguments, **more)

    world.runner = Twice(2, run=world.run_split)

    result = world.round().run()

    assert result.file_count == 2
    assert len(world.data_files()) == 2
    assert world.orphans() == []


def test_results_that_miss_a_split_are_refused(world: TieringWorld) -> None:
    _filled(world)

    class Forgetful(ThreadRunner):
        def run(self, *arguments: Any, **more: Any) -> Any:
            return super().run(*arguments, **more)[:1]

    world.runner = Forgetful(2, run=world.run_split)

    with pytest.raises(CorruptDataError, match="10 rows in 1 splits; 20 in 2 were planned"):
        world.tier()

    assert world.data_files() == []
