"""Transactions, appends and restarts in any order, against a model: a cut never shows half.

All rows of a request or transaction have one time, and no two share one, whatever the clock does.
"""

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

from streamhouse.core.errors import TransactionClosedError, TransactionNotFoundError
from streamhouse.core.model.transaction import TransactionOperation, TransactionStatus
from streamhouse.storage_service.engine.manager import TabletManager
from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.kv.plan.write_plan import KeyWrite
from streamhouse.storage_service.log.append_queue import RoutedBatch
from tests.support.examples import examples
from tests.support.in_process_service import EVENTS, open_manager, routed, table_descriptor

_BUCKETS = 3
_CONFIG: dict[str, Any] = {"transaction_chunk_bytes": 700, "transaction_outcomes_max": 4}

Cut = dict[int, int]
Ranges = dict[int, tuple[int, int]]


@dataclass
class _World:
    """What was written, and what a reader saw while it was."""

    is_keyed: bool
    random: Random
    now_us: int = 1_000_000
    next_id: int = 0
    units: list[Ranges] = field(default_factory=list)
    rows: dict[int, list[int]] = field(default_factory=lambda: {b: [] for b in range(_BUCKETS)})
    cuts: list[Cut] = field(default_factory=list)
    version: int = 0
    open: dict[str, list[tuple[str, dict[int, list[int]]]]] = field(default_factory=dict)

    def fresh(self) -> dict[int, list[int]]:
        """Return new ids for some buckets."""
        buckets = self.random.sample(range(_BUCKETS), self.random.randint(1, _BUCKETS))
        ids = {}
        for bucket in buckets:
            count = self.random.randint(1, 12)
            ids[bucket] = list(range(self.next_id, self.next_id + count))
            self.next_id += count
        return ids

    def clock_us(self) -> int:
        """Return the time of a clock that often stands, and sometimes goes back."""
        self.now_us += self.random.choice((0, 0, 0, 1, 1_000, -1, -1_000))
        return self.now_us

    def written(self, ranges: Ranges, ids: dict[int, list[int]]) -> None:
        """Note that these ids are stored; whose unit comes first in a bucket shows by its range."""
        self.units.append(ranges)
        for bucket, new in ids.items():
            start, end = ranges[bucket]
            assert end - start == len(new)
            stored = self.rows[bucket]
            stored.extend([-1] * (end - len(stored)))
            stored[start:end] = new


def _batch(ids: list[int]) -> pa.RecordBatch:
    return pa.record_batch([pa.array(ids, pa.int64()), [f"n{i}" for i in ids]], schema=EVENTS)


def _staged(ids: dict[int, list[int]]) -> list[RoutedBatch]:
    return [
        RoutedBatch(bucket, len(rows), memoryview(_batch(rows).serialize()).cast("B"))
        for bucket, rows in ids.items()
    ]


async def _write(manager: TabletManager, table: OpenTable, world: _World) -> None:
    ids = world.fresh()
    if world.is_keyed:
        writes = [KeyWrite(bucket, _batch(rows)) for bucket, rows in ids.items()]
        appended = await manager.write_keys(table, writes, columns=None, writer_id=0)
    else:
        batches = [routed(bucket, _batch(rows)) for bucket, rows in ids.items()]
        appended = await manager.append(table, batches)
    world.written(dict(appended.ranges), ids)


async def _begin(manager: TabletManager, table: OpenTable, world: _World) -> None:
    operation = TransactionOperation.UPSERT if world.is_keyed else TransactionOperation.APPEND
    transactions = manager.transactions.of(table)
    begun, _ = await transactions.begin(
        operation, columns=None, app_id=None, version=None, timeout_ms=None
    )
    world.open[begun] = []


async def _stage(manager: TabletManager, table: OpenTable, world: _World) -> None:
    if not world.open:
        return
    begun = world.random.choice(list(world.open))
    ids = world.fresh()
    transactions = manager.transactions.of(table)
    try:
        part, _ = await transactions.stage(begun, EVENTS, _staged(ids), token=None)
    except (TransactionNotFoundError, TransactionClosedError):
        assert begun not in world.open, "it was aborted or committed meanwhile"
    if begun in world.open:
        world.open[begun].append((part, ids))


