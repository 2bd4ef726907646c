"""Live cuts of the lake tables of a service in memory: what they have, and when they are made."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyiceberg.table import StaticTable

from streamhouse.core.errors import UnavailableError
from streamhouse.lake.catalogs._sql_catalog import open_catalog
from streamhouse.lake.guards.served_tables import ServedTable
from streamhouse.lake.staged_lake import StagedLake
from streamhouse.reading.live.live_table import STEPS_MAX, LiveCut, LiveLakeTable
from streamhouse.reading.tail.round_planner import PlanLimits
from tests.support.key_table_world import KeyTableWorld
from tests.support.tiering_world import TieringWorld, rows

NOW_S = 1_800_000_000.0


class LiveWorld:
    """The live cuts of the table `db.t` of a tiering world."""

    def __init__(self, tiering: TieringWorld) -> None:
        self.tiering = tiering
        self.service = tiering.service
        self.catalog = open_catalog(self.tiering.catalog)
        self.lake = StagedLake(self.catalog, tiering.catalog)
        self.live = LiveLakeTable(self.lake)

    def __enter__(self) -> LiveWorld:
        return self

    def __exit__(self, *error: object) -> None:
        self.catalog.close()

    def served(self) -> ServedTable:
        state = self.service.table_state("db.t")
        return ServedTable(info=state.table, lake=state.lake, positions=state.positions)

    def cut(self, *, now_s: float = NOW_S) -> LiveCut:
        return self.live.cut(self.served(), self.service, now_s=now_s)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[LiveWorld]:
    with TieringWorld(tmp_path) as tiering, LiveWorld(tiering) as opened:
        tiering.create_table(bucket_count=2)
        yield opened


def read(cut: LiveCut) -> pa.Table:
    """The rows that stock pyiceberg reads."""
    assert cut.metadata_location is not None
    return StaticTable.from_metadata(cut.metadata_location).scan().to_arrow()


def ids(cut: LiveCut) -> list[int]:
    return sorted(read(cut)["id"].to_pylist())


def test_a_table_that_was_never_tiered_has_its_rows(world: LiveWorld) -> None:
    empty = world.cut()
    world.service.append("db.t", 0, rows(0, 3))

    assert (ids(empty), empty.base_snapshot_id) == ([], None)
    assert ids(world.cut()) == [0, 1, 2]
    assert not world.catalog.table_exists("db.t")


def test_a_cut_has_the_rows_of_lake_and_log(world: LiveWorld) -> None:
    world.service.append("db.t", 0, rows(0, 3))
    snapshot_id = world.tiering.tier().snapshot_id
    world.service.append("db.t", 0, rows(3, 2))
    world.service.append("db.t", 1, rows(5, 2))

    cut = world.cut()

    assert ids(cut) == list(range(7))
    assert (cut.base_snapshot_id, cut.end_offsets) == (snapshot_id, {0: 5, 1: 2})
    assert len(world.tiering.lake_table().snapshots()) == 1
    assert len(cut.metadata.snapshots) == 2


def test_a_table_without_a_change_gets_the_same_cut(world: LiveWorld) -> None:
    world.service.append("db.t", 0, rows(0, 3))

    assert world.cut() is world.cut(now_s=NOW_S + 60)


def test_a_next_cut_writes_only_the_rows_that_came_since(world: LiveWorld) -> None:
    world.service.append("db.t", 0, rows(0, 3))
    world.cut()
    world.service.append("db.t", 1, rows(3, 2))

    cut = world.cut()

    assert (ids(cut), cut.rows_written) == ([0, 1, 2, 3, 4], 2)


def test_a_cut_is_made_anew_after_a_round(world: LiveWorld) -> None:
    world.service.append("db.t", 0, rows(0, 3))
    world.cut()
    world.tiering.tier()
    world.service.append("db.t", 0, rows(3, 1))

    cut = world.cut()

    assert (ids(cut), cut.rows_written) == ([0, 1, 2, 3], 1)
    assert cut.base_snapshot_id == world.tiering.lake_table().metadata.current_snapshot_id


def test_a_cut_is_made_anew_after_a_quarter_of_an_hour(world: LiveWorld) -> None:
    world.service.append("db.t", 0, rows(0, 3))
    old = world.cut()

    new = world.cut(now_s=NOW_S + 900)

    assert (new.rows_written, old.made_s, new.made_s) == (3, NOW_S, NOW_S + 900)


def test_updates_and_deletes_of_cold_and_hot_rows_are_right(tmp_path: Path) -> None:
    with KeyTableWorld(tmp_path) as keys, LiveWorld(keys.tiering) as world:
        keys.create_key_table(bucket_count=2)

        def shown() -> dict[int, float]:
            return {row["id"]: row["amount"] for row in read(world.cut()).to_pylist()}

        keys.upsert(*({"id": n, "region": "a", "amount": 1.0} for n in range(10)))
        assert shown() == dict.fromkeys(range(10), 1.0)
        keys.tiering.tier()
        keys.upsert(*({"id": n, "region": "b", "amount": 2.0} for n in range(5, 12)))
        keys.delete({"id": 0}, {"id": 11})
        expected = {n: 1.0 if n < 5 else 2.0 for n in range(1, 11)}
        assert shown() == expected
        keys.upsert({"id": 10, "region": "c", "amount": 3.0})
        keys.delete({"id": 1}, {"id": 5})
        expected = {n: v for n, v in expected.items() if n not in (1, 5)} | {10: 3.0}
        assert shown() == expected
        keys.tiering.tier()
        assert shown() == expected


def test_many_steps_become_one(world: LiveWorld) -> None:
    for n in range(STEPS_MAX + 2):
        world.service.append("db.t", 0, rows(n, 1))
        cut = world.cut()
        assert (ids(cut), cut.rows_written) == ([*range(n + 1)], n + 1 if n == STEPS_MAX else 1)


def test_more_rows_than_a_round_takes_are_refused(world: LiveWorld) -> None:
    live = LiveLakeTable(world.lake, limits=PlanLimits(rows_max=2))
    world.service.append("db.t", 0, rows(0, 3))

    with pytest.raises(UnavailableError, match=r"'db\.t': 3 rows wait for a round.*--once"):
        live.cut(world.served(), world.service, now_s=NOW_S)


def test_rows_that_left_the_log_before_the_first_round_are_no_rows(world: LiveWorld) -> None:
    world.service.append("db.t", 0, rows(0, 3))
    world.service.append("db.t", 0, rows(3, 2))
    world.service.expire_log("db.t", 0, 3)

    assert ids(world.cut()) == [3, 4]
