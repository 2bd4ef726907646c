"""What a subscription from the beginning yields is the log, whatever happens to the tiers.

The reader reads a few batches now and then and is started again with its last token, through JSON,
at any moment: in the middle of the history as well as of live rows.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from streamhouse.reading.follow.full_subscription import TableBatch
from tests.support.examples import examples
from tests.support.key_table_world import KeyTableWorld
from tests.support.reading_client import Follower, follow
from tests.support.union_world import Tiers, UnionWorld

BUCKETS = 2
SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("region", pa.string())])
KEY_SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("n", pa.int64())])

shares = st.floats(0, 1, allow_nan=False)
reading = st.one_of(
    st.tuples(st.just("read"), st.integers(1, 4)),
    st.tuples(st.just("restart")),
)
steps = st.one_of(
    st.tuples(st.just("append"), st.integers(0, BUCKETS - 1), st.integers(1, 12)),
    st.tuples(st.just("append"), st.integers(0, BUCKETS - 1), st.integers(1, 12)),
    st.tuples(st.just("tier")),
    st.tuples(st.just("nibble")),
    st.tuples(st.just("die"), st.sampled_from(("committed",))),
    st.tuples(st.just("expire"), shares),
    st.tuples(st.just("rewrite"), st.booleans()),
    reading,
    reading,
)


class _Life:
    """One log table's life, and its reader."""

    def __init__(self, world: UnionWorld) -> None:
        self.world = world
        self.tiers = Tiers(world, ())
        self.next_id = 0

        def begin(token: Mapping[str, Any] | None) -> Iterator[TableBatch]:
            said = None if token is None else json.loads(json.dumps(token))
            return follow(world.tiering.service, UnionWorld.PATH, token=said)

        self.follower = Follower(begin)

    def append(self, bucket: int, count: int) -> None:
        ids = list(range(self.next_id, self.next_id + count))
        self.next_id += count
        regions = [("eu", "us", None)[i % 3] for i in ids]
        self.world.append(bucket, pa.record_batch([ids, regions], schema=SCHEMA))

    def tier(self) -> None:
        if self.tiers.lacks_rows():
            self.world.tiering.tier()

    def step(self, name: str, *arguments: Any) -> None:
        for owner in (self.follower, self.tiers, self):
            if hasattr(owner, name):
                getattr(owner, name)(*arguments)
                return
        raise AssertionError(name)


@settings(max_examples=examples(12), deadline=None)
@given(partitioned=st.booleans(), life=st.lists(steps, min_size=8, max_size=40))
def test_a_log_tables_rows_come_once_and_in_order(
    partitioned: bool, life: list[tuple[Any, ...]]
) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="full-subscription-") as folder,
        UnionWorld(Path(folder)) as world,
    ):
        world.tiering.create_table(
            UnionWorld.PATH,
            SCHEMA,
            bucket_count=BUCKETS,
            partitioned_by=["region"] if partitioned else [],
        )
        table = _Life(world)
        for name, *arguments in life:
            table.step(name, *arguments)
        table.follower.read()

        seen = table.follower.seen
        for bucket in range(BUCKETS):
            mine = [row for row in world.rows if row.bucket == bucket]
            expected = [(row.offset, row.timestamp_us, *row.values) for row in mine]
            assert _rows_of(seen, bucket) == expected


def _rows_of(batches: list[TableBatch], bucket: int) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    for batch in batches:
        if batch.bucket == bucket:
            times = batch.timestamps.cast(pa.int64())
            columns = [batch.offsets, times, *batch.data.columns]
            found += zip(*(column.to_pylist() for column in columns), strict=True)
    return found


key_changes = st.lists(
    st.tuples(st.sampled_from(("upsert", "upsert", "delete")), st.integers(0, 12)),
    min_size=1,
    max_size=8,
)
key_steps = st.one_of(
    st.tuples(st.just("write"), key_changes),
    st.tuples(st.just("write"), key_changes),
    st.tuples(st.just("tier")),
    st.tuples(st.just("expire_snapshots")),
    reading,
    reading,
)


class _KeyLife:
    """One primary key table's life, and its reader."""

    def __init__(self, world: KeyTableWorld) -> None:
        self.world = world
        self.next_value = 0
        self.has_expired = False

        def begin(token: Mapping[str, Any] | None) -> Iterator[TableBatch]:
            said = None if token is None else json.loads(json.dumps(token))
            return follow(world.tiering.service, KeyTableWorld.PATH, token=said, step_rows_max=4)

        self.follower = Follower(begin)

    def write(self, changes: list[tuple[str, int]]) -> None:
        made = []
        for how, key in changes:
            self.next_value += 1
            row = {"id": key, "n": self.next_value}
            made.append((how, row if how == "upsert" else {"id": key}))
        self.world.change(made)  # type: ignore[arg-type]

    def tier(self) -> None:
        state = self.world.union.state()
        if any(at.high_watermark > at.tiered_offset for at in state.positions.values()):
            self.world.tiering.tier()

    def expire_snapshots(self) -> None:
        if self.world.union.state().lake.snapshot_id is not None:
            self.world.union.expire_old_snapshots()
            self.has_expired = True

    def step(self, name: str, *arguments: Any) -> None:
        owner = self.follower if hasattr(self.follower, name) else self
        getattr(owner, name)(*arguments)


@settings(max_examples=examples(12), deadline=None)
@given(
    before=key_changes,
    is_tiered=st.booleans(),
    life=st.lists(key_steps, min_size=6, max_size=24),
)
def test_a_primary_key_tables_rows_and_changes_make_the_table(
    before: list[tuple[str, int]], is_tiered: bool, life: list[tuple[Any, ...]]
) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="full-subscription-") as folder,
        KeyTableWorld(Path(folder)) as world,
    ):
        world.create_key_table(KEY_SCHEMA, bucket_count=BUCKETS)
        table = _KeyLife(world)
        table.write(before)
        if is_tiered:
            table.tier()
        for name, *arguments in life:
            table.step(name, *arguments)
        table.follower.read()

        found: dict[int, int] = {}
        last = dict.fromkeys(range(BUCKETS), -1)
        for batch in table.follower.seen:
            rows = batch.data.to_pylist()
            for offset, row in zip(batch.offsets.to_pylist(), rows, strict=True):
                assert offset > last[batch.bucket]
                last[batch.bucket] = offset
                _apply(found, row, is_strict=not table.has_expired)
        assert found == {row["id"]: row["n"] for row in world.rows.values()}


def _apply(found: dict[int, int], row: dict[str, Any], *, is_strict: bool) -> None:
    """Change the copy as a consumer of changes does; `is_strict` refuses what does not fit."""
    change, key, value = row["__change_type"], row["id"], row["n"]
    if is_strict:
        assert (key in found) is (change != "+I" and not (change == "+U" and key not in found))
        assert change not in ("-U", "-D") or found[key] == value
    if change == "-D":
        found.pop(key, None)
    elif change in ("+I", "+U"):
        found[key] = value
