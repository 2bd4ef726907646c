"""Rewriting files of a real lake table: what is replaced, what is kept, who wins a race."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.manifest import ManifestContent
from pyiceberg.table import Table
from pyiceberg.types import LongType

from streamhouse.core.errors import CorruptDataError, FencedError, UnavailableError
from streamhouse.core.model.lake.facts import TIERED_OFFSETS_PROPERTY
from streamhouse.tiering.maintain._maintenance import Claim
from tests.support.log_table_world import LogTableWorld


def _live(table: Table) -> dict[ManifestContent, dict[str, tuple[int, int]]]:
    """Path -> (sequence number, rows) of the current snapshot's data and delete files."""
    found: dict[ManifestContent, dict[str, tuple[int, int]]] = {
        ManifestContent.DATA: {},
        ManifestContent.DELETES: {},
    }
    snapshot = table.current_snapshot()
    assert snapshot is not None
    for manifest in snapshot.manifests(table.io):
        for entry in manifest.fetch_manifest_entry(table.io):
            file = entry.data_file
            found[manifest.content][file.file_path] = (
                entry.sequence_number or 0,
                file.record_count,
            )
    return found


def test_small_files_become_one_a_bucket_in_a_replace_snapshot(lake: LogTableWorld) -> None:
    lake.tiering.create_table(bucket_count=2)
    for _ in range(8):
        lake.append(30, bucket=0)
        lake.tier_rows(50, bucket=1)
    before = lake.tiering.lake_table().current_snapshot()
    assert before is not None

    report = lake.tiering.maintain()

    assert report.rewritten is not None
    assert (report.rewritten.files_before, report.rewritten.files_after) == (16, 2)
    assert (report.rewritten.rows, report.rewritten.rows_dropped) == (640, 0)
    lake.check()
    table = lake.tiering.lake_table()
    snapshot = table.current_snapshot()
    assert snapshot is not None
    assert snapshot.summary is not None
    assert snapshot.summary.operation.value == "replace"
    assert snapshot.snapshot_id == report.rewritten.snapshot_id
    assert snapshot.summary.additional_properties["total-data-files"] == "2"
    assert snapshot.summary.additional_properties["total-records"] == "640"
    assert snapshot.summary.additional_properties[TIERED_OFFSETS_PROPERTY] == '{"0": 240, "1": 400}'
    # As old as the rows: what somebody deletes by value meanwhile applies to them.
    assert {sequence for sequence, _ in _live(table)[ManifestContent.DATA].values()} == {
        before.sequence_number
    }
    assert table.scan(snapshot_id=before.snapshot_id).to_arrow().num_rows == 640


def test_rounds_go_on_from_a_rewritten_table(lake: LogTableWorld) -> None:
    lake.tiering.create_table()
    lake.tier_small_files(8)
    lake.tiering.maintain()

    result = lake.tier_rows(10)

    assert (result.kind, result.tiered_offsets) == ("tiered", {0: 90})
    lake.check()


def test_files_keep_partition_schema_and_order(lake: LogTableWorld) -> None:
    lake.tiering.create_table(partitioned_by=["truncate(2, name)", "bucket(3, id)"], bucket_count=2)
    for _ in range(8):
        lake.append(40, bucket=0)
        lake.tier_rows(40, bucket=1)

    assert lake.tiering.maintain(policy=lake.tiering.on_demand()).rewritten is not None

    lake.check_addresses()
    new = [task.file for task in lake.tiering.lake_table().scan().plan_files()]
    partitions = [tuple(file.partition[i] for i in range(len(file.partition))) for file in new]
    assert len(set(partitions)) == len(partitions)
    assert {file.sort_order_id for file in new} == {1}


def test_deleted_rows_are_folded_in_and_their_delete_files_removed(
    lake: LogTableWorld,
) -> None:
    lake.tiering.create_table()
    lake.tier_rows(100)
    lake.tier_rows(100)
    lake.delete(*((0, n) for n in range(40)))
    lake.delete((0, 150), (0, 40))
    assert len(_live(lake.tiering.lake_table())[ManifestContent.DELETES]) == 3

    report = lake.tiering.maintain(policy=lake.tiering.policy())

    # Of the second file one row is deleted: not worth a rewrite, its delete file stays.
    assert report.rewritten is not None
    assert (report.rewritten.files_before, report.rewritten.rows_dropped) == (1, 41)
    assert (report.rewritten.deletes_before, report.rewritten.deletes_after) == (2, 0)
    assert len(_live(lake.tiering.lake_table())[ManifestContent.DELETES]) == 1
    lake.check()

    lake.tiering.maintain(policy=lake.tiering.on_demand())
    assert len(_live(lake.tiering.lake_table())[ManifestContent.DELETES]) == 0
    lake.check()


def test_a_file_whose_rows_are_all_deleted_leaves_nothing_behind(lake: LogTableWorld) -> None:
    lake.tiering.create_table()
    lake.tier_rows(10)
    lake.delete(*((0, n) for n in range(10)))

    report = lake.tiering.maintain(policy=lake.tiering.policy())

    assert report.rewritten is not None
    assert (report.rewritten.files_after, report.rewritten.rows) == (0, 0)
    assert _live(lake.tiering.lake_table()) == {
        ManifestContent.DATA: {},
        ManifestContent.DELETES: {},
    }
    lake.check()
    lake.tier_rows(5)
    lake.check()


