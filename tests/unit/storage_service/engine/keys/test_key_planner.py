"""Planning a round: what fails leaves nothing behind, what the event loop plans is short."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from streamhouse.storage_service.engine.keys._key_planner import KeyPlanner, KeyRequest
from streamhouse.storage_service.engine.keys.key_table import KeyTable
from streamhouse.storage_service.engine.manager import TabletManager
from streamhouse.storage_service.kv.plan.write_plan import KeyWrite, delete_of
from tests.support.held_step import around
from tests.support.in_process_service import (
    EVENTS,
    event_rows,
    open_manager,
    table_descriptor,
    until,
)


async def _table(manager: TabletManager, bucket_count: int = 1) -> KeyTable:
    descriptor = table_descriptor(bucket_count=bucket_count, primary_key=("id",))
    table = await manager.create_table(descriptor)
    assert isinstance(table, KeyTable)
    return table


def _planner(table: KeyTable) -> KeyPlanner:
    return KeyPlanner(table.key_buckets, table="events", frame_bytes_max=1 << 20)


def _request(*writes: KeyWrite) -> KeyRequest:
    return KeyRequest(writes, None, 0, asyncio.get_running_loop().create_future())


def _request_of_four_in_each(start: int) -> KeyRequest:
    """Four rows for each of two buckets, with keys from `start` and from `start + 50` on."""
    return _request(*(KeyWrite(b, event_rows(50 * b + start, 50 * b + start + 4)) for b in (0, 1)))


@pytest.mark.parametrize("failing_call", range(1, 5))
async def test_nothing_stays_of_a_plan_that_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing_call: int
) -> None:
    """Memory runs out somewhere in planning two requests, of two buckets, on a third."""
    calls = itertools.count(1)

    def failing(put: Any, *arguments: Any) -> None:
        put(*arguments)
        if next(calls) == failing_call:
            raise MemoryError

    async with open_manager(tmp_path) as manager:
        table = await _table(manager, 2)
        planner = _planner(table)
        requests = [_request_of_four_in_each(start) for start in range(3)]
        list(planner.plan(requests[:1]))
        around(monkeypatch, "planned-putting", failing)

        list(planner.plan(requests[1:]))

        assert [request.error for request in requests] == [None] * 3
        for bucket in (0, 1):
            parts = [p for request in requests for p in request.parts if p.bucket == bucket]
            # Each of the later ones has one row that is new.
            assert [(part.start, part.end) for part in parts] == [(0, 4), (4, 5), (5, 6)]
            assert table.key_buckets[bucket].rows.planned_offset == 6
        planner.take_back(requests)
        assert [bucket.rows.planned_offset for bucket in table.key_buckets] == [0, 0]


@pytest.mark.parametrize("failing_call", range(1, 5))
async def test_nothing_stays_of_a_write_that_a_bug_meets_as_it_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing_call: int
) -> None:
    """It is met in a plan of one request or of two, and once more as they are planned again."""
    calls = itertools.count(1)

    def failing(accept: Any, *arguments: Any) -> None:
        accept(*arguments)
        if next(calls) in (failing_call, failing_call + 2):
            raise MemoryError

    async with open_manager(tmp_path) as manager:
        table = await _table(manager, 2)
        planner = _planner(table)
        requests = [_request_of_four_in_each(start) for start in (0, 10, 20)]
        around(monkeypatch, "changes-accepting", failing)

        list(planner.plan(requests[:1]))
        list(planner.plan(requests[1:]))

        assert any(request.error for request in requests)
        for bucket in (0, 1):
            parts = [p for request in requests for p in request.parts if p.bucket == bucket]
            assert [(p.start, p.end) for p in parts] == [(0, 4), (4, 8), (8, 12)][: len(parts)]
            assert table.key_buckets[bucket].rows.planned_offset == 4 * len(parts)
        planner.take_back(requests)


class _Plans:
    """How many rows each plan had, of those that the event loop made and of the others."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.on_loop: list[int] = []
        self.on_threads: list[int] = []
        around(patch, "keys-planning", self._plan)

    def _plan(self, plan: Any, buckets: Any, writes: Sequence[KeyWrite], **columns: Any) -> Any:
        is_on_loop = threading.current_thread() is threading.main_thread()
        rows = sum(write.rows.num_rows for write in writes)
        (self.on_loop if is_on_loop else self.on_threads).append(rows)
        return plan(buckets, writes, **columns)


