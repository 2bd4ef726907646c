"""What other engines may change in each kind of lake table, through the catalog and past it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyiceberg.exceptions import ForbiddenError
from pyiceberg.manifest import DataFile, FileFormat, ManifestEntryStatus
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Operation

from streamhouse.core.errors import CorruptDataError, StreamhouseError
from streamhouse.core.model.lake.facts import LakeState
from streamhouse.lake.snapshots.live_files import unreadable_format
from streamhouse.reading.lake_only.lake_bucket import lake_bucket_rows
from streamhouse.reading.options.options import BATCH, read_options
from streamhouse.reading.plan.pinned_table import count_rows
from tests.support.foreign_deletes import (
    commit_carried_files,
    commit_compaction,
    commit_delete_files,
    commit_repeated_removals,
    commit_without_manifests,
    equality_delete_file,
    position_delete_file,
)
from tests.support.key_table_world import KEY_SCHEMA, KeyTableWorld
from tests.support.rest_world import RestWorld
from tests.support.tiering_world import Killed, dying_at

LAYOUT = {"table.datalake.batch-layout.sort": "region"}
HISTORY = {"table.datalake.changelog": "true"}
RULES = {
    "db.t": "through the streamhouse service only",
    "db.t$changelog": "the full history keeps every change for good",
    "db.t$batch": "the batch layout has the rows of 'db.t'",
    "db.l": "the table has a batch layout, which would keep the rows",
    "db.l$batch": "the batch layout has the rows of 'db.l'",
}


@pytest.fixture
def rest(tmp_path: Path) -> Iterator[RestWorld]:
    """Tables in the lake: `db.t` with a primary key and `db.l` with all theirs, and `db.log`."""
    with KeyTableWorld(tmp_path) as world, RestWorld(world.tiering) as opened:
        world.create_key_table(properties={**LAYOUT, **HISTORY})
        world.upsert(*({"id": i, "region": f"r{i}", "amount": 1.0} for i in range(10)))
        world.catch_up()
        for path, layout in (("db.l", LAYOUT), ("db.log", {})):
            world.tiering.create_table(path, KEY_SCHEMA, properties=layout)
            world.tiering.service.append(path, 0, _rows())
            world.tiering.tier(path)
        yield opened


def _rows() -> pa.RecordBatch:
    rows = [{"id": i, "region": f"r{i}", "amount": 1.0} for i in range(10)]
    return pa.RecordBatch.from_pylist(rows, schema=KEY_SCHEMA)


def _file_of(table: Table) -> DataFile:
    return next(iter(table.scan().plan_files())).file


def _delete_some(table: Table) -> None:
    table.delete("id < 3")


def _delete_all(table: Table) -> None:
    table.delete("true")


def _delete_by_position(table: Table) -> None:
    file = _file_of(table)
    deletes = position_delete_file(table, [(file.file_path, 1)], partition=file.partition)
    commit_delete_files(table, [deletes])


def _update(table: Table) -> None:
    rows = table.scan().to_arrow()
    at = rows.schema.get_field_index("amount")
    table.overwrite(rows.set_column(at, rows.schema.field(at), pa.array([9.0] * rows.num_rows)))


def _overwrite_with_fewer(table: Table) -> None:
    table.overwrite(table.scan(row_filter="id >= 5").to_arrow())


CHANGES = (_delete_some, _delete_all, _delete_by_position, _update, _overwrite_with_fewer)


@pytest.mark.parametrize("name", RULES)
def test_rows_stay_where_something_else_goes_by_them(rest: RestWorld, name: str) -> None:
    before = rest.world.lake_table(name).metadata_location
    for change in CHANGES:
        with pytest.raises(ForbiddenError, match=RULES[name]):
            change(rest.client().load_table(tuple(name.split("."))))

    assert rest.world.lake_table(name).metadata_location == before


@pytest.mark.parametrize("change", CHANGES)
def test_rows_of_a_log_table_are_deleted_and_updated(
    rest: RestWorld, change: Callable[[Table], None]
) -> None:
    change(rest.client().load_table("db.log"))

    assert len(rest.world.lake_table("db.log").metadata.snapshots) > 1


@pytest.mark.parametrize("name", RULES)
def test_every_lake_table_is_compacted(rest: RestWorld, name: str) -> None:
    table = rest.client().load_table(tuple(name.split(".")))
    rows = table.scan().to_arrow().num_rows

    commit_compaction(table)

    assert rest.world.lake_table(name).scan().to_arrow().num_rows == rows


def test_a_compaction_takes_deleted_rows_along(tmp_path: Path) -> None:
    with KeyTableWorld(tmp_path) as world, RestWorld(world.tiering) as rest:
        world.create_key_table()
        world.upsert(*({"id": i, "region": "r", "amount": 1.0} for i in range(10)))
        world.catch_up()
        world.delete({"id": 3}, {"id": 4})
        world.catch_up()

        commit_compaction(rest.client().load_table("db.t"))

        assert world.in_lake() == world.live
        assert len(world.live) == 8


@pytest.mark.parametrize("name", ["db.t", "db.log"])
def test_what_says_that_it_compacts_loses_no_rows(rest: RestWorld, name: str) -> None:
    table = rest.client().load_table(name)
    before = _file_of(table).file_path

    with pytest.raises(ForbiddenError, match="the commit loses 10 rows"):
        commit_compaction(table, [])

    assert _file_of(rest.world.lake_table(name)).file_path == before


def test_a_snapshot_without_changes_passes(rest: RestWorld) -> None:
    table = rest.client().load_table("db.t")

    table.append(table.schema().as_arrow().empty_table())

    assert len(rest.world.addresses()) == 10


def test_a_snapshot_without_changes_stops_no_round_after_a_compaction(rest: RestWorld) -> None:
    """It leaves out the manifest that says which files the compaction has replaced."""
    table = rest.client().load_table("db.t")
    commit_compaction(table)
    table.refresh().append(table.schema().as_arrow().empty_table())

    _write_one(rest, "db.t")
    rest.world.tier("db.t")

    assert len(rest.world.addresses()) == 11


@pytest.mark.parametrize("operation", [Operation.APPEND, Operation.REPLACE])
def test_files_do_not_go_unsaid(rest: RestWorld, operation: Operation) -> None:
    with pytest.raises(ForbiddenError):
        commit_without_manifests(rest.client().load_table("db.t"), operation)

    assert len(rest.world.addresses()) == 10


@pytest.mark.parametrize("name", ["db.t", "db.log"])
def test_a_file_that_goes_is_not_there_still(rest: RestWorld, name: str) -> None:
    table = rest.client().load_table(name)

    with pytest.raises(ForbiddenError):
        commit_carried_files(table, [_file_of(table)], ManifestEntryStatus.DELETED)


@pytest.mark.parametrize("name", ["db.t", "db.log"])
def test_a_removal_may_be_repeated(rest: RestWorld, name: str) -> None:
    """DuckDB 1.5 does so, whenever it deletes rows of a file again in format version 3."""
    table = rest.client().load_table(name)
    commit_compaction(table)

    commit_repeated_removals(table.refresh())
    commit_repeated_removals(table.refresh())

    assert len(rest.world.addresses(name)) == 10


def test_a_repeated_removal_makes_no_room_for_rows(rest: RestWorld) -> None:
    table = rest.client().load_table("db.log")
    removed = _file_of(table)
    commit_compaction(table)

    with pytest.raises(ForbiddenError, match="adds 10 more rows than it removes"):
        commit_repeated_removals(table.refresh(), [removed])

    assert len(rest.world.addresses("db.log")) == 10


@pytest.mark.parametrize("name", ["db.t", "db.t$changelog", "db.t$batch", "db.l", "db.l$batch"])
def test_no_round_is_built_on_what_was_committed_past_the_catalog(
    rest: RestWorld, name: str
) -> None:
    world = rest.world
    path = name.partition("$")[0]
    table = world.lake_table(name)
    before = table.metadata.current_snapshot_id
    assert before is not None
    # Two snapshots: one without the old rows, then one with the new ones.
    _overwrite_with_fewer(table)
    _write_one(rest, path)

    with pytest.raises(CorruptDataError, match=f"changed rows past the service.* back to {before}"):
        world.tier(path)
    world.service.release(path)
    world.lake_table(name).manage_snapshots().rollback_to_snapshot(before).commit()
    world.tier(path)

    assert len(world.addresses(path)) == 11


@pytest.mark.parametrize("is_expired", [False, True])
def test_no_read_has_what_was_committed_past_the_catalog(rest: RestWorld, is_expired: bool) -> None:
    world = rest.world
    registered = world.service.table_state("db.t").lake
    world.lake_table("db.t").delete("id < 3")
    if not is_expired:
        assert _read(rest, "db.t") == 10
        assert len(_bucket_rows(rest, registered)) == 10
        return
    # The registered snapshot has gone, and the current one has other rows.
    table = world.lake_table("db.t")
    current = table.metadata.current_snapshot_id
    old = [s.snapshot_id for s in table.snapshots() if s.snapshot_id != current]
    table.maintenance.expire_snapshots().by_ids(old).commit()

    for read in (lambda: _read(rest, "db.t"), lambda: _bucket_rows(rest, registered)):
        with pytest.raises(CorruptDataError, match="another engine changed rows past the service"):
            read()


def _bucket_rows(rest: RestWorld, lake: LakeState) -> pa.Table:
    info = rest.world.service.describe_table("db.t")
    rows = lake_bucket_rows(rest.world.catalog, info, lake, 0)
    return pa.Table.from_batches(rows.batches)


def _write_one(rest: RestWorld, path: str) -> None:
    row = {"id": 99, "region": "r", "amount": 1.0, "__change_type": 0, "__retracts": None}
    schema = rest.world.service.describe_table(path).log_schema
    rest.world.service.append(path, 0, pa.RecordBatch.from_pylist([row], schema=schema))


@pytest.mark.parametrize("file_format", [FileFormat.ORC, FileFormat.AVRO])
def test_deletes_that_nobody_here_reads_are_refused(
    rest: RestWorld, file_format: FileFormat
) -> None:
    table = rest.client().load_table("db.log")
    file = _file_of(table)
    deletes = position_delete_file(
        table, [(file.file_path, 1)], partition=file.partition, file_format=file_format
    )

    with pytest.raises(ForbiddenError, match=f"is {file_format}, and Streamhouse reads lake files"):
        commit_delete_files(table, [deletes])


def test_what_a_commit_may_not_bring_no_read_takes(rest: RestWorld) -> None:
    """The rule of commits and that of reads are one, whatever comes."""
    table = rest.world.lake_table("db.log")
    file = _file_of(table)
    ids = pa.table({"id": pa.array([1], pa.int64())})
    foreign = [
        position_delete_file(
            table, [(file.file_path, 1)], partition=file.partition, file_format=FileFormat.ORC
        ),
        equality_delete_file(table, ids, partition=file.partition),
    ]
    for deletes in foreign:
        with pytest.raises(ForbiddenError) as refused:
            commit_delete_files(rest.client().load_table("db.log"), [deletes])
        commit_delete_files(rest.world.lake_table("db.log"), [deletes])
        with pytest.raises(StreamhouseError) as unread:
            _read(rest, "db.log")
        assert str(unread.value).partition("': ")[2] in str(refused.value)
        first = rest.world.lake_table("db.log").metadata.snapshots[0].snapshot_id
        rest.world.lake_table("db.log").manage_snapshots().rollback_to_snapshot(first).commit()


@pytest.mark.parametrize("written", ["PARQUET", "parquet", FileFormat.PARQUET])
def test_formats_have_no_case(written: str) -> None:
    assert unreadable_format("file", written) == ""
    assert "Parquet only" in unreadable_format("file", "orc")


def _read(rest: RestWorld, table: str) -> int:
    options = read_options({"table": table, "endpoint": "http://memory"}, use=BATCH)
    return count_rows(rest.world.service, options)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_reported_last", [False, True])
def test_a_delete_beside_a_round_that_nobody_reported_is_seen(
    rest: RestWorld, is_reported_last: bool
) -> None:
    """A worker died between its commit and its report, before or after the delete."""
    world = rest.world
    if not is_reported_last:
        world.lake_table("db.log").delete("id < 3")
    world.service.append("db.log", 0, _rows())
    with pytest.raises(Killed):
        world.round(world.claim("db.log"), checkpoint=dying_at("committed")).run()
    if is_reported_last:
        world.lake_table("db.log").delete("id < 3 and __offset < 10")

    assert _read(rest, "db.log") == 17
    world.service.release("db.log")
    world.tier("db.log")
    assert _read(rest, "db.log") == 17
