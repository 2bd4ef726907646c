"""A live cut has exactly the rows of the table, whatever happened to the tiers, for every reader.

One example is a table's life: appends, or upserts and deletes, and between them rounds, workers
that die, layouts, retention, and rewrites of lake files by a foreign engine. After each step the
live cut is read by stock pyiceberg and by DuckDB, and beside them the union read; all must find the
model's rows, each at its address. DuckDB reads every cut again at the end: none has changed.
"""

from __future__ import annotations

import datetime as dt
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st
from pyiceberg.table import StaticTable

from integration.judges.duckdb_read import connect
from streamhouse.core.errors import UnavailableError
from streamhouse.core.model.lake.facts import LakeRole
from streamhouse.lake.catalogs._sql_catalog import open_catalog
from streamhouse.lake.guards.served_tables import ServedTable
from streamhouse.lake.staged_lake import StagedLake
from streamhouse.reading.live.live_table import LiveLakeTable
from tests.support.examples import examples
from tests.support.key_table_world import Address, KeyTableWorld
from tests.support.union_world import Tiers

BUCKETS = 2
KEYS = 12
SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("region", pa.string()),
        pa.field("n", pa.int32()),
        pa.field("at", pa.timestamp("us", tz="UTC")),
        pa.field("place", pa.struct([("tags", pa.list_(pa.string()))])),
    ]
)
METADATA = ("__bucket", "__offset", "__timestamp")
REGIONS = ("eu", "us", None)
PARTITIONS = (
    (),
    ("region",),
    ("bucket(3, n)", "region"),
    ("truncate(1, region)",),
    ("truncate(4, n)", "year(at)"),
    ("month(at)",),
    ("day(at)", "bucket(2, region)"),
    ("hour(at)",),
)
LAYOUTS = (
    {"table.datalake.batch-layout.sort": "region, n"},
    {"table.datalake.batch-layout.partition": "bucket(3, n)"},
    {"table.datalake.batch-layout.partition": "region"},
)
DEATHS = ("files-written", "committed", "batch-committed")

Row = dict[str, Any]
numbers = st.floats(0, 1, allow_nan=False)
change = st.tuples(
    st.sampled_from(["upsert", "upsert", "delete"]),
    st.integers(0, KEYS - 1),
    st.integers(0, 30),
)
write = st.tuples(
    st.just("write"), st.integers(0, BUCKETS - 1), st.lists(change, min_size=1, max_size=9)
)
other = st.one_of(
    write,
    st.tuples(st.just("tier")),
    st.tuples(st.just("nibble")),
    st.tuples(st.just("die"), st.sampled_from(DEATHS)),
    st.tuples(st.just("lay_out"), st.integers(0, 3)),
    st.tuples(st.just("expire"), numbers),
    st.tuples(st.just("rewrite"), st.booleans()),
)


