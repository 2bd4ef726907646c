"""The live cuts of a service: fresh, whole, shared, pinned, bounded, and swept."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streamhouse.core.errors import (
    HistoryDivergedError,
    OverloadedError,
    TableNotFoundError,
)
from streamhouse.core.model.lake.facts import LakeRole
from streamhouse.core.model.table import TablePath
from streamhouse.lake.files.lake_filesystem import LakeFilesystem
from streamhouse.lake.files.live_folders import HANDED_OUT_S, READABLE_S
from streamhouse.storage_service.engine.upkeep._retention import apply_retention
from streamhouse.storage_service.live.live_places import LivePlaces
from tests.support.expired_log import EXPIRING
from tests.support.held_step import around
from tests.support.in_process_service import event_rows
from tests.support.live_world import Caller, LiveWorld, live_world, rows_of


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


async def test_the_status_has_the_latest_cut_and_the_rows_since(tmp_path: Path) -> None:
    async with live_world(tmp_path) as world:
        await world.http.create_table(bucket_count=2)
        await world.write("append", event_rows(0, 5))

        async def state() -> dict[str, Any] | None:
            answer = await world.http.call("GET", "/v1/status", query={"table": "events"})
            state: dict[str, Any] | None = answer.json()["tables"][0]["live"]
            return state

        assert await state() is None
        await world.cut()
        await world.write("append", event_rows(5, 7))
        present = await state()
        assert present is not None
        assert (present["rows_written"], present["rows_since"]) == (5, 2)


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


async def test_a_cut_has_all_that_was_acknowledged_beside_writes_and_rounds(tmp_path: Path) -> None:
    async with live_world(tmp_path) as world:
        await world.http.create_table(bucket_count=3)
        await world.http.create_table("keyed", primary_key=("id",), bucket_count=3)
        ends = {"events": 0, "keyed": 0}
        is_over = False

        async def write_log() -> None:
            while not is_over:
                start = ends["events"]
                parts = (event_rows(start + n, start + n + 5) for n in (0, 5, 10))
                await world.transact(*parts)
                ends["events"] += 15

        async def write_keys() -> None:
            while not is_over:
                start = ends["keyed"]
                # The first ten rows are old ones, with the same values.
                await world.write("upsert", event_rows(max(0, start - 10), start + 15), "keyed")
                ends["keyed"] += 15

        async def load(path: str) -> None:
            for _ in range(10):
                end = ends[path]
                rows = await world.rows(path)
                assert len(rows) >= end
                assert len(rows) % 15 == 0
                assert rows == _events((0, len(rows)))

        async def run_rounds() -> None:
            for path in ("events", "keyed") * 3:
                await world.tier(path)

        writing = asyncio.gather(write_log(), write_keys())
        try:
            while not all(ends.values()):
                await asyncio.sleep(0)
            await asyncio.gather(load("events"), load("keyed"), load("keyed"), run_rounds())
        finally:
            is_over = True
            await writing
        assert len(await world.rows("keyed")) == ends["keyed"]


async def test_rows_that_leave_the_log_during_a_build_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with live_world(tmp_path) as world:
        properties = {"table.datalake.enabled": "false", **EXPIRING}
        await world.http.create_table(properties=properties)
        for start in range(0, 20_000, 5_000):
            await world.write("append", event_rows(start, start + 5_000))
        assert len(await world.rows()) == 20_000
        table, loop = world.table(), asyncio.get_running_loop()
        await world.write("append", event_rows(20_000, 20_001))

        def read_late(read: Callable[..., Any], *args: Any, **more: Any) -> Any:
            retention = apply_retention(table, world.service.manager.runtime)
            asyncio.run_coroutine_threadsafe(retention, loop).result()
            return read(*args, **more)

        world.set_clock(HANDED_OUT_S)
        around(monkeypatch, "log-read", read_late)
        rows = await world.rows()
        log_start = table.tablets[0].log_start_offset
        assert log_start > 0
        assert rows == _events((log_start, 20_001))


async def test_the_snapshot_below_a_cut_is_pinned_with_few_writes(tmp_path: Path) -> None:
    async with live_world(tmp_path) as world:
        await world.http.create_table()
        await world.write("append", event_rows(0, 3))
        await world.tier()
        pins, snapshot_id = world.table().lake_pins, world.table().lake.snapshot_id

        await world.cut()
        (first,) = pins.current()
        await world.write("append", event_rows(3, 5))
        await world.cut()
        (second,) = pins.current()
        world.set_clock(READABLE_S * 0.6)
        cut = await world.cut()
        (third,) = pins.current()

        assert first is second
        assert first.snapshot_id == cut.base_snapshot_id == snapshot_id
        assert third.expires_timestamp_us >= (cut.made_s + READABLE_S) * 1_000_000
        answer = await world.http.call("GET", "/v1/tables/events/lake/pins")
        assert [pin["snapshot_id"] for pin in answer.json()["pins"]] == [str(snapshot_id)]


async def test_with_too_many_pins_the_age_of_snapshots_must_keep_them(tmp_path: Path) -> None:
    async with live_world(tmp_path) as world:
        await world.http.create_table()
        short = {"table.datalake.snapshot.max-age": "1m"}
        for start in (0, 3):
            await world.write("append", event_rows(start, start + 3))
            await world.tier()
            world.table().lake_pins._owner_pins_max = 1
            assert await world.rows() == _events((0, start + 3))
        assert len(world.table().lake_pins.current()) == 1

        path = TablePath.parse("events")
        await world.service.manager.alter_properties(path, updates=short, removals=())
        with pytest.raises(OverloadedError, match="has its limit of 1 lake pins"):
            await world.cut()


async def test_old_folders_are_deleted_also_of_earlier_processes(tmp_path: Path) -> None:
    async with live_world(tmp_path) as world:
        await world.http.create_table()
        await world.write("append", event_rows(0, 3))
        await world.cut()
        await world.live._look()
        folders = world.folders()
        assert len(folders) == 2
        (place,) = world.table().sidecar(LivePlaces).uris
        assert (await _gauges(world))["live_folders"] == 2
        assert (await _gauges(world))["live_bytes"] > 100
        assert (await _gauges(world))["live_process_bytes"] > 10 << 20

    async with live_world(tmp_path) as world:
        assert world.table().sidecar(LivePlaces).uris == {place}
        # A busy machine takes its time between the cut and this look.
        world.set_clock(READABLE_S * 0.8)
        await world.live._look()
        assert world.folders() == folders
        world.set_clock(READABLE_S + 5)
        await world.live._look()
        assert world.folders() == []
        assert (await _gauges(world))["live_bytes"] == 0
        # Nothing is left to look for.
        assert world.table().sidecar(LivePlaces).uris == frozenset()
        assert await world.rows() == _events((0, 3))

    async with live_world(tmp_path) as world:
        assert world.table().sidecar(LivePlaces).uris == {place}


async def _gauges(world: LiveWorld) -> dict[str, float]:
    return {name: read() for name, (_, read) in world.service.door_gauges.items()}


async def test_folders_of_a_dropped_table_are_deleted_and_no_cut_is_made(tmp_path: Path) -> None:
    async with live_world(tmp_path) as world:
        await world.http.create_table()
        await world.write("append", event_rows(0, 3))
        before = await world.cut()
        await world.live._look()
        await world.service.manager.drop_table(TablePath.parse("events"))

        with pytest.raises(TableNotFoundError, match="events"):
            await world.cut()
        assert rows_of(before) == _events((0, 3))
        await world.http.create_table()
        assert await world.rows() == []
        world.set_clock(READABLE_S + 5)
        await world.live._look()
        assert world.folders() == []


async def test_a_store_that_fails_is_reported_once_and_asked_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with live_world(tmp_path) as world:
        await world.http.create_table()
        await world.write("append", event_rows(0, 3))
        await world.cut()
        sweep, files = world.live._sweep, world.live._sweep._files
        sweep._files = LakeFilesystem({})
        bad = "gs://bucket/db/t"
        await world.table().sidecar(LivePlaces).add(bad, now_s=0)
        world.set_clock(READABLE_S + 5)
        with caplog.at_level(logging.WARNING):
            await world.live._look()
            await world.live._look()
        assert world.folders() == []
        assert caplog.text.count("event=live_folders_stay") == 1
        assert world.table().sidecar(LivePlaces).uris == {bad}
        sweep._files = files


async def test_a_cut_is_refused_without_room_and_an_unchanged_one_is_not(tmp_path: Path) -> None:
    async with live_world(tmp_path, live_bytes_max=1) as world:
        await world.http.create_table()
        await world.write("append", event_rows(0, 3))
        cut = await world.cut()
        await world.write("append", event_rows(3, 4))

        with pytest.raises(OverloadedError, match=r"1 bytes \(live_bytes_max\); the oldest are"):
            await world.cut()
        world.set_clock(READABLE_S + 5)
        await world.live._look()
        assert await world.rows() == _events((0, 4))
        assert cut is not await world.cut()


async def test_answer_memory_is_held_for_a_build_and_given_back(tmp_path: Path) -> None:
    async with live_world(tmp_path) as world:
        await world.http.create_table()
        await world.write("append", event_rows(0, 50_000))
        answers = world.service.answers
        before = answers.held_ever
        caller = Caller()

        await world.live.cut(caller, TablePath.parse("events"), LakeRole.ROWS)

        assert answers.held_ever - before > 1_000_000
        assert answers.held == 0
        assert caller.hold is None
        small = answers.held_ever
        await world.cut()
        assert answers.held_ever == small


async def test_a_diverged_table_is_refused_until_one_history_is_chosen(tmp_path: Path) -> None:
    async with live_world(tmp_path) as world:
        await world.http.create_table()
        await world.write("append", event_rows(0, 3))
        table = world.table()
        keep = table.lake
        table.keep_lake(dataclasses.replace(keep, diverged="table 'events': two histories"))
        with pytest.raises(HistoryDivergedError, match="two histories"):
            await world.cut()
        table.keep_lake(keep)
        assert await world.rows() == _events((0, 3))


async def test_a_cancelled_request_leaves_its_build_to_the_next(tmp_path: Path) -> None:
    async with live_world(tmp_path) as world:
        await world.http.create_table()
        await world.write("append", event_rows(0, 3))
        await world.cut()
        await world.write("append", event_rows(3, 9))
        request = asyncio.ensure_future(world.cut())
        while not _is_building(world):
            await asyncio.sleep(0)
        request.cancel()

        assert await world.rows() == _events((0, 9))
        with pytest.raises(asyncio.CancelledError):
            await request


def _is_building(world: LiveWorld) -> bool:
    return any(cached.building.locked() for cached in world.live._cached.values())
