"""Many writers of one table, on a disk that holds and fails syncs and writes at random.

Rounds are planned while others are synced, taken back and planned again. Whatever happens, the
changelog of every bucket is one history (each change meets the row before it), it gives the rows
that are found, and it has what was answered, where the answer says. A run is a seed: `check(seed)`
repeats it.

With a journal, several rounds are in flight to a journal that stores late, and the machine is lost
at a random moment: the next life has what the journal has stored. `check_lost(seed)` repeats a run.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import errno
import functools
import os
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from streamhouse.core.errors import (
    StorageFailedError,
    UnavailableError,
    UnknownOutcomeError,
    UnsupportedError,
)
from streamhouse.core.model.changelog import (
    DELETE,
    INSERT,
    OPERATION_DELETE,
    OPERATION_UPSERT,
    UPDATE_AFTER,
)
from streamhouse.core.model.schema_change import read_stored
from streamhouse.core.model.transaction import TransactionOperation
from streamhouse.storage_service.engine.keys._older_keys import older_keys
from streamhouse.storage_service.engine.keys.key_table import KeyTable
from streamhouse.storage_service.engine.manager import TabletManager
from streamhouse.storage_service.engine.open_table import Appended
from streamhouse.storage_service.kv.plan.write_plan import KeyWrite, delete_of
from streamhouse.storage_service.log.append_queue import RoutedBatch
from tests.support.examples import examples
from tests.support.held_step import around, lower
from tests.support.in_process_service import EVENTS, open_manager, table_descriptor
from tests.support.kv_model import Entry, identity
from tests.support.kv_world import entries_of, fold_log, looked_up
from tests.support.late_world import LateWorld

_BUCKETS: Final = 3
_WRITERS: Final = 6
# Everybody writes to these; the others of a writer are its own.
_SHARED_IDS: Final = 30
_OWN_IDS: Final = 60
_NEW: Final = (INSERT, UPDATE_AFTER)
_WAIT_S: Final = 20.0
_REFUSED: Final = (StorageFailedError, UnavailableError)


class _Disk:
    """Lets a sync go on when the event loop has turned a few times; fails some."""

    def __init__(self, random: Random, *, is_faulty: bool) -> None:
        self._random = random
        self._may_sync = threading.Semaphore(0)
        self._sync_faults = 0.03 if is_faulty else 0.0
        self._write_faults = 0.05 if is_faulty else 0.0

    def sync(self, real: Callable[[Any], None], segment: Any) -> None:
        assert self._may_sync.acquire(timeout=_WAIT_S)
        if self._random.random() < self._sync_faults:
            raise OSError(errno.EIO, "Input/output error")
        real(segment)

    def write(self, real: Callable[..., int], *arguments: Any) -> int:
        # Rows alone: marks and state files are written by the same call.
        is_rows = Path(f"/proc/self/fd/{arguments[0]}").readlink().suffix == ".log"
        if is_rows and self._random.random() < self._write_faults:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*arguments)

    async def turn(self) -> None:
        while True:
            for _ in range(self._random.randint(0, 40)):
                await asyncio.sleep(0)
            self._may_sync.release()

    def end(self) -> None:
        self._may_sync.release(1 << 20)


@asynccontextmanager
async def _on(disk: _Disk, random: Random) -> AsyncIterator[None]:
    turning = asyncio.ensure_future(disk.turn())
    with pytest.MonkeyPatch.context() as patch:
        around(patch, "segment-syncing", disk.sync)
        patch.setattr(os, "pwritev", functools.partial(disk.write, os.pwritev))
        lower(patch, "rows-overlapping", random.choice((1, 30)))
        lower(patch, "rows-short", random.choice((0, 100, 1_000)))
        lower(patch, "run-bytes", random.choice((1 << 10, 1 << 20)))
        try:
            yield
        finally:
            turning.cancel()
            disk.end()


@dataclass
class _Writer:
    """Numbers its batches, a sequence a bucket; `unknown` is to be repeated after a restart."""

    number: int
    random: Random
    sequences: list[int] = field(default_factory=lambda: [0] * _BUCKETS)
    unknown: list[KeyWrite] | None = None
    answered: list[tuple[KeyWrite, tuple[int, int]]] = field(default_factory=list)
    written: int = 0
    under_way: list[KeyWrite] | None = None

    def after_loss(self) -> _Writer:
        """Return the writer as a program that goes on with another machine from here."""
        return _Writer(
            self.number,
            Random(self.random.random()),
            list(self.sequences),
            self.under_way or self.unknown,
            list(self.answered),
            self.written,
        )

    def writes(self) -> list[KeyWrite]:
        random = self.random
        writes = []
        for bucket in sorted(random.sample(range(_BUCKETS), random.randint(1, _BUCKETS))):
            own = random.sample(range(_OWN_IDS), random.choice((1, 3, 40)))
            ids = {1_000 + self.number * _OWN_IDS + i for i in own}
            ids |= {random.randrange(_SHARED_IDS) for _ in range(random.randint(0, 4))}
            self.written += 1
            name = f"{self.number}.{self.written}"
            deletes = 1
            if random.random() < 0.3:
                # Often just what another writer wants, too: then it changes nothing.
                ids, name = {random.randrange(3)}, "same"
                deletes = random.choice((0, 9))
            # A key has one bucket.
            chosen = [i * _BUCKETS + bucket for i in ids]
            names = [name] * len(chosen)
            rows = pa.record_batch([pa.array(chosen, pa.int64()), names], schema=EVENTS)
            weights = (9 - deletes, deletes)
            kinds = random.choices((OPERATION_UPSERT, OPERATION_DELETE), weights, k=len(chosen))
            operations = None if random.random() < 0.5 else np.array(kinds, dtype=np.int8)
            sequence = self.sequences[bucket] + 1
            # Of the first version: columns are added meanwhile.
            writes.append(KeyWrite(bucket, rows, operations, sequence, schema_id=0))
        return writes

    async def write(self, manager: TabletManager, table: KeyTable) -> None:
        """Write some; often again before the first is answered."""
        writes = self.under_way = self.unknown or self.writes()
        times = self.random.choice((1, 1, 2))
        answers = await asyncio.gather(
            *(
                manager.write_keys(table, writes, columns=None, writer_id=self.number + 1)
                for _ in range(times)
            ),
            return_exceptions=True,
        )
        self.under_way = None
        done = [answer for answer in answers if isinstance(answer, Appended)]
        errors = [answer for answer in answers if not isinstance(answer, Appended)]
        unknown = [error for error in errors if isinstance(error, UnknownOutcomeError)]
        for error in errors:
            if not isinstance(error, (*_REFUSED, UnknownOutcomeError)):
                raise error
        if done:
            self.unknown = None
        for write in writes if done else ():
            ranges = {answer.ranges[write.bucket] for answer in done}
            self.answered += [(write, of_write) for of_write in ranges]
            # What changed nothing used no sequence up, and is not remembered.
            changed = {(start, end) for start, end in ranges if end > start}
            assert len(changed) < 2
            self.sequences[write.bucket] += len(changed)
        if unknown and not done:
            self.unknown = writes


async def _flush(manager: TabletManager, table: KeyTable, random: Random) -> None:
    bucket = random.choice(table.key_buckets)
    await table.key_writer.on_thread(bucket.rows.flush)


async def _add_column(manager: TabletManager, table: KeyTable, random: Random) -> None:
    name = f"c{random.randrange(1 << 30)}"
    # A lost machine may leave a transaction open.
    with contextlib.suppress(UnsupportedError):
        await manager.alter_schema(table.path, [{"add": name, "type": "string"}])


async def _alter(manager: TabletManager, table: KeyTable, random: Random) -> None:
    updates = {"table.log.ttl": f"{random.randint(1, 9)}h"}
    await manager.alter_properties(table.path, updates=updates, removals=())


async def _commit(manager: TabletManager, table: KeyTable, random: Random) -> None:
    transactions = manager.transactions.of(table)
    begun, _ = await transactions.begin(
        TransactionOperation.UPSERT, columns=None, app_id=None, version=None, timeout_ms=None
    )
    schema = table.info.schema.to_arrow()
    batches = []
    for bucket in range(_BUCKETS):
        ids = [i * _BUCKETS + bucket for i in range(random.randint(1, _SHARED_IDS))]
        name = f"t{random.randrange(1 << 30)}"
        rows = pa.RecordBatch.from_pylist([{"id": i, "name": name} for i in ids], schema=schema)
        batches.append(RoutedBatch(bucket, len(ids), memoryview(rows.serialize()).cast("B")))
    part, _ = await transactions.stage(begun, schema, batches, token=None)
    await transactions.commit(begun, [part], wait_s=_WAIT_S)


async def _expire(manager: TabletManager, table: KeyTable, random: Random) -> None:
    """Delete what has a version below some offset by the time it is its turn."""
    number = random.randrange(_BUCKETS)
    bucket = table.key_buckets[number]
    end = random.randint(0, bucket.log.high_watermark)
    bytes_max = random.choice((1 << 10, 1 << 20))
    pieces = older_keys(table.key_writer, bucket.rows, end, bytes_max=bytes_max)
    with contextlib.suppress(*_REFUSED, UnknownOutcomeError):
        async with contextlib.aclosing(pieces):
            async for keys in pieces:
                if keys.num_rows:
                    write = delete_of(number, keys, written_below=end)
                    answer = await manager.write_keys(table, [write], columns=None, writer_id=0)
                    for line in _entries(table, number, *answer.ranges[number]):
                        assert line.change_type == DELETE
                        assert line.retracts is not None
                        assert line.retracts < end


_Act = Callable[[TabletManager, KeyTable, Random], Coroutine[Any, Any, None]]
_ON_ANY_DISK: Final[tuple[_Act, ...]] = (_flush, _alter, _add_column, _expire)
# A transaction that is decided waits until the disk takes it.
_ON_A_GOOD_DISK: Final[tuple[_Act, ...]] = (*_ON_ANY_DISK, _commit)


_Beside = Callable[[KeyTable], Coroutine[Any, Any, None]]


async def _nothing(table: KeyTable) -> None:
    del table


async def _live(
    manager: TabletManager,
    writers: list[_Writer],
    random: Random,
    *,
    is_faulty: bool,
    beside: _Beside = _nothing,
) -> None:
    """One life of the service, which may end while writes are under way."""
    if not manager.list_tables(None):
        await manager.create_table(table_descriptor(bucket_count=_BUCKETS, primary_key=("id",)))
    table = next(iter(manager.open_tables()))
    assert isinstance(table, KeyTable)
    for writer in writers:
        while writer.unknown is not None:
            await writer.write(manager, table)
    _check(table, writers)
    async with _on(_Disk(random, is_faulty=is_faulty), random):
        acts = _ON_ANY_DISK if is_faulty else _ON_A_GOOD_DISK

        async def write(writer: _Writer) -> None:
            for _ in range(random.randint(1, 12)):
                for _ in range(random.randint(0, 60)):
                    await asyncio.sleep(0)
                if writer.unknown is None:
                    await writer.write(manager, table)

        async def act() -> None:
            for _ in range(random.randint(0, 3)):
                await random.choice(acts)(manager, table, random)

        tasks = [asyncio.ensure_future(write(writer)) for writer in writers]
        acting = asyncio.ensure_future(act())
        going_on = asyncio.ensure_future(beside(table))
        is_stopped = random.random() < 0.3
        await acting
        if is_stopped:
            await table.stop(flush=False)
        await asyncio.gather(*tasks, going_on)
        if not is_stopped:
            _check(table, writers)


def _memory(random: Random) -> dict[str, int]:
    return {"key_memory_bytes_max": random.choice((1 << 14, 1 << 30))}


async def _life(folder: Path, writers: list[_Writer], random: Random, *, is_faulty: bool) -> None:
    """One life of a service without a journal."""
    async with open_manager(folder, **_memory(random)) as manager:
        await _live(manager, writers, random, is_faulty=is_faulty)


@dataclass
class _Lost:
    """A lost machine: the next one, and what readers and writers knew at that moment."""

    world: LateWorld
    writers: list[_Writer]
    shown: list[list[object]]
    """Of each bucket, the lines that readers may have seen."""


@asynccontextmanager
async def _storing(world: LateWorld, random: Random) -> AsyncIterator[None]:
    """Let the journal store a few operations now and then."""
    turns_max = random.choice((50, 500, 2_000))

    async def store() -> None:
        while True:
            for _ in range(random.randint(0, turns_max)):
                await asyncio.sleep(0)
            world.journal.store(random.randint(1, 5))

    storing = asyncio.ensure_future(store())
    try:
        yield
    finally:
        storing.cancel()


async def _life_until_lost(
    world: LateWorld, writers: list[_Writer], random: Random, next_folder: Path, *, is_faulty: bool
) -> _Lost:
    """One life with a journal; what happens after the loss is never seen by anybody."""
    lost: list[_Lost] = []

    async def lose(table: KeyTable) -> None:
        for _ in range(random.choice((0, 100, 1_000, 5_000))):
            await asyncio.sleep(0)
        shown = [_shown(table, number) for number in range(_BUCKETS)]
        going_on = [writer.after_loss() for writer in writers]
        lost.append(_Lost(world.restored_at(next_folder), going_on, shown))

    async with _storing(world, random), world.opened(**_memory(random)) as manager:
        await _live(manager, writers, random, is_faulty=is_faulty, beside=lose)
    return lost[0]


async def _check_lost(lost: _Lost) -> None:
    """The next machine has what was shown, and what was answered, where it was."""
    async with _storing(lost.world, Random(0)), lost.world.opened() as manager:
        table = next(iter(manager.open_tables()))
        assert isinstance(table, KeyTable)
        for number, lines in enumerate(lost.shown):
            assert _shown(table, number)[: len(lines)] == lines
        _check(table, lost.writers)


def _entries(table: KeyTable, bucket: int, start: int, end: int) -> list[Entry]:
    """Return the lines of a bucket's changelog at the offsets [start, end)."""
    entries: list[Entry] = []
    position = start
    while position < end:
        for frame in table.key_buckets[bucket].log.read(position, bytes_max=1 << 20):
            rows = read_stored(frame.payload, table.info, stored_as=frame.schema_id)
            entries += entries_of(rows, frame.base_offset)
            position = frame.base_offset + frame.row_count
    return [entry for entry in entries if start <= entry.offset < end]