def test_columns_of_other_engines_survive(lake: LogTableWorld) -> None:
    lake.tiering.create_table()
    lake.tier_small_files(4)
    with lake.tiering.lake_table().update_schema() as change:
        change.add_column("checked_by", LongType())
    table = lake.tiering.lake_table()
    checked = table.scan().to_arrow().sort_by("id")
    position = checked.schema.get_field_index("checked_by")
    table.overwrite(checked.set_column(position, "checked_by", pa.array(range(40), pa.int64())))
    lake.tier_rows(10)

    report = lake.tiering.maintain(policy=lake.tiering.on_demand())

    assert report.rewritten is not None
    found = lake.tiering.lake_table().scan().to_arrow().sort_by("id")
    assert found["checked_by"].to_pylist() == [*range(40), *[None] * 10]
    lake.check()


def test_a_deletion_during_a_rewrite_wins(lake: LogTableWorld) -> None:
    lake.tiering.create_table()
    lake.tier_small_files(8)

    def delete_meanwhile(step: str) -> None:
        if step == "files-rewritten":
            lake.delete((0, 5))
            # A commit after the deletion must not hide it.
            lake.delete((0, 77))

    with pytest.raises(UnavailableError, match="rows of files being rewritten were deleted"):
        lake.tiering.maintain(lake.tiering.maintainer(checkpoint=delete_meanwhile))
    lake.check()
    assert not list((lake.tiering.folder / "warehouse").rglob("rewrite-*/*"))

    lake.tiering.maintain()
    lake.check()
    assert len(lake.tiering.lake_table().inspect.files()) <= 2


def test_a_foreign_compaction_during_a_rewrite_wins(lake: LogTableWorld) -> None:
    lake.tiering.create_table()
    lake.tier_small_files(8)

    def compact_meanwhile(step: str) -> None:
        if step == "files-rewritten":
            table = lake.tiering.lake_table()
            table.overwrite(table.scan().to_arrow())

    with pytest.raises(UnavailableError, match="no longer part of it"):
        lake.tiering.maintain(lake.tiering.maintainer(checkpoint=compact_meanwhile))
    lake.check()
    lake.tiering.maintain()
    lake.check()


def test_a_foreign_append_during_a_rewrite_does_not_hinder_it(lake: LogTableWorld) -> None:
    lake.tiering.create_table()
    lake.tier_small_files(8)

    def alter_meanwhile(step: str) -> None:
        if step == "rewrite-staged" and "owner" not in lake.tiering.lake_table().properties:
            with lake.tiering.lake_table().transaction() as change:
                change.set_properties({"owner": "x"})
            table = lake.tiering.lake_table()
            table.append(table.scan().to_arrow().slice(0, 0))

    report = lake.tiering.maintain(lake.tiering.maintainer(checkpoint=alter_meanwhile))

    assert report.rewritten is not None
    assert lake.tiering.lake_table().properties["owner"] == "x"
    lake.check()


def test_a_worker_that_lost_its_claim_replaces_nothing(lake: LogTableWorld) -> None:
    lake.tiering.create_table()
    lake.tier_small_files(8)
    before = lake.tiering.lake_table().metadata.current_snapshot_id

    def lost() -> None:
        raise FencedError("another worker has the table")

    with pytest.raises(FencedError):
        lake.tiering.maintain(check=lost)
    assert lake.tiering.lake_table().metadata.current_snapshot_id == before
    assert not list((lake.tiering.folder / "warehouse").rglob("rewrite-*/*"))


def test_a_newer_epoch_in_the_lake_fences_maintenance(lake: LogTableWorld) -> None:
    lake.tiering.create_table()
    lake.tier_small_files(8)
    stale = lake.tiering.service.table_state("db.t")

    def round_meanwhile(step: str) -> None:
        if step == "files-rewritten":
            lake.tier_rows(10)

    maintainer = lake.tiering.maintainer(checkpoint=round_meanwhile)
    lake_table = lake.tiering.open()

    # The table is loaded again only when its commit fails.
    with pytest.raises(FencedError, match="was advanced by tiering epoch 9"):
        maintainer.maintain(
            lake_table, stale.table, Claim(epoch=stale.lake.tiering_epoch, snapshot_id=None)
        )
    lake.check()


def test_a_file_that_is_not_what_its_metadata_says_is_not_rewritten(
    lake: LogTableWorld,
) -> None:
    lake.tiering.create_table()
    lake.tier_small_files(8)
    path = lake.tiering.data_files()[0]
    whole = path.read_bytes()
    pq.write_table(pq.read_table(path).slice(1), path)

    with pytest.raises(CorruptDataError, match="has 9 rows, not the 10"):
        lake.tiering.maintain()
    assert not list((lake.tiering.folder / "warehouse").rglob("rewrite-*/*"))

    # With the file back from a copy, the next run rewrites it.
    path.write_bytes(whole)
    assert lake.tiering.maintain().rewritten is not None
    lake.check()


def test_many_small_delete_files_become_few(lake: LogTableWorld) -> None:
    lake.tiering.create_table()
    lake.tier_rows(200)
    for n in range(9):
        lake.delete((0, 20 * n))
    before = lake.tiering.lake_table().current_snapshot()
    assert before is not None

    report = lake.tiering.maintain(policy=lake.tiering.policy())

    assert report.rewritten is not None
    assert (report.rewritten.files_before, report.rewritten.files_after) == (0, 0)
    assert (report.rewritten.deletes_before, report.rewritten.deletes_after) == (9, 1)
    [(sequence, positions)] = _live(lake.tiering.lake_table())[ManifestContent.DELETES].values()
    assert positions == 9
    assert sequence > (before.sequence_number or 0)
    lake.check()
    lake.delete((0, 7))
    lake.check()
    assert lake.tiering.maintain(policy=lake.tiering.on_demand()).rewritten is not None
    lake.check()
