"""Manifests: their number stays small however many rounds commit, and nothing gets lost."""

from __future__ import annotations

import pytest
from pyiceberg.manifest import ManifestEntryStatus

from streamhouse.lake.commits import _new_manifests as iceberg_manifests
from tests.support.held_step import lower
from tests.support.tiering_world import TieringWorld, rows


def _manifests(world: TieringWorld):
    table = world.lake_table()
    snapshot = table.current_snapshot()
    assert snapshot is not None
    return table, snapshot.manifests(table.io)


def _tier_rounds(world: TieringWorld, numbers: range) -> None:
    """A round of ten rows for each number."""
    for number in numbers:
        world.service.append("db.t", 0, rows(number * 10, 10))
        world.tier()


def test_manifests_of_many_rounds_are_merged(
    world: TieringWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    lower(monkeypatch, "manifests-merged", 4)
    world.create_table()
    _tier_rounds(world, range(15))

    table, manifests = _manifests(world)

    # Every four manifests of a size became one; all of these are in the smallest size class.
    assert len(manifests) <= 4
    (newest,) = [m for m in manifests if m.has_added_files() and m.sequence_number == 15]
    statuses = [e.status for e in newest.fetch_manifest_entry(table.io)]
    assert statuses == [ManifestEntryStatus.ADDED]
    assert world.addresses() == [(0, offset) for offset in range(150)]
    entries = [entry for m in manifests for entry in m.fetch_manifest_entry(table.io)]
    by_snapshot = {entry.snapshot_id: entry for entry in entries}
    assert len(entries) == len(by_snapshot) == 15
    for number, snapshot in enumerate(table.snapshots(), start=1):
        entry = by_snapshot[snapshot.snapshot_id]
        assert entry.sequence_number == entry.file_sequence_number == number


def test_old_snapshots_stay_readable_after_manifests_merged(
    world: TieringWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    lower(monkeypatch, "manifests-merged", 2)
    world.create_table()
    _tier_rounds(world, range(6))

    table = world.lake_table()

    counts = [
        table.scan(snapshot_id=snapshot.snapshot_id).to_arrow().num_rows
        for snapshot in table.snapshots()
    ]
    assert counts == [10, 20, 30, 40, 50, 60]


def test_deletes_of_another_engine_are_carried_over(
    world: TieringWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    lower(monkeypatch, "manifests-merged", 2)
    world.create_table()
    _tier_rounds(world, range(3))
    world.lake_table().delete("id < 10")
    _tier_rounds(world, range(3, 6))

    assert world.addresses() == [(0, offset) for offset in range(10, 60)]


@pytest.mark.parametrize(
    ("manifest_bytes", "size_class"),
    [(1, 0), (32 << 10, 0), ((32 << 10) + 1, 1), (256 << 10, 1), (2 << 20, 2), (64 << 20, 4)],
)
def test_size_classes_grow_eightfold(manifest_bytes: int, size_class: int) -> None:
    assert iceberg_manifests._size_class(manifest_bytes) == size_class
