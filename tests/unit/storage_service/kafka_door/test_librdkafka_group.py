"""A group of librdkafka's consumers, where the answer to one request decides what they do next."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from streamhouse.core.errors import UnavailableError
from tests.support.held_step import around
from tests.support.in_process_service import event_rows
from tests.support.kafka_group import LibrdkafkaMember, PollingGroup
from tests.support.kafka_world import kafka_world


async def test_librdkafka_asks_again_for_positions_that_are_unavailable_for_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = 3

    async def unavailable_at_first(real: Any, *arguments: Any) -> Any:
        nonlocal refusals
        if refusals:
            refusals -= 1
            raise UnavailableError("the lease ran out a moment ago")
        return await real(*arguments)

    around(monkeypatch, "positions-read", unavailable_at_first)
    async with kafka_world(tmp_path) as world:
        await world.http.create_table(bucket_count=2)
        await world.http.append([(0, 0, event_rows(0, 10)), (1, 0, event_rows(0, 5))])
        brokers = str(world.door.address)
        group = PollingGroup(lambda: LibrdkafkaMember(brokers, "events", "billing"), patience_s=30)
        group.start()
        try:
            await asyncio.to_thread(group.wait_for, 15)
        finally:
            await asyncio.to_thread(group.end)
