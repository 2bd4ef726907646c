"""Overwrites, other writes and restarts in any order: every cut shows the rows before or after."""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from streamhouse.core.model.changelog import DELETE, UPDATE_BEFORE
from streamhouse.core.model.transaction import TransactionOperation
from streamhouse.storage_service.engine.keys.key_table import KeyTable
from streamhouse.storage_service.engine.manager import TabletManager
from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.kv.plan.write_plan import KeyWrite
from streamhouse.storage_service.log.append_queue import RoutedBatch
from tests.support.examples import examples
from tests.support.in_process_service import EVENTS, open_manager, routed, table_descriptor
from tests.support.kv_world import looked_up

_BUCKETS = 3
# Pieces so small that most overwrites take many.
_CONFIG: dict[str, Any] = {"transaction_chunk_bytes": 300}

Rows = dict[int, str]
Cut = tuple[tuple[int, int], ...]


@dataclass
class _World:
    """The rows there are, and those that each cut must show."""

    random: Random
    is_keyed: bool
    rows: Rows = field(default_factory=dict)
    expected: dict[Cut, Rows] = field(default_factory=dict)
    seen: set[Cut] = field(default_factory=set)
    written: int = 0

    def some(self) -> Rows:
        """Return rows that may be there already, also exactly so."""
        ids = self.random.sample(range(60), self.random.randint(0, 25))
        if not self.is_keyed:
            # A log has every row that is written: each has an id of its own.
            ids = [60 * (self.written + place) + i for place, i in enumerate(ids)]
            self.written += len(ids)
        return {i: self.rows.get(i, "") or f"n{self.random.randint(0, 3)}" for i in ids}


def _by_bucket(rows: Rows) -> dict[int, pa.RecordBatch]:
    batches = {}
    for bucket in range(_BUCKETS):
        own = {i: name for i, name in rows.items() if i % _BUCKETS == bucket}
        if own:
            ids = pa.array(own, pa.int64())
            batches[bucket] = pa.record_batch([ids, list(own.values())], schema=EVENTS)
    return batches


async def _write(manager: TabletManager, table: OpenTable, world: _World) -> None:
    rows = world.some()
    batches = _by_bucket(rows)
    if world.is_keyed:
        writes = [KeyWrite(bucket, batch) for bucket, batch in batches.items()]
        await manager.write_keys(table, writes, columns=None, writer_id=0)
    elif batches:
        appended = [routed(bucket, batch) for bucket, batch in batches.items()]
        await manager.append(table, appended)
    world.rows = world.rows | rows


async def _overwrite(manager: TabletManager, table: OpenTable, world: _World) -> None:
    transactions = manager.transactions.of(table)
    begun, _ = await transactions.begin(
        TransactionOperation.OVERWRITE, columns=None, app_id=None, version=None, timeout_ms=None
    )
    parts, rows = [], {}
    for _ in range(world.random.randint(0, 3)):
        part = world.some()
        rows.update(part)
        batches = [
            RoutedBatch(bucket, batch.num_rows, memoryview(batch.serialize()).cast("B"))
            for bucket, batch in _by_bucket(part).items()
        ]
        parts.append((await transactions.stage(begun, EVENTS, batches, token=None))[0])
    assert await transactions.commit(begun, parts, wait_s=60)
    world.rows = rows


async def _watch(table: OpenTable, world: _World) -> None:
    while True:
        world.seen.add(_cut(table))
        await asyncio.sleep(0)


def _cut(table: OpenTable) -> Cut:
    """Return where the rows, or changes, of each bucket begin and end."""
    positions = sorted(table.positions().items())
    return tuple((p.truncated_offset, p.high_watermark) for _, p in positions)


def _folded(table: OpenTable, cut: Cut) -> Rows:
    """Return the rows that a cut shows: those of the log, or those that the changelog makes."""
    rows: Rows = {}
    for bucket, (offset, end) in enumerate(cut):
        while offset < end:
            for frame in table.tablets[bucket].read(offset, bytes_max=1 << 20):
                payload = pa.py_buffer(frame.payload)
                changes = pa.ipc.read_record_batch(payload, table.info.log_schema)
                for change in changes.slice(0, end - offset).to_pylist():
                    if change.get("__change_type") in (UPDATE_BEFORE, DELETE):
                        assert rows.pop(change["id"]) == change["name"]
                    else:
                        assert change["id"] not in rows
                        rows[change["id"]] = change["name"]
                offset = frame.base_offset + frame.row_count
    return rows


async def _live(data_dir: Path, world: _World, actions: list[str]) -> None:
    async with open_manager(data_dir, **_CONFIG) as manager:
        if not manager.list_tables(None):
            key = ("id",) if world.is_keyed else ()
            descriptor = table_descriptor(bucket_count=_BUCKETS, primary_key=key)
            await manager.create_table(descriptor)
        table = next(iter(manager.open_tables()))
        world.expected[_cut(table)] = world.rows
        watcher = asyncio.ensure_future(_watch(table, world))
        for action in actions:
            await {"write": _write, "overwrite": _overwrite}[action](manager, table, world)
            world.expected[_cut(table)] = world.rows
            assert table.row_count == len(world.rows)
        watcher.cancel()
        ends = [at for _, at in sorted(table.positions().items())]
        assert world.seen <= world.expected.keys()
        for cut, rows in world.expected.items():
            # What is no row of a log any more cannot be read there.
            if all(start >= at.truncated_offset for (start, _), at in zip(cut, ends, strict=True)):
                assert _folded(table, cut) == rows
        keys = pa.array(range(60), pa.int64())
        for bucket, keyed in enumerate(table.key_buckets if isinstance(table, KeyTable) else ()):
            found = looked_up(keyed.rows, pa.record_batch([keys], names=["id"])).rows.to_pydict()
            own = {i: name for i, name in world.rows.items() if i % _BUCKETS == bucket}
            assert dict(zip(found["id"], found["name"], strict=True)) == own


_LIVES = st.lists(
    st.lists(st.sampled_from(["write", "overwrite"]), max_size=6), min_size=1, max_size=3
)


@settings(max_examples=examples(20), deadline=None, phases=(Phase.explicit, Phase.generate))
@given(is_keyed=st.booleans(), lives=_LIVES, seed=st.integers(0, 1 << 32))
async def test_every_cut_shows_the_rows_before_or_after(
    is_keyed: bool, lives: list[list[str]], seed: int
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        world = _World(Random(seed), is_keyed)
        for actions in lives:
            await _live(Path(directory), world, actions)
