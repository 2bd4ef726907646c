"""Columns that were added with a default, judged by stock pyiceberg, DuckDB and Iceberg Java.

In Iceberg's format version 3, and in a table that goes from 2 to 3 before: files from before the
columns lack them, in both versions, and every engine must find the defaults of every plain type.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pytest
from pyiceberg.catalog import load_catalog
from pyiceberg.table import StaticTable

from integration.judges.engines import read_many_with_spark35, read_with_duckdb
from integration.judges.every_type import SCHEMA, plain, row
from integration.judges.format_versions import EVERY, FormatVersion
from streamhouse.api.client import StreamhouseClient
from tests.support.command_line import streamhouse
from tests.support.service_process import ServiceProcess
from tests.support.tier_once import tier_once

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ID: Final = pa.schema([SCHEMA.field("id")])
ADDED: Final = [
    column for column in SCHEMA if column.name != "id" and not pa.types.is_nested(column.type)
]
# A row of which no plain column is null.
DEFAULTS: Final = row(14)
LATER: Final = row(100)
NAMES: Final = ["id", *(column.name for column in ADDED)]
PLAIN: Final = [name for name in NAMES if not pa.types.is_decimal(SCHEMA.field(name).type)]
ALL: Final = f"SELECT {', '.join(NAMES)} FROM lake_table ORDER BY id"
FILTERED: Final = f"SELECT id FROM lake_table WHERE number = {DEFAULTS['number']} ORDER BY id"


@dataclass(frozen=True)
class Judged:
    """Where a table's metadata is, before maintenance packs its files and after; our own read."""

    location: str
    packed: str
    ours: pa.Table


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[FormatVersion, Judged]]:
    with (
        ServiceProcess(tmp_path_factory.mktemp("service")) as service,
        StreamhouseClient(service.endpoint) as client,
    ):
        described = client.lake_catalog()
        catalog = load_catalog(described.name, **described.properties)
        found = {}
        for version in EVERY:
            if version.at_the_end == 2:
                # It has no place for a default.
                continue
            path = f"default.t{len(found)}"
            client.create_table(path, ID, primary_key=["id"], properties=version.properties)
            client.upsert(path, pa.table({"id": range(10)}, schema=ID))
            tier_once(client, path)
            if version.upgrade:
                client.alter_properties(path, updates=version.upgrade)
            client.delete(path, pa.table({"id": [3]}, schema=ID))
            for column in ADDED:
                client.add_column(path, column.name, column.type, default=DEFAULTS[column.name])
            later = pa.Table.from_pylist([LATER], schema=SCHEMA).select(NAMES)
            client.upsert(path, later)
            tier_once(client, path)
            location = catalog.load_table(path).metadata_location
            streamhouse("maintain", path, "--endpoint", service.endpoint)
            packed = catalog.load_table(path).metadata_location
            ours = client.read(path).select(NAMES).sort_by("id")
            found[version] = Judged(location, packed, ours)
        yield found
        catalog.close()


@pytest.fixture(params=[version for version in EVERY if version.at_the_end == 3], ids=str)
def table(tables: dict[FormatVersion, Judged], request: pytest.FixtureRequest) -> Judged:
    return tables[request.param]


def _expected() -> list[dict[str, Any]]:
    old = [{**DEFAULTS, "id": number} for number in range(10) if number != 3]
    return plain([{name: values[name] for name in NAMES} for values in (*old, LATER)])


@pytest.mark.end_to_end
def test_we_and_stock_pyiceberg_and_duckdb_find_the_defaults(table: Judged) -> None:
    assert plain(table.ours.to_pylist()) == _expected()
    for location in (table.location, table.packed):
        opened = StaticTable.from_metadata(location)
        scanned = opened.scan().to_arrow().select(NAMES).sort_by("id")
        by_filter = opened.scan(
            f"number = {DEFAULTS['number']}", selected_fields=("id",)
        ).to_arrow()

        assert plain(scanned.to_pylist()) == _expected()
        assert by_filter.sort_by("id").to_pylist() == _of_the_default()
        assert plain(read_with_duckdb(location, ALL)) == _expected()
        assert read_with_duckdb(location, FILTERED) == _of_the_default()
    assert len(list(opened.scan().plan_files())) == 1


@pytest.mark.judge
def test_iceberg_java_finds_the_defaults(tables: dict[FormatVersion, Judged]) -> None:
    """But for two bugs of 1.10.2, apache/iceberg issues 16502 and 16690.

    Decimals with defaults are read row by row only. A filter on a column with a default loses the
    rows of files without the column, until maintenance has packed the files.
    """
    by_row = "SET spark.sql.iceberg.vectorization.enabled=false"
    whole = f"SELECT {', '.join(PLAIN)} FROM lake_table ORDER BY id"
    requests = []
    for table in tables.values():
        requests += [(table.location, query) for query in (whole, "SELECT price FROM lake_table")]
        requests += [(table.location, FILTERED), (table.packed, FILTERED)]
    requests.append((next(iter(tables.values())).location, by_row))
    requests += [(table.location, ALL) for table in tables.values()]

    answers = iter(read_many_with_spark35(requests))

    for _ in tables:
        assert plain(next(answers)) == [{name: row[name] for name in PLAIN} for row in _expected()]
        assert "Cannot cast default value to int" in next(answers)[0]["error"]
        assert next(answers) == []
        assert next(answers) == _of_the_default()
    next(answers)
    for _ in tables:
        assert plain(next(answers)) == _expected()


def _of_the_default() -> list[dict[str, Any]]:
    return [{"id": row["id"]} for row in _expected() if row["number"] == DEFAULTS["number"]]
