"""TPC-H with refreshes over lake tables, judged by stock pyiceberg, DuckDB and Iceberg Java.

All tables with a key are primary key tables. Each refresh inserts new orders with their line items,
deletes old ones, and changes others; rounds and maintenance come between. One database a format
version of Iceberg: 2, 3, and 2 to 3 between two refreshes. The last refresh stays in the log: live
tables and our own queries must have it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from duckdb import DuckDBPyConnection
from pyiceberg.catalog import load_catalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.table import StaticTable

from integration.judges.duckdb_read import connect
from integration.judges.engines import run_in_spark35
from integration.judges.format_versions import EVERY, FormatVersion
from streamhouse.api.client import StreamhouseClient
from streamhouse.client import StorageClient
from streamhouse.tiering.worker.maintain_job import maintain_table
from streamhouse.tiering.worker.thread_runner import ThreadRunner
from tests.support.live_tables import attach_live
from tests.support.service_process import ServiceProcess
from tests.support.tier_once import tier_once
from tests.support.tpch import TABLES, queries, tpch_tables

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SCALE: Final = 0.001
REFRESHES: Final = 5
KEYS: Final = {
    "supplier": ["s_suppkey"],
    "customer": ["c_custkey"],
    "part": ["p_partkey"],
    "partsupp": ["ps_partkey", "ps_suppkey"],
    "orders": ["o_orderkey"],
    "lineitem": ["l_orderkey", "l_linenumber"],
}
PARTITIONED_BY: Final = {"orders": ["o_orderstatus"], "lineitem": ["year(l_shipdate)"]}
# The tables that refreshes change: the column of the order, and the column that changes.
REFRESHED: Final = {
    "orders": ("o_orderkey", "o_orderstatus"),
    "lineitem": ("l_orderkey", "l_linestatus"),
}

Tables = dict[str, pa.Table]
Answer = Counter[str]


@dataclass(frozen=True)
class Refresh:
    """The numbers of the orders that a refresh inserts, deletes and changes."""

    inserted: pa.Array
    deleted: pa.Array
    changed: pa.Array

    @classmethod
    def numbered(cls, number: int, first_new: int) -> Refresh:
        """Return refresh `number`, which touches old and new files of the lake."""
        return cls(
            inserted=pa.array(range(first_new + 60 * number, first_new + 60 * (number + 1))),
            deleted=pa.array(range(1 + number, first_new // 2, 17)),
            changed=pa.array(range(first_new // 2 + number, first_new + 60 * number, 11)),
        )


@dataclass(frozen=True)
class State:
    """Where the refreshed tables' metadata is after a step, and the tables as they must be."""

    what: str
    locations: Mapping[str, str]
    tables: Tables


