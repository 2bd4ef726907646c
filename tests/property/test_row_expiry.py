"""Rows by key that age, against a dict with times: writes, trimming, restarts, looks in any order.

A row is there for its time to live since it was last written, by whatever wrote it, changed or not;
a look takes away every row that is older by more than the step between two marks.
"""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pyarrow as pa
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from streamhouse.core.model.changelog import DELETE, UPDATE_BEFORE
from streamhouse.core.model.table_state import TieringReport
from streamhouse.storage_service.engine.manager import TabletManager
from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.engine.upkeep._retention import apply_retention
from streamhouse.storage_service.kv.plan.write_plan import KeyWrite, delete_of
from tests.support.examples import examples
from tests.support.in_process_service import EVENTS, expiry_of, open_manager, table_descriptor
from tests.support.kv_world import looked_up

BUCKETS = 2
IDS = 24
TTL_S = 6_400
STEP_S = TTL_S // 64


@dataclass
class _World:
    """The rows there are by id: their name and when they were last written."""

    random: Random
    now_us: int = 1_800_000_000_000_000
    rows: dict[int, tuple[str, int]] = field(default_factory=dict)

    def clock_us(self) -> int:
        return self.now_us


def _batch(rows: dict[int, str]) -> pa.RecordBatch:
    return pa.record_batch([pa.array(rows, pa.int64()), list(rows.values())], schema=EVENTS)


def _writes(rows: dict[int, str], *, is_delete: bool = False) -> list[KeyWrite]:
    writes = []
    for bucket in range(BUCKETS):
        batch = _batch({i: name for i, name in rows.items() if i % BUCKETS == bucket})
        if batch.num_rows:
            write = delete_of(bucket, batch) if is_delete else KeyWrite(bucket, batch)
            writes.append(write)
    return writes


class _Life:
    """The table between two restarts."""

    def __init__(self, manager: TabletManager, table: OpenTable, world: _World) -> None:
        self.manager = manager
        self.table = table
        self.world = world
        self.expiry = expiry_of(
            manager, clock_us=world.clock_us, monotonic_s=lambda: self.looks * TTL_S
        )
        self.looks = 0

    async def write(self) -> None:
        ids = self.world.random.sample(range(IDS), self.world.random.randint(1, 10))
        rows = {i: f"n{self.world.random.randint(0, 1)}" for i in ids}
        await self.manager.write_keys(self.table, _writes(rows), columns=None, writer_id=0)
        self.world.rows |= {i: (name, self.world.now_us) for i, name in rows.items()}

    async def delete(self) -> None:
        ids = self.world.random.sample(range(IDS), self.world.random.randint(1, 4))
        writes = _writes(dict.fromkeys(ids, ""), is_delete=True)
        await self.manager.write_keys(self.table, writes, columns=None, writer_id=0)
        for i in ids:
            self.world.rows.pop(i, None)

    async def wait(self) -> None:
        self.world.now_us += self.world.random.randint(1, TTL_S // 2) * 1_000_000

    async def look(self) -> None:
        self.looks += 1
        await self.expiry.look()
        self.check(must_be_gone_after_s=TTL_S + 2 * STEP_S)

    async def look_while_writing(self) -> None:
        self.looks += 1
        await asyncio.gather(self.expiry.look(), self.write())
        self.check(must_be_gone_after_s=TTL_S + 2 * STEP_S)

    async def trim(self) -> None:
        """Make the log forget what it can; the service looks far more often than it trims."""
        await self.look()
        ends = {b: at.high_watermark for b, at in self.table.positions().items()}
        claim = await self.manager.tiering.claim("w", tables=[self.table], force=True)
        if claim.assignment is not None:
            await self.manager.tiering.complete(
                self.table,
                TieringReport(
                    table_id=self.table.info.table_id,
                    epoch=claim.assignment.epoch,
                    snapshot_id=claim.assignment.epoch,
                    table_uuid="u",
                    tiered_offsets=ends,
                ),
            )
        runtime = dataclasses.replace(self.manager.runtime, clock_us=lambda: self.world.now_us + 1)
        await apply_retention(self.table, runtime, is_early=True)

    def check(self, *, must_be_gone_after_s: float | None = None) -> None:
        there = self.there()
        for i, (name, written_us) in list(self.world.rows.items()):
            age_s = (self.world.now_us - written_us) / 1e6
            if age_s < TTL_S:
                assert there.get(i) == name, f"row {i} is {age_s} s old and gone"
            elif must_be_gone_after_s is not None and age_s > must_be_gone_after_s:
                assert i not in there, f"row {i} is {age_s} s old and still there"
            if i not in there:
                del self.world.rows[i]
        assert there == {i: name for i, (name, _) in self.world.rows.items()}
        assert self.table.row_count == len(there)

    def there(self) -> dict[int, str]:
        keys = pa.record_batch([pa.array(range(IDS), pa.int64())], names=["id"])
        rows: dict[int, str] = {}
        for bucket in self.table.key_buckets:
            found = looked_up(bucket.rows, keys).rows.to_pydict()
            rows |= dict(zip(found["id"], found["name"], strict=True))
        return rows


ACTIONS = {
    "write": _Life.write,
    "delete": _Life.delete,
    "wait": _Life.wait,
    "look": _Life.look,
    "look while writing": _Life.look_while_writing,
    "trim": _Life.trim,
}


async def _live(data_dir: Path, world: _World, actions: list[str], *, is_last: bool) -> None:
    async with open_manager(data_dir, clock_us=world.clock_us) as manager:
        if not manager.list_tables(None):
            ttl = {"table.datalake.ttl": f"{TTL_S}s"}
            await manager.create_table(
                table_descriptor(bucket_count=BUCKETS, primary_key=("id",), properties=ttl)
            )
        table = next(iter(manager.open_tables()))
        life = _Life(manager, table, world)
        life.check()
        for action in actions:
            await ACTIONS[action](life)
        life.check()
        if not is_last:
            return
        # Nobody writes any more: in the end nothing is left, and the changelog says so.
        for _ in range(5):
            await life.wait()
            await life.look()
        world.now_us += 2 * TTL_S * 1_000_000
        await life.look()
        assert life.there() == {}
        _check_retractions(table)


def _check_retractions(table: OpenTable) -> None:
    """Every change that the log still has retracts what was there, and at the end nothing is."""
    for tablet in table.tablets:
        live: dict[int, str] = {}
        offset = tablet.log_start_offset
        is_whole = offset == 0
        while offset < tablet.high_watermark:
            for frame in tablet.read(offset, bytes_max=1 << 20):
                payload = pa.py_buffer(frame.payload)
                for change in pa.ipc.read_record_batch(payload, table.info.log_schema).to_pylist():
                    if change["__change_type"] in (UPDATE_BEFORE, DELETE):
                        before = live.pop(change["id"], None)
                        assert before == change["name"] or not is_whole
                    else:
                        assert change["id"] not in live
                        live[change["id"]] = change["name"]
                offset = frame.base_offset + frame.row_count
        assert live == {}


@settings(max_examples=examples(30), deadline=None, phases=(Phase.explicit, Phase.generate))
@given(
    lives=st.lists(st.lists(st.sampled_from(sorted(ACTIONS)), max_size=12), min_size=1, max_size=3),
    seed=st.integers(0, 1 << 32),
)
async def test_rows_stay_their_time_and_no_longer(lives: list[list[str]], seed: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        world = _World(Random(seed))
        for number, actions in enumerate(lives, 1):
            is_last = number == len(lives)
            await _live(Path(directory), world, actions, is_last=is_last)
