"""Tables of format version 3 with deletion vectors, read as any Iceberg table is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from pyiceberg.table import StaticTable

from integration.judges.duckdb_read import connect
from streamhouse.connector._spark_versions import ReadAllAvailable
from streamhouse.core.errors import CorruptDataError, UnsupportedError
from streamhouse.lake.files.lake_filesystem import LakeFilesystem
from streamhouse.lake.snapshots.inventory import InventoryReader
from tests.support.iceberg_world import IcebergWorld, ids_of, numbered
from tests.support.v3_tables import commit_vectors, written_vectors

SIZES = (70_000, 10, 500)
# Of the second file nothing is deleted; the vectors differ in length.
DELETED = ((*range(0, 69_000, 7), 69_999), (), (3, 4, 5))


@pytest.fixture
def world(tmp_path: Path) -> Iterator[IcebergWorld]:
    with IcebergWorld(tmp_path) as opened:
        yield opened


def _filled(world: IcebergWorld) -> list[str]:
    """Make three data files; return their paths in the order of their rows."""
    world.create(numbered(0, 0).schema)
    start = 0
    for size in SIZES:
        world.append(numbered(start, start + size))
        start += size
    tasks = world.table().scan().plan_files()
    by_size = {task.file.record_count: task.file.file_path for task in tasks}
    return [by_size[size] for size in SIZES]


def _live_ids(deleted: Sequence[Sequence[int]] = DELETED) -> list[int]:
    ids, start = list[int](), 0
    for size, gone in zip(SIZES, deleted, strict=True):
        ids += sorted({*range(start, start + size)} - {start + row for row in gone})
        start += size
    return ids


def _with_vectors(world: IcebergWorld, paths: Sequence[str]) -> None:
    positions = {path: gone for path, gone in zip(paths, DELETED, strict=True) if gone}
    commit_vectors(world.table(), written_vectors(world.table(), positions))


def _ids(world: IcebergWorld) -> list[int]:
    ids: list[int] = world.read()["id"].to_pylist()
    return ids


def test_we_read_what_pyiceberg_and_duckdb_read(world: IcebergWorld) -> None:
    _with_vectors(world, _filled(world))
    assert world.table().metadata.format_version == 3

    assert _ids(world) == _live_ids()
    location = world.table().metadata_location
    assert sorted(StaticTable.from_metadata(location).scan().to_arrow()["id"].to_pylist()) == (
        _live_ids()
    )
    with connect() as duckdb:
        rows = duckdb.execute(f"SELECT id FROM iceberg_scan('{location}') ORDER BY id").fetchall()
    assert [row[0] for row in rows] == _live_ids()


def test_a_vector_replaces_the_position_deletes_of_its_file(world: IcebergWorld) -> None:
    """An upgraded table has deletes of both kinds; a vector has all deletes of its file."""
    paths = _filled(world)
    world.delete_at(paths[1], 0, 9)
    world.delete_at(paths[2], 3, 499)
    vectors = written_vectors(world.table(), {paths[2]: (3, 7)})
    commit_vectors(world.table(), vectors)

    assert _ids(world) == _live_ids(((), (0, 9), (3, 7)))


def test_each_file_is_read_with_its_own_vector_only(world: IcebergWorld) -> None:
    """Another vector of the same Puffin file may be lost."""
    paths = _filled(world)
    vectors = written_vectors(world.table(), {paths[0]: (1,), paths[2]: range(100)})
    commit_vectors(world.table(), vectors)
    (place,) = (v for v in vectors if v.data_path == paths[0])
    puffin = Path(place.path.removeprefix("file://"))
    content = bytearray(puffin.read_bytes())
    content[place.offset + 12] ^= 1
    puffin.write_bytes(content)

    assert world.read(where="id >= 70010").num_rows == 400
    with pytest.raises(CorruptDataError, match=rf"at byte {place.offset}: .* checksum is wrong"):
        world.read()


def test_a_stream_begins_without_deleted_rows_and_stops_at_a_delete(world: IcebergWorld) -> None:
    paths = _filled(world)
    following = world.stream()
    start = following.initialOffset()
    _with_vectors(world, paths)
    fresh = world.stream()
    begin = fresh.initialOffset()
    end = fresh.latestOffset(begin, ReadAllAvailable())

    assert ids_of(fresh, begin, end) == _live_ids()
    with pytest.raises(UnsupportedError, match="it deletes rows, which a stream of appends"):
        following.latestOffset(start, ReadAllAvailable())


def test_two_vectors_of_a_data_file_are_damage(world: IcebergWorld) -> None:
    paths = _filled(world)
    for position in (1, 2):
        commit_vectors(world.table(), written_vectors(world.table(), {paths[2]: (position,)}))

    with pytest.raises(CorruptDataError, match=f"'{paths[2]}' has two deletion vectors"):
        world.read()


def test_a_vector_without_a_place_is_refused(world: IcebergWorld) -> None:
    paths = _filled(world)
    (vector,) = written_vectors(world.table(), {paths[2]: (1,)})
    commit_vectors(world.table(), [replace(vector, data_path=None)])  # type: ignore[arg-type]

    with pytest.raises(UnsupportedError, match="puffin' does not say of which rows"):
        world.read()


def test_the_inventory_has_vectors_as_the_deletes_of_their_files(world: IcebergWorld) -> None:
    paths = _filled(world)
    world.delete_at(paths[2], 3, 499)
    _with_vectors(world, paths)

    inventory = InventoryReader(LakeFilesystem({})).read(world.table())
    assert inventory is not None
    by_path = {file.path: file for file in inventory.files}
    assert [by_path[path].deleted_rows for path in paths] == [len(gone) for gone in DELETED]
    assert not any(file.is_fixed for file in inventory.files)
    # The position deletes hide nothing that a vector does not.
    needed = {deletes.is_vector: deletes.data_paths for deletes in inventory.deletes}
    assert needed[False] == frozenset()
    assert {(d.deletes.path, *d.data_paths) for d in inventory.deletes if d.is_vector} == {
        (v.path, path) for path in (paths[0], paths[2]) for v in by_path[path].deletes
    }
