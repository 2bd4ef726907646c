"""`wait_tiered` of both clients, with a worker and without one."""

from __future__ import annotations

import asyncio
import threading

import pytest

from streamhouse import AsyncStreamhouseClient, InvalidRequestError, UnavailableError
from streamhouse.client import StorageClient
from tests.support.service_process import ServiceProcess
from tests.support.tier_once import tier_once

pytestmark = pytest.mark.slow


def test_it_returns_when_the_rows_of_the_call_are_in_the_lake(client: StorageClient) -> None:
    client.create_table("t", "id BIGINT", bucket_count=2)
    client.wait_tiered("t", timeout_s=1)
    client.append("t", [{"id": i} for i in range(3)])

    waiting = threading.Thread(target=client.wait_tiered, args=("t",), kwargs={"timeout_s": 60})
    waiting.start()
    tier_once(client, "t")
    waiting.join(60)

    assert not waiting.is_alive()
    assert sum(at.tiered_offset for at in client.positions("t").values()) == 3


async def test_it_is_awaited_and_says_how_far_it_is_in_time(
    client: StorageClient, service: ServiceProcess
) -> None:
    client.create_table("t", "id BIGINT")
    client.create_table("log_only", "id BIGINT", properties={"table.datalake.enabled": "false"})
    async with AsyncStreamhouseClient(service.endpoint) as awaited:
        for table in ("t", "log_only"):
            await awaited.append(table, {"id": 1})

        with pytest.raises(UnavailableError, match=r"^1 rows of 'default\.t' .* after 0\.01 s: "):
            await awaited.wait_tiered("t", timeout_s=0.01)
        with pytest.raises(InvalidRequestError, match=r"datalake\.enabled is false"):
            await awaited.wait_tiered("log_only")
        waiting = asyncio.create_task(awaited.wait_tiered("t"))
        await awaited.list_tables()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
