"""Reads of a primary key table find exactly the rows of a dict, whatever happened to the tiers.

One example is a table's life: upserts and deletes, tiering rounds, retention, rewrites of lake
files by a foreign engine, and between them every way to read. What a stream bootstraps from is
read when it comes up and again after everything else happened.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from streamhouse.core.errors import OffsetOutOfRangeError
from streamhouse.reading.follow._stream_plan import plan_bootstrap_range, plan_stream_range
from streamhouse.reading.follow.stream_position import Bootstrap
from streamhouse.reading.options.options import STREAM, read_options
from streamhouse.reading.plan._read_cut import ReadPlan
from streamhouse.reading.plan.row_form import table_columns
from streamhouse.reading.scan.scan import LakePiece, LogPiece
from streamhouse.reading.scan.split_reader import read_split
from tests.support.examples import examples
from tests.support.key_table_world import Address, KeyTableWorld
from tests.support.union_world import Tiers

BUCKETS = 2
KEYS = 12
SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("region", pa.string()),
        pa.field("n", pa.int8()),
    ]
)
REGIONS = ("eu", "us", None)
Row = dict[str, Any]
Position = dict[int, int]
PREDICATES: dict[str, Callable[[Address, Row], bool]] = {
    "region = 'eu'": lambda _, r: r["region"] == "eu",
    "n > 3": lambda _, r: r["n"] is not None and r["n"] > 3,
    "id >= 2 AND id < 9 AND region IS NOT NULL": lambda _, r: (
        2 <= r["id"] < 9 and r["region"] is not None
    ),
    "__bucket = 1 AND __offset < 7": lambda a, _: a[0] == 1 and a[1] < 7,
}

LAYOUTS = (
    {"table.datalake.batch-layout.sort": "region, n"},
    {
        "table.datalake.batch-layout.partition": "bucket(3, n)",
        "table.datalake.batch-layout.sort": "zorder(region, n)",
    },
    {"table.datalake.batch-layout.partition": "region"},
)
DEATHS = ("committed", "batch-files-written", "batch-committed")

numbers = st.floats(0, 1, allow_nan=False)
change = st.tuples(
    st.sampled_from(["upsert", "upsert", "delete"]),
    st.integers(0, KEYS - 1),
    st.sampled_from(REGIONS),
    st.one_of(st.none(), st.integers(0, 6)),
)
writes = st.tuples(
    st.just("write"), st.integers(0, BUCKETS - 1), st.lists(change, min_size=3, max_size=12)
)
others = st.one_of(
    st.tuples(st.just("tier")),
    st.tuples(st.just("tier")),
    st.tuples(st.just("nibble")),
    st.tuples(st.just("die"), st.sampled_from(DEATHS)),
    st.tuples(st.just("lay_out"), st.integers(0, 3)),
    st.tuples(st.just("expire"), numbers),
    st.tuples(st.just("rewrite"), st.booleans()),
    st.tuples(
        st.just("read"),
        st.sampled_from([None, *PREDICATES]),
        st.sampled_from([None, ("region", "n"), ("n",)]),
    ),
    st.tuples(st.just("scan"), st.sampled_from([None, *PREDICATES]), st.integers(0, 20)),
    st.tuples(st.just("read_lake")),
    st.tuples(st.just("read_changes"), st.sampled_from(["log", "changelog"])),
    st.tuples(st.just("read_as_of"), numbers),
    st.tuples(st.just("stream"), numbers, numbers, st.booleans()),
    st.tuples(st.just("bootstrap"), numbers, numbers),
)
lives = st.lists(st.tuples(writes, others), min_size=3, max_size=8)


class Life:
    """One table's life, and what was read of it."""

    def __init__(self, world: KeyTableWorld) -> None:
        self.world = world
        self.tiers = Tiers(world.union, LAYOUTS)
        self.replays: list[tuple[Bootstrap, Position, Position, Any]] = []

    def write(self, bucket: int, changes: list[tuple[Any, ...]]) -> None:
        self.world.write(
            bucket,
            [
                (operation, {"id": key * BUCKETS + bucket, "region": region, "n": n})
                for operation, key, region, n in changes
            ],
        )

    def tier(self) -> None:
        if self.tiers.lacks_rows():
            self.world.tiering.tier()

    def pack(self) -> None:
        """Our maintenance rewrites what it would."""
        if self.world.union.state().lake.snapshot_id is not None:
            tiering = self.world.tiering
            tiering.maintain(policy=tiering.on_demand())

    def read(self, where: str | None, columns: tuple[str, ...] | None) -> None:
        options = {"where": where, "columns": columns and ",".join(columns)}
        given = {key: value for key, value in options.items() if value is not None}
        names = columns or tuple(SCHEMA.names)
        expected = {
            address: {name: row[name] for name in names}
            for address, row in self.world.live_rows().items()
            if where is None or PREDICATES[where](address, row)
        }

        for found in self.world.union.read_layouts(minPartitions=3, **given):
            assert _rows(found) == expected

    def scan(self, where: str | None, limit: int) -> None:
        """Changes that come while a scan is read are none of its rows."""
        given = {} if where is None else {"where": where}
        expected = {
            address: row
            for address, row in self.world.live_rows().items()
            if where is None or PREDICATES[where](address, row)
        }

        whole = self.world.union.scan(includeMetadata=True, minPartitions=3, **given)
        some = self.world.union.scan(limit=limit, includeMetadata=True, minPartitions=3, **given)
        assert self.world.union.count(**given) == len(expected)
        self.write(0, [("upsert", 0, "us", 1), ("delete", 1, None, None)])

        assert _rows(whole.read_all()) == expected
        found = _rows(some.read_all())
        assert len(found) == min(limit, len(expected))
        assert found.items() <= expected.items()

    def read_lake(self) -> None:
        ends = {b: at.tiered_offset for b, at in self.world.union.state().positions.items()}

        found = self.world.union.read(f"{KeyTableWorld.PATH}$lake", includeMetadata=True)

        assert _rows(found) == self.world.rows_at(ends)

    def read_changes(self, part: str) -> None:
        at = self.world.union.state().positions

        found = self.world.union.read(f"{KeyTableWorld.PATH}${part}", includeMetadata=True)

        expected = {
            (bucket, offset): change
            for (bucket, offset), change in self.world.changelog().items()
            if offset
            >= (0 if part == "changelog" and self._has_history() else at[bucket].log_start_offset)
        }
        assert _changes(found) == expected

    def read_as_of(self, share: float) -> None:
        if not self.world.moments:
            return
        moment = self.world.moments[int(share * (len(self.world.moments) - 1))]
        try:
            # Options take milliseconds, and the world's clock ticks in whole ones.
            found = self.world.union.read(
                includeMetadata=True, asOfTimestamp=moment.timestamp_us // 1_000
            )
        except OffsetOutOfRangeError:
            assert any(at.log_start_offset for at in self.world.union.state().positions.values())
            return

        assert _rows(found) == self.world.rows_at(moment.ends)

    def stream(self, low: float, high: float, upserts_only: bool) -> None:
        at = self.world.union.state().positions
        first = {b: 0 if self._has_history() else p.log_start_offset for b, p in at.items()}
        start = {b: _between(first[b], p.high_watermark, low) for b, p in at.items()}
        end = {b: _between(start[b], p.high_watermark, high) for b, p in at.items()}

        plan = plan_stream_range(*self._stream(upserts_only), start=start, end=end)

        inside = {
            address: (kind, row)
            for address, (kind, row) in self.world.changelog().items()
            if start[address[0]] <= address[1] < end[address[0]]
        }
        if upserts_only:
            versions = {a: row for a, (kind, row) in inside.items() if kind in ("+I", "+U")}
            assert _rows(self._table(plan)) == versions
        else:
            assert _changes(self._table(plan)) == inside
            assert _each_bucket_in_order_in_one_split(plan)

    def bootstrap(self, low: float, high: float) -> None:
        lake = self.world.union.state().lake
        if lake.snapshot_id is None:
            return
        start = {b: _between(0, end, low) for b, end in lake.tiered_offsets.items()}
        end = {b: _between(start[b], e, high) for b, e in lake.tiered_offsets.items()}
        bootstrap = Bootstrap(snapshot_id=lake.snapshot_id, ends=lake.tiered_offsets, pin="p")
        expected = {
            address: ("+I", row)
            for address, row in self.world.rows_at(lake.tiered_offsets).items()
            if start[address[0]] <= address[1] < end[address[0]]
        }

        self.replays.append((bootstrap, start, end, expected))
        self.replay()

    def step(self, name: str, *arguments: Any) -> None:
        """Take the step of that name: one of the tiers', or one of this life."""
        getattr(self.tiers if hasattr(self.tiers, name) else self, name)(*arguments)

    def replay(self) -> None:
        for bootstrap, start, end, expected in self.replays:
            plan = plan_bootstrap_range(*self._stream(False), bootstrap, start=start, end=end)
            assert _changes(self._table(plan)) == expected

    def _has_history(self) -> bool:
        return self.world.union.state().lake.changelog is not None

    def _stream(self, upserts_only: bool) -> tuple[Any, ...]:
        state = self.world.union.state()
        feed = "false" if upserts_only else "true"
        given = {"table": KeyTableWorld.PATH, "endpoint": "http://memory", "readChangeFeed": feed}
        output = table_columns(
            state.table, columns=None, include_metadata=True, has_change_type=not upserts_only
        )
        return self.world.union.client, state, read_options(given, use=STREAM), output

    def _table(self, plan: ReadPlan) -> pa.Table:
        batches = [
            batch
            for split in plan.splits
            for batch in read_split(split, plan.context, client=self.world.union.client)
        ]
        return pa.Table.from_batches(batches, schema=plan.context.output_schema)