@dataclass
class Shop:
    """A database with TPC-H's tables, and the tables that it must have."""

    client: StreamhouseClient
    catalog: SqlCatalog
    version: FormatVersion
    tables: Tables = field(default_factory=dict)
    states: list[State] = field(default_factory=list)

    @property
    def database(self) -> str:
        return f"tpch_{str(self.version).replace(' ', '_')}"

    def create(self, made: Tables, first_new: int) -> None:
        """Make the tables, with the orders below `first_new`."""
        self.client.create_database(self.database)
        for name, rows in made.items():
            self.client.create_table(
                f"{self.database}.{name}",
                rows.schema,
                primary_key=KEYS.get(name, []),
                bucket_count=2,
                partitioned_by=PARTITIONED_BY.get(name, ()),
                properties={
                    "table.datalake.auto-maintenance": "false",
                    **self.version.properties,
                },
            )
            self.tables[name] = rows
            if name in REFRESHED:
                old = pc.less(rows[REFRESHED[name][0]], first_new)
                self.tables[name] = rows.filter(old)
            write = self.client.upsert if name in KEYS else self.client.append
            write(f"{self.database}.{name}", self.tables[name])
        self.tier(*TABLES)

    def refresh(self, refresh: Refresh, made: Tables) -> None:
        for name, (order, status) in REFRESHED.items():
            path, rows = f"{self.database}.{name}", self.tables[name]
            new = made[name].filter(pc.is_in(made[name][order], refresh.inserted))
            old = rows.filter(pc.is_in(rows[order], refresh.deleted))
            changing = rows.filter(pc.is_in(rows[order], refresh.changed))
            place = rows.schema.get_field_index(status)
            values = pa.array(["P"] * changing.num_rows)
            changed = changing.set_column(place, rows.schema.field(place), values)
            self.client.upsert(path, pa.concat_tables([new, changed]))
            self.client.delete(path, old.select(KEYS[name]))
            gone = pa.concat_arrays([refresh.deleted, refresh.changed])
            kept = rows.filter(pc.invert(pc.is_in(rows[order], gone)))
            self.tables[name] = pa.concat_tables([kept, changed, new])

    def tier(self, *names: str) -> None:
        tier_once(self.client, *(f"{self.database}.{name}" for name in names))

    def upgrade(self) -> None:
        for name in TABLES if self.version.upgrade else ():
            self.client.alter_properties(f"{self.database}.{name}", updates=self.version.upgrade)

    def maintain(self) -> None:
        client, runner = StorageClient.of(self.client), ThreadRunner(2)
        for name in REFRESHED:
            path = f"{self.database}.{name}"
            for _ in maintain_table(client, client.lake_catalog(), runner, path):
                pass

    def note(self, what: str) -> None:
        locations = {name: self.location(name) for name in REFRESHED}
        self.states.append(State(f"{self.database} after {what}", locations, dict(self.tables)))

    def location(self, name: str) -> str:
        return self.catalog.load_table((self.database, name)).metadata_location

    def live(self, made: Tables, first_new: int) -> None:
        """Play the database's life; its last refresh stays in the log."""
        self.create(made, first_new)
        for number in range(REFRESHES):
            self.refresh(Refresh.numbered(number, first_new), made)
            if number == REFRESHES - 1:
                return
            self.tier(*REFRESHED)
            self.note(f"refresh {number}")
            if number == 1:
                self.upgrade()
            if number == 2:
                self.maintain()
                self.note("maintenance")


@pytest.fixture(scope="module")
def shops(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[FormatVersion, Shop]]:
    made = {name: _keyed(name, rows) for name, rows in tpch_tables(SCALE).items()}
    first_new = made["orders"].num_rows * 3 // 4
    with (
        ServiceProcess(tmp_path_factory.mktemp("service")) as service,
        StreamhouseClient(service.endpoint) as client,
    ):
        described = client.lake_catalog()
        catalog = load_catalog(described.name, **described.properties)
        assert isinstance(catalog, SqlCatalog)
        found = {version: Shop(client, catalog, version) for version in EVERY}
        for shop in found.values():
            shop.live(made, first_new)
        yield found
        catalog.close()


def _keyed(name: str, rows: pa.Table) -> pa.Table:
    """Return the rows with key columns that have no nulls."""
    return rows.cast(
        pa.schema([column.with_nullable(column.name not in KEYS[name]) for column in rows.schema])
        if name in KEYS
        else rows.schema
    )


@pytest.fixture(params=EVERY, ids=str)
def shop(shops: dict[FormatVersion, Shop], request: pytest.FixtureRequest) -> Shop:
    return shops[request.param]


def _ordered(found: pa.Table, name: str, expected: pa.Table) -> pa.Table:
    order = [(key, "ascending") for key in KEYS[name]]
    return found.select(expected.column_names).cast(expected.schema).sort_by(order)


def _answers(connection: DuckDBPyConnection, texts: Mapping[int, str]) -> dict[int, Answer]:
    return {
        number: _answer(connection.sql(text).to_arrow_table()) for number, text in texts.items()
    }


