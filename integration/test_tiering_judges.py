"""Lake tables judged by other engines: stock pyiceberg, DuckDB, Iceberg Java.

Every type, nulls, every partition transform, several rounds, several buckets, both of Iceberg's
format versions; read whole, and filtered by the partition's source column, which goes wrong when a
partition value or a bound does.
Each table is also read live, when its last rows were not in the lake yet.
"""

from __future__ import annotations

from collections.abc import Iterator

import duckdb
import pyarrow as pa
import pytest
from duckdb import DuckDBPyConnection
from pyiceberg.catalog import load_catalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.table import StaticTable

from integration.judges.duckdb_read import connect
from integration.judges.engines import read_many_with_spark35, read_with_duckdb
from integration.judges.every_type import SCHEMA, plain, row
from integration.judges.format_versions import BOTH, FormatVersion
from streamhouse.client import StorageClient
from tests.support.live_tables import live_catalog
from tests.support.service_process import ServiceProcess
from tests.support.tier_once import tier_once

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

# Partitioning -> filters on its source column. Quoting and literals are SQL of both engines.
CASES: dict[tuple[str, ...], list[str]] = {
    (): ["id = 17", "name IS NULL", "price < 0"],
    ("name",): ["name = 'ü2'", "name IS NULL"],
    ("flag",): ["flag = true", "flag IS NULL"],
    ("day",): ["day = DATE '1969-12-30'", "day > DATE '1970-01-01'"],
    ("tiny",): ["tiny = -3", "tiny > 100"],
    ("raw",): ["raw IS NOT NULL"],
    ("price",): ["price = -1.25", "price > 10"],
    ("bucket(5, id)",): ["id = 3", "id IN (4, 25)"],
    ("bucket(3, name)", "bucket(2, price)"): ["name = 'ü2'", "price = -1.25"],
    ("bucket(4, ts)", "bucket(4, day)", "bucket(4, raw)"): ["day = DATE '1969-12-30'"],
    ("bucket(4, small)",): ["small = -6"],
    ("truncate(2, name)",): ["name = 'ü2'", "name LIKE 'ü%'"],
    ("truncate(10, number)",): ["number = -9", "number >= 0"],
    ("truncate(100, wide)",): ["wide < 0"],
    ("truncate(1, raw)",): ["raw IS NULL"],
    ("year(ts_ntz)",): ["ts_ntz < TIMESTAMP '1970-01-01 00:00:00'"],
    ("month(day)",): ["day = DATE '1969-12-30'"],
    ("day(ts)",): ["ts < TIMESTAMP '1970-01-01 00:00:00'", "ts IS NULL"],
    ("hour(ts)", "flag"): ["ts < TIMESTAMP '1970-01-01 00:00:00' AND flag = true"],
}
BUCKET_KEYS: list[tuple[str, ...]] = [("id",), ("name",), (), ("id", "name"), ("flag",), ("ts",)]
ROW_COUNT = 60
ROUNDS = 3


ROWS = [row(i) for i in range(ROW_COUNT)]


class Lake:
    """A service whose tables are tiered, and its catalog as anybody may open it."""

    def __init__(self, client: StorageClient, catalog: SqlCatalog, version: FormatVersion) -> None:
        self._client = client
        self._properties = version.properties
        self._catalog = catalog
        self._live = live_catalog(client.endpoint)
        self._live_locations: dict[tuple[str, ...], str] = {}
        self.paths: dict[tuple[str, ...], str] = {}

    def table(self, partitioned_by: tuple[str, ...]) -> str:
        """The path of a table with all rows, tiered in several rounds."""
        if partitioned_by not in self.paths:
            number = len(self.paths)
            path = f"default.t{number}"
            self._client.create_table(
                path,
                SCHEMA,
                bucket_count=3,
                bucket_key=BUCKET_KEYS[number % len(BUCKET_KEYS)],
                partitioned_by=partitioned_by,
                properties=self._properties,
            )
            step = ROW_COUNT // ROUNDS
            for start in range(0, ROW_COUNT, step):
                rows = pa.Table.from_pylist(ROWS[start : start + step], schema=SCHEMA)
                self._client.append(path, rows)
                live = self._live.load_table(path)
                self._live_locations[partitioned_by] = live.metadata_location
                assert tier_once(self._client, path) == step
            self.paths[partitioned_by] = path
        return self.paths[partitioned_by]

    def metadata_location(self, partitioned_by: tuple[str, ...]) -> str:
        return self._catalog.load_table(self.table(partitioned_by)).metadata_location

    def locations(self, partitioned_by: tuple[str, ...]) -> tuple[str, str]:
        """Where the table's metadata is, and where that of its last live cut is."""
        committed = self.metadata_location(partitioned_by)
        return committed, self._live_locations[partitioned_by]