def _shown(table: KeyTable, bucket: int) -> list[object]:
    """Return what readers see of a bucket's changelog, without the columns that come and go."""
    return [
        (entry.offset, entry.change_type, entry.retracts, entry.row["id"], entry.row["name"])
        for entry in _entries(table, bucket, 0, table.key_buckets[bucket].log.high_watermark)
    ]


def _histories(entries: list[Entry]) -> dict[int, list[tuple[int, str | None]]]:
    """Return what became of each key: offsets, and the names from there on."""
    histories: dict[int, list[tuple[int, str | None]]] = {}
    for entry in entries:
        if entry.change_type in (*_NEW, DELETE):
            name = None if entry.change_type == DELETE else entry.row["name"]
            histories.setdefault(entry.row["id"], []).append((entry.offset, name))
    return histories


def _name_at(history: list[tuple[int, str | None]], end: int) -> str | None:
    """Return the name after the changes below `end`; None without a row."""
    count = bisect.bisect_left(history, end, key=lambda change: change[0])
    return history[count - 1][1] if count else None


def _wanted(write: KeyWrite) -> dict[int, str | None]:
    """Return the names that a write makes of its keys; None for a deleted row."""
    ids, names = write.rows.column("id").to_pylist(), write.rows.column("name").to_pylist()
    deletes = [False] * len(ids) if write.deletes is None else write.deletes.tolist()
    changes = zip(ids, names, deletes, strict=True)
    return {key: None if is_delete else name for key, name, is_delete in changes}


