"""The process that makes live cuts: killed, idle, and gone with its service."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streamhouse import StreamhouseClient
from streamhouse.core.errors import UnavailableError
from tests.support.held_step import around
from tests.support.in_process_service import EVENTS, event_rows
from tests.support.live_tables import live_catalog
from tests.support.live_world import LiveWorld, live_world
from tests.support.service_process import ServiceProcess
from tests.support.waiting import wait_until


def _pid(world: LiveWorld) -> int:
    process = world.live._builder._process
    assert process is not None
    return process.pid


async def test_a_process_that_was_killed_between_builds_is_started_again(tmp_path: Path) -> None:
    async with live_world(tmp_path) as world:
        await world.http.create_table(primary_key=("id",))
        await world.write("upsert", event_rows(0, 3))
        assert len(await world.rows()) == 3
        first = _pid(world)
        os.kill(first, signal.SIGKILL)
        await world.write("upsert", event_rows(2, 5))
        assert len(await world.rows()) == 5
        assert _pid(world) != first


@pytest.mark.parametrize("deaths", [1, 2])
async def test_a_build_whose_process_is_killed_begins_anew_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deaths: int
) -> None:
    async with live_world(tmp_path) as world:
        await world.http.create_table()
        await world.write("append", event_rows(0, 3))
        dead = []

        def killed(check: Callable[..., Any], *arguments: Any) -> Any:
            if len(dead) < deaths:
                dead.append(_pid(world))
                os.kill(dead[-1], signal.SIGKILL)
            return check(*arguments)

        around(monkeypatch, "live-room-asked", killed)
        if deaths == 2:
            with pytest.raises(UnavailableError, match="died twice; see the service's log"):
                await world.rows()
        assert len(await world.rows()) == 3
        assert len(dead) == deaths


async def test_an_idle_process_ends_and_the_next_load_starts_one(tmp_path: Path) -> None:
    async with live_world(tmp_path) as world:
        await world.http.create_table()
        await world.write("append", event_rows(0, 3))
        before = await world.cut()
        for _ in range(11):
            await asyncio.to_thread(world.live._builder.look)
        assert world.live._builder._process is None
        after = await world.cut()
        assert after.metadata_location != before.metadata_location
        assert len(await world.rows()) == 3


def test_the_process_ends_with_a_killed_service(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path / "data") as service:
        with StreamhouseClient(service.endpoint) as client:
            client.create_table("default.t", EVENTS)
            client.append("default.t", event_rows(0, 3))
            assert live_catalog(service.endpoint).load_table("default.t").scan().count() == 3
        (child,) = _children(service.pid)
        # A terminal and a process manager signal both; the service decides.
        os.kill(child, signal.SIGTERM)
        os.kill(child, signal.SIGINT)
        assert _children(service.pid) == [child]
        service.kill()
        wait_until(lambda: not _runs(child), "the end of the process")


def _children(pid: int) -> list[int]:
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sorted(int(child) for t in threads for child in (t / "children").read_text().split())


def _runs(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
