"""The route that turns a time into offsets: what it takes, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamhouse.core.errors import CorruptDataError
from streamhouse.storage_service.server.history.lake_reads import LakeReads
from tests.support.fetch_world import TIMES_US, MemoryHistory, tiered_clicks
from tests.support.held_step import lower
from tests.support.kafka_world import KafkaWorld, kafka_world

EARLY = str(10**13)
"""A time before all rows: the least that is one in microseconds."""
ROUTE = "/v1/tables/clicks/offsets"


async def _asked(world: KafkaWorld, **query: str) -> tuple[int, object]:
    answer = await world.http.call("GET", ROUTE, query={"table_id": "1", **query})
    body = answer.json()
    return answer.status, body.get("offsets") or body["error"]["message"]


async def test_a_time_in_the_lake_and_rows_from_an_offset_on(tmp_path: Path) -> None:
    history = MemoryHistory()
    async with kafka_world(tmp_path, history=history) as world:
        await tiered_clicks(world, history)
        moment = str(TIMES_US[0] + 1)

        assert await _asked(world, timestamp_us=moment) == (200, {"0": 10})
        assert await _asked(world, timestamp_us=moment, start='{"0": 15}') == (200, {"0": 15})
        assert await _asked(world, timestamp_us="0", start='{"0": 40}') == (200, {"0": 40})
        assert await _asked(world, timestamp_us=str(9 * 10**15)) == (200, {"0": 60})


async def test_an_unknown_parameter_is_refused(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        await tiered_clicks(world, MemoryHistory(), end=10, log_start=0)

        status, message = await _asked(world, timestamp_us=EARLY, los="skip")

        assert status == 400
        assert "unknown parameter 'los' (known: lost, start, table_id, timestamp_us)" in str(
            message
        )


async def test_a_time_of_rows_in_neither_tier_is_refused(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        await tiered_clicks(world, MemoryHistory(), end=10, log_start=20)

        status, message = await _asked(world, timestamp_us=EARLY)
        assert (status, "rows [0, 20) have left the log" in str(message)) == (416, True)
        assert await _asked(world, timestamp_us=EARLY, lost="skip") == (200, {"0": 20})
        status, message = await _asked(world, timestamp_us=EARLY, lost="no")
        assert (status, message) == (400, "parameter lost = 'no' is not one of refuse, skip")


async def test_a_lake_that_cannot_be_read_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> MemoryHistory:
        raise CorruptDataError("the catalog is damaged")

    async with kafka_world(tmp_path, history=MemoryHistory()) as world:
        await tiered_clicks(world, MemoryHistory())
        world.service.lake_reads = LakeReads(fails)

        assert await _asked(world, timestamp_us=EARLY) == (500, "the catalog is damaged")
        lower(monkeypatch, "history-reads", 0)
        status, message = await _asked(world, timestamp_us=EARLY)
        assert (status, "are in progress" in str(message)) == (503, True)
