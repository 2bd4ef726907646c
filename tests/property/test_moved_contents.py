"""What a table is beside its rows, over moves there and back between machines that die.

The model: rows by key, where a consumer stands, which version an application has committed, what
the lake has and under which epoch. Whoever serves the table says the same after every move, and
whoever served it before changes nothing of it any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final, TypeAlias

import pytest

from streamhouse.core.errors import StreamhouseError
from streamhouse.core.model.table import TablePath
from streamhouse.core.model.table_state import TieringAssignment, TieringReport
from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.kv.plan.write_plan import KeyWrite
from tests.support.in_process_service import (
    begin,
    event_rows,
    ids_of,
    routed,
    table_descriptor,
)
from tests.support.memory_store import MemoryStore
from tests.support.move_world import Died, Machine, MoveWorld

_TABLE: Final = TablePath("default", "events")
_HOUR_S: Final = 3_600.0
_PROPERTIES: Final = {"table.datalake.enabled": "true", "table.datalake.ttl": "1h"}
# A round that nobody hears of any more is over by then.
_LEASE_S: Final = 600.0


def _nothing() -> None:
    """Nobody else dies."""


Deaths: TypeAlias = Callable[[Machine, Machine], list[list[Machine]]]
"""Who may die while a table moves from one to the other; the first of them says when."""


def _one_or_none(source: Machine, target: Machine) -> list[list[Machine]]:
    return [[], [source], [target]]


def _both(source: Machine, target: Machine) -> list[list[Machine]]:
    return [[source, target], [target, source]]


class _Walk:
    """Random steps on a table that moves, and what must be there after each."""

    def __init__(self, seed: int, path: Path, deaths: Deaths) -> None:
        self.random = random.Random(seed)
        self.deaths = deaths
        self.world = MoveWorld(path, MemoryStore(), _TABLE)
        self.rows: set[int] = set()
        self.stands: list[int] = []
        """What the consumer has said since it was saved: after a death one of these, else the last.

        It is saved when the table moves, and what another process has read of it is."""
        self.version = 0
        self.epoch = 0
        self.tiered = 0
        self.snapshots = 0
        self.late: list[tuple[Machine, OpenTable, TieringAssignment]] = []
        self.machines: list[Machine] = []
        self.server: Machine

    @property
    def table(self) -> OpenTable:
        """The table, where it is served."""
        return self.server.manager.table(_TABLE)

    # -- steps -------------------------------------------------------------------------------------

    async def upsert(self) -> None:
        """Write some rows."""
        start = self.random.randrange(95)
        rows = event_rows(start, start + self.random.randrange(1, 5))
        write = KeyWrite(0, rows)
        await self.server.manager.write_keys(self.table, [write], columns=None, writer_id=0)
        self.rows |= set(rows.column("id").to_pylist())

    async def consume(self) -> None:
        """A consumer says where it stands."""
        end = self.table.tablets[0].high_watermark
        await self.table.consumers.report(
            "c", owner="me", offsets={0: end}, reads_lake=False, ttl_ms=10**12
        )
        self.stands.append(end)

    async def transact(self) -> None:
        """An application commits its next version, or gives it up while rows are staged."""
        transactions = self.server.manager.transactions.of(self.table)
        begun = await begin(transactions, True, version=self.version + 1)
        start = self.random.randrange(95)
        rows = event_rows(start, start + 3)
        staging = asyncio.ensure_future(
            transactions.stage(begun, rows.schema, [routed(0, rows)], token=None)
        )
        if self.random.random() < 0.4:
            await asyncio.sleep(0)
            transactions.abort(begun)
            if self.random.random() < 0.5:
                with contextlib.suppress(StreamhouseError):
                    await staging
            else:
                staging.cancel()
            return
        part, _ = await staging
        await transactions.commit(begun, [part], wait_s=20)
        self.version += 1
        self.rows |= set(rows.column("id").to_pylist())

    async def tier(self) -> None:
        """A worker takes the table; it answers soon, or when the table is somewhere else."""
        tiering = self.server.manager.tiering
        answer = await tiering.claim("w", tables=[self.table], force=True, include_idle=True)
        if answer.assignment is None:
            return
        assert answer.assignment.epoch > self.epoch, "an epoch is given out twice"
        self.epoch = answer.assignment.epoch
        if self.random.random() < 0.5:
            self.late.append((self.server, self.table, answer.assignment))
            self.world.ahead_s += _LEASE_S
            return
        self.tiered = self.table.tablets[0].high_watermark
        await tiering.complete(self.table, self.report(self.table, answer.assignment))

    def report(self, table: OpenTable, assignment: TieringAssignment) -> TieringReport:
        """Return what a worker says that has tiered all there is."""
        self.snapshots += 1
        return TieringReport(
            table_id=table.info.table_id,
            epoch=assignment.epoch,
            snapshot_id=self.snapshots,
            table_uuid="u",
            tiered_offsets={0: table.tablets[0].high_watermark},
        )

    async def expire(self) -> None:
        """All rows reach their time."""
        self.world.ahead_s += 2 * _HOUR_S
        await self.server.manager.row_expiry.look()
        self.rows = set()

    async def move(self) -> None:
        """Move the table; sometimes machines die in the middle, or row expiry goes on."""
        source = self.server
        target = self.world.machines["b" if source.shard == "a" else "a"]
        victims = self.random.choice(self.deaths(source, target))
        if victims:
            first, *others = victims
            first.stop_at = first.steps + self.random.randrange(1, 45)
            # At once, or with what it does about the death of the first.
            steps = self.random.choice([1, 1, 2, 3, 5, 10])

            def die_soon() -> None:
                for other in others:
                    other.stop_at = other.steps + steps

            first.on_death = die_soon

        async def during() -> None:
            if not source.is_dead and source.serves(_TABLE):
                with contextlib.suppress(StreamhouseError):
                    await source.manager.row_expiry.look()

        with contextlib.suppress(StreamhouseError, Died):
            await self.world.move(source, target, during=during)
        has_died = any(machine.is_dead for machine in victims)
        if has_died:
            await self.restart(victims)
        for machine in victims:
            machine.stop_at, machine.on_death = 0, _nothing
        self.server = await self.world.settle()
        if has_died and self.server is not source:
            found = self.found_stands()
            assert set(found) <= set(self.stands)
            assert bool(found) == bool(self.stands)
            self.stands = found
        elif self.server is not source:
            self.stands = self.stands[-1:]

    def found_stands(self) -> list[int]:
        """Return where the consumer stands, if there is one."""
        return [one.offsets[0] for one in self.table.consumers.current(10**12)]

    async def restart(self, victims: Sequence[Machine]) -> None:
        """Serve the shards of machines again, in any order, of which some die once more."""
        for machine in victims:
            machine.end()
        for machine in self.random.sample(victims, len(victims)):
            is_weak = len(victims) > 1 and self.random.random() < 0.5
            follower = await machine.follow(stop_at=self.random.randrange(1, 16) if is_weak else 0)
            self.machines.append(follower)
            # Of its own, while the others are not there.
            with contextlib.suppress(Died):
                await follower.moves.look()
            if follower.is_dead:
                self.machines.append(await follower.follow())
            follower.stop_at = 0

    async def answer_late(self) -> None:
        """A worker answers whom it got the table from, long ago."""
        if not self.late:
            return
        machine, table, assignment = self.late.pop(self.random.randrange(len(self.late)))
        is_current = assignment.epoch == self.epoch and table is self.table
        if machine.is_dead or is_current:
            return
        with pytest.raises(StreamhouseError):
            await machine.manager.tiering.complete(table, self.report(table, assignment))

    # -- judging -----------------------------------------------------------------------------------

    async def judge(self) -> None:
        """Whoever serves the table has all of it."""
        table = self.table
        assert set(ids_of(table)) == self.rows
        transactions = self.server.manager.transactions.of(table)
        assert transactions.open_count == 0
        assert (transactions.latest_version("app") or 0) == self.version
        assert table.lake.tiering_epoch == self.epoch
        assert table.lake.tiered_offsets == {0: self.tiered}
        assert self.found_stands() == self.stands[-1:]
        for machine in self.world.machines.values():
            manager, table_id = machine.manager, table.info.table_id
            # Of a move whose source died a part may have come: it goes when nobody asks for it.
            is_coming = table_id in manager.registry.moves.arriving
            is_there = manager.directory.table(table_id).exists()
            assert is_there == (machine is self.server) or is_coming

    async def walk(self, steps: int) -> None:
        """Go."""
        a, b = await self.world.start()
        self.machines, self.server = [a, b], a
        await a.manager.create_table(
            table_descriptor("events", primary_key=("id",), properties=_PROPERTIES)
        )
        choices: list[Callable[[], Awaitable[None]]] = [
            self.upsert,
            self.upsert,
            self.consume,
            self.transact,
            self.transact,
            self.tier,
            self.answer_late,
            self.expire,
            self.move,
            self.move,
            self.move,
        ]
        try:
            for _ in range(steps):
                await self.random.choice(choices)()
                await self.judge()
        finally:
            for machine in self.machines:
                machine.has_stopped.set()
                await machine.close()


def _walk(seed: int, steps: int, deaths: Deaths) -> None:
    with tempfile.TemporaryDirectory() as path:
        asyncio.run(_Walk(seed, Path(path), deaths).walk(steps))


@pytest.mark.parametrize("seed", range(3))
def test_a_table_is_the_same_after_each_move(seed: int) -> None:
    _walk(seed, 15, _one_or_none)


@pytest.mark.parametrize("seed", range(3))
def test_a_table_is_the_same_after_both_machines_died(seed: int) -> None:
    _walk(seed, 15, _both)


@pytest.mark.one_of(2)
@pytest.mark.slow
@pytest.mark.parametrize("deaths", [_one_or_none, _both])
@pytest.mark.parametrize(
    "seed",
    [*range(100, 104), *(pytest.param(n, marks=pytest.mark.long) for n in range(104, 120))],
)
def test_a_table_is_the_same_after_many_moves(seed: int, deaths: Deaths) -> None:
    _walk(seed, 40, deaths)
