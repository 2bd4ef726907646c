"""The rows of one bucket as the lake has them: all of them, each with its offset, none deleted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyiceberg.typedef import Record

from streamhouse.core.errors import SnapshotNotFoundError
from streamhouse.core.model.lake.facts import LakeState
from streamhouse.reading.lake_only.lake_bucket import lake_bucket_rows
from tests.support.foreign_deletes import commit_delete_files, position_delete_file
from tests.support.union_world import UnionWorld

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("tiny", pa.int8()),
        pa.field("tags", pa.list_(pa.string())),
    ]
)


def rows(start: int, count: int) -> pa.RecordBatch:
    lines = [
        {"id": i, "tiny": i % 100, "tags": None if i % 3 else [f"t{i}"]}
        for i in range(start, start + count)
    ]
    return pa.RecordBatch.from_pylist(lines, schema=SCHEMA)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[UnionWorld]:
    """Three rounds of ten rows a bucket: ids 0, 20, 40 in bucket 0; 10, 30, 50 in bucket 1."""
    with UnionWorld(tmp_path) as opened:
        opened.tiering.create_table(UnionWorld.PATH, SCHEMA, bucket_count=2)
        for number in range(3):
            for bucket in range(2):
                opened.append(bucket, rows(number * 20 + bucket * 10, 10))
            opened.tiering.tier()
        yield opened


def found(world: UnionWorld, lake: LakeState, bucket: int) -> tuple[int, list[tuple[int, int]]]:
    """Return the end offset, and (id, offset) of every row."""
    end, batches, _ = lake_bucket_rows(world.tiering.catalog, world.state().table, lake, bucket)
    pairs = []
    for batch in batches:
        assert batch.schema.remove(3).equals(SCHEMA)
        assert batch.schema.names[3] == "__offset"
        for line in batch.to_pylist():
            assert line["tiny"] == line["id"] % 100
            assert line["tags"] == (None if line["id"] % 3 else [f"t{line['id']}"])
            pairs.append((line["id"], line["__offset"]))
    return end, sorted(pairs)


def expected(bucket: int, rounds: int) -> list[tuple[int, int]]:
    return [(n * 20 + bucket * 10 + i, n * 10 + i) for n in range(rounds) for i in range(10)]


def test_every_row_of_the_bucket_with_its_offset(world: UnionWorld) -> None:
    lake = world.state().lake

    assert found(world, lake, 0) == (30, expected(0, 3))
    assert found(world, lake, 1) == (30, expected(1, 3))


def test_the_registered_snapshot_is_read_though_there_are_later_ones(world: UnionWorld) -> None:
    lake = world.state().lake
    world.append(0, rows(100, 5))
    world.tiering.tier()

    assert found(world, lake, 0) == (30, expected(0, 3))


def test_deleted_positions_are_left_out(world: UnionWorld) -> None:
    table = world.tiering.lake_table()
    first = min(
        (task.file for task in table.scan().plan_files()),
        key=lambda f: f.lower_bounds[table.schema().find_field("id").field_id],
    )
    gone = [(first.file_path, 0), (first.file_path, 7)]
    commit_delete_files(table, [position_delete_file(table, gone, partition=Record(0))])
    world.append(1, rows(100, 1))
    world.tiering.tier()

    rows_left = [pair for pair in expected(0, 3) if pair[0] not in (0, 7)]
    assert found(world, world.state().lake, 0) == (30, rows_left)


def test_of_an_expired_snapshot_the_current_one_goes_further(world: UnionWorld) -> None:
    lake = world.state().lake
    world.append(0, rows(100, 5))
    world.tiering.tier()
    world.expire_old_snapshots()

    end, pairs = found(world, lake, 0)

    assert end == 35
    assert pairs == [*expected(0, 3), *((100 + i, 30 + i) for i in range(5))]


def test_another_lake_table_is_refused(world: UnionWorld) -> None:
    state = world.state()
    other = LakeState(
        snapshot_id=state.lake.snapshot_id, table_uuid="0", tiered_offsets={0: 30, 1: 30}
    )
    with pytest.raises(SnapshotNotFoundError, match="is another one"):
        lake_bucket_rows(world.tiering.catalog, state.table, other, 0)
