"""The SQL catalog on a real PostgreSQL, as docs/object_stores.md has it: rounds, commits of other
engines, workers in a race, and connections that are lost at every step of a commit.

What is in the lake afterwards is asked of stock pyiceberg, DuckDB and Iceberg Java.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import urllib3
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.catalog.sql import SqlCatalog

from integration.judges.duckdb_read import connect
from integration.judges.engines import read_many_with_spark35
from integration.judges.postgres_faults import STEPS, KilledCommit, prepare_faults
from integration.judges.postgres_server import PostgresServer
from streamhouse.api.client import StreamhouseClient
from streamhouse.core.errors import StreamhouseError
from streamhouse.tiering.worker.embedded import EmbeddedTieringWorker
from tests.support.rest_world import adding_column, change_of
from tests.support.service_process import ServiceProcess
from tests.support.tier_once import tier_once

pytestmark = [pytest.mark.slow, pytest.mark.judge]

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string())])
Rows = list[tuple[int, str]]


def _rows(start: int, end: int, mark: str = "n") -> pa.Table:
    ids = range(start, end)
    return pa.table({"id": ids, "name": [f"{mark}{i}" for i in ids]}, schema=SCHEMA)


def _pairs(table: pa.Table) -> Rows:
    return sorted(zip(table["id"].to_pylist(), table["name"].to_pylist(), strict=True))


@dataclass
class World:
    """A server, a service whose catalog it holds, and the warehouse's folder."""

    server: PostgresServer
    database: str
    service: ServiceProcess
    client: StreamhouseClient
    judge: SqlCatalog
    warehouse: Path

    def killed(self, step: str) -> KilledCommit:
        return KilledCommit(self.server, self.database, step=step)

    def post(self, changes: list[dict[str, Any]]) -> tuple[int, str]:
        """Commit to several tables; return the status and the kind of the error."""
        url = f"{self.service.endpoint}/iceberg/v1/transactions/commit"
        answer = urllib3.request(
            "POST", url, json={"table-changes": changes}, retries=False, timeout=60
        )
        body = json.loads(answer.data or b"{}")
        return answer.status, body["error"]["type"] if body else ""

    @contextlib.contextmanager
    def rest(self) -> Iterator[Catalog]:
        uri = f"{self.service.endpoint}/iceberg"
        with contextlib.closing(load_catalog("rest", type="rest", uri=uri)) as opened:
            yield opened

    def check(self, path: str, expected: Rows) -> None:
        """The union read, pyiceberg on the database and DuckDB have exactly these rows."""
        assert _pairs(self.client.read(path)) == expected
        table = self.judge.load_table(path)
        assert _pairs(table.scan().to_arrow()) == expected
        with connect() as duckdb:
            found = duckdb.execute(
                f"SELECT id, name FROM iceberg_scan('{table.metadata_location}') ORDER BY id"
            ).fetchall()
        assert found == expected
        _CHECKED[table.metadata_location] = expected

    def unknown_metadata(self, path: str) -> set[str]:
        """Metadata files of a table that its newest metadata does not know."""
        table = self.judge.load_table(path)
        known = {entry.metadata_file for entry in table.metadata.metadata_log}
        folder = self.warehouse / Path(*path.split(".")) / "metadata"
        there = {f"file://{file}" for file in folder.glob("*.metadata.json")}
        return there - known - {table.metadata_location}


# What the last test asks Iceberg Java about, in one session: metadata file -> rows.
_CHECKED: dict[str, Rows] = {}


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with PostgresServer() as started, pytest.MonkeyPatch.context() as patch:
        sys.path.append(str(started.driver))
        patch.setenv("PGPASSWORD", started.environment()["PGPASSWORD"])
        yield started
        sys.path.remove(str(started.driver))


