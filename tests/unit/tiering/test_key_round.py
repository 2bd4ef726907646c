"""Rounds of primary key tables: after each, the lake holds exactly the rows of a dict model."""

from __future__ import annotations

import logging
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.manifest import DataFileContent
from pyiceberg.table.snapshots import Operation

from streamhouse.core.errors import CorruptDataError, UnavailableError
from streamhouse.reading.tail.round_planner import PlanLimits
from streamhouse.tiering.round._round import ROUND_STEPS
from tests.support.foreign_deletes import commit_compaction
from tests.support.key_table_world import KeyTableWorld
from tests.support.tiering_world import Killed, dying_at


def row(key: int, region: str | None = "eu", amount: float | None = 1.0) -> dict[str, Any]:
    return {"id": key, "region": region, "amount": amount}


def _operation(key_world: KeyTableWorld) -> Operation:
    snapshot = key_world.tiering.lake_table().current_snapshot()
    assert snapshot is not None
    assert snapshot.summary is not None
    return snapshot.summary.operation


def _files(key_world: KeyTableWorld) -> tuple[int, int]:
    """How many data files and delete files are live."""
    entries = key_world.tiering.lake_table().inspect.files().to_pylist()
    contents = [entry["content"] for entry in entries]
    deletes = contents.count(DataFileContent.POSITION_DELETES)
    return len(contents) - deletes, deletes


def test_the_first_round_writes_the_surviving_versions_only(key_world: KeyTableWorld) -> None:
    key_world.create_key_table()
    key_world.upsert(row(1), row(2), row(3))
    key_world.upsert(row(2, amount=2.0))
    key_world.delete(row(3))

    result = key_world.tiering.tier()

    assert key_world.in_lake() == key_world.live
    # +I x 3, -U, +U, -D.
    assert result.row_count == 6
    assert result.tiered_offsets == {0: 6}
    assert _operation(key_world) is Operation.APPEND
    assert _files(key_world) == (1, 0)


def test_updates_and_deletes_retract_rows_of_the_lake(key_world: KeyTableWorld) -> None:
    key_world.create_key_table()
    key_world.upsert(*(row(key) for key in range(10)))
    key_world.tiering.tier()
    key_world.upsert(row(3, amount=3.0), row(11))
    key_world.delete(row(4), row(99))

    key_world.tiering.tier()

    assert key_world.in_lake() == key_world.live
    assert _operation(key_world) is Operation.OVERWRITE
    assert _files(key_world) == (2, 1)


@pytest.mark.parametrize("image", ["full", "after"])
@pytest.mark.parametrize("buckets", [1, 3])
def test_many_rounds_with_reinserts_and_idle_buckets(
    key_world: KeyTableWorld, image: str, buckets: int
) -> None:
    key_world.create_key_table(bucket_count=buckets, properties={"table.changelog.image": image})
    for number in range(8):
        key_world.upsert(*(row(key, amount=float(number)) for key in range(number, 20, number + 1)))
        key_world.delete(row(number), row(19 - number))
        if number % 3 == 2:
            key_world.upsert(row(number))
        key_world.tiering.tier()
        assert key_world.in_lake() == key_world.live


def test_a_row_moves_between_lake_partitions(key_world: KeyTableWorld) -> None:
    key_world.create_key_table(bucket_count=2, partitioned_by=["region"])
    key_world.upsert(*(row(key, region="eu") for key in range(6)))
    key_world.tiering.tier()
    key_world.upsert(row(1, region="us"), row(2, region=None), row(3, region="eu", amount=2.0))
    key_world.tiering.tier()
    key_world.upsert(row(1, region="eu"), row(2, region="us"))
    key_world.delete(row(0))

    key_world.tiering.tier()

    assert key_world.in_lake() == key_world.live
    found = key_world.tiering.lake_table().scan("region = 'us'").to_arrow()
    assert found["id"].to_pylist() == [2]