async def _commit(manager: TabletManager, table: OpenTable, world: _World) -> None:
    if not world.open:
        return
    begun = world.random.choice(list(world.open))
    parts = world.open.pop(begun)
    world.random.shuffle(parts)
    named = parts[: world.random.randint(0, len(parts))]
    transactions = manager.transactions.of(table)
    result = await transactions.commit(begun, [part for part, _ in named], wait_s=60)
    assert result is not None
    assert result.status is TransactionStatus.COMMITTED
    ids: dict[int, list[int]] = {}
    for _, part in named:
        for bucket, rows in part.items():
            ids.setdefault(bucket, []).extend(rows)
    world.written(dict(result.ranges), ids)
    assert await transactions.commit(begun, [part for part, _ in named], wait_s=60) == result


async def _abort(manager: TabletManager, table: OpenTable, world: _World) -> None:
    if world.open:
        begun = world.random.choice(list(world.open))
        del world.open[begun]
        status = manager.transactions.of(table).abort(begun)
        assert status is TransactionStatus.ABORTED


_ACTIONS = {"write": _write, "begin": _begin, "stage": _stage, "commit": _commit, "abort": _abort}


async def _watch(table: OpenTable, world: _World) -> None:
    while True:
        cut = {bucket: p.high_watermark for bucket, p in table.positions().items()}
        if not world.cuts or world.cuts[-1] != cut:
            world.cuts.append(cut)
        await asyncio.sleep(0)


async def _live(data_dir: Path, world: _World, rounds: list[list[str]]) -> None:
    """One life of the service: each round's actions run at the same time."""
    async with open_manager(data_dir, clock_us=world.clock_us, **_CONFIG) as manager:
        if not manager.list_tables(None):
            key = ("id",) if world.is_keyed else ()
            await manager.create_table(table_descriptor(bucket_count=_BUCKETS, primary_key=key))
        table = next(iter(manager.open_tables()))
        watcher = asyncio.ensure_future(_watch(table, world))
        for actions in rounds:
            await asyncio.gather(*(_ACTIONS[name](manager, table, world) for name in actions))
            await asyncio.sleep(0)
        watcher.cancel()
        _check(table, world)


def _check(table: OpenTable, world: _World) -> None:
    for cut in world.cuts:
        for unit in world.units:
            sides = {cut[b] >= end for b, (start, end) in unit.items() if end > start}
            assert len(sides) < 2, f"cut {cut} shows half of {unit}"
            assert all(not start < cut[b] < end for b, (start, end) in unit.items())
    times: list[dict[int, int]] = []
    for bucket, tablet in enumerate(table.tablets):
        found: list[int] = []
        times.append({})
        while len(found) < tablet.high_watermark:
            for frame in tablet.read(len(found), bytes_max=1 << 20):
                times[bucket].update(
                    dict.fromkeys(
                        range(len(found), len(found) + frame.row_count), frame.timestamp_us
                    )
                )
                payload = pa.py_buffer(frame.payload)
                rows = pa.ipc.read_record_batch(payload, table.info.log_schema)
                found += rows.column("id").to_pylist()
        assert found == world.rows[bucket]
    versions = []
    for unit in world.units:
        of_unit = {times[b][row] for b, (start, end) in unit.items() for row in range(start, end)}
        assert len(of_unit) < 2, f"{unit} has several versions {of_unit}"
        versions += of_unit
    assert len(set(versions)) == len(versions), "two commits share a version"
    for of_bucket in times:
        assert list(of_bucket.values()) == sorted(of_bucket.values())
    if world.is_keyed:
        for bucket, keys in enumerate(table.key_buckets):
            assert keys.row_count == len(world.rows[bucket])


_LIVES = st.lists(
    st.lists(st.lists(st.sampled_from(sorted(_ACTIONS)), min_size=1, max_size=5), max_size=8),
    min_size=1,
    max_size=3,
)


@settings(max_examples=examples(20), deadline=None, phases=(Phase.explicit, Phase.generate))
@given(is_keyed=st.booleans(), lives=_LIVES, seed=st.integers(0, 1 << 32))
async def test_a_cut_never_shows_half_of_a_transaction(
    is_keyed: bool, lives: list[list[list[str]]], seed: int
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        world = _World(is_keyed, Random(seed))
        for rounds in lives:
            await _live(Path(directory), world, [["begin", "begin"], *rounds])