@pytest.fixture(scope="module", params=BOTH, ids=str)
def lake(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Lake]:
    with (
        ServiceProcess(tmp_path_factory.mktemp("service")) as service,
        StorageClient(service.endpoint) as client,
    ):
        described = client.lake_catalog()
        catalog = load_catalog(described.name, **described.properties)
        assert isinstance(catalog, SqlCatalog)
        yield Lake(client, catalog, request.param)
        catalog.close()


@pytest.fixture(scope="module")
def duckdb_connection() -> Iterator[DuckDBPyConnection]:
    with connect() as connection:
        yield connection


def _expected(where: str) -> list[int]:
    """The ids that a filter selects, by DuckDB on the rows themselves."""
    rows = pa.Table.from_pylist(ROWS, schema=SCHEMA).drop_columns(["counts"])
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        connection.register("source", rows)
        found = connection.execute(f"SELECT id FROM source WHERE {where} ORDER BY id").fetchall()
    return [row[0] for row in found]


EXPECTED = plain(ROWS)
ALL = f"SELECT {', '.join(SCHEMA.names)} FROM lake_table ORDER BY id"
SYSTEM = (
    "SELECT count(*) AS n, count(DISTINCT __bucket * 1000 + __offset) AS addresses,"
    " min(__timestamp) IS NOT NULL AS timed FROM lake_table"
)
NAMES = [" ".join(case) or "none" for case in CASES]


@pytest.mark.end_to_end
@pytest.mark.parametrize("partitioned_by", CASES, ids=NAMES)
def test_stock_pyiceberg_and_duckdb_read_every_row(
    lake: Lake, partitioned_by: tuple[str, ...]
) -> None:
    for location in lake.locations(partitioned_by):
        scan = StaticTable.from_metadata(location).scan(selected_fields=tuple(SCHEMA.names))
        assert plain(scan.to_arrow().sort_by("id").to_pylist()) == EXPECTED
    if partitioned_by in ((), ("name",), ("hour(ts)", "flag")):
        # A process each: for the rest, the filters below read every file too.
        location = lake.metadata_location(partitioned_by)
        assert plain(read_with_duckdb(location, ALL)) == EXPECTED
        assert read_with_duckdb(location, SYSTEM) == [
            {"n": ROW_COUNT, "addresses": ROW_COUNT, "timed": True}
        ]


@pytest.mark.end_to_end
@pytest.mark.parametrize("partitioned_by", CASES, ids=NAMES)
def test_duckdb_finds_the_same_rows_by_filter(
    lake: Lake, partitioned_by: tuple[str, ...], duckdb_connection: DuckDBPyConnection
) -> None:
    expected = {where: _expected(where) for where in CASES[partitioned_by]}
    assert any(expected.values())
    for location in lake.locations(partitioned_by):
        scan = f"iceberg_scan('{location.removeprefix('file://')}')"
        for where, ids in expected.items():
            rows = duckdb_connection.execute(f"SELECT id FROM {scan} WHERE {where} ORDER BY id")
            assert [row[0] for row in rows.fetchall()] == ids, (location, where)


@pytest.mark.judge
def test_iceberg_java_reads_every_table_whole_and_by_filter(lake: Lake) -> None:
    requests, expected = [], []
    for partitioned_by, filters in CASES.items():
        for location in lake.locations(partitioned_by):
            requests.append((location, SYSTEM))
            expected.append([{"n": ROW_COUNT, "addresses": ROW_COUNT, "timed": True}])
            for where in filters:
                requests.append((location, f"SELECT id FROM lake_table WHERE {where} ORDER BY id"))
                expected.append([{"id": i} for i in _expected(where)])
    requests.append((lake.metadata_location(()), ALL))

    *answers, everything = read_many_with_spark35(requests)

    assert dict(zip(requests, answers, strict=False)) == dict(zip(requests, expected, strict=False))
    assert plain(everything) == EXPECTED