def test_a_round_whose_versions_all_died_in_it_still_advances(key_world: KeyTableWorld) -> None:
    key_world.create_key_table()
    key_world.upsert(row(1))
    key_world.delete(row(1))

    first = key_world.tiering.tier()

    assert key_world.in_lake() == []
    assert first.tiered_offsets == {0: 2}
    key_world.upsert(row(2))
    key_world.tiering.tier()
    key_world.upsert(row(3))
    key_world.delete(row(3))
    last = key_world.tiering.tier()
    assert last.tiered_offsets == {0: 5}
    assert key_world.in_lake() == key_world.live
    assert key_world.tiering.service.table_state("db.t").lake.tiered_offsets == {0: 5}


def test_a_round_may_only_delete(key_world: KeyTableWorld) -> None:
    key_world.create_key_table()
    key_world.upsert(row(1), row(2))
    key_world.tiering.tier()
    key_world.delete(row(1), row(2))

    key_world.tiering.tier()

    assert key_world.in_lake() == []
    assert _files(key_world) == (1, 1)


def test_a_bucket_cut_into_many_tasks_and_rounds(key_world: KeyTableWorld) -> None:
    key_world.create_key_table(bucket_count=2)
    limits = PlanLimits(rows_max=40, key_bucket_rows_max=23, parallelism=4, split_rows_min=5)
    for number in range(6):
        key_world.upsert(*(row(key % 13, amount=float(key + number)) for key in range(30)))
        key_world.delete(*(row(key) for key in range(number, 13, 4)))
        assert key_world.tiering.round(limits=limits).run().row_count <= 40

    while key_world.lag:
        key_world.tiering.round(limits=limits).run()

    assert key_world.in_lake() == key_world.live


def test_composite_keys_of_which_one_column_is_the_bucket_key(key_world: KeyTableWorld) -> None:
    schema = pa.schema(
        [
            pa.field("day", pa.date32(), nullable=False),
            pa.field("name", pa.string(), nullable=False),
            pa.field("count", pa.int16()),
        ]
    )
    key_world.create_key_table(
        schema,
        primary_key=("day", "name"),
        bucket_key=("name",),
        bucket_count=3,
        partitioned_by=["month(day)"],
    )
    days = pa.array([0, 20, 40, 60], pa.date32()).to_pylist()
    for number in range(3):
        key_world.upsert(
            *({"day": d, "name": n, "count": number} for d in days[number:] for n in "abc")
        )
        key_world.delete({"day": days[number], "name": "b", "count": None})
        key_world.tiering.tier()
        assert key_world.in_lake() == key_world.live


def test_older_snapshots_keep_what_they_had(key_world: KeyTableWorld) -> None:
    key_world.create_key_table(bucket_count=2, partitioned_by=["region"])
    had = []
    for number in range(5):
        key_world.upsert(*(row(key, f"r{number % 2}", number / 2) for key in range(number, 9, 2)))
        had.append((key_world.tiering.tier().snapshot_id, key_world.live))

    assert [key_world.in_lake(snapshot_id) for snapshot_id, _ in had] == [live for _, live in had]


def test_many_touched_files_of_a_partition_share_one_delete_file(key_world: KeyTableWorld) -> None:
    key_world.create_key_table(properties={"table.datalake.format-version": "2"})
    for key in range(20):
        key_world.upsert(row(key))
        key_world.tiering.tier()
    assert _files(key_world) == (20, 0)

    key_world.upsert(*(row(key, amount=2.0) for key in range(20)))
    key_world.tiering.tier()

    assert _files(key_world) == (21, 1)
    assert key_world.in_lake() == key_world.live


@pytest.mark.parametrize("step", ROUND_STEPS)
def test_a_worker_may_die_after_any_step(key_world: KeyTableWorld, step: str) -> None:
    key_world.create_key_table(bucket_count=2)
    key_world.upsert(*(row(key) for key in range(10)))
    key_world.tiering.tier()
    key_world.upsert(*(row(key, amount=2.0) for key in range(0, 10, 2)))
    key_world.delete(row(1))

    with pytest.raises(Killed):
        key_world.tiering.round(checkpoint=dying_at(step)).run()
    key_world.tiering.service.release("db.t")
    key_world.upsert(row(3, amount=3.0), row(12))

    key_world.catch_up()

    assert key_world.in_lake() == key_world.live


