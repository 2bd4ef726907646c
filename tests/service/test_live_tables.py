"""The warehouse `live` of a real service process: other engines read rows that no round moved."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pytest
import urllib3
from pyiceberg.catalog import load_catalog
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.exceptions import NoSuchTableError

from integration.judges.duckdb_read import connect
from streamhouse.api.client import StreamhouseClient
from tests.support.service_process import ServiceProcess
from tests.support.tier_once import tier_once

pytestmark = pytest.mark.slow

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string())])


def _rows(start: int, end: int, name: str = "n") -> pa.Table:
    ids = range(start, end)
    return pa.table({"id": ids, "name": [f"{name}{i}" for i in ids]}, schema=SCHEMA)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with ServiceProcess(tmp_path_factory.mktemp("live") / "data") as started:
        yield started


@pytest.fixture(scope="module")
def client(service: ServiceProcess) -> Iterator[StreamhouseClient]:
    with StreamhouseClient(service.endpoint) as opened:
        yield opened


@pytest.fixture(scope="module")
def live(service: ServiceProcess) -> RestCatalog:
    uri = f"{service.endpoint}/iceberg"
    catalog = load_catalog("live", type="rest", uri=uri, warehouse="live")
    assert isinstance(catalog, RestCatalog)
    return catalog


def _read(live: RestCatalog, table: str) -> dict[int, str]:
    """The rows as pyiceberg reads them, with a plan of its own and with the service's."""
    uri = live.properties["uri"]
    planning = {"type": "rest", "warehouse": "live", "scan-planning-mode": "server"}
    own, served = (
        catalog.load_table(table).scan().to_arrow()
        for catalog in (live, load_catalog("planned", uri=uri, **planning))
    )
    assert own.sort_by("id").equals(served.sort_by("id"))
    return dict(zip(own["id"].to_pylist(), own["name"].to_pylist(), strict=True))


def test_rows_are_there_before_and_after_rounds(
    client: StreamhouseClient, live: RestCatalog
) -> None:
    client.create_table("default.log", SCHEMA, bucket_count=2)
    assert _read(live, "default.log") == {}
    client.append("default.log", _rows(0, 10))
    assert sorted(_read(live, "default.log")) == list(range(10))
    assert tier_once(client, "default.log") == 10
    client.append("default.log", _rows(10, 15))
    assert sorted(_read(live, "default.log")) == list(range(15))


def test_updates_and_deletes_of_rows_in_lake_and_log(
    client: StreamhouseClient, live: RestCatalog
) -> None:
    client.create_table("default.keys", SCHEMA, primary_key="id", bucket_count=2)
    client.upsert("default.keys", _rows(0, 20))
    assert tier_once(client, "default.keys") == 20
    client.upsert("default.keys", _rows(15, 25, "new"))
    client.delete("default.keys", pa.table({"id": [0, 24]}))
    expected = {i: f"{'n' if i < 15 else 'new'}{i}" for i in range(1, 24)}
    assert _read(live, "default.keys") == expected
    client.upsert("default.keys", _rows(1, 2, "again"))
    assert _read(live, "default.keys") == expected | {1: "again1"}


def test_duckdb_reads_what_was_appended_a_moment_before(
    service: ServiceProcess, client: StreamhouseClient
) -> None:
    client.create_table("default.duck", SCHEMA)
    counted = 'SELECT count(*) FROM live."default".duck'
    with connect() as duckdb:
        duckdb.execute(
            f"ATTACH 'live' AS live (TYPE ICEBERG, ENDPOINT '{service.endpoint}/iceberg',"
            " AUTHORIZATION_TYPE 'none')"
        )
        assert duckdb.execute(counted).fetchone() == (0,)
        client.append("default.duck", _rows(0, 3))
        assert duckdb.execute(counted).fetchone() == (3,)
        assert tier_once(client, "default.duck") == 3
        client.append("default.duck", _rows(3, 5))
        assert duckdb.execute(counted).fetchone() == (5,)

        # A round after the transaction's begin does not show the snapshot before the round.
        duckdb.execute("BEGIN")
        duckdb.execute("SELECT 1")
        assert tier_once(client, "default.duck") == 2
        assert duckdb.execute(counted).fetchone() == (5,)
        # A table may be younger than the transaction that reads.
        client.create_table("default.duckling", SCHEMA)
        client.append("default.duckling", _rows(0, 2))
        counted = 'SELECT count(*) FROM live."default".duckling'
        assert duckdb.execute(counted).fetchone() == (2,)
        duckdb.execute("COMMIT")


def test_pyiceberg_cannot_commit(client: StreamhouseClient, live: RestCatalog) -> None:
    client.create_table("default.read", SCHEMA)
    client.append("default.read", _rows(0, 1))
    table = live.load_table("default.read")

    with pytest.raises(NotImplementedError, match="does not support"):
        table.append(table.scan().to_arrow())
    assert _read(live, "default.read") == {0: "n0"}
    assert live.table_exists("default.read")
    with pytest.raises(NoSuchTableError):
        live.load_table("default.nothing")


def test_an_unchanged_table_is_answered_with_304(
    service: ServiceProcess, client: StreamhouseClient
) -> None:
    client.create_table("default.same", SCHEMA)
    client.append("default.same", _rows(0, 3))
    assert tier_once(client, "default.same") == 3
    for prefix in ("live/", ""):
        url = f"{service.endpoint}/iceberg/v1/{prefix}namespaces/default/tables/same"
        etag = urllib3.request("GET", url).headers["etag"]
        headers = {"if-none-match": f'"other", W/{etag}'}
        again = urllib3.request("GET", url, headers=headers)
        assert (again.status, again.data, again.headers["etag"]) == (304, b"", etag)
        other = urllib3.request("GET", f"{url}?snapshots=refs", headers=headers)
        assert (other.status, other.headers["etag"] == etag) == (200, False)
        client.append("default.same", _rows(3, 4))
        changed = urllib3.request("GET", url, headers=headers)
        assert changed.status == (200 if prefix else 304)
