"""The live files a round looks rows up in: right for every bucket, each manifest read once."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pyiceberg.io.pyarrow import PyArrowFileIO

from streamhouse.lake.snapshots.live_files import LiveFilesCache
from tests.support.held_step import lower
from tests.support.tiering_world import TieringWorld, rows


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The manifests that were read, in order."""
    found: list[str] = []
    new_input = PyArrowFileIO.new_input

    def read(self: PyArrowFileIO, location: str) -> Any:
        if re.search(r"-m\d+\.avro$", location):
            found.append(location)
        return new_input(self, location)

    monkeypatch.setattr(PyArrowFileIO, "new_input", read)
    return found


def _tier(world: TieringWorld, bucket: int, count: int) -> None:
    world.service.append("db.t", bucket, rows(0, count))
    world.tier()


def test_files_by_bucket_with_their_offsets(world: TieringWorld) -> None:
    world.create_table(bucket_count=2)
    _tier(world, 0, 10)
    _tier(world, 1, 5)
    _tier(world, 0, 7)

    live = LiveFilesCache().of(world.lake_table())

    bounds = [(f.first_offset, f.last_offset) for f in live.of_bucket(0, before=17)]
    assert sorted(bounds) == [(0, 9), (10, 16)]
    assert [f.first_offset for f in live.of_bucket(0, before=10)] == [0]
    (other,) = live.of_bucket(1, before=5)
    assert (other.last_offset, other.partition, other.is_shared) == (4, (1,), False)
    on_disk = {f"file://{path}" for path in world.data_files()}
    assert {f.path for b in (0, 1) for f in live.of_bucket(b, before=99)} == on_disk
    assert live.missing([*on_disk, "file:///gone"]) == {"file:///gone"}


def test_a_manifest_is_read_once(
    world: TieringWorld, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lower(monkeypatch, "manifests-merged", 4)
    world.create_table()
    cache = LiveFilesCache()
    seen: list[str] = []
    for number in range(12):
        _tier(world, 0, 10)
        reads.clear()
        live = cache.of(world.lake_table())
        seen += reads
        assert len(live.of_bucket(0, before=1_000)) == number + 1

    assert len(seen) == len(set(seen)) >= 12


def test_a_file_whose_bucket_is_not_in_its_bounds_may_be_of_any(world: TieringWorld) -> None:
    world.create_table(bucket_count=2)
    _tier(world, 0, 10)
    table = world.lake_table()
    with table.transaction() as change:
        change.set_properties({"write.metadata.metrics.column.__bucket": "none"})
        change.set_properties({"write.metadata.metrics.column.__offset": "none"})
    table.overwrite(table.scan().to_arrow())

    live = LiveFilesCache().of(table)

    for bucket in (0, 1):
        (file,) = live.of_bucket(bucket, before=1)
        assert file.is_shared
        assert file.first_offset == 0
        assert file.last_offset > 1 << 60


def test_a_table_without_snapshots_has_no_files(world: TieringWorld) -> None:
    info = world.create_table()
    world.lake().open_or_create(info, world.service.table_state("db.t").lake)

    live = LiveFilesCache().of(world.lake_table())

    assert live.of_bucket(0, before=10) == ()
