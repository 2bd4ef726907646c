"""Lake tables in format version 3, read by stock pyiceberg and by DuckDB."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.catalog.sql import SqlCatalog

from integration.judges.duckdb_read import connect
from streamhouse.core.errors import InvalidRequestError
from streamhouse.core.model.lake.facts import LakeCatalog
from tests.support.held_step import lower
from tests.support.tiering_world import TieringWorld, lake_in_folder, rows

VERSION_3 = {"table.datalake.format-version": "3"}


def in_duckdb(world: TieringWorld, columns: str, path: str = "db.t") -> list[tuple[Any, ...]]:
    location = world.lake_table(path).metadata_location.removeprefix("file://")
    with connect() as duckdb:
        return duckdb.execute(f"SELECT {columns} FROM iceberg_scan('{location}')").fetchall()


def _metadata(world: TieringWorld) -> dict[str, Any]:
    location = world.lake_table().metadata_location.removeprefix("file://")
    metadata: dict[str, Any] = json.loads(Path(location).read_text())
    return metadata


def _tier_rounds(world: TieringWorld, numbers: range) -> None:
    """A round of ten rows for each number."""
    for number in numbers:
        world.service.append("db.t", 0, rows(number * 10, 10))
        world.tier()


def test_tables_are_of_version_2_unless_asked(world: TieringWorld) -> None:
    world.create_table()
    _tier_rounds(world, range(1))

    metadata = _metadata(world)

    assert metadata["format-version"] == 2
    assert "next-row-id" not in metadata
    assert not {"first-row-id", "added-rows"} & metadata["snapshots"][0].keys()


def test_the_version_is_2_or_3(world: TieringWorld) -> None:
    with pytest.raises(InvalidRequestError, match="a whole number from 2 to 3"):
        world.create_table(properties={"table.datalake.format-version": "4"}).properties()


def test_rows_have_ids(world: TieringWorld) -> None:
    world.create_table(properties=VERSION_3)
    _tier_rounds(world, range(3))

    metadata = _metadata(world)

    assert metadata["format-version"] == 3
    assert metadata["next-row-id"] == 30
    ids = [(s["first-row-id"], s["added-rows"]) for s in metadata["snapshots"]]
    assert ids == [(0, 10), (10, 10), (20, 10)]
    assert world.addresses() == [(0, offset) for offset in range(30)]
    assert sorted(in_duckdb(world, "_row_id, id")) == [(n, n) for n in range(30)]


def test_ids_stay_while_manifests_are_merged(
    world: TieringWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    lower(monkeypatch, "manifests-merged", 2)
    world.create_table(properties=VERSION_3)
    _tier_rounds(world, range(2))
    before = dict(in_duckdb(world, "id, _row_id"))

    _tier_rounds(world, range(2, 7))

    after = dict(in_duckdb(world, "id, _row_id"))
    assert len(after) == len(set(after.values())) == 70
    assert before.items() <= after.items()
    table = world.lake_table()
    assert len(table.current_snapshot().manifests(table.io)) < 7


def test_a_catalog_that_pyiceberg_commits_to_has_both_versions(tmp_path: Path) -> None:
    """As Hive and Glue: pyiceberg applies the updates and writes the metadata."""
    described = lake_in_folder(tmp_path)
    stock = {"py-catalog-impl": f"{SqlCatalog.__module__}.{SqlCatalog.__name__}"}
    kept = {key: value for key, value in described.properties.items() if key != "type"}
    with TieringWorld(tmp_path, catalog=LakeCatalog(name="lake", properties=stock | kept)) as world:
        world.create_table("db.new", properties=VERSION_3)
        world.create_table("db.old")
        for path in ("db.new", "db.old"):
            world.service.append(path, 0, rows(0, 10))
            world.tier(path)

        world.service.change_layout("db.old", VERSION_3)
        for path in ("db.new", "db.old"):
            world.service.append(path, 0, rows(10, 10))
            world.tier(path)

            assert world.lake_table(path).metadata.format_version == 3
            ids = in_duckdb(world, "_row_id, id", path)
            assert sorted(id_ for _, id_ in ids) == list(range(20))
            assert len({row_id for row_id, _ in ids}) == 20
