"""Live cuts of tables with and without keys, as stock pyiceberg reads them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.table import StaticTable

from streamhouse.core.errors import UnavailableError
from streamhouse.lake.catalogs._sql_catalog import open_catalog
from streamhouse.lake.uncommitted_catalog import UncommittedCatalog
from streamhouse.reading.live import live_lake_table
from streamhouse.reading.live.live_lake_table import CHUNKS_MAX, LiveCut, LiveLakeTable
from streamhouse.reading.tail.round_planner import PlanLimits
from tests.support.key_table_world import KeyTableWorld
from tests.support.log_table_world import LogTableWorld
from tests.support.tiering_world import TieringWorld

_NOW_S = 1_800_000_000.0


class _Live:
    """Cuts of one table, and what stock pyiceberg reads in them."""

    def __init__(self, world: TieringWorld, path: str = "db.t", **more: Any) -> None:
        self.world, self.path, self.now_s = world, path, _NOW_S
        self.catalog = open_catalog(world.catalog)
        self.live = LiveLakeTable(
            UncommittedCatalog(self.catalog),
            world.catalog,
            compare=lambda state, covered: world.service.compare_history(
                path, table_id=state.table.table_id, covered=covered
            ),
            **more,
        )

    def cut(self) -> LiveCut:
        return self.live.cut(
            self.world.service.table_state(self.path), self.world.service, now_s=self.now_s
        )

    def rows(self) -> list[dict[str, Any]]:
        read = StaticTable.from_metadata(self.cut().table.metadata_location or "").scan().to_arrow()
        return sorted(read.to_pylist(), key=lambda row: (row["__bucket"], row["__offset"]))

    def addresses(self) -> list[tuple[int, int]]:
        return [(row["__bucket"], row["__offset"]) for row in self.rows()]


@contextmanager
def _live(world: TieringWorld, **more: Any) -> Iterator[_Live]:
    live = _Live(world, **more)
    try:
        yield live
    finally:
        live.catalog.close()


def test_a_log_table_is_read_with_its_tail(tmp_path: Path) -> None:
    with LogTableWorld(tmp_path) as world, _live(world.tiering) as live:
        world.tiering.create_table(bucket_count=2, partitioned_by=["bucket(4, id)"])
        assert live.rows() == []
        world.append(3)
        assert live.addresses() == [(0, 0), (0, 1), (0, 2)]
        world.tier_rows(4)
        world.append(2, bucket=1)
        before = live.cut()
        assert live.addresses() == [*((0, n) for n in range(7)), (1, 0), (1, 1)]
        assert live.cut() is before
        world.append(1)
        assert live.addresses() == [*((0, n) for n in range(8)), (1, 0), (1, 1)]
        assert (
            len(live.cut().table.metadata.snapshots)
            == len(world.tiering.lake_table().snapshots()) + 1
        )
        # Nothing was committed.
        assert world.tiering.addresses() == [(0, n) for n in range(7)]


def test_a_key_table_is_read_with_updates_and_deletes_of_cold_and_hot_rows(tmp_path: Path) -> None:
    with KeyTableWorld(tmp_path) as world, _live(world.tiering) as live:
        world.create_key_table(bucket_count=2)

        def shown() -> dict[int, float]:
            return {row["id"]: row["amount"] for row in live.rows()}

        world.upsert(*({"id": n, "region": "a", "amount": 1.0} for n in range(10)))
        assert shown() == dict.fromkeys(range(10), 1.0)
        world.tiering.tier()
        world.upsert(*({"id": n, "region": "b", "amount": 2.0} for n in range(5, 12)))
        world.delete({"id": 0}, {"id": 11})
        expected = {n: 1.0 if n < 5 else 2.0 for n in range(1, 11)}
        assert shown() == expected
        world.upsert({"id": 10, "region": "c", "amount": 3.0})
        world.delete({"id": 1}, {"id": 5})
        expected = {n: v for n, v in expected.items() if n not in (1, 5)} | {10: 3.0}
        assert shown() == expected
        world.tiering.tier()
        assert shown() == expected


def test_chunks_are_made_one_when_they_are_many_and_anew_when_they_are_old(tmp_path: Path) -> None:
    with LogTableWorld(tmp_path) as world, _live(world.tiering) as live:
        world.tiering.create_table()
        world.tier_rows(2)
        for n in range(CHUNKS_MAX + 2):
            world.append(1)
            assert len(live.addresses()) == 3 + n
        files = StaticTable.from_metadata(live.cut().table.metadata_location or "").inspect.files()
        assert files.num_rows < 5
        before = live.cut()
        live.now_s += live_lake_table.HANDED_OUT_S - 1
        assert live.cut() is before
        live.now_s += 1
        after = live.cut()
        assert after is not before
        assert after.made_s == live.now_s
        assert len(live.addresses()) == CHUNKS_MAX + 4


def test_too_many_rows_wait_for_a_round(tmp_path: Path) -> None:
    limits = PlanLimits(rows_max=2)
    with LogTableWorld(tmp_path) as world, _live(world.tiering, limits=limits) as live:
        world.tiering.create_table()
        world.append(3)
        with pytest.raises(UnavailableError, match=r"'db\.t': 3 rows are not in the lake yet.*run"):
            live.cut()
        world.tiering.tier()
        assert len(live.addresses()) == 3
