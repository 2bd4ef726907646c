"""Rows of tables in format version 3 are changed and moved, and each keeps its id."""

from __future__ import annotations

from typing import Any

import pytest

from streamhouse.reading.tail.round_planner import PlanLimits
from streamhouse.tiering.maintain.maintenance_report import MaintenanceReport
from tests.support.key_table_world import KeyTableWorld
from tests.support.row_lineage import Lineage, lineage_in_lake

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


def _lineage(world: KeyTableWorld) -> dict[int, Lineage]:
    """Key -> lineage of the row."""
    lineages = lineage_in_lake(world)
    return {row["id"]: lineages[address] for address, row in world.live_rows().items()}


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


@pytest.mark.parametrize("partitioned_by", [[], ["region"]])
def test_an_updated_row_keeps_its_id(key_world: KeyTableWorld, partitioned_by: list[str]) -> None:
    world = key_world
    world.create_key_table(partitioned_by=partitioned_by, properties={VERSION: "3"})
    world.upsert(*_rows(range(10), 0.0))
    world.catch_up()
    before = _lineage(world)

    # One change; several in one round; another partition; deleted and inserted again; a new row.
    world.upsert(*_rows(range(3), 1.0))
    world.upsert(*_rows(range(2), 2.0))
    world.upsert({"id": 3, "region": "moved", "amount": 1.0})
    world.delete({"id": 4}, {"id": 5})
    world.upsert(*_rows(range(4, 5), 3.0), *_rows(range(20, 21), 0.0))
    world.catch_up()
    after = _lineage(world)

    now = world.tiering.lake_table().metadata.last_sequence_number
    assert {key: after[key].row_id for key in range(4)} == {
        key: before[key].row_id for key in range(4)
    }
    assert {after[key].sequence_number for key in (0, 1, 2, 3, 4, 20)} == {now}
    assert {key: after[key] for key in range(6, 10)} == {key: before[key] for key in range(6, 10)}
    assert {after[4].row_id, after[20].row_id}.isdisjoint(row.row_id for row in before.values())
    assert len({row.row_id for row in after.values()}) == len(after)

    # A row that has its id in its file is changed, too.
    world.upsert(*_rows(range(2), 4.0))
    world.catch_up()
    assert {key: row.row_id for key, row in _lineage(world).items()} == {
        key: row.row_id for key, row in after.items()
    }


def test_a_row_keeps_its_id_over_the_splits_of_a_round(key_world: KeyTableWorld) -> None:
    world = key_world
    world.create_key_table(properties={VERSION: "3"})
    world.upsert(*_rows(range(5), 0.0))
    world.catch_up()
    before = _lineage(world)

    # The versions of each row lie in several splits, and so do those of a row made in the round.
    for amount in range(1, 8):
        world.upsert(*_rows(range(6), float(amount)))
    limits = PlanLimits(parallelism=8, split_rows_min=4)
    result = world.tiering.round(world.tiering.claim(), limits=limits).run()
    after = _lineage(world)

    assert result is not None
    assert {key: after[key].row_id for key in before} == {
        key: row.row_id for key, row in before.items()
    }
    assert len({row.row_id for row in after.values()}) == 6
    assert world.in_lake() == world.live
