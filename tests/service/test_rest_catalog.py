"""The REST catalog of a real service process: token, other engines, limits, and no cost unused."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest
import urllib3
from pyiceberg.catalog import load_catalog
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import ForbiddenError, UnauthorizedError

from integration.judges.duckdb_read import connect
from streamhouse.api.client import StreamhouseClient
from streamhouse.core.errors import StreamhouseError
from tests.support.flaky_proxy import FlakyProxy
from tests.support.service_process import ServiceProcess
from tests.support.tier_once import tier_once

pytestmark = pytest.mark.slow

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string())])
TOKEN = "a-secret-of-tests"


def _rows(start: int, end: int) -> pa.Table:
    ids = range(start, end)
    return pa.table({"id": ids, "name": [f"n{i}" for i in ids]}, schema=SCHEMA)


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rest") / "data"


@pytest.fixture(scope="module")
def service(data_dir: Path) -> Iterator[ServiceProcess]:
    """A service whose workers and readers go through its REST catalog."""
    token_file = data_dir.parent / "token"
    token_file.write_text(TOKEN)
    token_file.chmod(0o600)
    arguments = ("--token-file", str(token_file), "--catalog-access", "service")
    with ServiceProcess(data_dir, *arguments) as started:
        yield started


@pytest.fixture(scope="module")
def client(service: ServiceProcess) -> Iterator[StreamhouseClient]:
    with StreamhouseClient(service.endpoint, token=TOKEN) as opened:
        yield opened


def _catalog(service: ServiceProcess, token: str = TOKEN) -> RestCatalog:
    uri = f"{service.endpoint}/iceberg"
    catalog = load_catalog("streamhouse", type="rest", uri=uri, token=token)
    assert isinstance(catalog, RestCatalog)
    return catalog


def _tiered_table(client: StreamhouseClient, path: str) -> None:
    """A table with 300 rows in the lake and 50 more in the log."""
    client.create_table(path, SCHEMA, bucket_count=2)
    for start in (0, 100, 200):
        client.append(path, _rows(start, start + 100))
        assert tier_once(client, path, token=TOKEN) == 100
    client.append(path, _rows(300, 350))


def test_tiering_and_union_reads_go_through_the_service(
    service: ServiceProcess, client: StreamhouseClient
) -> None:
    _tiered_table(client, "default.through")

    assert client.lake_catalog().properties["uri"] == f"{service.endpoint}/iceberg"
    assert sorted(client.read("default.through")["id"].to_pylist()) == list(range(350))


def test_pyiceberg_reads_and_deletes_and_may_not_append(
    service: ServiceProcess, client: StreamhouseClient
) -> None:
    _tiered_table(client, "default.judged")
    table = _catalog(service).load_table("default.judged")

    assert sorted(table.scan().to_arrow()["id"].to_pylist()) == list(range(300))
    table.delete("id < 10")
    with pytest.raises(ForbiddenError, match="more rows than it removes"):
        table.append(table.scan(limit=1).to_arrow())

    # Its snapshot was registered before the engine was answered.
    state = client.table_state("default.judged")
    current = _catalog(service).load_table("default.judged").metadata.current_snapshot_id
    assert state.lake.snapshot_id == current
    assert sorted(client.read("default.judged")["id"].to_pylist()) == list(range(10, 350))
    assert client.count("default.judged") == 340
    assert tier_once(client, "default.judged", token=TOKEN) == 50
    assert sorted(client.read("default.judged")["id"].to_pylist()) == list(range(10, 350))


def test_a_commit_past_the_service_is_seen_by_the_next_read(
    data_dir: Path, client: StreamhouseClient
) -> None:
    _tiered_table(client, "default.passed")
    uri = f"sqlite:///{data_dir / 'lake' / 'catalog.db'}"
    with contextlib.closing(SqlCatalog("streamhouse", uri=uri)) as behind:
        behind.load_table("default.passed").delete("id < 10")
        current = behind.load_table("default.passed").metadata.current_snapshot_id

    assert client.count("default.passed") == 340
    assert client.table_state("default.passed").lake.snapshot_id == current
    assert sorted(client.read("default.passed")["id"].to_pylist()) == list(range(10, 350))


def test_duckdb_attaches_and_reads(service: ServiceProcess, client: StreamhouseClient) -> None:
    _tiered_table(client, "default.attached")
    duckdb = connect()

    duckdb.execute(
        f"ATTACH 'streamhouse' AS lake"
        f" (TYPE ICEBERG, ENDPOINT '{service.endpoint}/iceberg', TOKEN '{TOKEN}')"
    )
    found = duckdb.execute('SELECT count(*), sum(id) FROM lake."default".attached').fetchall()

    assert found == [(300, sum(range(300)))]


def test_duckdb_makes_tables_and_updates_and_deletes_rows_of_log_tables(
    service: ServiceProcess, client: StreamhouseClient
) -> None:
    _tiered_table(client, "default.updated")
    client.create_table("default.keyed", SCHEMA, primary_key=["id"])
    client.upsert("default.keyed", _rows(0, 10))
    assert tier_once(client, "default.keyed", token=TOKEN) == 10
    duckdb = connect()
    duckdb.execute(
        f"ATTACH 'streamhouse' AS lake"
        f" (TYPE ICEBERG, ENDPOINT '{service.endpoint}/iceberg', TOKEN '{TOKEN}')"
    )
    # Our readers need neither the order nor the size of files that other engines write.
    duckdb.execute("SET unsafe_iceberg_ignore_sort_order = true")
    duckdb.execute("SET ignore_target_file_size_for_partitioned_tables = true")

    duckdb.execute('CREATE SCHEMA lake."a b"')
    duckdb.execute('CREATE TABLE lake."a b".made AS SELECT 1 AS x, 2 AS y')
    duckdb.execute("UPDATE lake.\"default\".updated SET name = 'new' WHERE id < 5")
    duckdb.execute('DELETE FROM lake."default".updated WHERE id % 10 = 9')
    for statement in ("DELETE FROM {} WHERE id < 3", "UPDATE {} SET name = 'new' WHERE id < 3"):
        with pytest.raises(Exception, match="through the streamhouse service only"):
            duckdb.execute(statement.format('lake."default".keyed'))

    assert duckdb.execute('SELECT x, y FROM lake."a b".made').fetchall() == [(1, 2)]
    found = client.read("default.updated").sort_by("id").to_pylist()
    gone = [id_ for id_ in range(300) if id_ % 10 == 9]
    assert [row["id"] for row in found] == [n for n in range(350) if n not in gone]
    assert [row["name"] for row in found[:6]] == [*["new"] * 5, "n5"]
    assert client.count("default.keyed") == client.read("default.keyed").num_rows == 10


@pytest.mark.parametrize("written", ["x+y", "x%20y"])
def test_a_name_with_a_space_is_read_however_it_is_written(
    service: ServiceProcess, written: str
) -> None:
    """Iceberg Java writes a plus sign, and its grants are those of the name."""
    _catalog(service).create_namespace_if_not_exists("x y")
    headers = {"Authorization": f"Bearer {TOKEN}"}

    answer = urllib3.request(
        "GET", f"{service.endpoint}/iceberg/v1/namespaces/{written}", headers=headers
    )

    assert answer.json()["namespace"] == ["x y"]


def test_commits_of_many_at_once_all_land_once(service: ServiceProcess) -> None:
    catalog = _catalog(service)
    catalog.create_namespace_if_not_exists("shared")
    properties = {"commit.retry.num-retries": "50", "commit.retry.min-wait-ms": "10"}
    catalog.create_table("shared.t", SCHEMA, properties=properties)

    def append(writer: int) -> None:
        table = _catalog(service).load_table("shared.t")
        for number in range(4):
            table.append(_rows(writer * 100 + number, writer * 100 + number + 1))

    with ThreadPoolExecutor(3) as writers:
        list(writers.map(append, range(3)))

    found = catalog.load_table("shared.t")
    expected = [writer * 100 + number for writer in range(3) for number in range(4)]
    assert sorted(found.scan().to_arrow()["id"].to_pylist()) == expected
    assert len(found.metadata.snapshots) == 12


def test_tiering_finds_its_commit_when_the_answer_was_lost(
    service: ServiceProcess, client: StreamhouseClient
) -> None:
    client.create_table("default.lossy", SCHEMA)
    with FlakyProxy(int(service.endpoint.rpartition(":")[2])) as proxy:
        for number in range(6):
            client.append("default.lossy", _rows(number * 10, number * 10 + 10))
            with StreamhouseClient(proxy.endpoint, token=TOKEN) as worker:
                worker.describe_table("default.lossy")
                proxy.answers_to_lose = 1 + number
                # It may give up; what it did then is found by the next one.
                with contextlib.suppress(StreamhouseError):
                    tier_once(worker, "default.lossy", token=TOKEN)
                proxy.answers_to_lose = 0
        assert proxy.answers_lost > 6
    with contextlib.suppress(StreamhouseError):
        tier_once(client, "default.lossy", token=TOKEN)

    table = _catalog(service).load_table("default.lossy")
    assert sorted(table.scan().to_arrow()["id"].to_pylist()) == list(range(60))
    assert sorted(client.read("default.lossy")["id"].to_pylist()) == list(range(60))


def test_a_wrong_token_is_refused_in_the_protocols_form(service: ServiceProcess) -> None:
    with pytest.raises(
        UnauthorizedError, match="NotAuthorizedException: the bearer token is wrong"
    ):
        _catalog(service, "wrong").list_namespaces()


def test_a_lake_catalog_that_is_the_service_itself_is_found_out(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path) as first:
        port = first.endpoint.rpartition(":")[2]
    own = f"http://127.0.0.1:{port}/iceberg"
    arguments = ("--port", port, "--catalog-property", "type=rest")
    with ServiceProcess(tmp_path, *arguments, "--catalog-property", f"uri={own}") as service:
        answer = urllib3.request("GET", f"{service.endpoint}/iceberg/v1/namespaces", timeout=60)

        assert answer.status == 400
        assert "is this service itself" in answer.json()["error"]["message"]


def test_the_lake_library_is_loaded_by_the_first_request_only(tmp_path: Path) -> None:
    def is_loaded(pid: int) -> bool:
        # Its compiled parts are mapped into the process that imported it.
        return "sqlalchemy" in Path(f"/proc/{pid}/maps").read_text()

    with ServiceProcess(tmp_path, is_executed=True) as service:
        with StreamhouseClient(service.endpoint) as client:
            client.create_table("default.t", SCHEMA)
        assert not is_loaded(service.pid)

        answer = urllib3.request("GET", f"{service.endpoint}/iceberg/v1/config", timeout=60)
        assert answer.status == 200
        assert (
            urllib3.request("GET", f"{service.endpoint}/iceberg/v1/namespaces", timeout=60).status
            == 200
        )
        assert is_loaded(service.pid)
        assert service.terminate() == 0
