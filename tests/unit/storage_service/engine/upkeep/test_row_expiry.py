"""Deleting rows by key that have reached their time: races, limits, restarts, failures."""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import json
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from streamhouse.core.errors import (
    CorruptDataError,
    InvalidSchemaError,
    OverloadedError,
)
from streamhouse.storage_service.directory.runtime import clock_us
from streamhouse.storage_service.directory.state_file import seal
from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.engine.upkeep.row_ages import RowAges
from streamhouse.storage_service.kv.plan.write_plan import KeyWrite
from tests.support.held_step import around
from tests.support.in_process_service import (
    HOUR_US,
    TTL,
    ExpiryWorld,
    expiry_world,
    ids_of,
    open_manager,
    table_descriptor,
)
from tests.support.state_files import content_of, state_file


async def test_a_row_written_between_look_and_delete_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with expiry_world(tmp_path) as world:
        table = await world.table()
        await world.upsert(table, range(10))

        async def write_first(real: Any, table: OpenTable, write: KeyWrite) -> Any:
            assert write.rows.num_rows == 10, "all were found to be old"
            await world.upsert(table, [3, 4])
            return await real(table, write)

        around(monkeypatch, "expired-deleting", write_first)
        await world.look()

        assert ids_of(table) == [3, 4]
        assert world.expired == [8]
        assert table.row_count == 2


async def test_rows_are_looked_at_only_now_and_then_but_at_once_when_the_time_changes(
    tmp_path: Path,
) -> None:
    async with expiry_world(tmp_path) as world:
        table = await world.table()
        await world.upsert(table, [1])
        await world.look()
        assert ids_of(table) == []

        await world.upsert(table, [2])
        await world.look(ahead_us=4 * HOUR_US)
        assert ids_of(table) == [2], "a twenty-fourth of an hour has not passed"
        world.monotonic_s += 3_600 / 24
        await world.look(ahead_us=4 * HOUR_US)
        assert ids_of(table) == []

        await world.upsert(table, [3])
        await world.manager.alter_properties(
            table.path, updates={"table.datalake.ttl": "2h"}, removals=()
        )
        await world.look(ahead_us=8 * HOUR_US)
        assert ids_of(table) == []


async def test_an_upsert_that_changes_nothing_counts_from_when_the_table_has_a_time_to_live(
    tmp_path: Path,
) -> None:
    async with expiry_world(tmp_path) as world:
        table = await world.table(properties={})
        await world.upsert(table, [1])
        assert (await world.upsert(table, [1])).ranges == {0: (1, 1)}, "no change"
        await world.manager.alter_properties(table.path, updates=TTL, removals=())
        assert (await world.upsert(table, [1])).ranges == {0: (1, 3)}, "-U and +U"
        await world.manager.alter_properties(table.path, updates={}, removals=list(TTL))
        assert (await world.upsert(table, [1])).ranges == {0: (3, 3)}


@pytest.mark.parametrize("updates", [{}, {"table.datalake.ttl": "10d"}])
async def test_nothing_more_is_deleted_once_the_owner_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, updates: dict[str, str]
) -> None:
    async with expiry_world(tmp_path) as world:
        table = await world.table()
        await world.upsert(table, range(2_000), "x" * 500)

        async def alter_then(real: Any, *of: Any, **others: Any) -> Any:
            appended = await real(*of, **others)
            await world.manager.alter_properties(
                table.path, updates=updates, removals=[] if updates else list(TTL)
            )
            return appended

        around(monkeypatch, "expired-deleting", alter_then)
        await world.look()

        assert len(world.expired) == 1, "the piece that was on its way"
        assert table.row_count == 2_000 - world.expired[0] > 0