def _answer(rows: pa.Table) -> Answer:
    return Counter(str(row) for row in rows.to_pylist())


def _expected(tables: Tables) -> dict[int, Answer]:
    """The answers of DuckDB over the rows themselves."""
    with duckdb.connect() as connection:
        for name, rows in tables.items():
            connection.register(name, rows)
        answers = _answers(connection, queries())
    assert sum(map(bool, answers.values())) >= 15
    return answers


def test_the_lives_have_what_is_hard(shop: Shop) -> None:
    """Deleted rows of the table's format version, and of both after an upgrade."""
    kinds = [_delete_files(state, name) for state in shop.states for name in REFRESHED]

    assert shop.catalog.load_table((shop.database, "orders")).format_version == (
        shop.version.at_the_end
    )
    assert set().union(*kinds) == {
        "PARQUET" if shop.version.created == 2 else "PUFFIN",
        "PUFFIN" if shop.version.at_the_end == 3 else "PARQUET",
    }


def _delete_files(state: State, name: str) -> set[str]:
    """The formats of the table's delete files."""
    files = StaticTable.from_metadata(state.locations[name]).inspect.delete_files()
    return set(files["file_format"].to_pylist())


@pytest.mark.end_to_end
def test_stock_pyiceberg_reads_every_state(shop: Shop) -> None:
    for state in shop.states:
        for name, location in state.locations.items():
            expected = state.tables[name]
            found = StaticTable.from_metadata(location).scan().to_arrow()
            assert _ordered(found, name, expected) == _ordered(expected, name, expected), state.what


@pytest.mark.end_to_end
def test_duckdb_reads_every_state(shop: Shop) -> None:
    with connect() as connection:
        for state in shop.states:
            locations = {name: shop.location(name) for name in TABLES} | dict(state.locations)
            for name, location in locations.items():
                scan = f"iceberg_scan('{location.removeprefix('file://')}')"
                connection.execute(f"CREATE OR REPLACE VIEW {name} AS SELECT * FROM {scan}")
            assert _answers(connection, queries()) == _expected(state.tables), state.what


@pytest.mark.end_to_end
def test_live_tables_and_our_own_queries_have_the_last_refresh(shop: Shop) -> None:
    expected = _expected(shop.tables)
    texts = queries(shop.database)

    assert {number: _answer(shop.client.query(text)) for number, text in texts.items()} == expected
    with connect() as connection:
        attach_live(connection, shop.client.endpoint)
        assert _answers(connection, queries(f"live.{shop.database}")) == expected


@pytest.mark.judge
def test_iceberg_java_finds_the_last_refresh(
    shops: dict[FormatVersion, Shop], tmp_path: Path
) -> None:
    """All databases hold the same rows: Spark's answers over Parquet files of these."""
    texts = list(queries().values())
    tables = shops[EVERY[0]].tables
    statements = []
    for name, rows in tables.items():
        pq.write_table(rows, tmp_path / f"{name}.parquet")
        source = f"USING parquet OPTIONS (path '{tmp_path / name}.parquet')"
        statements.append(f"CREATE TEMPORARY VIEW {name} {source}")
    statements += texts
    statements += [f"DROP VIEW {name}" for name in tables]
    for shop in shops.values():
        statements += [f"USE lake.{shop.database}", *texts]

    uri = f"{shops[EVERY[0]].client.endpoint}/iceberg"
    answers = iter(run_in_spark35(statements, uri=uri, warehouse="live"))

    assert not any(next(answers) for _ in tables)
    expected = [_java_answer(next(answers)) for _ in texts]
    assert not any(next(answers) for _ in tables)
    for shop in shops.values():
        assert next(answers) == []
        assert [_java_answer(next(answers)) for _ in texts] == expected, shop.database


def _java_answer(rows: list[dict[str, Any]] | dict[str, str]) -> Answer:
    assert isinstance(rows, list), rows
    return Counter(str(row) for row in rows)
