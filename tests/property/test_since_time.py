"""The first row since a time, whatever left the log, was overwritten, or is in no lake any more."""

from __future__ import annotations

import asyncio
import tempfile
from bisect import bisect_left
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from streamhouse.core.model.lake.facts import LakeState
from streamhouse.storage_service.engine.manager import TabletManager
from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.server.history.lake_reads import LakeReads
from streamhouse.storage_service.server.history.since_time import (
    SinceTime,
    TimeQuestion,
    first_since,
)
from tests.support.fetch_world import MemoryHistory
from tests.support.in_process_service import event_rows, make_table, open_manager, routed

_BEGIN_US = 1_000_000

_steps = st.lists(
    st.one_of(
        # Rows, and how far the clock went meanwhile: it may be set back.
        st.tuples(st.just("append"), st.integers(1, 3), st.integers(-2, 3)),
        st.tuples(st.sampled_from(["tier", "cut", "cut all", "overwrite"]), st.just(0), st.just(0)),
    ),
    min_size=1,
    max_size=12,
)


@dataclass
class _World:
    """One bucket, and what was ever written to it: the time of each offset."""

    manager: TabletManager
    table: OpenTable
    history: MemoryHistory = field(default_factory=MemoryHistory)
    clock_us: int = _BEGIN_US
    times_us: list[int] = field(default_factory=list)
    batches: list[tuple[int, pa.RecordBatch]] = field(default_factory=list)
    tiered: int = 0

    async def append(self, count: int, later_us: int) -> None:
        self.clock_us += later_us
        first = len(self.times_us)
        rows = event_rows(first, first + count)
        batch = routed(0, rows)._replace(timestamp_us=self.clock_us)
        appended = await self.manager.append(self.table, [batch])
        self.times_us += [appended.timestamp_us] * count
        self.batches.append((first, rows))

    def cut(self, offset: int) -> None:
        """Remove batches that end at or below an offset; each of them has its segment."""
        self.table.tablet(0).apply_retention(
            timestamp_us_before=1 << 60, offset_max=offset, tiered_offset=self.tiered
        )

    def tier(self) -> None:
        """Have in the lake what is in the log and not there yet."""
        log = self.table.tablet(0)
        for first, rows in self.batches:
            if first >= max(self.tiered, log.log_start_offset):
                self.history.keep(0, first, self.times_us[first], rows)
        self.tiered = len(self.times_us)
        self.table.keep_lake(
            LakeState(snapshot_id=1, table_uuid="u", tiered_offsets={0: self.tiered})
        )

    def overwrite(self) -> None:
        self.table.truncate({0: len(self.times_us)}, timestamp_us=self.clock_us)
        self.history.runs.clear()


async def _built(manager: TabletManager, steps: list[tuple[str, int, int]]) -> _World:
    world = _World(manager, await make_table(manager, is_keyed=False))
    for step, count, later_us in steps:
        if step == "append":
            await world.append(count, later_us)
            # Each batch gets a segment of its own.
            world.cut(0)
        elif step == "tier":
            world.tier()
        elif step == "overwrite":
            world.overwrite()
        else:
            world.cut(world.tiered if step == "cut" else len(world.times_us))
    return world


async def _check(folder: Path, steps: list[tuple[str, int, int]]) -> None:
    async with open_manager(folder, clock_us=lambda: _BEGIN_US - 10) as manager:
        world = await _built(manager, steps)
        lake_reads = LakeReads(lambda: world.history)
        moments = range(_BEGIN_US - 12, max(world.times_us, default=_BEGIN_US) + 3)
        questions = [TimeQuestion(world.table, 0, moment) for moment in moments]
        answers = await first_since(questions, run=manager.runtime.run, lake_reads=lake_reads)
        lake_reads.close()
        log = world.table.tablet(0)
        first = world.table.truncated_offsets.get(0, 0)
        in_lake = [
            o
            for start, _, rows in world.history.runs.get(0, [])
            for o in range(start, start + len(rows))
        ]
        is_joined = world.tiered >= log.log_start_offset
        lake_rows = {o for o in in_lake if is_joined and o >= max(first, log.forgotten_offset)}
        log_rows = set(range(log.log_start_offset, len(world.times_us)))
        for question, answer in zip(questions, answers, strict=True):
            _judge(world, question.timestamp_us, answer, first, lake_rows | log_rows)


def _judge(world: _World, moment: int, answer: object, first: int, readable: set[int]) -> None:
    times = world.times_us
    assert isinstance(answer, SinceTime), answer
    # Time never goes back, whatever the clock did.
    assert times == sorted(times)
    rows = [o for o in sorted(readable) if times[o] >= moment]
    offset = rows[0] if rows else len(times)
    assert answer.offset == offset
    assert answer.timestamp_us == (times[offset] if rows else None)
    if answer.lost is None:
        assert offset == max(first, bisect_left(times, moment))
    else:
        assert not readable & set(range(answer.lost.start, answer.lost.end))
        assert all(times[o] >= moment for o in readable)


@given(_steps)
def test_the_first_row_since_a_time(steps: list[tuple[str, int, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_check(Path(folder), steps))