class Life:
    """One table's life, and every live cut that was made of it."""

    def __init__(self, world: KeyTableWorld, readers: duckdb.DuckDBPyConnection) -> None:
        self.world = world
        self.union = world.union
        self.tiers = Tiers(world.union, LAYOUTS)
        self.duckdb = readers
        self.is_keyed = bool(world.info.descriptor.primary_key)
        self.catalog = open_catalog(world.tiering.catalog)
        lake = StagedLake(self.catalog, world.tiering.catalog)
        self.live = {role: LiveLakeTable(lake, role=role) for role in LakeRole}
        self.now_s = 1_800_000_000.0
        self.cuts: dict[str, dict[Address, Row]] = {}

    def write(self, bucket: int, changes: list[tuple[str, int, int]]) -> None:
        rows = [(verb, _row(key * BUCKETS + bucket, value)) for verb, key, value in changes]
        if self.is_keyed:
            self.world.write(bucket, rows)
        else:
            batch = pa.RecordBatch.from_pylist([row for _, row in rows], schema=SCHEMA)
            self.union.append(bucket, batch)

    def tier(self) -> None:
        if self.tiers.lacks_rows():
            self.world.tiering.tier()

    def step(self, name: str, *arguments: Any) -> None:
        """Take a step, of the tiers or of this life, and judge the cut after it."""
        getattr(self.tiers if hasattr(self.tiers, name) else self, name)(*arguments)
        self.judge()

    def expected(self) -> dict[Address, Row]:
        if self.is_keyed:
            return self.world.live_rows()
        return {
            (row.bucket, row.offset): dict(zip(SCHEMA.names, row.values, strict=True))
            for row in self.union.rows
        }

    def judge(self) -> None:
        expected = self.expected()
        self.cut(LakeRole.ROWS, expected)
        assert _addressed(self.union.read(includeMetadata=True)) == expected
        properties = self.union.state().table.properties()
        if properties.has_batch_layout:
            # A new layout lacks what has left the log until rounds have filled it.
            with suppress(UnavailableError):
                self.cut(LakeRole.BATCH, expected)
        if properties.datalake_changelog:
            changes = self.world.changelog().items()
            history = {at: row | {"__change_type": kind} for at, (kind, row) in changes}
            self.cut(LakeRole.CHANGES, history)

    def cut(self, role: LakeRole, expected: dict[Address, Row]) -> None:
        """Make the live cut of a lake table, and read it by each engine."""
        self.now_s += 100.0
        state = self.union.state()
        served = ServedTable(info=state.table, lake=state.lake, positions=state.positions)
        cut = self.live[role].cut(served, self.world.tiering.service, now_s=self.now_s)
        stock = StaticTable.from_metadata(cut.metadata_location).scan().to_arrow()
        assert _addressed(stock) == expected
        self.read_again(cut.metadata_location, expected)
        self.cuts[cut.metadata_location] = expected

    def read_again(self, location: str, expected: dict[Address, Row]) -> None:
        scan = f"SELECT * FROM iceberg_scan('{location.removeprefix('file://')}')"
        assert _addressed(self.duckdb.execute(scan).to_arrow_table()) == expected


@contextmanager
def _life(folder: Path, *, is_keyed: bool, **table: Any) -> Iterator[Life]:
    with KeyTableWorld(folder) as world, connect() as readers:
        world.create_key_table(
            SCHEMA, primary_key=["id"] if is_keyed else [], bucket_count=BUCKETS, **table
        )
        life = Life(world, readers)
        yield life
        life.catalog.close()


@settings(max_examples=examples(10), deadline=None)
@given(
    is_keyed=st.sampled_from([True, True, False]),
    partitioned_by=st.sampled_from(PARTITIONS),
    image=st.sampled_from(["full", "after"]),
    has_history=st.booleans(),
    first_step=st.sampled_from(["tier", "nibble"]),
    steps=st.lists(other, min_size=3, max_size=14),
)
def test_every_reader_finds_the_rows_of_the_model(
    is_keyed: bool,
    partitioned_by: tuple[str, ...],
    image: str,
    has_history: bool,
    first_step: str,
    steps: list[tuple[Any, ...]],
) -> None:
    properties = {"table.changelog.image": image} if is_keyed else {}
    if is_keyed and has_history:
        properties["table.datalake.changelog"] = "true"
    with (
        tempfile.TemporaryDirectory(prefix="live-cuts-") as folder,
        _life(
            Path(folder), is_keyed=is_keyed, partitioned_by=partitioned_by, properties=properties
        ) as life,
    ):
        # Neither tiered nor written to.
        life.judge()
        for bucket in range(BUCKETS):
            life.step("write", bucket, [("upsert", key, key) for key in range(KEYS)])
        life.step(first_step)
        for name, *arguments in steps:
            life.step(name, *arguments)
        life.tier()
        for location, expected in life.cuts.items():
            life.read_again(location, expected)


def _row(key: int, value: int) -> Row:
    """Return a row whose every value, and so its partition, differs by `value`."""
    moment = dt.datetime(2024, 12, 31, 22, tzinfo=dt.UTC) + dt.timedelta(hours=value * 2)
    return {
        "id": key,
        "region": REGIONS[value % 3],
        "n": None if value % 5 == 0 else value - 9,
        "at": None if value % 7 == 0 else moment,
        "place": None if value % 4 == 0 else {"tags": [REGIONS[value % 3], f"v{value}"]},
    }


def _addressed(table: pa.Table) -> dict[Address, Row]:
    """Return the user's columns of every row by its address, which no two rows share."""
    rows = table.to_pylist()
    names = [name for name in table.column_names if name not in METADATA]
    by_address = {(r["__bucket"], r["__offset"]): {n: r[n] for n in names} for r in rows}
    assert len(by_address) == len(rows)
    return by_address
