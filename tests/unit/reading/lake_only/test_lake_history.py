"""A bucket's older rows from the lake: by offset, from any offset, in parts of any size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.typedef import Record

from streamhouse.core.errors import CorruptDataError, SnapshotNotFoundError
from streamhouse.core.model.changelog import CHANGE_TYPE_NAMES
from streamhouse.core.model.schema_change import change_schema
from streamhouse.core.model.table import TableInfo
from streamhouse.reading.lake_only.lake_history import IcebergCursor, IcebergHistory
from tests.support.foreign_deletes import commit_delete_files, position_delete_file
from tests.support.key_table_world import KeyTableWorld
from tests.support.union_world import UnionWorld

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("region", pa.string()),
        pa.field("tags", pa.list_(pa.string())),
    ]
)


def rows(start: int, count: int, *, regions: int = 3) -> pa.RecordBatch:
    lines = [
        {"id": i, "region": f"r{i % regions}", "tags": None if i % 3 else [f"t{i}"]}
        for i in range(start, start + count)
    ]
    return pa.RecordBatch.from_pylist(lines, schema=SCHEMA)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[UnionWorld]:
    with UnionWorld(tmp_path) as opened:
        yield opened


def filled(world: UnionWorld, *, rounds: int = 3, count: int = 10, **table: Any) -> UnionWorld:
    """Rounds of `count` rows for each of two buckets, all of them tiered."""
    world.tiering.create_table(UnionWorld.PATH, SCHEMA, bucket_count=2, **table)
    for number in range(rounds):
        for bucket in range(2):
            world.append(bucket, rows((number * 2 + bucket) * count, count))
        world.tiering.tier()
    return world


def opened(
    world: UnionWorld, bucket: int, offset: int, history: IcebergHistory | None = None
) -> IcebergCursor:
    state = world.state()
    history = history or IcebergHistory(world.tiering.catalog)
    return history.open(state.table, state.lake, bucket, offset=offset)


def read_on(
    cursor: IcebergCursor, *, rows_max: int = 1 << 20, bytes_max: int = 1 << 30
) -> list[tuple[int, int, tuple[Any, ...]]]:
    """(offset, time, values) of all rows from where the cursor is, in the order they come."""
    lines = []
    while cursor.next_offset < cursor.end_offset:
        before = cursor.next_offset
        found = cursor.read(rows_max=rows_max, bytes_max=bytes_max)
        assert found.rows.num_rows <= rows_max
        assert found.next_offset == cursor.next_offset > before
        values = zip(*(column.to_pylist() for column in found.rows.columns), strict=True)
        offsets, times = found.offsets.tolist(), found.timestamps_us.tolist()
        assert all(before <= offset < found.next_offset for offset in offsets)
        lines += list(zip(offsets, times, values, strict=True))
    cursor.close()
    return lines


def truth(world: UnionWorld, bucket: int, *, start: int = 0) -> list[Any]:
    return sorted(
        (row.offset, row.timestamp_us, tuple(row.values))
        for row in world.rows
        if row.bucket == bucket and row.offset >= start
    )


@pytest.mark.parametrize("partitioned_by", [(), ("region",), ("truncate(1, region)",)])
@pytest.mark.parametrize("rows_max", [1, 7, 1000])
def test_rows_come_in_the_order_of_their_offsets(
    world: UnionWorld, partitioned_by: tuple[str, ...], rows_max: int
) -> None:
    filled(world, partitioned_by=partitioned_by)
    for bucket in range(2):
        assert read_on(opened(world, bucket, 0), rows_max=rows_max) == truth(world, bucket)


@pytest.mark.parametrize("start", [0, 1, 9, 10, 11, 29])
def test_a_cursor_begins_at_any_offset(world: UnionWorld, start: int) -> None:
    filled(world, partitioned_by=("region",))
    assert read_on(opened(world, 1, start)) == truth(world, 1, start=start)


def test_few_bytes_are_at_least_a_row(world: UnionWorld) -> None:
    filled(world)
    found = opened(world, 0, 0).read(rows_max=100, bytes_max=1)
    assert found.offsets.tolist() == [0]
    assert found.next_offset == 1


@pytest.mark.parametrize("keep_bounds", [True, False])
def test_files_that_another_engine_has_compacted(world: UnionWorld, keep_bounds: bool) -> None:
    # Its files have the newest rows first: offsets do not ascend there.
    history = IcebergHistory(world.tiering.catalog, window_rows=4)
    filled(world, partitioned_by=("region",))
    world.rewrite_lake(keep_bounds=keep_bounds)
    world.append(0, rows(60, 5))
    world.tiering.tier()
    assert read_on(opened(world, 0, 0, history), rows_max=3) == truth(world, 0)
    assert read_on(opened(world, 1, 11, history)) == truth(world, 1, start=11)


def test_more_files_overlap_than_may_be_open(world: UnionWorld) -> None:
    filled(world, partitioned_by=("region",), rounds=2, count=30)
    history = IcebergHistory(world.tiering.catalog, files_open_max=2, window_rows=4)
    assert read_on(opened(world, 0, 3, history), rows_max=8) == truth(world, 0, start=3)


def test_files_are_opened_when_they_are_reached_and_closed_when_they_are_read(
    world: UnionWorld,
) -> None:
    filled(world)
    cursor = opened(world, 0, 0)
    assert cursor.held_bytes == 0
    cursor.read(rows_max=4, bytes_max=1 << 20)
    one_file = cursor.held_bytes
    assert one_file > 0
    cursor.read(rows_max=8, bytes_max=1 << 20)
    assert 0 < cursor.held_bytes < 2 * one_file
    read_on(cursor)
    assert cursor.held_bytes == 0


def test_rows_that_another_engine_deleted_are_gaps(world: UnionWorld) -> None:
    filled(world, rounds=1)
    table = world.tiering.lake_table()
    tasks = [*table.scan().plan_files()]
    file = next(t.file for t in tasks if t.file.partition == Record(0))
    deletes = position_delete_file(
        table, [(file.file_path, 0), (file.file_path, 4)], partition=Record(0)
    )
    commit_delete_files(table, [deletes])
    current = world.tiering.lake_table().metadata.current_snapshot_id
    state = world.state()
    lake = replace(state.lake, snapshot_id=current)
    cursor = IcebergHistory(world.tiering.catalog).open(state.table, lake, 0, offset=0)
    assert [offset for offset, _, _ in read_on(cursor)] == [1, 2, 3, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("is_one_file", [True, False])
def test_a_row_that_is_there_twice_is_damage(world: UnionWorld, is_one_file: bool) -> None:
    filled(world, rounds=1)
    table = world.tiering.lake_table()
    stored = table.scan().to_arrow()
    if is_one_file:
        table.overwrite(pa.concat_tables([stored, stored.slice(0, 1)]))
    else:
        table.append(stored.slice(0, 1))
    state = world.state()
    current = world.tiering.lake_table().metadata.current_snapshot_id
    lake = replace(state.lake, snapshot_id=current)
    history = IcebergHistory(world.tiering.catalog)
    bucket, offset = (stored.column(name)[0].as_py() for name in ("__bucket", "__offset"))
    cursor = history.open(state.table, lake, bucket, offset=0)
    with pytest.raises(
        CorruptDataError, match=f"bucket {bucket}: the lake has offset {offset} more than once"
    ):
        cursor.read(rows_max=100, bytes_max=1 << 20)


def test_a_cursor_whose_files_are_gone_says_so_and_the_next_one_goes_on(
    world: UnionWorld,
) -> None:
    filled(world)
    history = IcebergHistory(world.tiering.catalog)
    cursor = opened(world, 0, 0, history)
    cursor.read(rows_max=4, bytes_max=1 << 20)
    world.rewrite_lake()
    world.expire_old_snapshots()
    for file in world.tiering.orphans():
        file.unlink()

    # The file that is open stays readable.
    assert cursor.read(rows_max=6, bytes_max=1 << 20).next_offset == 10
    with pytest.raises(SnapshotNotFoundError):
        cursor.read(rows_max=4, bytes_max=1 << 20)
    assert read_on(opened(world, 0, 10, history)) == truth(world, 0, start=10)


def test_one_plan_serves_every_bucket_until_rows_are_wanted_that_it_lacks(
    world: UnionWorld,
) -> None:
    filled(world)
    history = IcebergHistory(world.tiering.catalog)
    for bucket, offset in ((0, 0), (1, 5), (0, 29)):
        opened(world, bucket, offset, history).close()
    assert history.plans_made == 1
    world.append(0, rows(60, 5))
    world.tiering.tier()
    opened(world, 0, 29, history).close()
    assert history.plans_made == 1
    assert read_on(opened(world, 0, 30, history)) == truth(world, 0, start=30)
    assert history.plans_made == 2


def test_rows_have_the_schema_that_the_table_has_now(world: UnionWorld) -> None:
    filled(world, rounds=1)
    state = world.state()
    changed: TableInfo = change_schema(
        state.table,
        [
            {"rename": "region", "to": "place"},
            {"drop": "tags", "confirm": "tags"},
            {"add": "note", "type": "string"},
        ],
    )
    cursor = IcebergHistory(world.tiering.catalog).open(changed, state.lake, 0, offset=8)
    found = cursor.read(rows_max=10, bytes_max=1 << 20)
    assert found.rows.to_pylist() == [
        {"id": 8, "place": "r2", "note": None},
        {"id": 9, "place": "r0", "note": None},
    ]


def test_the_changes_of_a_primary_key_table_come_from_its_full_history(tmp_path: Path) -> None:
    with KeyTableWorld(tmp_path) as world:
        world.create_key_table(properties={"table.datalake.changelog": "true"})
        world.upsert({"id": 1, "region": "a", "amount": 1.0})
        world.upsert({"id": 2, "region": "b", "amount": 2.0})
        world.tiering.tier()
        world.upsert({"id": 1, "region": "c", "amount": 2.0})
        world.delete({"id": 2})
        world.tiering.tier()
        found = read_on(opened(world.union, 0, 0), rows_max=2)

    names = [(values[0], values[1], CHANGE_TYPE_NAMES[values[-1]]) for _, _, values in found]
    assert names == [
        (1, "a", "+I"),
        (2, "b", "+I"),
        (1, "a", "-U"),
        (1, "c", "+U"),
        (2, "b", "-D"),
    ]
    assert [offset for offset, _, _ in found] == [0, 1, 2, 3, 4]


def test_a_primary_key_table_without_full_history_has_no_older_changes(tmp_path: Path) -> None:
    with KeyTableWorld(tmp_path) as world:
        world.create_key_table()
        world.upsert({"id": 1, "region": "a", "amount": 1.0})
        world.tiering.tier()
        with pytest.raises(SnapshotNotFoundError, match=r"no lake table 'db.t\$changelog' yet"):
            opened(world.union, 0, 0)


def test_another_lake_table_is_refused(world: UnionWorld) -> None:
    filled(world, rounds=1)
    state = world.state()
    lake = replace(state.lake, table_uuid="00000000-0000-0000-0000-000000000000")
    with pytest.raises(SnapshotNotFoundError, match="is another one"):
        IcebergHistory(world.tiering.catalog).open(state.table, lake, 0, offset=0)


def test_what_the_lake_covers_is_told(world: UnionWorld) -> None:
    filled(world)
    lake = world.state().lake
    covered = opened(world, 0, 0).covered
    assert covered is not None
    assert covered.tiered_offsets == lake.tiered_offsets
    assert covered.fingerprints == lake.fingerprints


@pytest.mark.parametrize("partitioned_by", [(), ("region",)])
def test_the_first_row_since_a_time(world: UnionWorld, partitioned_by: tuple[str, ...]) -> None:
    filled(world, partitioned_by=partitioned_by)
    history, state = IcebergHistory(world.tiering.catalog), world.state()
    times = sorted({row.timestamp_us for row in world.rows})
    for time in [*times, *(t - 1 for t in times), *(t + 1 for t in times)]:
        for bucket in range(2):
            late = (row[:2] for row in truth(world, bucket) if row[1] >= time)
            found = history.first_since(state.table, state.lake, bucket, time, offset=0)
            assert found == min(late, default=None)
