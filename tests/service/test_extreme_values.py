"""The extremes of every type in a real service: written, tiered, rewritten, found everywhere."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from click.testing import CliRunner
from pyiceberg.catalog import load_catalog
from pyiceberg.table import Table

from integration.judges.duckdb_read import connect
from streamhouse.api.client import StreamhouseClient
from streamhouse.cli.client_commands.maintain import command as maintain
from streamhouse.cli.server_commands.check import command as check
from streamhouse.cli.server_commands.dump import command as dump
from streamhouse.core.errors import UnsupportedError
from tests.support.extreme_values import EXTREMES, extreme_rows, same_rows
from tests.support.service_process import ServiceProcess
from tests.support.tier_once import tier_once

pytestmark = pytest.mark.slow

WHERE = {
    "day": "day >= '+10000-01-01' OR day < '0001-01-01' OR day IS NULL OR day >= '0001-01-01'",
    "at": "at < '-0001-01-01' OR at >= '-0001-01-01' OR at IS NULL",
    "local": "local > '9999-12-31 23:59:59.999999' OR local <= '+10000-01-01' OR isnull(local)",
    "name": "name >= '' OR name IS NULL",
    "huge": "huge >= 0 OR huge < 0 OR huge IS NULL",
    "amount": "amount >= 0 OR amount < 0 OR amount IS NULL",
}
KEY = ["day", "at", "name"]
MANUAL = "table.datalake.auto-maintenance"


@pytest.fixture
def client(service: ServiceProcess) -> Iterator[StreamhouseClient]:
    with StreamhouseClient(service.endpoint) as opened:
        yield opened


def _lake_table(client: StreamhouseClient, name: str) -> Table:
    catalog = load_catalog(
        "judge", type="rest", uri=f"{client.endpoint}/iceberg", warehouse="default"
    )
    return catalog.load_table(f"default.{name}")


def _judge(client: StreamhouseClient, name: str, expected: pa.Table) -> None:
    """Raise unless our own format, stock pyiceberg and DuckDB find the expected rows."""
    same_rows(client.read(name), expected)
    for column, where in WHERE.items():
        if column in expected.column_names:
            same_rows(client.read(name, where=where), expected)
    assert client.read(f"{name}$files").num_rows
    table = _lake_table(client, name)
    same_rows(table.scan().to_arrow(), expected, is_loose=True)
    location = table.metadata_location.removeprefix("file://")
    with connect() as duckdb:
        found = duckdb.execute(f"SELECT * FROM iceberg_scan('{location}')").to_arrow_table()
    same_rows(found, expected)


def test_a_log_table_of_every_type(client: StreamhouseClient) -> None:
    rows = extreme_rows()
    client.create_table("plain", rows.schema, properties={MANUAL: "false"})
    half = len(rows) // 2
    for part in (rows.slice(0, half), rows.slice(half)):
        client.append("plain", part)
        same_rows(client.read("plain").slice(0, 0), rows.slice(0, 0))
        tier_once(client, "plain")
    _judge(client, "plain", rows)

    done = CliRunner().invoke(maintain, ["plain", "--endpoint", client.endpoint])

    assert done.exception is None, done.output
    assert "2 files became 1" in done.output
    _judge(client, "plain", rows)


def test_keys_and_partitions_of_every_year(client: StreamhouseClient) -> None:
    """Upserted, staged, deleted; with a full history and a second layout; rewritten at the end."""
    rows = _keys()
    client.create_table(
        "keyed",
        rows.schema,
        primary_key=KEY,
        bucket_count=3,
        bucket_key=["at"],
        partitioned_by=["month(day)", "truncate(3, name)"],
        properties={
            MANUAL: "false",
            "table.datalake.changelog": "true",
            "table.datalake.batch-layout.partition": "year(at)",
            "table.datalake.batch-layout.sort": "zorder(at, day, name)",
        },
    )
    client.upsert("keyed", rows)
    tier_once(client, "keyed")
    _judge(client, "keyed", rows)
    changed = rows.set_column(0, rows.schema.field("id"), pc.add(rows["id"], 1_000))
    with client.begin_transaction("keyed", operation="upsert") as transaction:
        transaction.commit([transaction.stage(changed)])
    same_rows(client.read("keyed"), changed)
    tier_once(client, "keyed")
    gone = changed.slice(0, 3)
    client.delete("keyed", gone.select(KEY))
    left = changed.slice(3)
    same_rows(client.read("keyed"), left)
    tier_once(client, "keyed")
    _judge(client, "keyed", left)
    assert client.read("keyed$changelog").num_rows == 3 * len(rows) + 3

    done = CliRunner().invoke(maintain, ["keyed", "--endpoint", client.endpoint])

    assert done.exception is None, done.output
    _judge(client, "keyed", left)
    found = client.lookup("keyed", changed.select(KEY))
    assert found["__found"].to_pylist() == [False] * 3 + [True] * len(left)
    same_rows(found.slice(3), left)
    with pytest.raises(UnsupportedError, match="years 1 to 9999"):
        client.lookup_one("keyed", **_python_key(left))


def _keys() -> pa.Table:
    """Return rows that are keyed by extremes: no two have the same, and none is null."""
    rows = extreme_rows("day", "at", "name", "huge", "days").slice(0, len(EXTREMES["name"]))
    for name in KEY:
        values = rows[name].combine_chunks().drop_null()
        column = values.take(pa.array([i % len(values) for i in range(len(rows))]))
        position = rows.schema.get_field_index(name)
        rows = rows.set_column(position, rows.schema.field(name).with_nullable(False), column)
    return rows


def _python_key(rows: pa.Table) -> dict[str, Any]:
    """Return a key that Python can hold, of a row that it cannot."""
    every = (rows.slice(number, 1) for number in range(len(rows)))
    row = next(r for r in every if _python_has(r.select(KEY)) and not _python_has(r))
    return dict(row.select(KEY).to_pylist()[0])


def _python_has(rows: pa.Table) -> bool:
    try:
        rows.to_pylist()
    except (OverflowError, ValueError):
        return False
    return True


def test_a_data_directory_of_them_is_sound_and_opens_again(tmp_path: Path) -> None:
    rows = extreme_rows()
    keyed = _keys()
    with ServiceProcess(tmp_path) as service, StreamhouseClient(service.endpoint) as client:
        client.create_table("plain", rows.schema)
        client.create_table("keyed", keyed.schema, primary_key=KEY, bucket_count=2)
        client.append("plain", rows)
        client.upsert("keyed", keyed)
        service.kill()
    segments = sorted(tmp_path.glob("tables/*/bucket-*/*.log"))
    dumped = [CliRunner().invoke(dump, [str(segment), "--rows"]) for segment in segments]
    checked = CliRunner().invoke(check, ["--data-dir", str(tmp_path)])
    with ServiceProcess(tmp_path) as service, StreamhouseClient(service.endpoint) as client:
        same_rows(client.read("plain"), rows)
        same_rows(client.read("keyed"), keyed)
        same_rows(client.lookup("keyed", keyed.select(KEY)), keyed)

    text = "".join(result.output for result in dumped)
    assert [result.exception for result in dumped if result.exception is not None] == []
    for wanted in ('"+294247-01-10 04:00:54.775807+00:00"', '"-5877641-06-23"'):
        assert text.count(wanted) >= 4
    assert checked.exit_code == 0, checked.output
