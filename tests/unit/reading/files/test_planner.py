"""Planning on real Iceberg metadata: pruning, deletes, snapshots that come and go."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.typedef import Record

from streamhouse.core.errors import (
    CorruptDataError,
    SnapshotNotFoundError,
    UnsupportedError,
)
from streamhouse.core.model.lake.facts import LakeCatalog
from streamhouse.core.model.offsets import OffsetRange
from streamhouse.lake.files.deletes.deleted_positions import DeleteFile
from streamhouse.lake.snapshots.live_files import DeleteEntry, data_files
from streamhouse.reading.files._file_pruning import LakeQuery
from streamhouse.reading.files.planner import LakeTable, open_lake_table
from streamhouse.reading.where.parser import parse_predicate
from tests.support.foreign_deletes import (
    commit_delete_files,
    equality_delete_file,
    position_delete_file,
)
from tests.support.union_world import UnionWorld

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("region", pa.string()),
        pa.field("amount", pa.float64()),
        pa.field("price", pa.decimal128(30, 4)),
        pa.field("day", pa.date32()),
        pa.field("flag", pa.bool_()),
        pa.field("raw", pa.binary()),
        pa.field("place", pa.struct([("zone", pa.int32())])),
    ]
)


def events(start: int, count: int, *, region: str | None = "eu") -> pa.RecordBatch:
    rows = [
        {
            "id": i,
            "region": region,
            "amount": i / 2,
            "price": i,
            "day": i,
            "flag": i % 2 == 0,
            "raw": b"%d" % i,
            "place": {"zone": i},
        }
        for i in range(start, start + count)
    ]
    return pa.RecordBatch.from_pylist(rows, schema=SCHEMA)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[UnionWorld]:
    with UnionWorld(tmp_path) as opened:
        yield opened


def filled(world: UnionWorld, **options: Any) -> LakeTable:
    """Four rounds: ids 0..39 in tens, regions eu, us, eu, null; two buckets take turns."""
    world.tiering.create_table(UnionWorld.PATH, SCHEMA, bucket_count=2, **options)
    for i, region in enumerate(["eu", "us", "eu", None]):
        world.append(i % 2, events(i * 10, 10, region=region))
        world.tiering.tier()
    return opened(world)


def opened(world: UnionWorld) -> LakeTable:
    return open_lake_table(world.tiering.catalog, UnionWorld.PATH)


def planned(
    world: UnionWorld, lake: LakeTable, *, where: str | None = None, **query: Any
) -> list[int]:
    """Return the first id's tens of every planned file."""
    state = world.state()
    predicate = None if where is None else parse_predicate(where, state.table.schema, table="t")
    assert state.lake.snapshot_id is not None
    found = lake.plan(
        state.table.schema,
        LakeQuery(predicate=predicate, **query),
        snapshot_id=state.lake.snapshot_id,
    )
    firsts = [pq.read_table(f.path.removeprefix("file://"))["id"][0].as_py() for f in found.files]
    return sorted(first // 10 for first in firsts)


def test_a_lake_that_is_older_than_the_service_is_refused(world: UnionWorld) -> None:
    """The catalog was put back as it was: its current snapshot lacks rows that were tiered."""
    world.tiering.create_table(UnionWorld.PATH, SCHEMA, bucket_count=1)
    catalog = world.tiering.folder / "catalog.db"
    older = b""
    for start in (0, 10):
        world.append(0, events(start, 10))
        world.tiering.tier()
        older = older or catalog.read_bytes()
    state = world.state()
    catalog.write_bytes(older)
    ranges = {
        bucket: OffsetRange(bucket=bucket, start=0, end=end)
        for bucket, end in state.lake.tiered_offsets.items()
    }
    assert state.lake.snapshot_id is not None

    with pytest.raises(CorruptDataError, match="bucket 0 up to offset 10, but rows up to 20"):
        opened(world).plan(
            state.table.schema,
            LakeQuery(ranges=ranges),
            snapshot_id=state.lake.snapshot_id,
            successor_of=state.table,
        )


def test_a_damaged_manifest_is_refused_with_a_sentence(world: UnionWorld) -> None:
    lake = filled(world)
    for path in world.tiering.folder.rglob("*-m0.avro"):
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])

    with pytest.raises(CorruptDataError, match="its manifests are damaged"):
        planned(world, lake)


@pytest.mark.parametrize(
    ("where", "files"),
    [
        ("id < 10", [0]),
        ("id between 15 and 25", [1, 2]),
        ("amount < 5", [0]),
        # To Spark NaN is above every number, and the manifest does not say that there is none.
        ("amount >= 15", [0, 1, 2, 3]),
        ("price = 12.0000", [1]),
        ("day > date'1970-02-01'", [3]),
        ("flag or not flag", [0, 1, 2, 3]),
        ("raw = x'3232'", [0, 2]),
        ("place.zone = 3", [0, 1, 2, 3]),
        ("region = 'us'", [1]),
        ("region is null", [3]),
        ("region is not null", [0, 1, 2]),
        ("region in ('us', 'xx') or id = 39", [1, 3]),
        ("not (id < 30)", [3]),
        ("id > 1000", []),
    ],
)
@pytest.mark.parametrize("partitioned_by", [[], ["region"], ["truncate(1, region)"]])
def test_files_are_pruned_by_partition_and_bounds(
    world: UnionWorld, where: str, files: list[int], partitioned_by: list[str]
) -> None:
    lake = filled(world, partitioned_by=partitioned_by)

    assert planned(world, lake, where=where) == files