@settings(max_examples=examples(20), deadline=None)
@given(
    partitioned=st.booleans(),
    history=st.booleans(),
    layout=st.sampled_from([{}, *LAYOUTS]),
    image=st.sampled_from(["full", "after"]),
    version=st.sampled_from(["2", "3"]),
    life=lives,
)
def test_reads_equal_the_model(
    partitioned: bool,
    history: bool,
    layout: dict[str, str],
    image: str,
    version: str,
    life: list[tuple[tuple[Any, ...], ...]],
) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="union-read-keys-") as folder,
        KeyTableWorld(Path(folder)) as world,
    ):
        world.create_key_table(
            SCHEMA,
            bucket_count=BUCKETS,
            partitioned_by=["region"] if partitioned else [],
            properties={
                "table.changelog.image": image,
                "table.datalake.changelog": str(history).lower(),
                "table.datalake.format-version": version,
                **layout,
            },
        )
        table = Life(world)
        # Most of what follows changes rows that the lake has.
        for bucket in range(BUCKETS):
            table.write(bucket, [("upsert", key, "eu", key % 7) for key in range(KEYS)])
        table.tier()
        for name, *arguments in itertools.chain.from_iterable(life):
            # Stock pyiceberg compacts no table of format version 3.
            is_ours = (name, version) == ("rewrite", "3")
            table.step(*(("pack",) if is_ours else (name, *arguments)))
        table.read(None, None)
        table.tier()
        table.read(None, None)
        table.replay()


def _between(low: int, high: int, share: float) -> int:
    return low + round((high - low) * share)


def _rows(table: pa.Table) -> dict[Address, Row]:
    """Return the user's columns of every row by its address, which no two rows share."""
    found: dict[Address, Row] = {}
    for row in table.to_pylist():
        address = (row.pop("__bucket"), row.pop("__offset"))
        assert row.pop("__timestamp") is not None
        assert address not in found
        found[address] = row
    return found


def _changes(table: pa.Table) -> dict[Address, tuple[str, Row]]:
    return {address: (row.pop("__change_type"), row) for address, row in _rows(table).items()}


def _each_bucket_in_order_in_one_split(plan: ReadPlan) -> bool:
    pieces = [piece for split in plan.splits for piece in split.pieces]
    buckets = [piece.bucket for piece in pieces if isinstance(piece, LogPiece)]
    of_splits = [{p.bucket for p in s.pieces if isinstance(p, LakePiece)} for s in plan.splits]
    lake = [bucket for found in of_splits for bucket in found]
    return len(buckets) == len(set(buckets)) and len(lake) == len(set(lake))
