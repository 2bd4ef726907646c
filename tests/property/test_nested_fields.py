"""Fields are added and widened inside columns at any time of a table's life: rows are found.

One example is a table's life on a real service with a journal: rows are written by programs that
know any version of the schema, staged before a field is added and committed behind it, tiered, and
the machine is lost. What is read is compared with a list of rows, in which a field is null that a
row was written without: union reads, the log in the first and the newest version, rows by key, and
what pyiceberg and DuckDB find in the lake.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyiceberg.catalog import load_catalog

from integration.judges.duckdb_read import connect
from streamhouse.api.client import StreamhouseClient
from streamhouse.core.errors import StreamhouseError
from tests.support.examples import examples
from tests.support.service_process import ServiceProcess
from tests.support.tier_once import tier_once

pytestmark = pytest.mark.slow

SPOT = pa.struct([("x", pa.int32())])
FIRST = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field(
            "place",
            pa.struct(
                [
                    ("city", pa.string()),
                    ("spots", pa.list_(pa.field("element", SPOT))),
                    ("sizes", pa.map_(pa.string(), SPOT)),
                    ("ratio", pa.float32()),
                    ("price", pa.decimal128(5, 2)),
                ]
            ),
        ),
        pa.field("spots", pa.list_(pa.field("element", SPOT))),
        pa.field("counts", pa.list_(pa.field("element", pa.int16()))),
    ]
)
PARENTS: list[list[str]] = [
    ["place"],
    ["place", "spots", "element"],
    ["place", "sizes", "value"],
    ["spots", "element"],
]
TYPES: list[Any] = [
    pa.string(),
    pa.int64(),
    pa.struct([("a", pa.int32()), ("b", pa.list_(pa.field("element", pa.string())))]),
]
WIDER: list[tuple[list[str], pa.DataType]] = [
    (["place", "spots", "element", "x"], pa.int64()),
    (["place", "sizes", "value", "x"], pa.int64()),
    (["place", "ratio"], pa.float64()),
    (["place", "price"], pa.decimal128(9, 2)),
    (["spots", "element", "x"], pa.int64()),
    (["counts", "element"], pa.int32()),
    (["counts", "element"], pa.int64()),
]
SYSTEM = ["__bucket", "__offset", "__timestamp"]
NAMES = itertools.count()

adds = st.tuples(st.just("add"), st.sampled_from(PARENTS), st.sampled_from(TYPES), st.booleans())
writes = st.tuples(st.just("write"), st.integers(1, 6), st.integers(0, 9))
steps = st.one_of(
    adds,
    st.tuples(st.just("widen"), st.sampled_from(range(len(WIDER)))),
    st.tuples(st.just("widen"), st.sampled_from(range(len(WIDER)))),
    writes,
    writes,
    st.tuples(st.just("staged"), adds, st.integers(0, 9)),
    st.tuples(st.just("tier")),
    st.tuples(st.just("lose_the_machine")),
)


def value_of(t: pa.DataType, seed: int) -> Any:
    """Some value of a type; null now and then, at every depth."""
    if seed % 7 == 3:
        return None
    if pa.types.is_struct(t):
        return {f.name: value_of(f.type, seed * 3 + place) for place, f in enumerate(t)}
    if pa.types.is_list(t):
        return [value_of(t.value_type, seed + n) for n in range(seed % 3)]
    if pa.types.is_map(t):
        return [(f"k{n}", value_of(t.item_type, seed + n)) for n in range(seed % 3)]
    if pa.types.is_decimal(t):
        return Decimal(seed % 1000) / 4
    return f"s{seed}" if pa.types.is_string(t) else seed


def as_version(value: Any, t: pa.DataType) -> Any:
    """What a value is as one of type `t`, with more fields or fewer."""
    if value is None or not pa.types.is_nested(t):
        return value
    if pa.types.is_struct(t):
        return {f.name: as_version(value.get(f.name), f.type) for f in t}
    if pa.types.is_map(t):
        return [(key, as_version(item, t.item_type)) for key, item in value]
    return [as_version(item, t.value_type) for item in value]


def as_pyiceberg(row: dict[str, Any], schema: pa.Schema) -> dict[str, Any]:
    """What pyiceberg makes of a row: it reads null arrays and maps of structs as empty ones."""

    def read(value: Any, t: pa.DataType) -> Any:
        if pa.types.is_map(t) and pa.types.is_struct(t.item_type):
            return [(key, read(item, t.item_type)) for key, item in value or []]
        if pa.types.is_list(t) and pa.types.is_struct(t.value_type):
            return [read(item, t.value_type) for item in value or []]
        if pa.types.is_struct(t) and value is not None:
            return {f.name: read(value[f.name], f.type) for f in t}
        return value

    return {f.name: read(row[f.name], f.type) for f in schema}


class World:
    """A service whose machine is lost now and then; lake and journal outlive it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._arguments = [
            *("--journal", f"file://{folder / 'journal'}", "--lease-ms", "1000"),
            *("--catalog-property", "type=sql"),
            *("--catalog-property", f"uri=sqlite:///{folder / 'catalog.db'}"),
            *("--warehouse", f"file://{folder / 'lake'}"),
        ]
        self._start()

    def _start(self) -> None:
        self._service = ServiceProcess(self._folder / "data", *self._arguments)
        self._service.__enter__()
        self.client = StreamhouseClient(self._service.endpoint)

    def lose_the_machine(self) -> None:
        """Kill the process and delete its directory; another one takes over from the journal."""
        self.client.close()
        self._service.kill()
        self._service.__exit__(None, None, None)
        shutil.rmtree(self._folder / "data")
        self._start()

    def close(self) -> None:
        """End the service."""
        self.client.close()
        self._service.__exit__(None, None, None)


