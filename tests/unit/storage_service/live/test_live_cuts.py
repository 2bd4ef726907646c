"""The live cuts of a service: fresh, whole, shared, pinned, bounded, and swept."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from tests.support.in_process_service import event_rows
from tests.support.live_world import live_world, rows_of


def _events(*ranges: tuple[int, int]) -> list[tuple[int, str]]:
    return sorted((n, f"n{n}") for start, end in ranges for n in range(start, end))


async def test_a_cut_has_what_was_acknowledged_in_log_and_lake(tmp_path: Path) -> None:
    async with live_world(tmp_path) as world:
        await world.http.create_table(bucket_count=2)
        await world.write("append", event_rows(0, 5))
        assert await world.rows() == _events((0, 5))
        await world.tier()
        assert await world.rows() == _events((0, 5))
        await world.write("append", event_rows(5, 7))
        assert await world.rows() == _events((0, 7))
        before = await world.cut()
        assert await world.cut() is before


async def test_a_cut_of_a_table_with_keys_has_its_changes(tmp_path: Path) -> None:
    async with live_world(tmp_path) as world:
        await world.http.create_table(primary_key=("id",), bucket_count=2)
        await world.write("upsert", event_rows(0, 9))
        await world.tier()
        await world.write("upsert", event_rows(6, 12))
        await world.write("delete", event_rows(2, 4).select(["id"]))
        assert await world.rows() == _events((0, 2), (4, 12))


async def test_waiting_requests_share_a_cut_that_is_taken_after_they_came(tmp_path: Path) -> None:
    async with live_world(tmp_path) as world:
        await world.http.create_table()
        await world.write("append", event_rows(0, 1))
        await world.cut()
        builds = world.service.metrics._live_cut_seconds
        count = _count(builds)
        kept = next(iter(world.live._cached.values()))
        async with kept.turn:
            waiting = [asyncio.ensure_future(world.cut()) for _ in range(8)]
            await asyncio.sleep(0)
            await world.write("append", event_rows(1, 2))

        cuts = await asyncio.gather(*waiting)

        assert len({id(cut) for cut in cuts}) == 1
        assert rows_of(cuts[0]) == _events((0, 2))
        assert _count(builds) == count + 1


def _count(histogram: Any) -> float:
    (family,) = histogram.collect()
    return float(next(s.value for s in family.samples if s.name.endswith("_count")))
