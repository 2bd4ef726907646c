"""A machine with an engine and a journal that dies at some object that it stores, as a process.

`World` is what outlives machines: what was acknowledged, what was on its way, and the lake. A
machine goes on with what it finds of it, on its own data directory, and checks that it shows just
that: a change that was on its way happened as a whole or not at all, and is then repeated.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from streamhouse.core.errors import CorruptDataError, StreamhouseError
from streamhouse.core.model.schema import type_to_json
from streamhouse.core.model.table import TablePath
from streamhouse.core.model.table_state import EMBEDDED_WORKER_ID, TieringReport
from streamhouse.core.model.transaction import TransactionOperation, TransactionStatus
from streamhouse.storage_service.directory.runtime import clock_us
from streamhouse.storage_service.engine.keys.key_recovery import KeyRecovery
from streamhouse.storage_service.engine.keys.key_table import KeyTable
from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.engine.upkeep._retention import apply_retention
from streamhouse.storage_service.kv.plan.write_plan import KeyWrite
from streamhouse.storage_service.ownership.journal.store._file_store import FileObjectStore
from tests.property.machines.machine_disks import (
    FULL,
    REFUSED,
    MortalStore,
    check_not_half_ready,
    copy_disk,
    disk_full,
    journalled_bytes,
)
from tests.property.machines.machine_world import (
    BUCKETS,
    Change,
    LakeOf,
    Rows,
    Staged,
    World,
    by_bucket,
    differing,
    folded,
    is_less,
    short,
    wide,
)
from tests.support.in_process_service import (
    EVENTS,
    HOUR_US,
    expiry_of,
    later,
    routed,
    table_descriptor,
)
from tests.support.journalled_engine import (
    JournalledEngine,
    journalled_engine,
    logged_ids,
    names_by_id,
)

__all__ = ["COPIES", "Life", "live"]

COPIES: Final = 3
"""How many older copies of disks are kept at a time, as directories `copy0` and so on."""

_TABLES_MAX: Final = 4
_YEAR_US: Final = 365 * 24 * HOUR_US
_PROPERTIES: Final = {"table.log.segment-bytes": "64kb", "table.log.ttl": "1ms"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """What a machine has before it: `lives` changes of the store, and `steps`.

    `full_after` is how many writes of a restore its disk takes. `is_damaged` says that its disk has
    other bits than were written: then it may refuse to show anything, and does no more.
    """

    name: str
    seed: int
    lives: int = 1 << 30
    steps: int = 0
    full_after: int | None = None
    is_damaged: bool = False


def live(root: Path, life: Life) -> None:
    """Be a machine; the target of a process of its own."""
    # Who dies as a process leaves what it wrote.
    os.fsync = os.fdatasync = lambda descriptor: None
    asyncio.run(_live(root, life))
    os._exit(0)


async def _live(root: Path, life: Life) -> None:
    before = journalled_bytes(root / life.name)
    full = contextlib.ExitStack()
    if life.full_after is not None:
        is_full = full.enter_context(disk_full(root / life.name, life.full_after))
    try:
        await _live_on(root, life, full)
    except (StreamhouseError, OSError) as error:
        if life.full_after is not None and is_full():
            full.close()
            check_not_half_ready(root / life.name, before)
            os._exit(FULL)
        if life.is_damaged and isinstance(error, CorruptDataError):
            os._exit(REFUSED)
        raise


async def _live_on(root: Path, life: Life, full: contextlib.ExitStack) -> None:
    world, rng = World.load(root), random.Random(life.seed)
    store = MortalStore(FileObjectStore(root / "store"), life.lives, rng)
    async with journalled_engine(
        root / life.name,
        store,  # type: ignore[arg-type]
        recovery=KeyRecovery(lake_rows=LakeOf(world)),
        on_begun=full.close,
        # Only when the machine says so.
        retention_interval_ms=24 * 3_600_000,
    ) as engine:
        machine = _Machine(engine, root, life, world, rng)
        if life.is_damaged and engine.manager.damaged_tables():
            os._exit(REFUSED)
        await machine.check()
        for _ in range(life.steps):
            await machine.step(rng.choice(_KINDS))
        if life.steps and rng.random() < 0.5:
            # Nothing is appended after the copy, nor a segment begun, that says that it is old.
            for kind in (*["retain"] * rng.randrange(4), "copy"):
                await machine.step(kind)
            for _ in range(rng.randrange(12)):
                await machine.step(rng.choice(_UPKEEP))
        # Ended at a quiet moment, as if killed: nothing is tidied up.
        os._exit(0)


class _Machine:
    """What a machine does, and what it must show."""

    def __init__(
        self, engine: JournalledEngine, root: Path, life: Life, world: World, rng: random.Random
    ) -> None:
        self.engine = engine
        self.manager = engine.manager
        self.root = root
        self.directory = root / life.name
        self.world = world
        self.rng = rng

    def table(self, name: str) -> OpenTable:
        return self.manager.table(TablePath.parse(name))

    # -- what it shows ---------------------------------------------------------------------------

    def shown(self) -> Rows:
        names = [str(path).rpartition(".")[2] for path in self.manager.list_tables(None)]
        tables = {name: self.table(name) for name in names}
        return {
            name: names_by_id(table) if isinstance(table, KeyTable) else logged_ids(table)
            for name, table in tables.items()
        }

    def fact(self, name: str) -> Any:
        table = self.table(name)
        positions = [(t.log_start_offset, t.high_watermark) for t in table.tablets]
        pins = [pin.to_json() for pin in table.lake_pins.current()]
        ages = self.manager.directory.row_ages_file(table.info.table_id)
        aging = ages.path.read_bytes() if ages.exists() else b""
        return positions, table.lake.to_json(), table.info.schema.to_json(), pins, aging

    async def check(self) -> None:
        """Compare everything with what it must be, and repeat what was on its way."""
        assert not self.manager.damaged_tables(), self.manager.damaged_tables()
        world, change = self.world, self.world.change
        touched = change.table if change else ""
        shown = self.shown()
        allowed = [world.rows, change.after] if change else [world.rows]
        if change and change.kind == "upsert":
            # Unacknowledged, it is whole in each bucket, not in all: only a transaction is.
            for bucket in range(BUCKETS):
                allowed.append(deepcopy(world.rows))
                names = change.given[0].items()
                allowed[-1][touched].update((i, n) for i, n in names if i % BUCKETS == bucket)
        if change and change.kind in ("retain", "expire"):
            assert is_less(shown.get(touched), world.rows[touched]), (change.kind, shown)
        else:
            assert shown in allowed, (short(change), differing(shown, world.rows))
        for name in world.rows.keys() - {touched}:
            assert shown[name] == world.rows[name], name
            assert self.fact(name) == world.facts[name], name
        world.rows = shown
        await self._check_transactions(touched)
        if change is not None:
            await self._repeat(change)
        self._acknowledged(touched)

    async def _check_transactions(self, touched: str) -> None:
        for number, staged in self.world.transactions.items():
            if staged.table in self.world.rows and staged.table != touched:
                status = self.manager.transactions.of(self.table(staged.table)).status(number)
                assert status["status"] == TransactionStatus.OPEN, (number, status)

    async def _repeat(self, change: Change) -> None:
        if change.kind in ("append", "upsert", "commit"):
            await self._do(change)
            assert self.shown() == change.after, short(change)
            self.world.rows = deepcopy(change.after)

    # -- what it does ----------------------------------------------------------------------------

    async def step(self, kind: str) -> None:
        """Do something that a service may do."""
        change = getattr(self, f"plan_{kind}")()
        if change is None:
            return
        self.world.change = change
        self.world.save(self.root)
        await self._do(change)
        self.world.done[kind] = self.world.done.get(kind, 0) + 1
        shown = self.shown()
        if kind in ("retain", "expire"):
            assert is_less(shown[change.table], self.world.rows[change.table]), change
        else:
            assert shown == change.after, (short(change), differing(shown, change.after))
        self.world.rows = shown
        self._acknowledged(change.table)

    def _acknowledged(self, touched: str) -> None:
        world = self.world
        world.change = None
        if touched in world.rows:
            world.facts[touched] = self.fact(touched)
        world.transactions = {n: s for n, s in world.transactions.items() if s.table in world.rows}
        world.save(self.root)

    async def _do(self, change: Change) -> None:
        await getattr(self, f"do_{change.kind}")(change.table, change.given)

    def _chosen(self, *, is_keyed: bool | None = None, is_written: bool = False) -> str | None:
        """Return a table of this kind; one that has another schema by now takes no rows."""
        names = [
            name
            for name, rows in sorted(self.world.rows.items())
            if is_keyed in (None, isinstance(rows, dict))
            and not (is_written and len(self.table(name).info.schema.columns) > len(EVENTS))
        ]
        return self.rng.choice(names) if names else None

    def _after(self, name: str, rows: Any) -> Rows:
        after = deepcopy(self.world.rows)
        after[name] = rows
        return after

    def _same(self, kind: str, name: str | None, given: Any = None) -> Change | None:
        return None if name is None else Change(kind, name, given, deepcopy(self.world.rows))

    def plan_create(self) -> Change | None:
        if len(self.world.rows) >= _TABLES_MAX:
            return None
        is_keyed = self.rng.random() < 0.6
        empty: Any = {} if is_keyed else [[] for _ in range(BUCKETS)]
        name = f"t{self.world.number()}"
        return Change("create", name, is_keyed, self._after(name, empty))

    async def do_create(self, name: str, is_keyed: bool) -> None:
        key = ("id",) if is_keyed else ()
        ages = {"table.datalake.ttl": "1h"} if is_keyed else {}
        await self.manager.create_table(
            table_descriptor(
                name, bucket_count=BUCKETS, primary_key=key, properties={**_PROPERTIES, **ages}
            )
        )

    def plan_drop(self) -> Change | None:
        name = self._chosen()
        if name is None or len(self.world.rows) < 3:
            return None
        after = {n: rows for n, rows in deepcopy(self.world.rows).items() if n != name}
        return Change("drop", name, None, after)

    async def do_drop(self, name: str, given: None) -> None:
        await self.manager.drop_table(TablePath.parse(name))

    def plan_append(self) -> Change | None:
        name = self._chosen(is_keyed=False, is_written=True)
        if name is None:
            return None
        bucket, ids = self.rng.randrange(BUCKETS), self._ids()
        rows = deepcopy(self.world.rows[name])
        rows[bucket] += ids
        given = (bucket, ids, self._sequences(name)[bucket])
        return Change("append", name, given, self._after(name, rows))

    async def do_append(self, name: str, given: tuple[int, list[int], int]) -> None:
        bucket, ids, sequence = given
        batch = routed(bucket, wide(ids), writer_id=9, sequence=sequence)
        await self.manager.append(self.table(name), [batch])  # type: ignore[arg-type]
        self._written(name, [bucket])

    def _ids(self) -> list[int]:
        return [self.world.number() for _ in range(self.rng.randrange(1, 40))]

    def _sequences(self, name: str) -> list[int]:
        """Return the next sequence of each bucket's writer, of a change that goes to all.

        What is on its way is repeated before anything else, so none is left out.
        """
        return [at + 1 for at in self.world.sequences.get(name, [0] * BUCKETS)]

    def _names(self) -> dict[int, str]:
        name = f"v{self.world.number()}-" + "y" * self.rng.randrange(2_000)
        return dict.fromkeys(self.rng.sample(range(100), 12), name)

    def plan_upsert(self) -> Change | None:
        name = self._chosen(is_keyed=True, is_written=True)
        if name is None:
            return None
        names = self._names()
        rows = {**self.world.rows[name], **names}
        given = (names, self._sequences(name))
        return Change("upsert", name, given, self._after(name, rows))

    async def do_upsert(self, name: str, given: tuple[dict[int, str], list[int]]) -> None:
        names, sequences = given
        writes = [KeyWrite(b, rows, sequence=sequences[b]) for b, rows in by_bucket(names)]
        table = self.table(name)
        assert isinstance(table, KeyTable)
        await self.manager.write_keys(table, writes, columns=None, writer_id=9)
        self._written(name, [write.bucket for write in writes])

    def _written(self, name: str, buckets: list[int]) -> None:
        sequences = self.world.sequences.setdefault(name, [0] * BUCKETS)
        for bucket in buckets:
            sequences[bucket] += 1

    def plan_stage(self) -> Change | None:
        name = self._chosen(is_written=True)
        return self._same("stage", name)

    async def do_stage(self, name: str, given: None) -> None:
        table = self.table(name)
        transactions = self.manager.transactions.of(table)
        is_overwrite = isinstance(table, KeyTable) and self.rng.random() < 0.4
        operation = TransactionOperation.APPEND
        if isinstance(table, KeyTable):
            operation = TransactionOperation.UPSERT
        if is_overwrite:
            operation = TransactionOperation.OVERWRITE
        number, _ = await transactions.begin(
            operation, columns=None, app_id=None, version=None, timeout_ms=3_600_000
        )
        staged = Staged(name, [], {} if table.info.is_primary_key_table else [[], []], is_overwrite)
        for _ in range(self.rng.randrange(4)):
            if isinstance(table, KeyTable):
                names = self._names()
                staged.rows.update(names)
                batches = [routed(b, rows) for b, rows in by_bucket(names)]
            else:
                bucket, ids = self.rng.randrange(BUCKETS), self._ids()
                staged.rows[bucket] += ids
                batches = [routed(bucket, wide(ids))]
            part, _ = await transactions.stage(number, EVENTS, batches, token=None)
            staged.parts.append(part)
        self.world.transactions[number] = staged

    def plan_commit(self) -> Change | None:
        for number, staged in self.world.transactions.items():
            if len(self.table(staged.table).info.schema.columns) > len(EVENTS):
                continue
            rows = deepcopy(self.world.rows[staged.table])
            if staged.is_overwrite:
                rows = staged.rows
            elif isinstance(rows, dict):
                rows.update(staged.rows)
            else:
                rows = [a + b for a, b in zip(rows, staged.rows, strict=True)]
            after = self._after(staged.table, rows)
            return Change("commit", staged.table, (number, staged.parts), after)
        return None

    async def do_commit(self, name: str, given: tuple[str, list[str]]) -> None:
        number, parts = given
        transactions = self.manager.transactions.of(self.table(name))
        result = await transactions.commit(number, parts, wait_s=60)
        assert result is not None
        assert result.status is TransactionStatus.COMMITTED
        self.world.transactions.pop(number, None)

    def plan_widen(self) -> Change | None:
        name = self._chosen(is_written=True)
        # Nor while one is open that was begun when its machine died.
        if name is None or self.manager.transactions.of(self.table(name)).open_count:
            return None
        return self._same("widen", name)

    async def do_widen(self, name: str, given: None) -> None:
        change = {"add": "more", "type": type_to_json(pa.int64()), "comment": "", "first": False}
        await self.manager.alter_schema(TablePath.parse(name), [change])

    def plan_tier(self) -> Change | None:
        return self._same("tier", self._chosen(is_written=True))

    async def do_tier(self, name: str, given: None) -> None:
        table = self.table(name)
        tiering = self.manager.tiering
        answer = await tiering.claim(EMBEDDED_WORKER_ID, tables=[table], force=True)
        if answer.assignment is None:
            return
        table_id = table.info.table_id
        ends = {b: at.high_watermark for b, at in answer.assignment.state.positions.items()}
        if isinstance(table, KeyTable):
            for bucket, end in ends.items():
                before = self.world.lake.get((table_id, bucket), (0, {}))
                self.world.lake[table_id, bucket] = folded(table, bucket, before, end)
        # The lake has it before the service knows.
        self.world.save(self.root)
        report = TieringReport(
            table_id=table_id,
            epoch=answer.assignment.epoch,
            snapshot_id=self.world.number(),
            table_uuid="uuid",
            tiered_offsets=ends,
        )
        await tiering.complete(table, report)

    def plan_retain(self) -> Change | None:
        return self._same("retain", self._chosen())

    async def do_retain(self, name: str, given: None) -> None:
        async with self.manager.runtime.changing_files:
            await apply_retention(self.table(name), later(self.manager, _YEAR_US))
        # Nobody waits for what is removed: what is not stored is got back from the journal.
        await self.engine.wait_stored()

    def plan_expire(self) -> Change | None:
        self.world.ahead_us += 3 * HOUR_US
        return self._same("expire", self._chosen(is_keyed=True))

    async def do_expire(self, name: str, given: None) -> None:
        expiry = expiry_of(
            self.manager,
            clock_us=lambda: clock_us() + self.world.ahead_us,
            monotonic_s=lambda: 0.0,
            tables=[self.table(name)],
        )
        await expiry.look()

    def plan_checkpoint(self) -> Change | None:
        return Change("checkpoint", "", None, deepcopy(self.world.rows))

    async def do_checkpoint(self, name: str, given: None) -> None:
        await self.engine.checkpoint()

    def plan_pin(self) -> Change | None:
        return self._same("pin", self._chosen(), self.world.number())

    async def do_pin(self, name: str, number: int) -> None:
        pins = self.table(name).lake_pins
        if self.rng.random() < 0.3:
            await pins.unpin(f"holder{number % 3}", owner="me")
        else:
            day_ms = 24 * 3_600_000
            await pins.pin(f"holder{number % 3}", owner="me", snapshot_id=number, ttl_ms=day_ms)

    def plan_copy(self) -> Change | None:
        return Change("copy", "", None, deepcopy(self.world.rows))

    async def do_copy(self, name: str, given: None) -> None:
        copy_disk(self.directory, self.root / f"copy{self.rng.randrange(COPIES)}")


_KINDS: Final = (
    *["append"] * 6,
    *["upsert"] * 6,
    *["stage"] * 3,
    *["commit"] * 3,
    *["tier"] * 3,
    *["retain"] * 3,
    *["checkpoint"] * 2,
    *["copy"] * 2,
    *["pin"] * 2,
    *["create"] * 2,
    *["expire", "drop", "widen"],
)
_UPKEEP: Final = (*["retain"] * 4, *["tier"] * 4, "pin", "checkpoint")