def _check(table: KeyTable, writers: list[_Writer]) -> None:
    """The log is one history, leads to the rows that are there, and has what was answered."""
    for number, bucket in enumerate(table.key_buckets):
        assert bucket.is_usable
        entries = _entries(table, number, 0, bucket.log.high_watermark)
        state = fold_log(entries, ("id",))
        assert bucket.row_count == len(state) == bucket.rows.row_count
        keys = pa.record_batch([pa.array([key for (key,) in state], pa.int64())], names=["id"])
        found = looked_up(bucket.rows, keys)
        assert found.found.all()
        assert identity(found.rows.to_pylist()) == identity([row for _, row in state.values()])
        histories = _histories(entries)
        for writer in writers:
            for write, (start, end) in writer.answered:
                if write.bucket == number:
                    assert end <= bucket.log.high_watermark
                    lines = [line for line in entries[start:end] if line.change_type in _NEW]
                    names = {line.row["name"] for line in lines}
                    assert names <= set(write.rows.column("name").to_pylist())
                    assert len(lines) < 2 * write.rows.num_rows
                    for key, name in _wanted(write).items():
                        assert _name_at(histories.get(key, []), end) == name


def _writers(random: Random) -> list[_Writer]:
    return [_Writer(number, Random(random.random())) for number in range(_WRITERS)]


def check(seed: int, folder: Path) -> None:
    random = Random(seed)
    writers = _writers(random)
    for _ in range(3):
        asyncio.run(_life(folder, writers, random, is_faulty=random.random() < 0.7))
    asyncio.run(_life(folder, writers, random, is_faulty=False))


def check_lost(seed: int, folder: Path) -> None:
    random = Random(seed)
    world, writers = LateWorld(folder / "0"), _writers(random)
    for number in range(3):
        life = _life_until_lost(
            world,
            writers,
            random,
            folder / str(number + 1),
            is_faulty=random.random() < 0.3,
        )
        lost = asyncio.run(life)
        asyncio.run(_check_lost(lost))
        world, writers = lost.world, lost.writers


@settings(max_examples=examples(3), deadline=None, phases=(Phase.explicit, Phase.generate))
@given(st.integers(0, 1 << 32))
def test_rounds_that_overlap_are_one_history(seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        check(seed, Path(folder))


@settings(max_examples=examples(3), deadline=None, phases=(Phase.explicit, Phase.generate))
@given(st.integers(0, 1 << 32))
def test_rounds_in_flight_to_a_journal_outlive_the_machine(seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        check_lost(seed, Path(folder))
