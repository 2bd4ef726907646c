"""Merges, blind writes and restarts, many at once: what a merge has read is what it replaces.

Each merge reads some keys, computes rows from what it read, and commits them if nobody has changed
them since. It reads as a job does that looks keys up: each key at a moment of its own, after the
positions were taken, and a task that is run again looks them up again. Some lose the answer of
their commit and ask again, at once or after a restart. The model applies what was committed one
after the other, in the order of the changelog: where a merge replaces a row there is the row that
it had read, so no update is lost, and none is made twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pyarrow as pa
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from streamhouse.core.errors import CommitConflictError
from streamhouse.core.model.changelog import (
    DELETE,
    OPERATION_DELETE,
    OPERATION_UPSERT,
    UPDATE_BEFORE,
)
from streamhouse.core.model.transaction import (
    CommitResult,
    Isolation,
    ReadPosition,
    TransactionOperation,
)
from streamhouse.storage_service.engine.keys.key_table import KeyTable
from streamhouse.storage_service.engine.manager import TabletManager
from streamhouse.storage_service.engine.transactions.table_transactions import TableTransactions
from streamhouse.storage_service.kv.plan.write_plan import KeyWrite
from streamhouse.storage_service.log.append_queue import RoutedBatch
from streamhouse.storage_service.log.staged_part import OPERATION_COLUMN
from tests.support.examples import examples
from tests.support.in_process_service import EVENTS, open_manager, table_descriptor
from tests.support.kv_world import looked_up

_BUCKETS = 2
_KEYS = 8
_STAGED = EVENTS.append(pa.field(OPERATION_COLUMN, pa.int8()))

Rows = dict[int, str]


@dataclass(frozen=True)
class _Lost:
    """A commit whose answer was lost: what it named, and what became of it, None: a conflict."""

    transaction_id: str
    parts: tuple[str, ...]
    read: ReadPosition
    result: CommitResult | None


@dataclass
class _World:
    """What was committed: for each key, what each write found (if it looked) and what it left."""

    random: Random
    writes: dict[tuple[int, int], tuple[dict[int, str | None] | None, dict[int, str | None]]] = (
        field(default_factory=dict)
    )
    lost: list[_Lost] = field(default_factory=list)
    conflicts: int = 0
    merges: int = 0
    names: int = 0

    def name(self) -> str:
        self.names += 1
        return f"n{self.names}"


def _bucket(key: int) -> int:
    return key % _BUCKETS


def _read(table: KeyTable, keys: list[int]) -> dict[int, str | None]:
    """Return the newest row of each key: a read may see more than the cut that it began with."""
    found: dict[int, str | None] = dict.fromkeys(keys)
    for bucket, keyed in enumerate(table.key_buckets):
        own = pa.record_batch(
            [pa.array([k for k in keys if _bucket(k) == bucket], pa.int64())], ["id"]
        )
        rows = looked_up(keyed.rows, own).rows.to_pydict()
        found.update(zip(rows["id"], rows["name"], strict=True))
    return found


def _staged(rows: dict[int, str | None]) -> list[RoutedBatch]:
    batches = []
    for bucket in range(_BUCKETS):
        own = {k: v for k, v in rows.items() if _bucket(k) == bucket}
        if own:
            operations = [OPERATION_DELETE if v is None else OPERATION_UPSERT for v in own.values()]
            columns = [list(own), list(own.values()), operations]
            batch = pa.record_batch(
                [pa.array(c, f.type) for c, f in zip(columns, _STAGED, strict=True)], schema=_STAGED
            )
            batches.append(RoutedBatch(bucket, len(own), memoryview(batch.serialize()).cast("B")))
    return batches


async def _merge(manager: TabletManager, table: KeyTable, world: _World) -> None:
    """Read, compute, commit; on a conflict from the start."""
    transactions = manager.transactions.of(table)
    keys = world.random.sample(range(_KEYS), world.random.randint(1, 4))
    for _ in range(world.random.randint(1, 3)):
        read = ReadPosition(
            offsets={b: at.high_watermark for b, at in table.positions().items()},
            isolation=world.random.choice(list(Isolation)),
        )
        begun, _ = await transactions.begin(
            TransactionOperation.UPSERT, columns=None, app_id=None, version=None, timeout_ms=None
        )
        found: dict[int, str | None] = {}
        left: dict[int, str | None] = {}
        parts = []
        for key in keys:
            for _ in range(world.random.choice([1, 1, 2])):
                await asyncio.sleep(0)
                found |= _read(table, [key])
                row = found[key]
                changed = f"{row or ''}>{world.name()}"[-30:]
                left[key] = None if world.random.random() < 0.3 else changed
                staged = _staged({key: left[key]})
                part, _ = await transactions.stage(begun, _STAGED, staged, token=None)
            # Some rows are looked at and left alone, some go, some change.
            if world.random.random() < 0.2:
                del left[key]
            else:
                parts.append(part)
        result = await _committed(transactions, world, begun, parts, read)
        if result is None:
            world.conflicts += 1
            continue
        world.merges += 1
        for bucket, (start, end) in result.ranges.items():
            if end > start:
                own = {k: v for k, v in left.items() if _bucket(k) == bucket}
                world.writes[bucket, start] = ({k: found[k] for k in own}, own)
        return


async def _committed(
    transactions: TableTransactions,
    world: _World,
    begun: str,
    parts: list[str],
    read: ReadPosition,
) -> CommitResult | None:
    """Commit; None is a conflict. Some answers are lost, and asked for once more."""
    result = None
    with contextlib.suppress(CommitConflictError):
        result = await transactions.commit(begun, parts, wait_s=60, read=read)
        assert result is not None
    if world.random.random() < 0.5:
        lost = _Lost(begun, tuple(parts), read, result)
        world.lost.append(lost)
        await _ask_again(transactions, lost)
    return result


async def _ask_again(transactions: TableTransactions, lost: _Lost) -> None:
    """Commit what was committed or refused before: the answer is the true one."""
    asked = transactions.commit(lost.transaction_id, lost.parts, wait_s=60, read=lost.read)
    if lost.result is None:
        with pytest.raises(CommitConflictError, match="written"):
            await asked
    else:
        assert await asked == lost.result


async def _write(manager: TabletManager, table: KeyTable, world: _World) -> None:
    """Write without looking."""
    keys = world.random.sample(range(_KEYS), world.random.randint(1, 3))
    rows = {key: world.name() for key in keys}
    writes = []
    for bucket in range(_BUCKETS):
        own = [key for key in keys if _bucket(key) == bucket]
        if own:
            batch = pa.record_batch(
                [pa.array(own, pa.int64()), [rows[key] for key in own]], schema=EVENTS
            )
            writes.append(KeyWrite(bucket, batch))
    appended = await manager.write_keys(table, writes, columns=None, writer_id=0)
    for bucket, (start, _) in appended.ranges.items():
        world.writes[bucket, start] = (
            None,
            {k: v for k, v in rows.items() if _bucket(k) == bucket},
        )


def _check(table: KeyTable, world: _World) -> None:
    """The serial model ends with the rows that are there, and every merge met what it had read."""
    rows: Rows = {}
    for found, left in (world.writes[place] for place in sorted(world.writes)):
        for key, row in left.items():
            if found is not None:
                assert rows.get(key) == found[key], "an update was lost"
            if row is None:
                rows.pop(key, None)
            else:
                rows[key] = row
    now = _read(table, list(range(_KEYS)))
    assert {key: row for key, row in now.items() if row is not None} == rows
    assert _folded(table) == rows


def _folded(table: KeyTable) -> Rows:
    rows: Rows = {}
    for tablet in table.tablets:
        offset = 0
        while offset < tablet.high_watermark:
            for frame in tablet.read(offset, bytes_max=1 << 20):
                payload = pa.py_buffer(frame.payload)
                changes = pa.ipc.read_record_batch(payload, table.info.log_schema)
                for change in changes.to_pylist():
                    if change["__change_type"] in (UPDATE_BEFORE, DELETE):
                        assert rows.pop(change["id"]) == change["name"]
                    else:
                        rows[change["id"]] = change["name"]
                offset = frame.base_offset + frame.row_count
    return rows


async def _live(data_dir: Path, world: _World, actions: list[str]) -> None:
    async with open_manager(data_dir) as manager:
        if not manager.list_tables(None):
            await manager.create_table(table_descriptor(bucket_count=_BUCKETS, primary_key=("id",)))
        table = next(iter(manager.open_tables()))
        assert isinstance(table, KeyTable)
        for lost in world.lost:
            await _ask_again(manager.transactions.of(table), lost)
        steps = {"merge": _merge, "write": _write}
        await asyncio.gather(*(steps[action](manager, table, world) for action in actions))
        _check(table, world)


_LIVES = st.lists(
    st.lists(st.sampled_from(["merge", "merge", "merge", "write"]), max_size=12),
    min_size=1,
    max_size=3,
)


@settings(max_examples=examples(25), deadline=None, phases=(Phase.explicit, Phase.generate))
@given(lives=_LIVES, seed=st.integers(0, 1 << 32))
async def test_no_update_is_lost(lives: list[list[str]], seed: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        world = _World(Random(seed))
        for actions in lives:
            await _live(Path(directory), world, actions)


async def test_merges_of_the_same_keys_do_meet() -> None:
    # How often depends on the order in which threads answer: one of each shows that both happen.
    with tempfile.TemporaryDirectory() as directory:
        world = _World(Random(1))
        await _live(Path(directory), world, ["merge"] * 30 + ["write"] * 5)
        assert world.conflicts >= 1
        assert world.merges >= 1