def test_partitions_prune_without_bounds(world: UnionWorld) -> None:
    filled(world, partitioned_by=["region"])
    world.rewrite_lake(keep_bounds=False)
    lake = opened(world)
    snapshot = world.tiering.lake_table().metadata.current_snapshot_id
    assert snapshot is not None
    schema = world.state().table.schema

    found = lake.plan(
        schema,
        LakeQuery(predicate=parse_predicate("region = 'us'", schema, table="t")),
        snapshot_id=snapshot,
    )

    assert [f.partition for f in found.files] == ["region=us/__bucket=1"]
    assert [(f.bucket, f.offset_start) for f in found.files] == [(None, None)]
    assert [f.constants for f in found.files] == [{2: "us", 1_000_000: 1}]


def test_offset_ranges_leave_out_files(world: UnionWorld) -> None:
    lake = filled(world)
    ranges = {1: OffsetRange(bucket=1, start=10, end=11)}

    assert planned(world, lake, ranges=ranges) == [3]


def test_times_leave_out_files(world: UnionWorld) -> None:
    lake = filled(world)
    times = sorted({row.timestamp_us for row in world.rows})

    assert planned(world, lake, from_timestamp_us=times[2]) == [2, 3]
    assert planned(world, lake, to_timestamp_us=times[2]) == [0, 1]


def test_what_is_known_of_a_file(world: UnionWorld) -> None:
    lake = filled(world)
    state = world.state()
    assert state.lake.snapshot_id is not None

    found = lake.plan(state.table.schema, LakeQuery(), snapshot_id=state.lake.snapshot_id)

    file = min(found.files, key=lambda f: f.timestamp_min_us or 0)
    assert (file.bucket, file.offset_start, file.offset_end, file.row_count) == (0, 0, 10, 10)
    assert file.timestamp_min_us == file.timestamp_max_us == world.rows[0].timestamp_us
    assert file.row_group_starts == (4,)
    assert file.file_bytes == Path(file.path.removeprefix("file://")).stat().st_size
    assert found.field_ids["id"] == 1
    assert found.field_ids["__offset"] == 1_000_001


def test_our_decoder_reads_what_the_library_reads(world: UnionWorld) -> None:
    filled(world, partitioned_by=["region"])
    world.rewrite_lake()
    table = world.tiering.lake_table()
    snapshot = table.current_snapshot()
    assert snapshot is not None

    for manifest in snapshot.manifests(table.io):
        ours = data_files(table.io, manifest)
        theirs = manifest.fetch_manifest_entry(table.io)
        files = [entry.data_file for entry in theirs]
        assert list(ours.paths) == [f.file_path for f in files]
        assert list(ours.file_bytes) == [f.file_size_in_bytes for f in files]
        assert list(ours.row_counts) == [f.record_count for f in files]
        assert list(ours.row_group_starts) == [f.split_offsets for f in files]
        assert list(ours.sequences) == [e.sequence_number for e in theirs]
        assert [dict(b) for b in ours.lower_bounds] == [f.lower_bounds for f in files]
        assert [dict(b) for b in ours.upper_bounds] == [f.upper_bounds for f in files]
        assert [dict(n) for n in ours.null_counts] == [dict(f.null_value_counts) for f in files]
        assert [ours.partitions[c] for c in ours.partition_codes] == [
            tuple(f.partition._data) for f in files
        ]


def test_an_unknown_snapshot(world: UnionWorld) -> None:
    lake = filled(world)

    with pytest.raises(SnapshotNotFoundError, match=r"has no snapshot 42.*see 'db.t\$snapshots'"):
        lake.plan(world.state().table.schema, LakeQuery(), snapshot_id=42)


def test_an_expired_snapshot_is_replaced_by_its_successor(world: UnionWorld) -> None:
    """A foreign engine compacted and expired: the pinned rows are all there, in other files."""
    filled(world, partitioned_by=["region"])
    world.append(0, events(100, 5))
    pinned = world.state()
    world.rewrite_lake()
    world.expire_old_snapshots()
    assert pinned.lake.snapshot_id not in opened(world).snapshot_ids()

    found = world.read(columns="id")

    assert sorted(found["id"].to_pylist()) == [*range(40), *range(100, 105)]
    with pytest.raises(SnapshotNotFoundError, match="has no snapshot"):
        world.read(asOfSnapshot=pinned.lake.snapshot_id)


