"""`table.datalake.batch-layout.*`: a second lake table has the same rows, whatever dies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from streamhouse.core.errors import StreamhouseError, UnavailableError
from streamhouse.core.model.lake.facts import LakeRole
from streamhouse.lake.files.lake_filesystem import LakeFilesystem
from streamhouse.reading.tail.round_planner import PlanLimits
from streamhouse.tiering.maintain._maintenance import Claim, Maintainer, MaintenancePolicy
from streamhouse.tiering.round._round import BATCH_STEPS, ROUND_STEPS
from tests.support.key_table_world import KeyTableWorld
from tests.support.tiering_world import Killed, dying_at

SORT = {"table.datalake.batch-layout.sort": "amount, region"}
BATCH = "db.t$batch"


def row(key: int, region: str | None = "eu", amount: float | None = 1.0) -> dict[str, Any]:
    return {"id": key, "region": region, "amount": amount}


def _live(key_world: KeyTableWorld, number: int) -> None:
    key_world.upsert(*(row(key, amount=float(-key * number)) for key in range(number, 12, 2)))
    key_world.delete(row(number))


def _in_batch(key_world: KeyTableWorld) -> list[Any]:
    rows = key_world.tiering.lake_table(BATCH).scan().to_arrow().to_pylist()
    return sorted((r["__bucket"], r["__offset"], r["id"], r["amount"]) for r in rows)


def _live_rows(key_world: KeyTableWorld) -> list[Any]:
    return sorted(
        (bucket, offset, r["id"], r["amount"])
        for bucket, model in enumerate(key_world.buckets)
        for offset, r in model.rows.values()
    )


def _lacks_rows(key_world: KeyTableWorld) -> bool:
    state = key_world.tiering.service.table_state("db.t")
    reached = state.reached_offsets()
    return any(at.high_watermark > reached[b] for b, at in state.positions.items())


def test_both_tables_have_the_rows_each_in_its_order(key_world: KeyTableWorld) -> None:
    key_world.create_key_table(bucket_count=2, partitioned_by=["region"], properties=SORT)
    for number in range(4):
        _live(key_world, number)
        result = key_world.tiering.tier()
        assert _in_batch(key_world) == _live_rows(key_world)
        assert key_world.in_lake() == key_world.live
        state = key_world.tiering.service.table_state("db.t").lake
        assert state.batch is not None
        assert state.batch.tiered_offsets == state.tiered_offsets == result.batch_offsets

    table = key_world.tiering.lake_table(BATCH)
    assert [str(f.transform) for f in table.spec().fields] == ["bucket[2]"]
    order = [table.schema().find_column_name(f.source_id) for f in table.sort_order().fields]
    assert order == ["amount", "region"]
    for file in table.scan().plan_files():
        amounts = pq.read_table(file.file.file_path.removeprefix("file://"))["amount"].to_pylist()
        assert amounts == sorted(amounts)
    assert table.properties["streamhouse.batch-layout-of-table-id"] == str(key_world.info.table_id)


def test_a_partitioned_z_order(key_world: KeyTableWorld) -> None:
    key_world.create_key_table(
        properties={
            "table.datalake.batch-layout.partition": "truncate(4, id), region",
            "table.datalake.batch-layout.sort": "zorder(amount, id)",
        }
    )
    for number in range(3):
        _live(key_world, number)
        key_world.tiering.tier()

    assert _in_batch(key_world) == _live_rows(key_world)
    table = key_world.tiering.lake_table(BATCH)
    assert [f.name for f in table.spec().fields] == ["id_trunc", "region", "id_bucket"]
    assert table.sort_order().is_unsorted


@pytest.mark.one_of(3)
@pytest.mark.parametrize("limited", [False, True], ids=["whole", "small-steps"])
@pytest.mark.parametrize("step", [*ROUND_STEPS, *BATCH_STEPS])
def test_a_worker_may_die_anywhere(key_world: KeyTableWorld, step: str, limited: bool) -> None:
    key_world.create_key_table(bucket_count=2, properties=SORT)
    _live(key_world, 0)
    key_world.tiering.tier()
    _live(key_world, 1)

    with pytest.raises(Killed):
        key_world.tiering.round(checkpoint=dying_at(step)).run()
    key_world.tiering.service.release("db.t")
    _live(key_world, 2)
    limits = PlanLimits(key_bucket_rows_max=2) if limited else PlanLimits()
    while _lacks_rows(key_world):
        key_world.tiering.round(limits=limits).run()

    assert _in_batch(key_world) == _live_rows(key_world)
    assert key_world.in_lake() == key_world.live


def test_a_layout_that_is_not_due_waits_for_a_later_round(key_world: KeyTableWorld) -> None:
    key_world.create_key_table(bucket_count=2, properties=SORT)
    for number in range(3):
        _live(key_world, number)
        key_world.tiering.round(replace(key_world.tiering.claim(), is_batch_due=False)).run()
    assert key_world.tiering.service.table_state("db.t").lake.batch is None
    assert key_world.in_lake() == key_world.live

    key_world.tiering.tier()

    assert _in_batch(key_world) == _live_rows(key_world)


def test_rows_are_fresh_when_the_layout_fails(key_world: KeyTableWorld) -> None:
    key_world.create_key_table(properties=SORT)
    _live(key_world, 0)

    def fail(reached: str) -> None:
        if reached == "batch-files-written":
            raise UnavailableError("no room")

    for number in (1, 2):
        _live(key_world, number)
        with pytest.raises(StreamhouseError, match="no room"):
            key_world.tiering.round(checkpoint=fail).run()
        assert key_world.in_lake() == key_world.live
        assert key_world.lag == 0
    key_world.tiering.tier()

    assert _in_batch(key_world) == _live_rows(key_world)
    assert key_world.tiering.service.failures("db.t") == ["unavailable: no room"] * 2


def test_a_worker_asked_to_tier_once_brings_rows_to_both(key_world: KeyTableWorld) -> None:
    key_world.create_key_table(properties=SORT)
    _live(key_world, 0)
    key_world.tiering.round(replace(key_world.tiering.claim(), is_batch_due=False)).run()

    (summary,) = key_world.tiering.worker().run_once()

    assert summary.error is None
    assert _in_batch(key_world) == _live_rows(key_world)


def test_tiering_once_after_a_death_brings_rows_to_both(key_world: KeyTableWorld) -> None:
    """A round that only registers what a dead worker committed has not brought them to both."""
    key_world.create_key_table(properties=SORT)
    _live(key_world, 0)

    with pytest.raises(Killed):
        key_world.tiering.round(checkpoint=dying_at("committed")).run()
    key_world.tiering.service.release("db.t")

    (summary,) = key_world.tiering.worker().run_once()

    assert summary.error is None
    assert _in_batch(key_world) == _live_rows(key_world)


def test_a_log_table_has_one_too(key_world: KeyTableWorld) -> None:
    schema = pa.schema([pa.field("n", pa.int64()), pa.field("s", pa.string())])
    key_world.tiering.create_table(
        "db.l", schema, bucket_count=2, properties={"table.datalake.batch-layout.sort": "n"}
    )
    for start in (0, 10):
        for bucket in (0, 1):
            numbers = pa.array([start + (i * 7) % 10 for i in range(10)])
            rows = pa.record_batch([numbers, numbers.cast(pa.string())], schema=schema)
            key_world.tiering.service.append("db.l", bucket, rows)
        key_world.tiering.tier("db.l")

    assert key_world.tiering.addresses("db.l$batch") == key_world.tiering.addresses("db.l")
    for file in key_world.tiering.lake_table("db.l$batch").scan().plan_files():
        numbers = pq.read_table(file.file.file_path.removeprefix("file://"))["n"].to_pylist()
        assert numbers == sorted(numbers)


def test_maintenance_makes_few_files_of_larger_runs(key_world: KeyTableWorld) -> None:
    key_world.create_key_table(properties=SORT)
    for number in range(12):
        _live(key_world, number)
        key_world.tiering.tier()
    state = key_world.tiering.service.table_state("db.t")
    assert state.lake.batch is not None
    before = key_world.tiering.lake_table(BATCH).inspect.files().num_rows

    opened = key_world.tiering.lake().open_or_create(
        state.table, state.lake.batch, role=LakeRole.BATCH
    )
    maintainer = Maintainer(
        pins=key_world.tiering.service,
        runner=key_world.tiering.runner,
        filesystem=LakeFilesystem(key_world.tiering.catalog.properties),
    )
    claim = Claim(epoch=state.lake.tiering_epoch, snapshot_id=state.lake.batch.snapshot_id)
    policy = MaintenancePolicy.of(state.table).on_demand()
    maintainer.maintain(opened, state.table, claim, policy=policy)

    table = key_world.tiering.lake_table(BATCH)
    assert _in_batch(key_world) == _live_rows(key_world)
    assert table.inspect.files().num_rows < before
    for file in table.scan().plan_files():
        rows = pq.read_table(file.file.file_path.removeprefix("file://"))
        assert rows["amount"].to_pylist() == sorted(rows["amount"].to_pylist())
    _live(key_world, 1)
    key_world.tiering.tier()
    assert _in_batch(key_world) == _live_rows(key_world)


def test_the_state_crosses_the_wire(key_world: KeyTableWorld) -> None:
    key_world.create_key_table(properties=SORT)
    _live(key_world, 0)
    key_world.tiering.tier()
    state = key_world.tiering.service.table_state("db.t")

    assert type(state).from_json(state.to_json()) == state
    assert state.in_batch_layout() is not None
