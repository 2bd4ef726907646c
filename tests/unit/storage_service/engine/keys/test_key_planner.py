"""Planning a round: what fails leaves nothing behind."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest

from streamhouse.storage_service.engine.keys.key_planner import KeyPlanner, KeyRequest
from streamhouse.storage_service.engine.keys.key_table import KeyTable
from streamhouse.storage_service.engine.manager import TabletManager
from streamhouse.storage_service.kv.plan.write_plan import KeyWrite
from tests.support.held_step import around
from tests.support.in_process_service import event_rows, open_manager, table_descriptor


async def _table(manager: TabletManager, bucket_count: int = 1) -> KeyTable:
    descriptor = table_descriptor(bucket_count=bucket_count, primary_key=("id",))
    table = await manager.create_table(descriptor)
    assert isinstance(table, KeyTable)
    return table


def _planner(table: KeyTable) -> KeyPlanner:
    return KeyPlanner(table.key_buckets, table="events", frame_bytes_max=1 << 20)


def _request(*writes: KeyWrite) -> KeyRequest:
    return KeyRequest(writes, None, 0, asyncio.get_running_loop().create_future())


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
        requests = [
            _request(*(KeyWrite(b, event_rows(50 * b + start, 50 * b + start + 4)) for b in (0, 1)))
            for start in range(3)
        ]
        planner.plan(requests[:1])
        around(monkeypatch, "planned-putting", failing)

        planner.plan(requests[1:])

        assert [request.error for request in requests] == [None] * 3
        for bucket in (0, 1):
            parts = [p for request in requests for p in request.parts if p.bucket == bucket]
            # Each of the later ones has one row that is new.
            assert [(part.start, part.end) for part in parts] == [(0, 4), (4, 5), (5, 6)]
            assert table.key_buckets[bucket].rows.planned_offset == 6
        planner.take_back(requests)
        assert [bucket.rows.planned_offset for bucket in table.key_buckets] == [0, 0]