async def test_a_pause_is_long_because_of_rows_looked_at_and_not_of_rows_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else more is to be deleted after it, which makes the next pause longer, without end."""

    async with expiry_world(tmp_path) as world:
        table = await world.table()

        async def slowly(real: Any, *of: Any, **others: Any) -> Any:
            world.monotonic_s += 1_000
            return await real(*of, **others)

        around(monkeypatch, "expired-deleting", slowly)
        for hours in (2, 4, 6):
            await world.upsert(table, [1])
            await world.look(ahead_us=hours * HOUR_US)
            assert ids_of(table) == []
            world.monotonic_s += 3_600 / 24


async def test_a_pause_is_no_longer_because_a_look_waited_for_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a takeover, while the rows are loaded, or on a machine that is busy."""

    async with expiry_world(tmp_path) as world:
        table = await world.table()

        async def late(real: Any, *of: Any, **others: Any) -> AsyncGenerator[pa.RecordBatch]:
            world.monotonic_s += 1_000
            async for keys in real(*of, **others):
                yield keys

        around(monkeypatch, "old-keys-read", late)
        for hours in (2, 4, 6):
            await world.upsert(table, [1])
            await world.look(ahead_us=hours * HOUR_US)
            assert ids_of(table) == []
            world.monotonic_s += 3_600 / 24


async def test_large_rows_are_deleted_in_pieces_that_the_log_takes(tmp_path: Path) -> None:
    async with expiry_world(tmp_path, batch_bytes_max=100000) as world:
        table = await world.table()
        for i in range(40):
            await world.upsert(table, [i], "x" * 20_000)
        await world.look()

        assert ids_of(table) == []
        assert sum(world.expired) == 40


async def test_nothing_is_deleted_while_the_disk_budget_is_used_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with expiry_world(tmp_path) as world:
        table = await world.table()
        await world.upsert(table, [1])
        world.room.append(OverloadedError("full"))
        await world.look()
        assert ids_of(table) == [1]
        assert "expiry_failed" in caplog.text

        # It is tried again with the next look, not only when it would be due.
        world.room.clear()
        await world.look()
        assert ids_of(table) == []


