"""Commits of other engines to a live table's lake table: which pass, and which are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.exceptions import (
    CommitFailedException,
    ForbiddenError,
    TableAlreadyExistsError,
)
from pyiceberg.manifest import ManifestEntryStatus
from pyiceberg.table import Table
from pyiceberg.table.update import (
    RemovePartitionSpecsUpdate,
    RemoveSnapshotRefUpdate,
    SetLocationUpdate,
    UpgradeFormatVersionUpdate,
)
from pyiceberg.types import LongType, StringType

from tests.support.foreign_deletes import (
    commit_carried_files,
    commit_delete_files,
    equality_delete_file,
    position_delete_file,
)
from tests.support.rest_world import RestWorld
from tests.support.tiering_world import rows


@pytest.fixture
def tiered(rest: RestWorld) -> RestWorld:
    """Two rounds of a table of two buckets."""
    rest.world.create_table(bucket_count=2)
    for start in (0, 100):
        for bucket in (0, 1):
            rest.world.service.append("db.t", bucket, rows(start, 50))
        rest.world.tier()
    return rest


def _rename_column(table: Table) -> None:
    table.update_schema().rename_column("__offset", "offset").commit()


def _rename_user_column(table: Table) -> None:
    table.update_schema().rename_column("name", "label").commit()


def _drop_column(table: Table) -> None:
    table.update_schema().delete_column("name").commit()


def _require_column(table: Table) -> None:
    with table.update_schema(allow_incompatible_changes=True) as update:
        update.add_column("more", StringType(), required=True, default_value="x")


def _remove_identity(table: Table) -> None:
    table.transaction().remove_properties("streamhouse.table-id").commit_transaction()


def _remove_other(table: Table) -> None:
    table.transaction().remove_properties("streamhouse.tiered-offsets").commit_transaction()


def _forge_offsets(table: Table) -> None:
    properties = {"streamhouse.tiered-offsets": '{"0": 1000000, "1": 0}'}
    table.transaction().set_properties(properties).commit_transaction()


def _remove_description(table: Table) -> None:
    table.transaction().remove_properties("streamhouse.table").commit_transaction()


def _spoil_description(table: Table) -> None:
    table.transaction().set_properties({"streamhouse.table": "mine"}).commit_transaction()


def _describe_another(table: Table) -> None:
    text = table.properties["streamhouse.table"].replace('"bucket_count":', '"bucket_count":1')
    table.transaction().set_properties({"streamhouse.table": text}).commit_transaction()


def _stop_metrics(table: Table) -> None:
    properties = {"write.metadata.metrics.column.__offset": "none"}
    table.transaction().set_properties(properties).commit_transaction()


def _roll_back(table: Table) -> None:
    first = table.metadata.snapshots[0].snapshot_id
    table.manage_snapshots().rollback_to_snapshot(first).commit()


def _append(table: Table) -> None:
    table.append(table.scan(limit=5).to_arrow())


def _overwrite_everything(table: Table) -> None:
    new = table.scan().to_arrow()
    moved = new.set_column(
        new.schema.get_field_index("__offset"),
        new.schema.field("__offset"),
        pa.array(range(10_000, 10_000 + new.num_rows), pa.int64()),
    )
    table.overwrite(moved)


def _commit(table: Table, *updates: Any) -> None:
    table._do_commit(updates, ())


def _move(table: Table) -> None:
    _commit(table, SetLocationUpdate(location="file:///elsewhere"))


def _remove_main(table: Table) -> None:
    _commit(table, RemoveSnapshotRefUpdate.model_validate({"ref-name": "main"}))


def _equality_delete(table: Table) -> None:
    files = [task.file for task in table.scan().plan_files()]
    keys = pa.table({"id": pa.array([1], pa.int64())})
    file = equality_delete_file(table, keys, partition=files[0].partition)
    commit_delete_files(table, [file])


REFUSED: dict[str, Callable[[Table], None]] = {
    "column '__offset' must keep its name": _rename_column,
    "column 'name' must keep its name, not become 'label'": _rename_user_column,
    "column 'name' must stay": _drop_column,
    "column 'more' must be optional": _require_column,
    "property 'streamhouse.table-id' must stay 1": _remove_identity,
    "property 'streamhouse.tiered-offsets' must stay": _remove_other,
    "property 'streamhouse.tiered-offsets' must": _forge_offsets,
    "property 'streamhouse.table' must stay": _remove_description,
    "its property streamhouse.table describes no table": _spoil_description,
    "property 'streamhouse.table' must describe that table": _describe_another,
    "property 'write.metadata.metrics.column.__offset' must stay full": _stop_metrics,
    "a roll back behind the tiered snapshot is refused": _roll_back,
    "adds 5 more rows than it removes": _append,
    "that were never tiered": _overwrite_everything,
    "its location must stay": _move,
    "its current snapshot must come from one that tiering wrote": _remove_main,
    "has equality deletes, which not every engine reads": _equality_delete,
}


@pytest.mark.parametrize(
    ("message", "change"), REFUSED.items(), ids=lambda v: getattr(v, "__name__", "")
)
def test_what_would_break_union_reads_is_refused(
    tiered: RestWorld, message: str, change: Callable[[Table], None]
) -> None:
    table = tiered.client().load_table("db.t")

    with pytest.raises(ForbiddenError, match=message):
        change(table)

    assert tiered.world.lake_table().metadata_location == table.metadata_location
    assert len(tiered.world.addresses()) == 200


def test_the_format_version_stays(tiered: RestWorld) -> None:
    table = tiered.client().load_table("db.t")

    with pytest.raises(ForbiddenError, match="its format version must stay 2"):
        _commit(table, UpgradeFormatVersionUpdate.model_validate({"format-version": 3}))


def test_the_table_itself_cannot_go_while_it_is_live(tiered: RestWorld) -> None:
    client = tiered.client()
    location = client.load_table("db.t").metadata_location

    for call in (
        lambda: client.drop_table("db.t"),
        lambda: client.purge_table("db.t"),
        lambda: client.rename_table("db.t", "db.u"),
        lambda: client.register_table("db.u", location),
    ):
        with pytest.raises(ForbiddenError):
            call()
    tiered.world.service.drop_table("db.t")
    client.rename_table("db.t", "db.u")
    client.drop_table("db.u")


def test_nobody_takes_the_name_that_tiering_will_need(rest: RestWorld) -> None:
    rest.world.create_table("db.t")
    client = rest.client()
    client.create_namespace("db")
    schema = pa.schema([("a", pa.int64())])
    other = client.create_table("db.other", schema)

    with pytest.raises(TableAlreadyExistsError):
        client.create_table("db.t", schema)
    with pytest.raises(TableAlreadyExistsError):
        client.create_table_transaction("db.t", schema)
    with pytest.raises(TableAlreadyExistsError):
        client.rename_table("db.other", "db.t")
    with pytest.raises(TableAlreadyExistsError):
        client.register_table("db.t", other.metadata_location)
    rest.world.service.append("db.t", 0, rows(0, 10))
    assert rest.world.tier().row_count == 10


def test_deletes_compaction_expiry_and_new_columns_pass(tiered: RestWorld) -> None:
    table = tiered.client().load_table("db.t")

    table.delete("id < 10")
    left = table.scan().to_arrow()
    assert left.num_rows == 180
    # Compaction by hand: everything is written anew, as it is.
    table.overwrite(left)
    table.update_schema().add_column("note", StringType()).commit()
    table.transaction().set_properties({"owner": "me"}).commit_transaction()
    with table.update_spec() as spec:
        spec.add_identity("name")
    ids = [s.snapshot_id for s in table.metadata.snapshots[:-1]]
    table.maintenance.expire_snapshots().by_ids(ids).commit()

    assert len(tiered.world.addresses()) == 180
    # And tiering goes on from where it was.
    tiered.world.service.append("db.t", 0, rows(500, 5))
    assert tiered.world.tier().row_count == 5
    assert len(tiered.world.addresses()) == 185


def test_position_deletes_pass(tiered: RestWorld) -> None:
    table = tiered.client().load_table("db.t")
    file = next(iter(table.scan().plan_files())).file

    commit_delete_files(
        table, [position_delete_file(table, [(file.file_path, 3)], partition=file.partition)]
    )

    assert len(tiered.world.addresses()) == 199


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (ManifestEntryStatus.EXISTING, "is carried on from before the commit, but was not there"),
        (ManifestEntryStatus.ADDED, "is new, but says that snapshot"),
    ],
)
def test_rows_do_not_come_in_as_if_they_had_been_there(
    tiered: RestWorld, status: ManifestEntryStatus, said: str
) -> None:
    """What says that it is old is compared with what was there."""
    table = tiered.client().load_table("db.t")
    is_added = status is ManifestEntryStatus.ADDED
    added_by = table.metadata.snapshots[0].snapshot_id if is_added else 0
    (file, *_) = [task.file for task in table.scan().plan_files()]
    before = tiered.world.addresses()

    with pytest.raises(ForbiddenError, match=said):
        commit_carried_files(table, [file], status, added_by=added_by)

    assert tiered.world.addresses() == before


def test_one_may_return_to_a_snapshot_that_covers_the_same_offsets(tiered: RestWorld) -> None:
    table = tiered.client().load_table("db.t")
    before = table.metadata.current_snapshot_id
    assert before is not None
    table.delete("id < 10")

    table.manage_snapshots().rollback_to_snapshot(before).commit()

    assert len(tiered.world.addresses()) == 200


def test_a_pinned_snapshot_is_not_expired(tiered: RestWorld) -> None:
    table = tiered.client().load_table("db.t")
    first = table.metadata.snapshots[0].snapshot_id
    tiered.tables.pinned.add(first)

    with pytest.raises(ForbiddenError, match="because a reader has pinned it"):
        table.maintenance.expire_snapshots().by_id(first).commit()
    tiered.tables.pinned.clear()
    table = tiered.client().load_table("db.t")
    table.maintenance.expire_snapshots().by_id(first).commit()

    assert tiered.world.lake_table().metadata.snapshot_by_id(first) is None


def test_a_partition_spec_that_tiering_writes_with_stays(tiered: RestWorld) -> None:
    table = tiered.client().load_table("db.t")
    with table.update_spec() as spec:
        spec.add_identity("name")

    with pytest.raises(ForbiddenError, match="partition spec 0 must stay"):
        _commit(table, RemovePartitionSpecsUpdate.model_validate({"spec-ids": [0]}))


def test_a_column_is_widened_once_the_service_says_so(tiered: RestWorld) -> None:
    table = tiered.client().load_table("db.t")

    table.update_schema().add_column("n", LongType()).commit()
    with pytest.raises(ForbiddenError, match="column '__bucket' must stay int"):
        table.update_schema().update_column("__bucket", LongType()).commit()


def test_tiering_through_the_catalog_is_a_round_like_any_other(rest: RestWorld) -> None:
    rest.world.create_table(bucket_count=2)
    rest.serve_tiering_through_rest()

    for start in (0, 100, 200):
        rest.world.service.append("db.t", 0, rows(start, 10))
        rest.world.tier()

    client = rest.client()
    assert client.load_table("db.t").scan().to_arrow().num_rows == 30
    state = rest.world.service.table_state("db.t")
    assert state.lake.tiered_offsets == {0: 30, 1: 0}


def test_a_round_of_an_old_epoch_does_not_land(rest: RestWorld) -> None:
    rest.world.create_table()
    rest.serve_tiering_through_rest()
    rest.world.service.append("db.t", 0, rows(0, 10))
    old = rest.world.claim()
    rest.world.service.release("db.t")
    rest.world.round(rest.world.claim()).run()
    rest.world.service.append("db.t", 0, rows(100, 10))
    rest.world.claim()
    with rest.client().load_table("db.t").transaction() as transaction:
        transaction.set_properties({"commit.retry.num-retries": "0"})
    table = rest.client().load_table("db.t")
    properties = {
        "streamhouse.table-id": "1",
        "streamhouse.tiering-epoch": str(old.epoch),
        "streamhouse.tiered-offsets": '{"0": 20}',
    }

    with pytest.raises(CommitFailedException, match="tiering epoch 1 is not the current one"):
        table.append(table.scan().to_arrow(), snapshot_properties=properties)
    assert rest.client().load_table("db.t").scan().to_arrow().num_rows == 10