def test_a_successor_with_newer_rows_is_cut_at_the_pinned_offsets(world: UnionWorld) -> None:
    filled(world)
    pinned = world.state()
    world.append(0, events(100, 5))
    world.tiering.tier()
    world.expire_old_snapshots()
    newer = world.state()
    # The service's answer is older than the lake: a reader may hold it across a round.
    world.tiering.service.set_lake(UnionWorld.PATH, pinned.lake)

    assert world.read(f"{UnionWorld.PATH}$lake").num_rows == 40
    assert world.read().num_rows == 45
    assert newer.lake.snapshot_id != pinned.lake.snapshot_id


def test_tiered_offsets_of_a_foreign_snapshot_are_its_ancestors(world: UnionWorld) -> None:
    filled(world)
    world.rewrite_lake()
    lake = opened(world)

    assert lake.tiered_offsets(lake.snapshot_ids()[-1]) == {0: 20, 1: 20}


def test_another_lake_table_under_the_same_name(world: UnionWorld) -> None:
    filled(world)

    with pytest.raises(SnapshotNotFoundError, match="is another one"):
        open_lake_table(world.tiering.catalog, UnionWorld.PATH, table_uuid="0" * 8)


def test_a_lake_table_that_is_gone(world: UnionWorld) -> None:
    with pytest.raises(SnapshotNotFoundError, match="has no lake table in catalog 'lake'"):
        opened(world)


def test_a_table_without_our_columns_is_refused(world: UnionWorld) -> None:
    lake = filled(world)
    with world.tiering.lake_table().update_schema(allow_incompatible_changes=True) as change:
        change.rename_column("__timestamp", "ts")

    with pytest.raises(CorruptDataError, match="has no column '__timestamp'"):
        planned(world, opened(world))
    assert planned(world, lake) == [0, 1, 2, 3]


def test_position_deletes_of_a_foreign_engine_hide_exactly_their_rows(world: UnionWorld) -> None:
    filled(world)
    table = world.tiering.lake_table()
    first, last = sorted(world.tiering.data_files(), key=lambda f: f.stat().st_mtime_ns)[::3]
    deleted = [(f"file://{first}", 0), (f"file://{first}", 9), (f"file://{last}", 4)]
    snapshot = commit_delete_files(
        table,
        [
            position_delete_file(table, deleted[:2], partition=Record(0)),
            position_delete_file(table, deleted[2:], partition=Record(1)),
        ],
    )
    # The next round makes the foreign snapshot an ancestor of one that the service knows.
    world.append(0, events(100, 3))
    world.tiering.tier()

    found = world.read(columns="id")["id"].to_pylist()
    filtered = world.read(columns="id", where="id < 12")["id"].to_pylist()

    assert sorted(found) == [i for i in [*range(40), 100, 101, 102] if i not in (0, 9, 34)]
    assert sorted(filtered) == [i for i in range(12) if i not in (0, 9)]
    assert world.read(asOfSnapshot=snapshot).num_rows == 37
    assert sum(world.read("db.t$files")["delete_files"].to_pylist()) >= 2


def test_equality_deletes_are_refused_by_name(world: UnionWorld) -> None:
    filled(world)
    table = world.tiering.lake_table()
    rows = pa.table({"id": pa.array([3], pa.int64())})
    commit_delete_files(table, [equality_delete_file(table, rows, partition=Record(0))])
    world.append(0, events(100, 3))
    world.tiering.tier()

    with pytest.raises(UnsupportedError, match=r"'db.t': file 'file://.* has equality deletes"):
        world.read()


def test_a_delete_applies_to_older_files_between_its_bounds() -> None:
    entry = DeleteEntry(
        deletes=DeleteFile(path="d", file_bytes=1),
        sequence=5,
        path_lower="file:/b",
        path_upper="file:/d",
    )

    assert entry.may_apply("file:/c", 5)
    assert not entry.may_apply("file:/c", 6)
    assert not entry.may_apply("file:/a", 1)
    assert not entry.may_apply("file:/e", 1)


@pytest.mark.slow
def test_planning_loads_neither_pandas_nor_datasets(world: UnionWorld) -> None:
    """Half a second that every new planning process would pay."""
    filled(world)
    catalog = LakeCatalog(
        name=world.tiering.catalog.name, properties=world.tiering.catalog.properties
    )
    program = f"""
import json, sys
from streamhouse.reading.files.planner import open_lake_table
from streamhouse.reading.files._file_pruning import LakeQuery
from streamhouse.core.model.lake.facts import LakeCatalog
from streamhouse.core.model.schema import Schema
import pyarrow as pa
lake = open_lake_table(LakeCatalog.from_json({catalog.to_json()!r}), "db.t")
schema = Schema.from_arrow(pa.schema([("id", pa.int64())]))
found = lake.plan(
    schema, LakeQuery(), snapshot_id=lake.snapshot_ids()[-1]
)
print(json.dumps([len(found.files), sorted({{"pandas", "pyarrow.dataset"}} & set(sys.modules))]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )

    assert done.stdout.strip() == "[4, []]", done.stderr
