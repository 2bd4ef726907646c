"""A union read finds exactly the rows that were appended, whatever happened to the tiers.

One example is a table's life: appends, tiering rounds, retention, rewrites of lake files by a
foreign engine, and between them every way to read. Stream ranges are read once when they come up
and again after everything else happened: a replay must give the same rows.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamhouse.core.errors import OffsetOutOfRangeError
from streamhouse.core.model.lake.facts import LakeRole
from streamhouse.reading.follow._stream_plan import plan_stream_range
from streamhouse.reading.options.options import STREAM, read_options
from streamhouse.reading.plan.scan_schema import output_columns
from streamhouse.reading.scan.split_reader import read_split
from tests.support.examples import examples
from tests.support.union_world import ModelRow, Tiers, UnionWorld

BUCKETS = 2
SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("region", pa.string()),
        pa.field("small", pa.int8()),
    ]
)
REGIONS = ("eu", "us", None)
PREDICATES: dict[str, Callable[[tuple[Any, ...]], bool]] = {
    "region = 'eu'": lambda r: r[1] == "eu",
    "id >= 20 AND id < 60": lambda r: 20 <= r[0] < 60,
    "region IS NULL OR small > 3": lambda r: r[1] is None or (r[2] is not None and r[2] > 3),
    "region IN ('us') AND id > 5": lambda r: r[1] == "us" and r[0] > 5,
    # On a row's address; the model's rows end with bucket, offset and timestamp.
    "__bucket = 1 AND (__offset < 7 OR id > 30)": lambda r: r[3] == 1 and (r[4] < 7 or r[0] > 30),
    "__timestamp < timestamp'2023-11-14 22:13:20.007'": lambda r: r[5] < 1_700_000_000_007_000,
}
LAYOUTS = (
    {"table.datalake.batch-layout.sort": "region, small"},
    {
        "table.datalake.batch-layout.partition": "truncate(10, id)",
        "table.datalake.batch-layout.sort": "zorder(region, id, small)",
    },
    {"table.datalake.batch-layout.partition": "region"},
)
DEATHS = ("committed", "batch-files-written", "batch-committed")
# In the rows' own lake table, and the second time in the batch layout.
AGING_DEATHS = (
    ("expiry-registered", 1),
    ("removal-staged", 1),
    ("removal-committed", 1),
    ("removal-staged", 2),
    ("removal-committed", 2),
)
TTL_MS = 10_000
Position = dict[int, int]
Row = tuple[Any, ...]

numbers = st.floats(0, 1, allow_nan=False)
appends = st.tuples(st.just("append"), st.integers(0, BUCKETS - 1), st.integers(1, 12))
steps = st.one_of(
    appends,
    appends,
    st.tuples(st.just("tier")),
    st.tuples(st.just("tier")),
    st.tuples(st.just("nibble")),
    st.tuples(st.just("die"), st.sampled_from(DEATHS)),
    st.tuples(st.just("overwrite"), st.integers(0, 5)),
    st.tuples(st.just("lay_out"), st.integers(0, 3)),
    st.tuples(st.just("expire"), numbers),
    st.tuples(st.just("age"), numbers, st.sampled_from([None, *AGING_DEATHS])),
    st.tuples(st.just("rewrite"), st.booleans()),
    st.tuples(
        st.just("read"),
        st.sampled_from([None, *PREDICATES]),
        st.sampled_from([None, ("region", "id"), ("small",)]),
    ),
    st.tuples(
        st.just("scan"),
        st.sampled_from([None, *PREDICATES]),
        st.sampled_from([None, ("region", "id"), ("small",)]),
        st.integers(0, 20),
    ),
    st.tuples(st.just("read_tier"), st.sampled_from(["lake", "log"])),
    st.tuples(st.just("read_as_of"), numbers),
    st.tuples(st.just("stream"), numbers, numbers, numbers, numbers),
)


class Life:
    """One table's life, and what was read of it."""

    def __init__(self, world: UnionWorld) -> None:
        self.world = world
        self.tiers = Tiers(world, LAYOUTS)
        self.next_id = 0
        self.replays: list[tuple[Position, Position, list[Row]]] = []

    def append(self, bucket: int, count: int) -> None:
        ids = range(self.next_id, self.next_id + count)
        self.next_id += count
        columns = [
            pa.array(ids),
            pa.array([REGIONS[i * 7 % 3] for i in ids], pa.string()),
            pa.array([None if i % 5 == 0 else i % 7 for i in ids], pa.int8()),
        ]
        self.world.append(bucket, pa.record_batch(columns, schema=SCHEMA))

    def tier(self) -> None:
        if self.lag() > 0 or self.world.state().has_overwritten_rows:
            result = self.world.tiering.tier()
            if result.kind == "recovered":
                return
            # Other engines see what the service says, row for row, and old rows for a while.
            expected = sorted((row.bucket, row.offset) for row in self.rows())
            assert self.young(self.world.tiering.addresses()) == expected
            state = self.world.state()
            if state.lake.batch is not None and not state.has_overwritten_rows:
                # One that is new, or late, is filled round by round.
                ends = state.lake.batch.tiered_offsets
                batch = self.world.tiering.addresses(LakeRole.BATCH.lake_name(UnionWorld.PATH))
                assert self.young(batch) == [(b, o) for b, o in expected if o < ends[b]]

    def rows(self) -> list[ModelRow]:
        """The rows of the table: all but those that have reached their time to live."""
        first = self.expired()
        return [row for row in self.world.rows if row.offset >= first[row.bucket]]

    def young(self, addresses: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Of the addresses of rows, which may not be gone, those that have not expired."""
        first = self.expired()
        return sorted((b, o) for b, o in addresses if o >= first[b])

    def expired(self) -> Position:
        return {b: at.expired_offset for b, at in self.world.state().positions.items()}

    def age(self, share: float, death: tuple[str, int] | None) -> None:
        """Time goes by until so many of the rows are too old; a worker looks, and may die at it."""
        if self.world.state().lake.snapshot_id is None or not self.rows():
            return
        rows = sorted(self.rows(), key=lambda row: row.timestamp_us)
        oldest_ms = rows[round(share * (len(rows) - 1))].timestamp_us // 1_000
        before = self.rows()

        self.world.age_out(oldest_ms + TTL_MS, death)

        kept = set(self.rows())
        assert all(row in kept for row in before if row.timestamp_us >= oldest_ms * 1_000)

    def overwrite(self, count: int) -> None:
        """All rows go, and in the same step others come."""
        self.world.overwrite()
        for bucket in range(BUCKETS if count else 0):
            self.append(bucket, count)

    def read(self, where: str | None, columns: tuple[str, ...] | None) -> None:
        options = {"where": where, "columns": columns and ",".join(columns)}
        given = {key: value for key, value in options.items() if value is not None}
        expected = [r for r in self.rows() if where is None or PREDICATES[where](_whole(r))]

        for found in self.world.read_layouts(**given):
            assert _rows(found) == _model_rows(expected, columns or tuple(SCHEMA.names))

    def scan(self, where: str | None, columns: tuple[str, ...] | None, limit: int) -> None:
        """Rows that come while a scan is read are none of its rows."""
        options = {"where": where, "columns": columns and ",".join(columns)}
        given = {key: value for key, value in options.items() if value is not None}
        rows = [r for r in self.rows() if where is None or PREDICATES[where](_whole(r))]
        expected = _model_rows(rows, columns or tuple(SCHEMA.names))

        whole = self.world.scan(includeMetadata=True, minPartitions=3, **given)
        some = self.world.scan(limit=limit, includeMetadata=True, minPartitions=3, **given)
        assert self.world.count(**{key: given[key] for key in given if key == "where"}) == len(rows)
        self.append(0, 3)

        assert _rows(whole.read_all()) == expected
        found = _rows(some.read_all())
        assert len(found) == min(limit, len(expected))
        assert set(found) <= set(expected)

    def read_tier(self, part: str) -> None:
        at = self.world.state().positions
        if part == "lake":
            expected = [r for r in self.rows() if r.offset < at[r.bucket].tiered_offset]
        else:
            # The log keeps rows for a time of its own.
            expected = [r for r in self.world.rows if r.offset >= at[r.bucket].log_start_offset]

        found = self.world.read(f"{UnionWorld.PATH}${part}", includeMetadata=True)

        assert _rows(found) == _model_rows(expected)

    def read_as_of(self, share: float) -> None:
        rows = self.rows()
        if not rows:
            return
        # Options take milliseconds, and the world's clock ticks in whole ones.
        moment = rows[int(share * (len(rows) - 1))].timestamp_us // 1_000

        before = self.world.read(includeMetadata=True, asOfTimestamp=moment)
        after = self.world.read(includeMetadata=True, startingTimestamp=moment + 1)

        assert _rows(before) == _model_rows([r for r in rows if r.timestamp_us <= moment * 1_000])
        assert _rows(after) == _model_rows([r for r in rows if r.timestamp_us > moment * 1_000])

    def stream(self, *shares: float) -> None:
        tops = {b: at.high_watermark for b, at in self.world.state().positions.items()}
        first = {b: at.first_offset for b, at in self.world.state().positions.items()}
        end = {b: first[b] + round((tops[b] - first[b]) * shares[b]) for b in tops}
        start = {b: first[b] + round((end[b] - first[b]) * shares[BUCKETS + b]) for b in tops}

        found = self.stream_rows(start, end)

        inside = [r for r in self.world.rows if start[r.bucket] <= r.offset < end[r.bucket]]
        assert found == _model_rows(inside)
        self.replays.append((start, end, found))

    def step(self, name: str, *arguments: Any) -> None:
        """Take the step of that name: one of the tiers', or one of this life."""
        getattr(self.tiers if hasattr(self.tiers, name) else self, name)(*arguments)

    def replay(self) -> None:
        first = self.truncated()
        for start, end, before in self.replays:
            if any(start[b] < min(first[b], end[b]) for b in first):
                with pytest.raises(OffsetOutOfRangeError, match="was overwritten"):
                    self.stream_rows(start, end)
                continue
            again = self.stream_rows(start, end)
            # What has expired since may be found in the log, and is not in the lake.
            first_row = self.expired()
            assert [r for r in again if r[-2] >= first_row[r[-3]]] == [
                r for r in before if r[-2] >= first_row[r[-3]]
            ]
            assert set(again) <= set(before)

    def stream_rows(self, start: Position, end: Position) -> list[Row]:
        options = {"table": UnionWorld.PATH, "endpoint": "http://memory", "minPartitions": "3"}
        state = self.world.state()
        output = output_columns(
            state.table.schema, columns=None, include_metadata=True, table=UnionWorld.PATH
        )
        plan = plan_stream_range(
            self.world.client,
            state,
            read_options(options, use=STREAM),
            output,
            start=start,
            end=end,
        )
        batches = [
            batch
            for split in plan.splits
            for batch in read_split(split, plan.context, client=self.world.client)
        ]
        return _rows(pa.Table.from_batches(batches, schema=plan.context.output_schema))

    def truncated(self) -> Position:
        return {b: at.truncated_offset for b, at in self.world.state().positions.items()}

    def lag(self) -> int:
        state = self.world.state()
        reached = state.reached_offsets()
        return sum(at.high_watermark - reached[b] for b, at in state.positions.items())


@settings(max_examples=examples(30), deadline=None)
@given(
    partitioned=st.booleans(),
    layout=st.sampled_from([{}, *LAYOUTS]),
    life=st.lists(steps, min_size=8, max_size=30),
)
def test_reads_equal_the_model(
    partitioned: bool, layout: dict[str, str], life: list[tuple[Any, ...]]
) -> None:
    with _table(partitioned, layout) as table:
        for name, *arguments in life:
            table.step(name, *arguments)
        table.read(None, None)
        table.replay()


aging_steps = st.one_of(
    st.tuples(st.just("append"), st.integers(0, BUCKETS - 1), st.integers(1, 6)),
    st.tuples(st.just("tier")),
    st.tuples(st.just("nibble")),
    st.tuples(st.just("die"), st.sampled_from(DEATHS)),
    st.tuples(st.just("lay_out"), st.integers(0, 3)),
    st.tuples(st.just("expire"), numbers),
)
agings = st.tuples(numbers, st.sampled_from([None, *AGING_DEATHS]))


@settings(max_examples=examples(6), deadline=None)
@given(
    partitioned=st.booleans(),
    layout=st.sampled_from(LAYOUTS),
    life=st.lists(
        st.tuples(st.lists(appends, max_size=3), aging_steps, agings), min_size=4, max_size=10
    ),
)
def test_both_layouts_have_the_same_rows_while_they_age(
    partitioned: bool,
    layout: dict[str, str],
    life: list[tuple[list[Row], Row, Row]],
) -> None:
    with _table(partitioned, layout) as table:
        for appended, (name, *arguments), aging in life:
            for _, *some in appended:
                table.append(*some)
                table.tier()
            table.step(name, *arguments)
            table.read(None, None)
            table.age(*aging)
            table.read(None, None)
            table.read("region = 'eu'", None)


@contextlib.contextmanager
def _table(partitioned: bool, layout: Mapping[str, str]) -> Iterator[Life]:
    with (
        tempfile.TemporaryDirectory(prefix="union-read-") as folder,
        UnionWorld(Path(folder)) as world,
    ):
        world.tiering.create_table(
            UnionWorld.PATH,
            SCHEMA,
            bucket_count=BUCKETS,
            partitioned_by=["region"] if partitioned else [],
            properties={**layout, "table.datalake.ttl": f"{TTL_MS}ms"},
        )
        yield Life(world)


def _whole(row: ModelRow) -> Row:
    return (*row.values, row.bucket, row.offset, row.timestamp_us)


def _rows(table: pa.Table) -> list[Row]:
    """Return the rows in address order, the timestamp as microseconds."""
    index = table.schema.get_field_index("__timestamp")
    table = table.set_column(index, "__timestamp", table.column(index).cast(pa.int64()))
    rows = zip(*(column.to_pylist() for column in table.columns), strict=True)
    return sorted(rows, key=lambda row: row[-3:])


def _model_rows(rows: list[ModelRow], names: tuple[str, ...] = tuple(SCHEMA.names)) -> list[Row]:
    found = []
    for row in sorted(rows, key=lambda r: (r.bucket, r.offset)):
        values = dict(zip(SCHEMA.names, row.values, strict=True))
        found.append((*(values[n] for n in names), row.bucket, row.offset, row.timestamp_us))
    return found