class Life:
    """One table's life, and the rows written to it, in order."""

    def __init__(self, world: World, *, is_keyed: bool) -> None:
        self.world = world
        self.path = f"default.nested_{next(NAMES)}"
        self.is_keyed = is_keyed
        self.written: list[dict[str, Any]] = []
        self.versions = [FIRST]
        self.widened: list[int] = []
        self.is_untiered = False
        keys = ["id"] if is_keyed else []
        self.client.create_table(
            self.path, FIRST, primary_key=keys, bucket_count=2, bucket_key=["id"]
        )

    @property
    def client(self) -> StreamhouseClient:
        return self.world.client

    def _rows(self, count: int, version: int) -> pa.Table:
        """Rows as a program makes them that knows one version of the schema."""
        schema = self.versions[version % len(self.versions)]
        start = len(self.written)
        rows = [
            {field.name: value_of(field.type, start + n) for field in schema}
            | {"id": (start + n) % 5 if self.is_keyed else start + n}
            for n in range(count)
        ]
        self.written += rows
        self.is_untiered = True
        return pa.Table.from_pylist(rows, schema=schema)

    def write(self, count: int, version: int) -> None:
        """Write rows as some version has them."""
        rows = self._rows(count, version)
        if self.is_keyed:
            self.client.upsert(self.path, rows)
        else:
            self.client.append(self.path, rows)

    def add(self, parent: list[str], t: pa.DataType, is_first: bool) -> None:
        """Add a field inside a column."""
        name = f"f{len(self.versions)}"
        info = self.client.add_column(self.path, [*parent, name], t, first=is_first)
        self.versions.append(info.schema.to_arrow())

    def widen(self, number: int) -> None:
        """Widen a type inside a column, unless it is as wide."""
        path, wanted = WIDER[number]
        if any(WIDER[done][0] == path and done >= number for done in self.widened):
            return
        self.widened.append(number)
        info = self.client.widen_column(self.path, path, wanted)
        self.versions.append(info.schema.to_arrow())

    def staged(self, add: tuple[Any, ...], version: int) -> None:
        """Stage rows, add a field, commit the rows; rows by key allow no change meanwhile."""
        rows = self._rows(3, version)
        operation = "upsert" if self.is_keyed else "append"
        with self.client.begin_transaction(self.path, operation=operation) as transaction:
            staged = transaction.stage(rows)
            if not self.is_keyed:
                self.add(*add[1:])
            transaction.commit([staged])

    def tier(self) -> None:
        """Move all rows to the lake, which gets the schema with them."""
        if self.is_untiered:
            self.is_untiered = False
            tier_once(self.client, self.path)
            self.check_lake()

    def lose_the_machine(self) -> None:
        """Go on from the journal."""
        self.world.lose_the_machine()

    def expected(self, version: int = -1) -> list[dict[str, Any]]:
        schema = self.versions[version]
        rows = {row["id"]: row for row in self.written}
        return [
            {f.name: as_version(rows[key].get(f.name), f.type) for f in schema}
            for key in sorted(rows)
        ]

    def check_lake(self) -> None:
        """Stock pyiceberg and DuckDB read what was tiered; each field keeps its id."""
        catalog = self.client.lake_catalog()
        lake = load_catalog(catalog.name, **catalog.properties).load_table(self.path)
        found = lake.scan().to_arrow().sort_by("id").drop(SYSTEM).to_pylist()
        schema = self.versions[-1]
        assert [as_pyiceberg(row, schema) for row in found] == [
            as_pyiceberg(row, schema) for row in self.expected()
        ]
        with connect() as duckdb:
            location = lake.metadata_location.removeprefix("file://")
            duckdb.execute(f"CREATE TEMP VIEW lake AS SELECT * FROM iceberg_scan('{location}')")
            query = f"SELECT * EXCLUDE ({', '.join(SYSTEM)}) FROM lake ORDER BY id"
            by_duckdb = duckdb.execute(query).to_arrow_table().to_pylist()
        assert by_duckdb == self.expected()
        ids: dict[int, str] = {}
        for schema in lake.metadata.schemas:
            for field_id in schema.field_ids:
                name = schema.find_column_name(field_id) or ""
                assert ids.setdefault(field_id, name) == name
        assert len(set(ids.values())) == len(ids)

    def check(self) -> None:
        """Every reader of the service finds the rows."""
        rows = self.client.read(self.path).sort_by("id")
        assert rows.to_pylist() == self.expected()
        for version in {0, len(self.versions) - 1}:
            schema = self.versions[version]
            ids = []
            for bucket, positions in self.client.positions(self.path).items():
                for batch in self.client.read_range(
                    self.path, bucket, 0, positions.high_watermark, schema_id=version
                ):
                    data = batch.data.select(schema.names)
                    assert data.schema.equals(schema)
                    ids += data.column("id").to_pylist()
                    for row in data.to_pylist():
                        written = [
                            {f.name: as_version(one.get(f.name), f.type) for f in schema}
                            for one in self.written
                            if one["id"] == row["id"]
                        ]
                        assert row in written
            assert set(ids) == {row["id"] for row in self.written}
        if self.is_keyed:
            self.check_lookups()

    def check_lookups(self) -> None:
        """Rows are found by key, one and many."""
        expected = self.expected()
        keys = pa.table({"id": pa.array([row["id"] for row in expected], pa.int64())})
        found = self.client.lookup(self.path, keys)
        assert found.select(self.versions[-1].names).to_pylist() == expected
        one = self.client.lookup_one(self.path, id=expected[0]["id"])
        assert one is not None
        assert one["spots"] == expected[0]["spots"]

    def refused(self) -> None:
        """Rows with a field that the table has not are refused, and nothing of them is written."""
        odd = pa.schema([FIRST.field("id"), pa.field("place", pa.struct([("odd", pa.int8())]))])
        rows = pa.Table.from_pylist([{"id": 0, "place": {"odd": 1}}], schema=odd)
        write = self.client.upsert if self.is_keyed else self.client.append
        with pytest.raises(StreamhouseError, match=self.path):
            write(self.path, rows)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    opened = World(tmp_path_factory.mktemp("world"))
    yield opened
    opened.close()


@settings(
    max_examples=examples(5),
    # A life takes seconds: a failing one is printed as it is.
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(is_keyed=st.booleans(), life=st.lists(steps, min_size=3, max_size=10))
def test_every_reader_finds_the_rows_whenever_fields_are_added_and_widened(
    world: World, is_keyed: bool, life: list[tuple[Any, ...]]
) -> None:
    table = Life(world, is_keyed=is_keyed)
    last = [
        ("tier",),
        ("add", PARENTS[1], TYPES[2], True),
        ("widen", 0),
        ("write", 4, 0),
        ("write", 4, -1),
        ("tier",),
    ]
    for name, *arguments in [("write", 5, 0), *life, *last]:
        getattr(table, name)(*arguments)
        table.check()
    table.refused()
    table.check()