@pytest.fixture(scope="module", params=["service", "direct"])
def world(
    request: pytest.FixtureRequest,
    server: PostgresServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[World]:
    """Workers and readers go through the service, or to the database themselves."""
    folder = tmp_path_factory.mktemp("postgres")
    warehouse = folder / "warehouse"
    database = f"lake_{request.param}"
    server.sql(f"CREATE DATABASE {database}")
    uri = f"{server.uri(database)}?connect_timeout=5&tcp_user_timeout=10000"
    arguments = (
        *(f"--warehouse=file://{warehouse}", f"--catalog-access={request.param}"),
        *("--catalog-property=type=sql", f"--catalog-property=uri={uri}"),
    )
    with (
        # Executed: the driver is on the Python path of this process only.
        ServiceProcess(
            folder / "data", *arguments, env=server.environment(), is_executed=True
        ) as service,
        StreamhouseClient(service.endpoint) as client,
        contextlib.closing(SqlCatalog("streamhouse", uri=uri, pool_pre_ping="true")) as judge,
    ):
        prepare_faults(server, database)
        client.create_database("shop")
        yield World(server, database, service, client, judge, warehouse)


def test_rounds_and_commits_of_others(world: World) -> None:
    """Log tables and a key table in rounds, deletes by pyiceberg, two tables in one commit."""
    log, second, keyed = "shop.events", "shop.visits", "shop.items"
    for path in (log, second):
        world.client.create_table(path, SCHEMA, bucket_count=3)
    world.client.create_table(keyed, SCHEMA, primary_key=["id"], bucket_count=2)
    for number in range(3):
        for path in (log, second):
            world.client.append(path, _rows(number * 100, number * 100 + 100))
        world.client.upsert(keyed, _rows(number * 50, number * 50 + 100, f"v{number}-"))
        tier_once(world.client)
    world.client.delete(keyed, _rows(190, 200).select(["id"]))
    tier_once(world.client)
    versions = {
        i: f"v{number}-{i}" for number in range(3) for i in range(number * 50, number * 50 + 100)
    }
    current = [(i, name) for i, name in sorted(versions.items()) if i < 190]
    world.check(log, _pairs(_rows(0, 300)))
    world.check(keyed, current)

    with world.rest() as rest:
        rest.load_table(log).delete("id < 10")
        changes = []
        for path, condition in ((log, "id < 20"), (second, "id >= 180"), (keyed, "id >= 180")):
            table = rest.load_table(path)
            transaction = table.transaction()
            transaction.delete(condition)
            changes.append(change_of(table, transaction))
    # Rows by key go by what the service deletes: nothing of the commit is done.
    assert world.post(changes) == (403, "ForbiddenException")
    assert world.post(changes[:2]) == (204, "")
    assert world.post(changes[:2]) == (409, "CommitFailedException")
    tables = {path: world.judge.load_table(path) for path in (log, second, keyed)}
    counts = {path: table.scan().to_arrow().num_rows for path, table in tables.items()}
    assert counts == {log: 280, second: 180, keyed: 190}
    assert world.client.count(second) == 180

    world.client.append(log, _rows(300, 310))
    world.client.upsert(keyed, _rows(0, 1, "last-"))
    tier_once(world.client)
    world.check(log, _pairs(_rows(20, 310)))
    world.check(keyed, [(0, "last-0"), *current[1:]])


def _killed_while(world: World, step: str, work: Callable[[], Any]) -> Any:
    with world.killed(step) as fault:
        answer = work()
    assert fault.is_done, f"no commit got to '{step}'"
    return answer


@pytest.mark.parametrize("step", STEPS)
def test_a_round_that_loses_its_connection_while_it_commits(world: World, step: str) -> None:
    """Killed while it makes the lake table and, later, at rounds: each row is there once."""
    log, keyed = f"shop.log_{step}", f"shop.key_{step}"
    world.client.create_table(log, SCHEMA, bucket_count=2)
    world.client.create_table(keyed, SCHEMA, primary_key=["id"], bucket_count=2)

    def tier() -> None:
        # A round may give up; the next one finds what it did.
        with contextlib.suppress(StreamhouseError):
            tier_once(world.client, log, keyed)

    for number in range(3):
        world.client.append(log, _rows(number * 100, number * 100 + 100))
        world.client.upsert(keyed, _rows(number * 50, number * 50 + 100, f"v{number}-"))
        _killed_while(world, step, tier)
        tier_once(world.client, log, keyed)
        world.check(log, _pairs(_rows(0, number * 100 + 100)))
    versions = {i: f"v{n}-{i}" for n in range(3) for i in range(n * 50, n * 50 + 100)}
    world.check(keyed, sorted(versions.items()))


@pytest.mark.parametrize("step", STEPS)
def test_a_commit_of_two_tables_that_loses_its_connection(world: World, step: str) -> None:
    paths = [f"own_{step}.{name}" for name in ("one", "two")]
    with world.rest() as rest:
        rest.create_namespace(f"own_{step}")
        for path in paths:
            rest.create_table(path, SCHEMA)
        changes = [adding_column(rest, path, "more") for path in paths]

    answer = _killed_while(world, step, lambda: world.post(changes))

    has = ["more" in world.judge.load_table(path).schema().column_names for path in paths]
    left = [len(world.unknown_metadata(path)) for path in paths]
    # A file stays where it may be needed: what failed for certain leaves none.
    assert (answer, has, left) == {
        "statement": ((503, "ServiceUnavailableException"), [False, False], [0, 0]),
        "commit": ((500, "CommitStateUnknownException"), [False, False], [1, 1]),
        "answer": ((500, "CommitStateUnknownException"), [True, True], [0, 0]),
    }[step]
    # The service goes on, with connections of its own.
    assert world.post(changes)[0] == (409 if step == "answer" else 204)


def test_connections_that_are_lost_between_requests_are_no_errors(world: World) -> None:
    path = "shop.restarted"
    world.client.create_table(path, SCHEMA)
    world.client.append(path, _rows(0, 10))
    tier_once(world.client, path)

    with world.rest() as rest:
        rest.load_table(path)
        world.server.restart()
        # No attempt fails, whichever of the service's connections it takes.
        assert rest.load_table(path).scan().to_arrow().num_rows == 10
    world.client.append(path, _rows(10, 20))
    assert tier_once(world.client, path) == 10
    world.check(path, _pairs(_rows(0, 20)))


def test_commits_that_name_two_tables_crosswise_do_not_wait_for_each_other(world: World) -> None:
    paths = ["cross.one", "cross.two"]
    with world.rest() as rest:
        rest.create_namespace("cross")
        for path in paths:
            rest.create_table(path, SCHEMA)

    def write(writer: int) -> set[tuple[int, str]]:
        seen = set()
        with world.rest() as rest:
            for number in range(15):
                name = f"c{writer}_{number}"
                changes = [adding_column(rest, path, name) for path in paths]
                answer = world.post(changes if writer else changes[::-1])
                seen.add(answer)
                if answer[0] == 204:
                    landed[writer].append(name)
        return seen

    landed: list[list[str]] = [[], []]
    with ThreadPoolExecutor(2) as pool:
        seen = set().union(*pool.map(write, range(2)))

    assert seen <= {(204, ""), (409, "CommitFailedException")}
    for path in paths:
        columns = world.judge.load_table(path).schema().column_names
        assert sorted(columns[2:]) == sorted(landed[0] + landed[1])
        assert world.unknown_metadata(path) == set()


def test_two_workers_race_while_connections_break(world: World) -> None:
    paths = [f"shop.race_{kind}{number}" for number in range(2) for kind in ("log", "key")]
    for path in paths:
        key = ["id"] if "key" in path else []
        properties = {"table.datalake.freshness": "1s"}
        world.client.create_table(
            path, SCHEMA, primary_key=key, bucket_count=2, properties=properties
        )
    workers = [EmbeddedTieringWorker(endpoint=world.client.endpoint, token=None) for _ in range(2)]
    for worker in workers:
        worker.start()
    stopping = threading.Event()

    def break_connections() -> None:
        while not stopping.wait(0.3):
            world.server.sql(
                "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity"
                f" WHERE datname = '{world.database}'"
            )

    breaker = threading.Thread(target=break_connections, daemon=True)
    breaker.start()
    try:
        for number in range(12):
            for path in paths:
                write = world.client.upsert if "key" in path else world.client.append
                write(path, _rows(number * 50, number * 50 + 50))
    finally:
        stopping.set()
        breaker.join()
    for path in paths:
        _wait_until_tiered(world.client, path)
    for worker in workers:
        worker.stop()

    for path in paths:
        world.check(path, _pairs(_rows(0, 600)))


def _wait_until_tiered(client: StreamhouseClient, path: str) -> None:
    ends = {b: p.high_watermark for b, p in client.positions(path).items()}
    deadline = time.monotonic() + 120
    while dict(client.table_state(path).lake.tiered_offsets) != ends:
        assert time.monotonic() < deadline, client.table_state(path).lake
        client.table_state(path, after={0: 10**9}, max_wait_ms=200)


def test_iceberg_java_finds_the_same_rows() -> None:
    """In all states that the tests above have checked."""
    assert _CHECKED
    query = "SELECT id, name FROM lake_table ORDER BY id"
    answers = read_many_with_spark35([(location, query) for location in _CHECKED])

    for expected, found in zip(_CHECKED.values(), answers, strict=True):
        assert [(row["id"], row["name"]) for row in found] == expected
