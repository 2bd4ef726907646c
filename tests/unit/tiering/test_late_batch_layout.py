"""A batch layout that a table gets later, changes or loses: it has the rows, whatever dies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from streamhouse.core.errors import UnavailableError, UnsupportedError
from streamhouse.reading.tail.round_planner import PlanLimits
from streamhouse.tiering.round._round import BATCH_STEPS, ROUND_STEPS
from tests.support.foreign_deletes import commit_delete_files, equality_delete_file
from tests.support.key_table_world import KeyTableWorld
from tests.support.kv_model import identity
from tests.support.tiering_world import Killed, dying_at

SORT = {"table.datalake.batch-layout.sort": "amount, region"}
OTHER = {
    "table.datalake.batch-layout.partition": "region",
    "table.datalake.batch-layout.sort": "id",
}
BATCH = "db.t$batch"


@pytest.fixture
def world(tmp_path: Path) -> Iterator[KeyTableWorld]:
    with KeyTableWorld(tmp_path) as opened:
        opened.create_key_table(bucket_count=2, partitioned_by=["region"])
        yield opened


def row(key: int, number: int) -> dict[str, Any]:
    return {"id": key, "region": ("eu", "us", None)[key % 3], "amount": float(-key * number)}


def _live(world: KeyTableWorld, number: int) -> None:
    world.upsert(*(row(key, number) for key in range(number, 24, 2)))
    world.delete(row(number, 0))


def _tiered_without(world: KeyTableWorld, rounds: int = 3) -> None:
    """Rounds that the layout did not see, and a log that has lost what they moved."""
    for number in range(rounds):
        _live(world, number)
        world.tiering.tier()
    _forget_log(world)


def _forget_log(world: KeyTableWorld) -> None:
    for bucket, end in world.tiering.service.table_state("db.t").reached_offsets().items():
        world.tiering.service.expire_log("db.t", bucket, end)


def _in_batch(world: KeyTableWorld) -> list[Any]:
    rows = world.tiering.lake_table(BATCH).scan().to_arrow().drop_columns("__timestamp").to_pylist()
    return sorted((r.pop("__bucket"), r.pop("__offset"), identity(r)) for r in rows)


def _finish(world: KeyTableWorld, **more: Any) -> None:
    while not all(
        at.high_watermark == world.tiering.service.table_state("db.t").reached_offsets()[bucket]
        for bucket, at in world.tiering.service.table_state("db.t").positions.items()
    ):
        world.tiering.round(**more).run()


def test_it_begins_with_the_rows_of_the_lake_and_goes_on_from_the_log(
    world: KeyTableWorld,
) -> None:
    _tiered_without(world)
    world.tiering.service.change_layout("db.t", SORT)
    assert world.tiering.service.table_state("db.t").in_batch_layout() is None

    # First what the log has lost, then the rest.
    world.tiering.tier()
    _finish(world)

    assert _in_batch(world) == world.live
    state = world.tiering.service.table_state("db.t").lake
    assert state.batch is not None
    assert state.batch.tiered_offsets == state.tiered_offsets
    for file in world.tiering.lake_table(BATCH).scan().plan_files():
        assert not file.delete_files
        amounts = pq.read_table(file.file.file_path.removeprefix("file://"))["amount"].to_pylist()
        assert amounts == sorted(amounts)
    for number in (3, 4):
        # Of the copied rows, some are retracted now.
        _live(world, number)
        world.tiering.tier()
        assert _in_batch(world) == world.live == world.in_lake()


@pytest.mark.one_of(3)
@pytest.mark.parametrize("step", [*ROUND_STEPS, *BATCH_STEPS])
def test_a_worker_may_die_anywhere_while_it_begins(world: KeyTableWorld, step: str) -> None:
    _tiered_without(world)
    world.tiering.service.change_layout("db.t", SORT)
    _live(world, 3)

    with pytest.raises(Killed):
        world.tiering.round(checkpoint=dying_at(step)).run()
    world.tiering.service.release("db.t")
    _live(world, 4)
    _finish(world, limits=PlanLimits(rows_max=9, key_bucket_rows_max=3))

    assert _in_batch(world) == world.live == world.in_lake()


def test_it_is_filled_round_by_round_while_rows_come_change_and_go(
    world: KeyTableWorld,
) -> None:
    _tiered_without(world)
    world.tiering.service.change_layout("db.t", SORT)
    limits = PlanLimits(rows_max=8)
    for number in range(3, 6):
        _live(world, number)
        world.tiering.round(limits=limits).run()
        state = world.tiering.service.table_state("db.t")
        assert state.lake.batch is not None
        # Readers wait for what the log has not.
        assert state.in_batch_layout() is None
    assert sum(state.lake.batch.tiered_offsets.values()) == 24

    while world.tiering.service.table_state("db.t").in_batch_layout() is None:
        world.tiering.round(limits=limits).run()
    while world.lag:
        world.tiering.round(limits=limits).run()
    assert world.in_lake() == world.live
    _finish(world)

    assert _in_batch(world) == world.live


def test_a_log_that_still_has_everything_is_read_instead(world: KeyTableWorld) -> None:
    for number in range(2):
        _live(world, number)
        world.tiering.tier()
    world.tiering.service.change_layout("db.t", SORT)

    world.tiering.round(limits=PlanLimits(key_bucket_rows_max=5)).run()

    state = world.tiering.service.table_state("db.t").lake
    assert state.batch is not None
    # As many as a round may move, not all at once.
    assert state.batch.tiered_offsets == {0: 5, 1: 5}
    _finish(world)
    assert _in_batch(world) == world.live


def test_another_layout_takes_its_place(world: KeyTableWorld) -> None:
    world.tiering.service.change_layout("db.t", SORT)
    _tiered_without(world)
    world.tiering.service.change_layout("db.t", OTHER)

    _finish(world)

    assert _in_batch(world) == world.live
    table = world.tiering.lake_table(BATCH)
    assert [f.name for f in table.spec().fields] == ["region", "id_bucket"]
    for file in table.scan().plan_files():
        ids = pq.read_table(file.file.file_path.removeprefix("file://"))["id"].to_pylist()
        assert ids == sorted(ids)
        assert file.file.spec_id == table.spec().spec_id
    _live(world, 3)
    world.tiering.tier()
    assert _in_batch(world) == world.live


def test_a_layout_that_was_dropped_begins_anew(world: KeyTableWorld) -> None:
    world.tiering.service.change_layout("db.t", SORT)
    _tiered_without(world)
    left = _in_batch(world)
    world.tiering.service.change_layout("db.t", {})
    _live(world, 3)
    world.tiering.tier()
    # Nobody writes it, and nobody takes it away.
    assert _in_batch(world) == left
    _forget_log(world)

    world.tiering.service.change_layout("db.t", SORT)
    _live(world, 4)
    _finish(world)

    assert _in_batch(world) == world.live


@pytest.mark.parametrize("step", BATCH_STEPS)
def test_a_round_that_runs_while_the_layout_changes_is_not_registered(
    world: KeyTableWorld, step: str
) -> None:
    world.tiering.service.change_layout("db.t", SORT)
    _live(world, 0)

    def change(reached: str) -> None:
        if reached == step:
            world.tiering.service.change_layout("db.t", OTHER)

    world.tiering.round(checkpoint=change).run()
    assert world.tiering.service.table_state("db.t").lake.batch is None

    _finish(world)

    assert _in_batch(world) == world.live
    assert [f.name for f in world.tiering.lake_table(BATCH).spec().fields] == [
        "region",
        "id_bucket",
    ]
    for file in world.tiering.lake_table(BATCH).scan().plan_files():
        assert file.file.spec_id == world.tiering.lake_table(BATCH).spec().spec_id


def test_rows_are_fresh_when_the_copy_fails(world: KeyTableWorld) -> None:
    _tiered_without(world)
    world.tiering.service.change_layout("db.t", SORT)
    _live(world, 3)

    def fail(reached: str) -> None:
        if reached == "batch-files-written":
            raise UnavailableError("no room")

    with pytest.raises(UnavailableError, match="no room"):
        world.tiering.round(checkpoint=fail).run()

    assert world.in_lake() == world.live
    assert not world.tiering.data_files(BATCH)


def test_files_that_cannot_be_copied_are_named(world: KeyTableWorld) -> None:
    _tiered_without(world)
    table = world.tiering.lake_table()
    ids = pa.table({"id": pa.array([5], pa.int64())})
    partition = next(iter(table.scan().plan_files())).file.partition
    deleted = commit_delete_files(table, [equality_delete_file(table, ids, partition=partition)])
    # An earlier release took it.
    lake = world.tiering.service.table_state("db.t").lake
    world.tiering.service.set_lake("db.t", replace(lake, snapshot_id=deleted))
    world.tiering.service.change_layout("db.t", SORT)

    with pytest.raises(UnsupportedError, match="equality deletes"):
        world.tiering.tier()


def test_overwritten_rows_are_not_copied(world: KeyTableWorld) -> None:
    schema = pa.schema([pa.field("n", pa.int64())])
    world.tiering.create_table("db.l", schema, bucket_count=1)
    for start in (0, 10):
        rows = pa.record_batch([pa.array(range(start, start + 10))], schema=schema)
        world.tiering.service.append("db.l", 0, rows)
        world.tiering.tier("db.l")
        if not start:
            world.tiering.service.overwrite("db.l")
    world.tiering.service.expire_log("db.l", 0, 20)
    world.tiering.service.change_layout("db.l", {"table.datalake.batch-layout.sort": "n"})

    world.tiering.tier("db.l")

    assert world.tiering.addresses("db.l$batch") == [(0, offset) for offset in range(10, 20)]
    state = world.tiering.service.table_state("db.l").lake
    assert state.batch is not None
    assert state.batch.truncated_offsets == state.truncated_offsets == {0: 10}
