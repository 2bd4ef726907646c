"""Clients of a service that is killed and goes on elsewhere: nobody errs, rows are there once."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from streamhouse.client import Producer, StorageClient
from streamhouse.lake.lake_tables import IcebergLake
from streamhouse.tiering.worker._service import TieringService
from streamhouse.tiering.worker.thread_runner import ThreadRunner
from tests.support.moved_service import MovedService, OwnedService

pytestmark = pytest.mark.slow

Service = MovedService | OwnedService

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string())])


def _rows(start: int, end: int) -> pa.Table:
    ids = list(range(start, end))
    return pa.table({"id": ids, "name": [f"n{i}" for i in ids]}, schema=SCHEMA)


@pytest.fixture(params=[MovedService, OwnedService])
def service(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Service]:
    with request.param(tmp_path) as service:
        yield service


@pytest.fixture
def client(service: Service) -> Iterator[StorageClient]:
    with StorageClient(service.endpoint) as client:
        yield client


def _read(client: StorageClient, path: str) -> list[int]:
    return sorted(
        row
        for bucket, at in client.positions(path).items()
        for batch in client.read_range(path, bucket, 0, at.high_watermark)
        for row in batch.data.column("id").to_pylist()
    )


def test_a_producer_and_a_subscription_go_on_where_they_were(
    service: Service, client: StorageClient
) -> None:
    client.create_table("events", SCHEMA, bucket_count=2, bucket_key=["id"])
    seen: dict[int, list[int]] = defaultdict(list)
    all_seen = threading.Event()

    def follow() -> None:
        for batch in client.subscribe("events", start={0: 0, 1: 0}):
            assert batch.base_offset == len(seen[batch.bucket])
            seen[batch.bucket] += batch.data.column("id").to_pylist()
            if sum(map(len, seen.values())) >= 3_000:
                all_seen.set()
                return

    follower = threading.Thread(target=follow, daemon=True)
    follower.start()
    with Producer(client, "events", linger_ms=0, batch_rows=20) as producer:
        for number in range(300):
            producer.send(_rows(10 * number, 10 * number + 10))
            if number in (100, 200):
                # Some are on their way, some wait: no flush before.
                service.move()
    assert all_seen.wait(60)
    follower.join()

    assert sorted(row for ids in seen.values() for row in ids) == list(range(3_000))
    assert all(ids == sorted(ids) for ids in seen.values())
    assert _read(client, "events") == list(range(3_000))


def test_calls_wait_for_the_one_that_takes_over(service: Service, client: StorageClient) -> None:
    client.create_table("log", SCHEMA, bucket_count=2)
    client.create_table("keyed", SCHEMA, primary_key=["id"])
    client.upsert("keyed", _rows(0, 100))
    transaction = client.begin_transaction("log", app_id="load", version=1)
    parts = [transaction.stage(_rows(0, 50))]
    failures: list[BaseException] = []

    def call(number: int) -> None:
        try:
            client.append("log", _rows(100 * number, 100 * number + 10))
            client.upsert("keyed", _rows(100 * number, 100 * number + 10))
            assert client.lookup_one("keyed", id=7) == {"id": 7, "name": "n7"}
        except BaseException as error:
            failures.append(error)
            raise

    service.kill()
    callers = [threading.Thread(target=call, args=(number,)) for number in range(1, 6)]
    for caller in callers:
        caller.start()
    service.start()
    for caller in callers:
        caller.join()
    parts.append(transaction.stage(_rows(50, 60)))
    service.move()
    transaction.commit(parts)
    service.move()
    client.create_table("made_elsewhere", SCHEMA)

    assert not failures
    appended = [row for n in range(1, 6) for row in range(100 * n, 100 * n + 10)]
    assert _read(client, "log") == [*range(60), *appended]
    assert client.count("keyed") == 100 + 50
    assert client.begin_transaction("log", app_id="load", version=1).is_skipped


def test_an_owner_that_stands_still_is_given_up(tmp_path: Path) -> None:
    """It takes connections and requests, and answers nothing."""
    with (
        OwnedService(tmp_path) as service,
        StorageClient(service.endpoint, timeout_s=4) as client,
    ):
        client.create_table("log", SCHEMA)
        client.create_table("keyed", SCHEMA, primary_key=["id"])
        client.append("log", _rows(0, 10))
        service.pause()
        client.append("log", _rows(10, 20))
        client.upsert("keyed", _rows(0, 10))

        assert _read(client, "log") == list(range(20))
        assert client.lookup_one("keyed", id=7) == {"id": 7, "name": "n7"}


@pytest.mark.parametrize("kind", [MovedService, OwnedService])
def test_a_tiering_worker_goes_on(kind: type[Service], tmp_path: Path) -> None:
    """Its catalog is the service's own, whose address changes with the owner."""
    with (
        kind(tmp_path, "--catalog-access", "service") as service,
        StorageClient(service.endpoint) as client,
    ):
        _tier_while_it_moves(service, client)


def _tier_while_it_moves(service: Service, client: StorageClient) -> None:
    client.create_table("events", SCHEMA)
    client.append("events", _rows(0, 500))
    moved: list[str] = []

    def checkpoint(step: str) -> None:
        # Once in the middle of a round, at the first of its steps.
        if not moved:
            moved.append(step)
            service.move()

    lake = IcebergLake(client.lake_catalog())
    try:
        worker = TieringService(
            client=client, lake=lake, runner=ThreadRunner(1), checkpoint=checkpoint
        )
        [summary] = worker.run_once()
        service.move()
        client.append("events", _rows(500, 700))
        [after] = worker.run_once()
    finally:
        lake.close()

    assert moved
    assert summary.error is None
    assert after.error is None
    assert {b: p.tiered_offset for b, p in client.positions("events").items()} == {0: 700}
