"""Rounds of primary key tables in format version 3: deleted rows are deletion vectors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyiceberg.manifest import DataFile

from integration.judges.duckdb_read import connect
from streamhouse.core.errors import UnavailableError
from streamhouse.lake.snapshots._manifests import live_entries, manifests_of
from streamhouse.lake.snapshots.live_files import is_vector, path_bounds
from tests.support.held_step import lower
from tests.support.key_table_world import KeyTableWorld
from tests.support.v3_tables import upgraded

VERSION_3 = {"table.datalake.format-version": "3"}


def row(key: int, amount: float = 1.0) -> dict[str, Any]:
    return {"id": key, "region": "eu", "amount": amount}


def _deletes(world: KeyTableWorld) -> list[DataFile]:
    """The live entries of deletes."""
    table = world.tiering.lake_table()
    snapshot = table.current_snapshot()
    assert snapshot is not None
    files = [
        entry.data_file
        for manifest in manifests_of(table.io, snapshot)
        for entry in live_entries(table.io, manifest)
    ]
    return [file for file in files if file.content.value]


def _check(world: KeyTableWorld) -> None:
    """What the lake holds, by stock pyiceberg and by DuckDB, and at most a vector a data file."""
    assert world.in_lake() == world.live
    location = world.tiering.lake_table().metadata_location.removeprefix("file://")
    with connect() as duckdb:
        found = duckdb.execute(f"SELECT id, amount FROM iceberg_scan('{location}')").fetchall()
    lived = world.tiering.lake_table().scan(selected_fields=("id", "amount")).to_arrow()
    assert sorted(found) == sorted(
        zip(lived["id"].to_pylist(), lived["amount"].to_pylist(), strict=True)
    )
    vectors = [path_bounds(file)[0] for file in _deletes(world) if is_vector(file)]
    assert len(vectors) == len(set(vectors))


def _puffins(world: KeyTableWorld) -> list[Path]:
    return sorted(world.tiering.folder.rglob("*.puffin"))


def test_updates_and_deletes_make_vectors(
    key_world: KeyTableWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    lower(monkeypatch, "manifests-merged", 2)
    key_world.create_key_table(bucket_count=2, properties=VERSION_3)
    for number in range(6):
        ids = range(number * 5, number * 5 + 20)
        key_world.upsert(*(row(key, float(number)) for key in ids))
        key_world.delete({"id": number * 5})
        key_world.tiering.tier()

        _check(key_world)

    deletes = _deletes(key_world)
    assert deletes
    assert all(is_vector(file) for file in deletes)
    # A Puffin file a round, and no other file of deletes.
    assert len(_puffins(key_world)) == 5
    assert not [path for path in key_world.tiering.data_files() if "-deletes" in path.name]


def test_position_deletes_from_before_an_upgrade_are_folded_in(key_world: KeyTableWorld) -> None:
    key_world.create_key_table(properties={"table.datalake.format-version": "2"})
    for start in (0, 10):
        key_world.upsert(*(row(key) for key in range(start, start + 10)))
        key_world.tiering.tier()
    key_world.upsert(row(1, 2.0), row(11, 2.0))
    key_world.tiering.tier()
    assert [is_vector(file) for file in _deletes(key_world)] == [False, False]
    upgraded(key_world.tiering.lake_table())

    key_world.upsert(row(2, 3.0))
    key_world.tiering.tier()

    _check(key_world)
    assert sorted(is_vector(file) for file in _deletes(key_world)) == [False, True]
    key_world.upsert(row(12, 4.0), row(3, 4.0))
    key_world.tiering.tier()
    _check(key_world)
    assert all(is_vector(file) for file in _deletes(key_world))


def test_maintenance_removes_vectors_with_their_data_files(key_world: KeyTableWorld) -> None:
    properties = {
        "table.datalake.snapshot.min-count": "1",
        "table.datalake.snapshot.max-age": "1ms",
    }
    key_world.create_key_table(properties=VERSION_3 | properties)
    for number in range(10):
        key_world.upsert(*(row(key, float(number)) for key in range(number, number + 5)))
        key_world.tiering.tier()
    before = len(_puffins(key_world))
    assert len(_deletes(key_world)) > 5

    report = key_world.tiering.maintain(policy=key_world.tiering.on_demand())

    assert report.rewritten is not None
    assert _deletes(key_world) == []
    _check(key_world)
    key_world.upsert(row(9, 100.0))
    key_world.tiering.tier()
    _check(key_world)
    key_world.tiering.maintain(policy=key_world.tiering.on_demand())
    _check(key_world)
    assert len(_puffins(key_world)) < before


def test_a_compaction_that_comes_between_makes_the_round_start_over(
    key_world: KeyTableWorld,
) -> None:
    key_world.create_key_table(properties=VERSION_3)
    for start in (0, 10):
        key_world.upsert(*(row(key) for key in range(start, start + 10)))
        key_world.tiering.tier()
    key_world.upsert(row(3, 2.0), row(13, 2.0))
    key_world.tiering.tier()
    key_world.upsert(row(4, 3.0))

    def compact(step: str) -> None:
        if step == "files-written":
            key_world.tiering.maintain(policy=key_world.tiering.on_demand())

    with pytest.raises(UnavailableError, match=r"another engine rewrote \d+ files"):
        key_world.tiering.round(checkpoint=compact).run()

    key_world.tiering.tier()
    _check(key_world)
