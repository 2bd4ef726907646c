"""The gate of a table: writes together, a commit alone, in the order they came."""

from __future__ import annotations

import asyncio

import pytest

from streamhouse.core.errors import StorageFailedError
from streamhouse.storage_service.engine._write_gate import WriteGate


async def _settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_commit_waits_for_writes_and_later_writes_for_it() -> None:
    gate = WriteGate()
    order: list[str] = []

    async def commit(name: str) -> None:
        async with gate.alone():
            order.append(name)
            await asyncio.sleep(0)
            order.append(f"{name} ended")

    async def write(name: str) -> None:
        await gate.enter()
        order.append(name)
        gate.leave()

    await gate.enter()
    await gate.enter()
    waiting = [
        asyncio.ensure_future(work)
        for work in (commit("first"), write("a"), write("b"), commit("second"), write("c"))
    ]
    await _settle()
    assert order == []
    gate.leave()
    await _settle()
    assert order == []
    gate.leave()
    await asyncio.gather(*waiting)
    assert order == ["first", "first ended", "a", "b", "second", "second ended", "c"]


async def test_who_gives_up_waiting_holds_nobody_up() -> None:
    gate = WriteGate()
    await gate.enter()

    async def commit() -> None:
        async with gate.alone():
            pass

    given_up = asyncio.ensure_future(commit())
    later = asyncio.ensure_future(gate.enter())
    await _settle()
    given_up.cancel()
    await later
    # Granted and cancelled in the same moment.
    gate.leave()
    granted = asyncio.ensure_future(commit())
    await asyncio.sleep(0)
    gate.leave()
    granted.cancel()
    await asyncio.gather(granted, return_exceptions=True)
    await gate.enter()
    gate.leave()


async def test_a_refusal_reaches_who_waits_and_who_comes() -> None:
    gate = WriteGate()
    async with gate.alone():
        waiting = asyncio.ensure_future(gate.enter())
        await _settle()
        gate.refuse(StorageFailedError("the disk is full"))
        with pytest.raises(StorageFailedError, match="the disk is full"):
            await waiting
        with pytest.raises(StorageFailedError, match="the disk is full"):
            await gate.enter()
        gate.allow()
    await gate.enter()
    gate.leave()
