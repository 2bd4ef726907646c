"""Snapshots that add and remove data files and delete files together, read by stock pyiceberg."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Sequence

import pytest
from pyiceberg.manifest import DataFile, ManifestContent, ManifestEntryStatus
from pyiceberg.table import Table

from streamhouse.core.errors import FencedError
from streamhouse.lake.commits._staged_snapshot import (
    Operation,
    SnapshotChanges,
    stage_snapshot,
)
from tests.support.foreign_deletes import position_delete_file
from tests.support.held_step import lower
from tests.support.tiering_world import TieringWorld, rows


@pytest.fixture
def table(world: TieringWorld) -> Table:
    """A lake table with two data files of ten rows: offsets 0 to 9 and 10 to 19."""
    world.create_table()
    for number in range(2):
        world.service.append("db.t", 0, rows(number * 10, 10))
        world.tier()
    return world.lake_table()


def _commit(table: Table, changes: SnapshotChanges, **summary: str) -> Table:
    staged = stage_snapshot(table, changes, summary=summary)
    table._do_commit(staged.updates, staged.requirements)
    return table.refresh()


def _files(table: Table) -> list[DataFile]:
    """The live data files, in offset order."""
    entries = _entries(table, ManifestContent.DATA)
    return sorted((entry.data_file for entry in entries), key=_first_id)


def _first_id(file: DataFile) -> int:
    return int.from_bytes(file.lower_bounds[1], "little")


def _entries(table: Table, content: ManifestContent):
    snapshot = table.current_snapshot()
    assert snapshot is not None
    return [
        entry
        for manifest in snapshot.manifests(table.io)
        if manifest.content is content
        for entry in manifest.fetch_manifest_entry(table.io, discard_deleted=True)
    ]


def _delete(table: Table, deleted: Sequence[tuple[DataFile, int]]) -> DataFile:
    return position_delete_file(
        table,
        [(file.file_path, position) for file, position in deleted],
        partition=deleted[0][0].partition,
    )


def _copy(file: DataFile) -> DataFile:
    """The same rows in a file of its own."""
    path = file.file_path.replace(".parquet", "-copy.parquet")
    shutil.copyfile(file.file_path.removeprefix("file://"), path.removeprefix("file://"))
    twin = copy.deepcopy(file)
    twin[1] = path
    return twin


def _totals(table: Table) -> dict[str, str]:
    snapshot = table.current_snapshot()
    assert snapshot is not None
    assert snapshot.summary is not None
    names = ("total-data-files", "total-delete-files", "total-records", "total-position-deletes")
    return {name: snapshot.summary.additional_properties[name] for name in names}


def _ids(table: Table) -> list[int]:
    return sorted(table.scan(selected_fields=("id",)).to_arrow()["id"].to_pylist())


def test_deletes_and_new_data_land_in_one_snapshot(world: TieringWorld, table: Table) -> None:
    first, second = _files(table)
    moved = position_delete_file(
        table, [(first.file_path, 3), (second.file_path, 0)], partition=first.partition
    )
    snapshots = len(table.snapshots())

    table = _commit(table, SnapshotChanges(operation=Operation.OVERWRITE, added=[moved]), note="x")

    assert len(table.snapshots()) == snapshots + 1
    assert _ids(table) == [i for i in range(20) if i not in (3, 10)]
    snapshot = table.current_snapshot()
    assert snapshot is not None
    assert snapshot.summary is not None
    assert snapshot.summary.operation is Operation.OVERWRITE
    assert snapshot.summary.additional_properties["note"] == "x"
    assert _totals(table) == {
        "total-data-files": "2",
        "total-delete-files": "1",
        "total-records": "20",
        "total-position-deletes": "2",
    }


def test_a_replace_takes_files_out_and_keeps_the_sequence_number(
    world: TieringWorld, table: Table
) -> None:
    first, second = _files(table)
    table = _commit(
        table, SnapshotChanges(operation=Operation.OVERWRITE, added=[_delete(table, [(first, 3)])])
    )
    (deletes,) = (entry.data_file for entry in _entries(table, ManifestContent.DELETES))

    rewritten = _copy(second)
    table = _commit(
        table,
        SnapshotChanges(
            operation=Operation.REPLACE,
            added=[rewritten],
            removed=[first, second, deletes],
            data_sequence_number=2,
        ),
    )

    assert _ids(table) == list(range(10, 20))
    assert _totals(table) == {
        "total-data-files": "1",
        "total-delete-files": "0",
        "total-records": "10",
        "total-position-deletes": "0",
    }
    (entry,) = _entries(table, ManifestContent.DATA)
    assert (entry.sequence_number, entry.file_sequence_number) == (2, 4)
    snapshot = table.current_snapshot()
    assert snapshot is not None
    assert snapshot.summary is not None
    assert snapshot.summary.operation is Operation.REPLACE
    removed = [
        entry
        for manifest in snapshot.manifests(table.io)
        for entry in manifest.fetch_manifest_entry(table.io, discard_deleted=False)
        if entry.status is ManifestEntryStatus.DELETED
    ]
    assert {entry.snapshot_id for entry in removed} == {snapshot.snapshot_id}
    assert len(removed) == 3
    assert world.addresses() == [(0, offset) for offset in range(10, 20)]


def test_entries_of_removed_files_vanish_with_the_next_snapshot(
    world: TieringWorld, table: Table
) -> None:
    first, second = _files(table)
    table = _commit(table, SnapshotChanges(operation=Operation.DELETE, removed=[first, second]))

    world.service.append("db.t", 0, rows(20, 5))
    world.tier()

    assert _ids(world.lake_table()) == list(range(20, 25))
    assert len(_entries(world.lake_table(), ManifestContent.DATA)) == 1


def test_a_file_that_is_not_live_cannot_be_removed(world: TieringWorld, table: Table) -> None:
    first, _ = _files(table)
    table = _commit(table, SnapshotChanges(operation=Operation.DELETE, removed=[first]))

    with pytest.raises(FencedError, match="1 of 1 files to replace are no longer part of it"):
        stage_snapshot(
            table, SnapshotChanges(operation=Operation.REPLACE, removed=[first]), summary={}
        )


def test_manifests_of_deletes_are_merged_too(
    world: TieringWorld, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    lower(monkeypatch, "manifests-merged", 4)
    first, second = _files(table)

    for position in range(10):
        added = [_delete(table, [(first, position)]), _delete(table, [(second, position)])]
        table = _commit(table, SnapshotChanges(operation=Operation.OVERWRITE, added=added[:1]))
        table = _commit(table, SnapshotChanges(operation=Operation.OVERWRITE, added=added[1:]))
        if position == 4:
            assert _ids(table) == [*range(5, 10), *range(15, 20)]

    assert _ids(table) == []
    snapshot = table.current_snapshot()
    assert snapshot is not None
    by_content = [manifest.content for manifest in snapshot.manifests(table.io)]
    assert by_content.count(ManifestContent.DELETES) <= 4
    entries = _entries(table, ManifestContent.DELETES)
    assert sorted(entry.sequence_number for entry in entries) == list(range(3, 23))
