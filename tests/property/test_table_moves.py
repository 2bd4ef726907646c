"""A table moves while machines die or stand still, and the store loses answers.

The model: the table is served by one shard at most at every step, by exactly one once both shards
have looked, and has all rows that were written to it, whoever serves it.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
from pathlib import Path

import pytest

from streamhouse.core.errors import StreamhouseError
from streamhouse.core.model.table import TablePath
from tests.support.in_process_service import event_rows, routed, table_descriptor
from tests.support.memory_store import FaultyMemoryStore, MemoryStore
from tests.support.move_world import Died, Machine, MoveWorld

_TABLE = TablePath("default", "events")
_WRITER = 7
# More than any move takes: then nobody dies.
_STEPS = 200


async def _write(machine: Machine, sequence: int) -> None:
    """Write one batch of one row; again it changes nothing."""
    batch = routed(0, event_rows(sequence, sequence + 1), writer_id=_WRITER, sequence=sequence)
    await machine.manager.append(machine.manager.table(_TABLE), [batch])


def _rows(machine: Machine) -> int:
    return machine.manager.table(_TABLE).tablets[0].high_watermark


async def _scenario(
    path: Path, faulty: FaultyMemoryStore, *, who: str, step: int, stalls: bool
) -> bool:
    """Move the table while `who` dies, or stands still, at a step; return whether it did.

    The store is faulty during the move; what it delays arrives when everything is over.
    """
    store = MemoryStore()
    world = MoveWorld(path, store, _TABLE)
    a, b = await world.start()
    everybody = [a, b]
    try:
        await a.manager.create_table(table_descriptor("events"))
        written = 0
        for written in (1, 2):
            await _write(a, written)
        victim = {"a": a, "b": b}[who]
        faulty.objects = store.objects
        world.store = faulty
        victim.is_stall = stalls
        victim.stop_at = victim.steps + step

        async def go_on() -> None:
            nonlocal written
            if not a.is_dead and a.serves(_TABLE):
                await _write(a, written + 1)
                written += 1

        moving = asyncio.ensure_future(world.move(a, b, during=go_on))
        stopped = asyncio.ensure_future(asyncio.to_thread(victim.has_stopped.wait))
        await asyncio.wait([moving, stopped], return_when=asyncio.FIRST_COMPLETED)
        has_stopped, victim.stop_at = victim.has_stopped.is_set(), 0
        if has_stopped:
            if not victim.is_stall:
                await asyncio.wait([moving])
            world.store = store
            everybody.append(await victim.follow())
            if victim.is_stall:
                # The successor goes on while the one before is still asleep, then that wakes up.
                with contextlib.suppress(StreamhouseError):
                    await _write(world.machines[who], written + 1)
                    written += 1
                victim.goes_on.set()
                await asyncio.wait([moving], timeout=60)
        else:
            victim.has_stopped.set()
            await asyncio.wait([moving])
            world.store = store
        if moving.done() and not moving.cancelled():
            error = moving.exception()
            assert error is None or isinstance(error, Died | StreamhouseError), error
        server = await world.settle()
        assert _rows(server) == written
        for sequence in range(written - 1, written + 2):
            await _write(server, sequence)
        assert _rows(server) == written + 1
        faulty.calm_down()
        assert await world.settle() is server
        # Repeated, the command does what it says.
        other = world.machines["b" if server.shard == "a" else "a"]
        assert await world.move(server, other), world.why
        assert await world.settle() is other
        for sequence in range(written, written + 3):
            await _write(other, sequence)
        assert _rows(other) == written + 2
    finally:
        for machine in everybody:
            machine.has_stopped.set()
            await machine.close()
    return has_stopped


def _play(seed: int, *, who: str, step: int, stalls: bool, faults: bool) -> bool:
    store = FaultyMemoryStore(seed, share=0.05 if faults else 0.0)
    with tempfile.TemporaryDirectory() as path:
        return asyncio.run(_scenario(Path(path), store, who=who, step=step, stalls=stalls))


@pytest.mark.parametrize("stalls", [False, True])
@pytest.mark.parametrize("who", ["a", "b"])
def test_a_machine_may_die_at_some_steps(who: str, stalls: bool) -> None:
    steps = random.Random(3).sample(range(1, 80), 6)
    for step in steps:
        _play(step, who=who, step=step, stalls=stalls, faults=False)


@pytest.mark.long
@pytest.mark.parametrize("stalls", [False, True])
@pytest.mark.parametrize("who", ["a", "b"])
def test_a_machine_may_die_at_every_step(who: str, stalls: bool) -> None:
    for step in range(1, _STEPS):
        if not _play(step, who=who, step=step, stalls=stalls, faults=False):
            assert step > 15, "a move has more steps"
            return
    raise AssertionError(f"a move has {_STEPS} steps or more")


@pytest.mark.long
@pytest.mark.parametrize("stalls", [False, True])
@pytest.mark.parametrize("who", ["a", "b"])
def test_a_machine_may_die_while_the_store_loses_answers(who: str, stalls: bool) -> None:
    for step in range(1, 30):
        _play(step, who=who, step=step, stalls=stalls, faults=True)