def test_files_of_a_round_that_fails_are_deleted(key_world: KeyTableWorld) -> None:
    key_world.create_key_table()
    key_world.upsert(row(1), row(2))
    key_world.tiering.tier()
    before = key_world.tiering.data_files()
    key_world.upsert(row(1, amount=2.0))
    assignment = key_world.tiering.claim()
    # Retention took what the round wants to read.
    key_world.tiering.service.expire_log("db.t", 0, 4)

    with pytest.raises(Exception, match="offset 2 of bucket 0"):
        key_world.tiering.round(assignment).run()

    assert key_world.tiering.data_files() == before


def test_rows_that_another_engine_deleted_stop_the_rounds_until_they_are_back(
    key_world: KeyTableWorld,
) -> None:
    key_world.create_key_table()
    key_world.upsert(*(row(key) for key in range(5)))
    key_world.tiering.tier()
    before = key_world.tiering.lake_table().metadata.current_snapshot_id
    assert before is not None
    key_world.tiering.lake_table().delete("id >= 3")
    key_world.upsert(row(3, amount=2.0), row(1, amount=2.0))

    with pytest.raises(CorruptDataError, match=f"changed rows past the service.* back to {before}"):
        key_world.tiering.tier()
    assert len(key_world.in_lake()) == 3

    key_world.tiering.lake_table().manage_snapshots().rollback_to_snapshot(before).commit()
    key_world.tiering.tier()
    assert key_world.in_lake() == key_world.live


def test_rows_that_an_earlier_release_let_others_delete_are_counted_not_missed(
    key_world: KeyTableWorld, caplog: pytest.LogCaptureFixture
) -> None:
    key_world.create_key_table()
    key_world.upsert(*(row(key) for key in range(5)))
    key_world.tiering.tier()
    table = key_world.tiering.lake_table()
    head = table.current_snapshot()
    assert head is not None
    assert head.summary is not None
    # A round has been built on the delete.
    ours = {k: v for k, v in head.summary.additional_properties.items() if "streamhouse" in k}
    table.delete("id >= 3", snapshot_properties=ours)
    key_world.upsert(row(3, amount=2.0), row(1, amount=2.0))

    with caplog.at_level(logging.WARNING):
        key_world.tiering.tier()

    assert "event=retracted_rows_gone table=db.t rows=1" in caplog.text
    assert sorted(entry[2][1][1][1][1] for entry in key_world.in_lake()) == [0, 1, 2, 3]


def test_rows_that_another_engine_deletes_during_a_round_stop_it(key_world: KeyTableWorld) -> None:
    key_world.create_key_table()
    key_world.upsert(*(row(key) for key in range(5)))
    key_world.tiering.tier()
    key_world.upsert(row(7))

    def delete(step: str) -> None:
        if step == "manifests-written" and len(key_world.tiering.lake_table().snapshots()) == 1:
            key_world.tiering.lake_table().delete("id = 3")

    with pytest.raises(CorruptDataError, match="changed rows past the service"):
        key_world.tiering.round(checkpoint=delete).run()
    assert len(key_world.in_lake()) == 4


def test_a_compaction_that_comes_between_makes_the_round_start_over(
    key_world: KeyTableWorld,
) -> None:
    key_world.create_key_table()
    key_world.upsert(*(row(key) for key in range(5)))
    key_world.tiering.tier()
    key_world.upsert(row(3, amount=2.0))

    def compact(step: str) -> None:
        if step == "files-written":
            commit_compaction(key_world.tiering.lake_table())

    with pytest.raises(UnavailableError, match="another engine rewrote 1 files"):
        key_world.tiering.round(checkpoint=compact).run()
    assert _files(key_world) == (1, 0)

    key_world.tiering.tier()

    assert key_world.in_lake() == key_world.live


def test_a_foreign_append_that_comes_between_does_not_disturb(key_world: KeyTableWorld) -> None:
    key_world.create_key_table()
    key_world.upsert(*(row(key) for key in range(5)))
    key_world.tiering.tier()
    key_world.upsert(row(3, amount=2.0))

    def touch(step: str) -> None:
        if step == "files-written":
            table = key_world.tiering.lake_table()
            table.append(table.schema().as_arrow().empty_table())

    key_world.tiering.round(checkpoint=touch).run()

    assert key_world.in_lake() == key_world.live