async def _write_all(manager: TabletManager, table: KeyTable, *writes: KeyWrite) -> list[Any]:
    """Write each by itself, at once."""
    requests = (manager.write_keys(table, [w], columns=None, writer_id=0) for w in writes)
    return await asyncio.gather(*requests, return_exceptions=True)


async def test_few_rows_are_planned_on_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = _Plans(monkeypatch)
    async with open_manager(tmp_path) as manager:
        table = await _table(manager)
        await _write_all(manager, table, *(KeyWrite(0, event_rows(n, n + 10)) for n in range(60)))
        await _write_all(manager, table, KeyWrite(0, event_rows(0, 500)))
        assert (plans.on_loop, plans.on_threads) == ([600, 500], [])

        await _write_all(manager, table, KeyWrite(0, event_rows(0, 5_000)))
        assert (plans.on_loop, plans.on_threads) == ([600, 500], [5_000])


@pytest.mark.parametrize("is_reopened", [False, True])
async def test_few_keys_of_long_rows_are_left_to_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_reopened: bool
) -> None:
    """The rows that deletes take away go into the changelog, whole."""
    ids = pa.array(range(100), pa.int64())
    deletes = delete_of(0, pa.record_batch([ids], names=["id"]))

    async with open_manager(tmp_path) as manager:
        table = await _table(manager)
        rows = pa.record_batch([ids, ["x" * 30_000] * 100], schema=EVENTS)
        await _write_all(manager, table, KeyWrite(0, rows), KeyWrite(0, event_rows(100, 110)))
        if not is_reopened:
            plans = _Plans(monkeypatch)
            await _write_all(manager, table, deletes)
    if is_reopened:
        async with open_manager(tmp_path) as manager:
            table = next(t for t in manager.open_tables() if isinstance(t, KeyTable))
            await until(lambda: table.key_buckets[0].rows.is_loaded)
            plans = _Plans(monkeypatch)
            await _write_all(manager, table, deletes)

    assert (plans.on_loop, plans.on_threads) == ([], [100])


async def test_many_plans_of_a_row_each_are_left_to_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deletes on a condition are not planned with others."""
    plans = _Plans(monkeypatch)
    async with open_manager(tmp_path) as manager:
        table = await _table(manager)
        await _write_all(manager, table, KeyWrite(0, event_rows(0, 40)))
        keys = pa.record_batch([pa.array([7], pa.int64())], names=["id"])
        await _write_all(manager, table, *[delete_of(0, keys, written_below=40)] * 30)

    assert plans.on_loop == [40, 1, 1]
    assert plans.on_threads == [1] * 28


async def test_requests_beside_a_refused_one_are_left_to_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = _Plans(monkeypatch)
    wrong = pa.record_batch([pa.array([None], pa.int64()), ["x"]], names=EVENTS.names)
    rows = [pa.record_batch(list(event_rows(n, n + 1)), names=EVENTS.names) for n in range(20)]
    async with open_manager(tmp_path) as manager:
        table = await _table(manager)
        answers = await _write_all(manager, table, *(KeyWrite(0, r) for r in [*rows, wrong]))

        assert [isinstance(answer, Exception) for answer in answers] == [False] * 20 + [True]
        assert table.key_buckets[0].row_count == 20
    assert plans.on_loop == [21, 1]
    assert plans.on_threads == [1] * 20


async def test_few_rows_on_top_of_many_are_left_to_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_sync = threading.Event()
    plans = _Plans(monkeypatch)

    def held(sync: Any, segment: Any) -> None:
        assert may_sync.wait(60)
        sync(segment)

    async with open_manager(tmp_path) as manager:
        table = await _table(manager)
        around(monkeypatch, "segment-syncing", held)
        many = asyncio.ensure_future(_write_all(manager, table, KeyWrite(0, event_rows(0, 5_000))))
        await until(lambda: table.key_buckets[0].rows.planned_offset == 5_000)
        few = KeyWrite(0, event_rows(5_000, 5_600))
        on_top = asyncio.ensure_future(_write_all(manager, table, few))
        await until(lambda: table.key_buckets[0].rows.planned_offset == 5_600)
        may_sync.set()
        await asyncio.gather(many, on_top)

    assert (plans.on_loop, plans.on_threads) == ([], [5_000, 600])
