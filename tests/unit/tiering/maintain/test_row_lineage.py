"""Maintenance of tables in format version 3 moves rows, and each row keeps its lineage."""

from __future__ import annotations

from typing import Any

import pytest

from integration.judges.duckdb_read import connect
from streamhouse.tiering.maintain.maintenance_report import MaintenanceReport
from tests.support.key_table_world import KeyTableWorld

VERSION = "table.datalake.format-version"


def _rows(keys: range, amount: float) -> list[dict[str, Any]]:
    return [{"id": key, "region": f"r{key % 2}", "amount": amount} for key in keys]


def _rounds(world: KeyTableWorld) -> None:
    """Small files, and rows deleted and changed in them."""
    for number in range(4):
        world.upsert(*_rows(range(number * 10, number * 10 + 10), float(number)))
        world.catch_up()
    world.upsert(*_rows(range(0, 40, 7), -1.0))
    world.delete(*({"id": key} for key in range(0, 40, 9)))
    world.catch_up()


def _pack(world: KeyTableWorld) -> MaintenanceReport:
    policy = world.tiering.on_demand()
    return world.tiering.maintain(policy=policy)


def _lineage(world: KeyTableWorld) -> dict[int, tuple[int, int]]:
    """Key -> row id, and the sequence number of the last change of the row, by DuckDB."""
    location = world.tiering.lake_table().metadata_location.removeprefix("file://")
    with connect() as duckdb:
        query = f"SELECT id, _row_id, _last_updated_sequence_number FROM iceberg_scan('{location}')"
        return {key: (row_id, number) for key, row_id, number in duckdb.execute(query).fetchall()}


@pytest.mark.parametrize("partitioned_by", [[], ["region"]])
def test_a_packed_row_keeps_its_id(key_world: KeyTableWorld, partitioned_by: list[str]) -> None:
    world = key_world
    world.create_key_table(partitioned_by=partitioned_by, properties={VERSION: "3"})
    _rounds(world)
    before = _lineage(world)
    assert len({row_id for row_id, _ in before.values()}) == len(before) == len(world.live)

    first = _pack(world)
    assert first.rewritten is not None
    assert _lineage(world) == before
    assert world.in_lake() == world.live

    # Rows that were moved once are moved again, among rows that were not.
    world.upsert(*_rows(range(40, 60), 5.0))
    world.catch_up()
    later = _lineage(world)
    assert before.items() <= later.items()
    assert len({row_id for row_id, _ in later.values()}) == len(later)
    assert _pack(world).rewritten is not None
    assert _lineage(world) == later
    assert world.in_lake() == world.live


def test_rows_get_their_ids_with_the_upgrade_and_keep_them(key_world: KeyTableWorld) -> None:
    world = key_world
    world.create_key_table()
    _rounds(world)
    world.info = world.tiering.service.change_layout(world.PATH, {VERSION: "3"})
    world.upsert(*_rows(range(40, 50), 5.0))
    world.catch_up()
    before = _lineage(world)
    assert len({row_id for row_id, _ in before.values()}) == len(before)

    assert _pack(world).rewritten is not None
    assert _lineage(world) == before
    assert world.in_lake() == world.live
