"""A standby that has not reached the end of the journal says so, from the beginning."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from streamhouse.storage_service.config import ServiceConfig
from streamhouse.storage_service.directory.data_directory import DataDirectory
from streamhouse.storage_service.ownership.journal.store._file_store import FileObjectStore
from streamhouse.storage_service.ownership.roles.role import Lag, Role, Standing
from streamhouse.storage_service.ownership.roles.taking import ShardTaker
from tests.support.journal_world import taken


async def test_a_standby_is_behind_until_it_has_followed_the_journal(tmp_path: Path) -> None:
    """It said that it lags nothing while it made its directory, which may take minutes."""
    taken(FileObjectStore(tmp_path / "journal"), lease_ms=3_600_000)
    directory = DataDirectory.open(tmp_path / "standby")
    config = ServiceConfig(
        data_dir=directory.path,
        journal_url=f"file://{tmp_path}/journal",
        is_standby=True,
        lease_ms=100,
    )
    standing, first = Standing("0"), list[tuple[Role, int]]()
    taker = ShardTaker(
        config,
        directory,
        endpoint="http://b",
        standing=standing,
        on_standby=lambda: first.append((standing.role, standing.lag.objects)),
    )

    taking = asyncio.ensure_future(taker.take())
    while not first or standing.lag.objects:
        assert not taking.done(), taking.result()
        await asyncio.sleep(0.001)

    assert first == [(Role.STANDBY, 1)]
    assert standing.lag.since_s is not None
    taking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await taking
    await taker.close()
    directory.close()


async def test_a_standby_waits_for_a_store_that_can_store_nothing_now(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk under the journal ended it at its start, when it was needed most."""
    taken(FileObjectStore(tmp_path / "journal"), lease_ms=3_600_000)
    in_the_way = tmp_path / "journal" / "probe"
    in_the_way.touch()
    directory = DataDirectory.open(tmp_path / "standby")
    config = ServiceConfig(
        data_dir=directory.path, journal_url=f"file://{tmp_path}/journal", is_standby=True
    )
    standing, is_standby = Standing("0"), asyncio.Event()
    taker = ShardTaker(
        config, directory, endpoint="http://b", standing=standing, on_standby=is_standby.set
    )

    taking = asyncio.ensure_future(taker.take())
    while "event=journal_store_failed" not in caplog.text:
        assert not taking.done(), taking.result()
        await asyncio.sleep(0.001)
    assert standing.role is Role.STANDBY
    in_the_way.unlink()
    async with asyncio.timeout(60):
        await is_standby.wait()

    taking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await taking
    await taker.close()
    directory.close()


def test_a_lag_grows_by_itself() -> None:
    """A standby whose store is away, or that is stuck, went on saying what it had last seen."""
    assert Lag(since_s=0.0).ms > 0
    assert Lag().ms == 0