async def test_a_table_that_fails_keeps_no_other_from_its_turn(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with expiry_world(tmp_path) as world:
        first, second = await world.table("first"), await world.table("second")
        for table in (first, second):
            await world.upsert(table, [1])
        world.ages_file(first).write_text('{"0": [[1]]}')
        await world.look()

        assert (ids_of(first), ids_of(second)) == ([1], [])
        assert "row_ages.json holds no ages of rows" in caplog.text


async def test_a_bucket_that_fails_keeps_no_other_from_its_turn_nor_looks_without_a_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with expiry_world(tmp_path) as world:
        table = await world.manager.create_table(
            table_descriptor("default.db", primary_key=("id",), bucket_count=3, properties=TTL)
        )
        for bucket in range(3):
            await world.upsert(table, [bucket], bucket=bucket)
        table.key_buckets[1].fail("it was told so")

        def slowly(real: Any, *of: Any, measured: Any, **others: Any) -> Any:
            def look(step: Callable[[], None]) -> None:
                world.thread_s += 0.6
                step()

            return real(*of, measured=lambda step: measured(lambda: look(step)), **others)

        around(monkeypatch, "old-keys-read", slowly)
        for later_s, failures in ((0, 1), (100, 1), (100, 2)):
            world.monotonic_s += later_s
            await world.look()
            assert [bucket.row_count for bucket in table.key_buckets] == [0, 1, 0]
            assert caplog.text.count("bucket 1: its rows are out of use, it") == failures


async def test_a_table_dropped_under_a_look_is_let_go_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with expiry_world(tmp_path) as world:
        table, other = await world.table(), await world.table("other")
        for each in (table, other):
            await world.upsert(each, range(5))

        async def drop_first(real: Any, of: OpenTable, *more: Any, **others: Any) -> Any:
            if of is table:
                await world.manager.drop_table(table.path)
            return await real(of, *more, **others)

        around(monkeypatch, "expired-deleting", drop_first)
        await world.look()

        assert [t.path for t in world.manager.open_tables()] == [other.path]
        assert ids_of(other) == []
        assert "expiry_failed" not in caplog.text
        assert "event=bug" not in caplog.text


async def test_a_table_is_not_dropped_while_the_ages_of_its_rows_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of a directory that is gone would be in the journal, and in the id's way for good."""
    async with expiry_world(tmp_path) as world:
        table = await world.table()
        await world.upsert(table, range(5))
        loop = asyncio.get_running_loop()
        dropping: list[concurrent.futures.Future[None]] = []

        def drop_first(real: Any, *args: Any, **named: Any) -> None:
            drop = world.manager.drop_table(table.path)
            dropping.append(asyncio.run_coroutine_threadsafe(drop, loop))
            with pytest.raises(concurrent.futures.TimeoutError):
                dropping[0].result(timeout=0.3)
            real(*args, **named)

        around(monkeypatch, "ages-advancing", drop_first)
        await world.look()
        await asyncio.wrap_future(dropping[0])
        assert list(world.manager.open_tables()) == []


async def test_ages_outlive_the_log_and_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the log has forgotten is old by the marks, and young without them."""

    async def left(*, with_marks: bool) -> list[int]:
        async with open_manager(tmp_path) as manager:
            world = ExpiryWorld(manager)
            (table,) = manager.open_tables()
            if not with_marks:
                world.ages_file(table).rename(tmp_path / "kept.json")
            # As of a log that was trimmed to its end.
            around(monkeypatch, "time-looked-up", lambda _, log, __: log.log_start_offset)
            await world.look(ahead_us=HOUR_US + 60_000_000)
            if not with_marks:
                (tmp_path / "kept.json").rename(world.ages_file(table))
            return ids_of(table)

    async with open_manager(tmp_path) as manager:
        world = ExpiryWorld(manager)
        await world.upsert(await world.table(), range(5))
        await world.look(ahead_us=0)
    assert await left(with_marks=False) == [0, 1, 2, 3, 4]
    assert await left(with_marks=True) == []


@pytest.mark.parametrize(
    "properties",
    [
        {"table.delete.behavior": "disallow"},
        {"table.delete.behavior": "ignore"},
        {"table.merge-engine": "first_row"},
        {"table.merge-engine": "aggregation"},
    ],
)
def test_a_table_whose_rows_are_never_deleted_has_no_time_to_live(
    properties: dict[str, str],
) -> None:
    behavior = properties.get("table.delete.behavior", "ignore")
    with pytest.raises(
        InvalidSchemaError,
        match=f"table.datalake.ttl deletes the rows .* table.delete.behavior = {behavior}; leave",
    ):
        table_descriptor(primary_key=("id",), properties=TTL | properties)


async def test_marks_are_few_however_long_a_table_is_written(tmp_path: Path) -> None:
    async with expiry_world(tmp_path) as world:
        table = await world.table()
        ages = RowAges(state_file(tmp_path / "ages.json", "row_ages"))
        start_us = clock_us()
        for minute in range(300):
            await world.upsert(table, [minute])
            now_us = start_us + minute * 60_000_000
            ages.advance(table.tablets, now_us=now_us, age_us=HOUR_US)
        marks = content_of(tmp_path / "ages.json")["0"]

        assert len(marks) < 140
        assert marks == sorted(marks)
        # Each step of a sixty-fourth of an hour is known.
        times = [time_us for time_us, _ in marks]
        assert max(b - a for a, b in itertools.pairwise(times)) <= 2 * 60_000_000


@pytest.mark.parametrize(
    ("content", "is_sealed"),
    [
        ('{"a": []}', True),
        ('{"0": [[1]]}', True),
        ('{"0": [[1, 5]]}', False),
        ("{", False),
        ("[]", False),
    ],
)
def test_a_damaged_file_of_ages_is_named(tmp_path: Path, content: str, is_sealed: bool) -> None:
    file = state_file(tmp_path / "row_ages.json", "row_ages")
    if is_sealed:
        file.path.write_bytes(seal(file.identity, json.loads(content)))
    else:
        file.path.write_text(content)

    with pytest.raises(
        CorruptDataError, match=r"row_ages\.json holds no ages of rows .* remove it"
    ):
        RowAges(file)
