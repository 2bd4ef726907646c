"""DuckDB deletes, updates and merges rows of log tables through the catalog, in both versions.

Each reader must have the rows of a model after each statement, whatever tiering and maintenance
do between. `integration/test_foreign_change_judges.py` has the same statements in Spark.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from duckdb import DuckDBPyConnection
from pyiceberg.catalog import load_catalog

from streamhouse.api.client import StreamhouseClient
from streamhouse.cli.client_commands.tables import command as tables
from tests.support.foreign_changes import (
    REFUSED_OF_KEY_TABLES,
    REFUSED_OF_LOG_TABLES,
    SCHEMA,
)
from tests.support.foreign_table import ForeignTable, attached_duckdb
from tests.support.service_process import ServiceProcess

pytestmark = pytest.mark.slow

SHORT_LOG = {"table.log.ttl": "1ms", "table.log.segment-bytes": "64kb"}
VERSION = "table.datalake.format-version"


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ServiceProcess]:
    with ServiceProcess(tmp_path, "--retention-interval-ms", "50") as started:
        yield started


@pytest.fixture
def client(service: ServiceProcess) -> Iterator[StreamhouseClient]:
    with StreamhouseClient(service.endpoint) as opened:
        yield opened


@pytest.fixture
def duckdb(service: ServiceProcess) -> Iterator[DuckDBPyConnection]:
    with attached_duckdb(service.endpoint) as opened:
        yield opened


@pytest.mark.parametrize("versions", ["2", "3", "23"])
def test_duckdb_changes_rows_of_log_tables(
    client: StreamhouseClient, duckdb: DuckDBPyConnection, versions: str
) -> None:
    """Version `23` is an upgrade in the middle."""
    table = ForeignTable(client, duckdb, f"log{versions}")
    client.create_table(
        table.path, SCHEMA, bucket_count=2, properties=SHORT_LOG | {VERSION: versions[0]}
    )
    for _ in range(3):
        table.append(100)
        table.tier()
    table.append(20)
    table.change(1, 8)

    client.alter_properties(table.path, updates={VERSION: versions[-1]})
    table.tier()
    table.check("a round")
    table.change(2, 5)
    table.maintain()
    table.check("maintenance")
    table.append(20)
    table.change(3, 4)
    table.tier()
    table.check("the last round")
    table.check_stream()


@pytest.mark.parametrize("version", ["2", "3"])
def test_what_is_refused_of_duckdb_changes_nothing(
    client: StreamhouseClient, duckdb: DuckDBPyConnection, version: str
) -> None:
    table = ForeignTable(client, duckdb, f"kept{version}")
    client.create_table(table.path, SCHEMA, properties={VERSION: version})
    table.append(100)
    table.tier()
    table.change(4, 2)
    keyed = ForeignTable(client, duckdb, f"keyed{version}")
    client.create_table(keyed.path, SCHEMA, primary_key=["id"], properties={VERSION: version})
    for _ in range(2):
        keyed.append(50)
        keyed.tier()
    before = [client.table_state(one.path).lake for one in (table, keyed)]

    for statement, reason in REFUSED_OF_LOG_TABLES.items():
        with pytest.raises(Exception, match=reason):
            duckdb.execute(statement.format(t=f'lake."default".kept{version}'))
    for statement in REFUSED_OF_KEY_TABLES:
        with pytest.raises(Exception, match="through the streamhouse service only"):
            duckdb.execute(statement.format(t=f'lake."default".keyed{version}'))

    assert [client.table_state(one.path).lake for one in (table, keyed)] == before
    for one in (table, keyed):
        one.check()
        one.append(10)
        one.tier()
        one.check()


@pytest.mark.parametrize("version", ["2", "3"])
def test_sums_are_right_after_duckdb(
    client: StreamhouseClient, duckdb: DuckDBPyConnection, version: str
) -> None:
    """DuckDB leaves the size of files out, and counts replaced deletion vectors on."""
    table = ForeignTable(client, duckdb, f"sums{version}")
    properties = {VERSION: version, "table.datalake.auto-maintenance": "false"}
    client.create_table(table.path, SCHEMA, properties=properties)
    table.append(300)
    table.tier()
    for rest in (1, 2, 3):
        duckdb.execute(f'DELETE FROM lake."default".sums{version} WHERE id % 10 = {rest}')
    sizes = CliRunner().invoke(tables, ["--endpoint", client.endpoint, "--sizes", "--json"])
    assert sizes.exception is None
    assert '"lake_rows": 300' in sizes.output
    table.append(10)
    table.tier()

    uri = f"{client.endpoint}/iceberg"
    lake_table = load_catalog("c", type="rest", uri=uri).load_table(table.path)
    snapshot = lake_table.current_snapshot()
    assert snapshot is not None
    assert snapshot.summary is not None
    summed = snapshot.summary.additional_properties
    assert int(summed["total-delete-files"]) == (1 if version == "3" else 3)
    assert summed["total-position-deletes"] == "90"
    assert summed["total-records"] == "310"
