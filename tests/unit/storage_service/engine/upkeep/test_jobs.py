"""The list of jobs: looks come again and again, whatever one of them meets, until all stop."""

from __future__ import annotations

import asyncio
import logging

import pytest

from streamhouse.core.errors import StorageFailedError
from streamhouse.storage_service.engine.upkeep.jobs import Job, Upkeep


@pytest.mark.parametrize(
    ("error", "reported"),
    [
        (StorageFailedError("the disk"), "event=job_failed job=one why='the disk'"),
        (KeyError("no such"), "event=bug job=one"),
    ],
)
async def test_a_look_that_fails_is_reported_and_comes_again(
    caplog: pytest.LogCaptureFixture, error: Exception, reported: str
) -> None:
    looks: asyncio.Queue[int] = asyncio.Queue()

    async def look() -> None:
        looks.put_nowait(1)
        raise error

    async def scenario() -> None:
        upkeep = Upkeep()
        upkeep.start([Job(name="one", every_ms=1, look=look)])
        for _ in range(3):
            await asyncio.wait_for(looks.get(), 60)
        await upkeep.stop()

    with caplog.at_level(logging.WARNING):
        await scenario()
    assert reported in caplog.text


async def test_an_eager_job_looks_at_once_and_a_stop_waits_for_what_is_under_way() -> None:
    seen: list[str] = []

    async def look() -> None:
        seen.append("begins")
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            seen.append("ends")

    async def never() -> None:
        seen.append("never")

    upkeep = Upkeep()
    day_ms = 86_400_000
    upkeep.start([Job(name="eager", every_ms=day_ms, look=look, is_eager=True)])
    upkeep.start([Job(name="later", every_ms=day_ms, look=never)])
    await asyncio.sleep(0)
    await upkeep.stop()
    await upkeep.stop()
    assert seen == ["begins", "ends"]
