"""NOT NULL is dropped at any time of a table's life: every reader of both tiers finds its rows.

One example is a table's life on a real service: rows are written, tiered, columns are freed, added
and renamed, in any order. What is read is compared with a list of rows: union reads, predicates on
null, stock pyiceberg, the log in the current version of the schema and in the first one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyiceberg.catalog import load_catalog

from streamhouse.api.client import StreamhouseClient
from streamhouse.core.errors import SchemaMismatchError
from tests.support.examples import examples
from tests.support.service_process import ServiceProcess
from tests.support.tier_once import tier_once

pytestmark = pytest.mark.slow

STRICT = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("size", pa.int32(), nullable=False),
        pa.field("name", pa.string(), nullable=False),
    ]
)
SYSTEM = ["__bucket", "__offset", "__timestamp"]
NAMES = itertools.count()

steps = st.one_of(
    st.tuples(st.just("write"), st.integers(1, 5), st.booleans()),
    st.tuples(st.just("write"), st.integers(1, 5), st.booleans()),
    st.tuples(st.just("tier")),
    st.tuples(st.just("free"), st.sampled_from(["size", "name"])),
    st.tuples(st.just("add")),
    st.tuples(st.just("rename")),
)


class Life:
    """One table's life, and the rows it must have by id."""

    def __init__(self, client: StreamhouseClient, *, is_keyed: bool) -> None:
        self.client = client
        self.path = f"default.freed_{next(NAMES)}"
        self.is_keyed = is_keyed
        self.rows: dict[int, dict[str, Any]] = {}
        self.columns = {"id": "id", "size": "size", "name": "name"}
        self.freed: set[str] = set()
        self.changes: list[dict[str, Any]] = []
        self.is_untiered = False
        client.create_table(self.path, STRICT, primary_key=["id"] if is_keyed else [])

    def write(self, count: int, with_nulls: bool) -> None:
        """Write rows, of which a table with keys has had some before."""
        start = 0 if self.is_keyed else len(self.rows)
        rows = []
        for number in range(start, start + count):
            row = dict.fromkeys(self.columns.values())
            row |= {
                "id": number,
                self.columns["size"]: number,
                self.columns["name"]: f"n{len(self.changes)}",
            }
            if with_nulls and number % 2:
                row |= {self.columns[column]: None for column in self.freed}
            rows.append(row)
        schema = self.client.describe_table(self.path).schema.to_arrow()
        table = pa.Table.from_pylist(rows, schema=schema)
        if self.is_keyed:
            self.client.upsert(self.path, table)
        else:
            self.client.append(self.path, table)
        self.rows |= {row["id"]: row for row in rows}
        self.changes += [dict(row) for row in rows]
        self.is_untiered = True
        self.refused()

    def refused(self) -> None:
        """A column that nobody freed takes no null."""
        for column in {"size", "name"} - self.freed:
            schema = self.client.describe_table(self.path).schema.to_arrow()
            row = {"id": 0, self.columns["size"]: 0, self.columns["name"]: "n"}
            row[self.columns[column]] = None
            loose = pa.schema([field.with_nullable(True) for field in schema])
            table = pa.Table.from_pylist([row], schema=loose)
            write = self.client.upsert if self.is_keyed else self.client.append
            with pytest.raises(SchemaMismatchError, match="--drop-not-null"):
                write(self.path, table)

    def tier(self) -> None:
        """Move all rows to the lake, which gets the schema with them."""
        if self.is_untiered:
            self.is_untiered = False
            tier_once(self.client, self.path)
            self.check_lake()

    def free(self, column: str) -> None:
        """Let a column be null."""
        if column not in self.freed:
            self.client.drop_not_null(self.path, self.columns[column])
            self.freed.add(column)

    def add(self) -> None:
        """Add a column, which is null in all rows."""
        name = f"new_{len(self.columns)}"
        self.client.add_column(self.path, name, pa.string())
        self.columns[name] = name
        for row in (*self.rows.values(), *self.changes):
            row[name] = None

    def rename(self) -> None:
        """Rename the column `size`."""
        old = self.columns["size"]
        new = self.columns["size"] = f"{old}x"
        self.client.rename_column(self.path, old, new)
        for row in {id(row): row for row in (*self.rows.values(), *self.changes)}.values():
            row[new] = row.pop(old)

    def expected(self) -> list[dict[str, Any]]:
        return [self.rows[key] for key in sorted(self.rows)]

    def check_lake(self) -> None:
        """Stock pyiceberg reads what was tiered, and knows which columns may be null."""
        catalog = self.client.lake_catalog()
        lake = load_catalog(catalog.name, **catalog.properties).load_table(self.path)
        found = lake.scan().to_arrow().sort_by("id").drop(SYSTEM).to_pylist()
        assert found == self.expected()
        required = {field.name for field in lake.schema().fields if field.required} - {*SYSTEM}
        assert required == {"id"} | {self.columns[c] for c in {"size", "name"} - self.freed}

    def check(self) -> None:
        """Every reader of the service finds the rows."""
        expected = self.expected()
        assert self.read() == expected
        for column in ("size", "name"):
            name = self.columns[column]
            are_null = [row for row in expected if row[name] is None]
            assert self.read(where=f"{name} IS NULL") == are_null
        end = self.client.positions(self.path)[0].high_watermark
        batches = self.client.read_range(self.path, 0, 0, end)
        in_log = [row["id"] for batch in batches for row in batch.data.to_pylist()]
        if not self.is_keyed:
            assert in_log == [row["id"] for row in self.changes]
        self.check_first_version(end)

    def check_first_version(self, end: int) -> None:
        """A reader that knows the first version gets it, or is told of the first null."""
        batches = self.client.read_range(self.path, 0, 0, end, schema_id=0)
        wanted = pa.schema(list(STRICT))
        has_null = any(row[self.columns[c]] is None for row in self.changes for c in self.freed)
        if has_null:
            with pytest.raises(SchemaMismatchError, match="NOT NULL in an older version"):
                list(batches)
            return
        for batch in batches:
            assert pa.schema(list(batch.data.schema)[: len(wanted)]) == wanted

    def read(self, **options: Any) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = (
            self.client.read(self.path, **options).sort_by("id").to_pylist()
        )
        return rows


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StreamhouseClient]:
    with (
        ServiceProcess(tmp_path_factory.mktemp("service")) as service,
        StreamhouseClient(service.endpoint) as opened,
    ):
        yield opened


@settings(
    max_examples=examples(6),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(is_keyed=st.booleans(), life=st.lists(steps, min_size=3, max_size=12))
def test_every_reader_finds_the_rows_whenever_not_null_is_dropped(
    client: StreamhouseClient, is_keyed: bool, life: list[tuple[Any, ...]]
) -> None:
    table = Life(client, is_keyed=is_keyed)
    for name, *arguments in [*life, ("write", 4, True), ("tier",)]:
        getattr(table, name)(*arguments)
        if name != "tier" or table.rows:
            table.check()
