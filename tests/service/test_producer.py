"""The producer against a running service: order, once, lost answers, restarts, backpressure."""

from __future__ import annotations

import threading
from pathlib import Path

import pyarrow as pa
import pytest

from streamhouse.client import Producer, StorageClient
from streamhouse.core.errors import (
    InvalidRequestError,
    OverloadedError,
    SchemaMismatchError,
    StreamhouseError,
    TableNotFoundError,
    UnsupportedError,
)
from tests.support.flaky_proxy import FlakyProxy
from tests.support.service_process import ServiceProcess

pytestmark = pytest.mark.slow

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string())])


def _rows(start: int, end: int, name: str = "n") -> pa.Table:
    ids = list(range(start, end))
    return pa.table({"id": ids, "name": [f"{name}{i}" for i in ids]}, schema=SCHEMA)


def _log(client: StorageClient, path: str) -> dict[int, list[int]]:
    """bucket -> ids in offset order."""
    found: dict[int, list[int]] = {}
    for bucket, positions in client.positions(path).items():
        found[bucket] = []
        for batch in client.read_range(path, bucket, 0, positions.high_watermark):
            found[bucket] += batch.data.column("id").to_pylist()
    return found


@pytest.mark.parametrize("key", [(), ("id",)])
def test_every_call_learns_where_its_rows_are(client: StorageClient, key: tuple[str, ...]) -> None:
    client.create_table("events", SCHEMA, bucket_count=3, bucket_key=key)
    with Producer(client, "events", linger_ms=2, batch_rows=50, max_in_flight=2) as producer:
        futures = [producer.send(_rows(7 * i, 7 * i + 7)) for i in range(100)]

    stored = _log(client, "events")
    assert sorted(i for ids in stored.values() for i in ids) == list(range(700))
    for number, future in enumerate(futures):
        ranges = future.result(timeout=0)
        ids = [i for b, (start, end) in ranges.items() for i in stored[b][start:end]]
        assert sorted(ids) == list(range(7 * number, 7 * number + 7))
    if key:
        # In a bucket, in the order of the calls.
        assert all(ids == sorted(ids) for ids in stored.values())


def test_lost_answers_store_nothing_twice_and_nothing_out_of_order(
    service: ServiceProcess, client: StorageClient
) -> None:
    client.create_table("events", SCHEMA, bucket_count=2, bucket_key=("id",))
    port = int(service.endpoint.rpartition(":")[2])
    with FlakyProxy(port) as proxy, StorageClient(proxy.endpoint) as flaky:
        producer = Producer(flaky, "events", linger_ms=0, batch_rows=10)
        proxy.answers_to_lose = 6
        for number in range(60):
            producer.send(_rows(5 * number, 5 * number + 5))
        producer.close()
        assert proxy.answers_lost == 6

    stored = _log(client, "events")
    assert sorted(i for ids in stored.values() for i in ids) == list(range(300))
    assert all(ids == sorted(ids) for ids in stored.values())


def test_upserts_and_deletes_apply_in_order_also_through_a_restart(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path) as first, StorageClient(first.endpoint) as client:
        client.create_table("rows", SCHEMA, bucket_count=2, primary_key=("id",))
        port = first.endpoint.rpartition(":")[2]
        producer = Producer(client, "rows", operation="upsert", linger_ms=1, batch_rows=20)
        for number in range(50):
            producer.send(_rows(0, 10, f"v{number}-"))
        started = threading.Event()
        producer.send(_rows(0, 10, "last-")).add_done_callback(lambda _: started.set())
        first.kill()
        with ServiceProcess(tmp_path, "--port", port):
            producer.close()
            assert started.is_set()
            found = client.lookup("rows", pa.table({"id": list(range(10))})).to_pydict()
            assert found["name"] == [f"last-{i}" for i in range(10)]
            with Producer(client, "rows", operation="delete") as deleter:
                deleter.send(pa.table({"id": [0, 1, 2]}))
            assert client.count("rows") == 7


def test_what_is_wrong_is_told_to_who_gave_it(client: StorageClient) -> None:
    client.create_table("events", SCHEMA)
    client.create_table(
        "rows", SCHEMA, primary_key=("id",), properties={"table.delete.behavior": "disallow"}
    )
    with pytest.raises(UnsupportedError, match="cannot be written by append"):
        Producer(client, "rows")
    with pytest.raises(InvalidRequestError, match="at least 1"):
        Producer(client, "events", batch_rows=0)
    producer = Producer(client, "rows", operation="upsert", linger_ms=10_000, batch_rows=1_000)
    with pytest.raises(SchemaMismatchError):
        producer.send(pa.table({"id": [1]}))
    changes = [
        pa.table({"__change_type": [kind], "id": [number], "name": ["x"]})
        for number, kind in enumerate(["+I", "-D", "+I"])
    ]
    good, bad, also_good = [producer.send(change) for change in changes]
    with pytest.raises(UnsupportedError, match="disallow"):
        producer.flush()
    # Rows that were sent together with a wrong one are stored all the same.
    assert good.result(timeout=0)
    assert also_good.result(timeout=0)
    assert isinstance(bad.exception(timeout=0), UnsupportedError)
    assert client.count("rows") == 2
    producer.close()
    with pytest.raises(InvalidRequestError, match="closed"):
        producer.send(_rows(0, 1))


def test_a_full_producer_makes_its_caller_wait_then_says_so(client: StorageClient) -> None:
    client.create_table("events", SCHEMA)
    producer = Producer(
        client,
        "events",
        linger_ms=60_000,
        batch_rows=1_000_000,
        buffer_bytes=1_000,
        max_block_s=0.0,
    )
    taken = producer.send(_rows(0, 1_000))
    with pytest.raises(OverloadedError, match="buffer_bytes"):
        producer.send(_rows(0, 1_000))
    producer.flush()
    assert taken.result(timeout=0) == {0: (0, 1_000)}
    producer.send(_rows(1_000, 1_001))
    producer.close()
    assert client.positions("events")[0].high_watermark == 1_001


def test_a_table_that_is_dropped_fails_the_delivery(client: StorageClient) -> None:
    client.create_table("events", SCHEMA)
    producer = Producer(client, "events", linger_ms=0)
    producer.send(_rows(0, 1))
    producer.flush()
    client.drop_table("events")
    lost = producer.send(_rows(1, 2))
    with pytest.raises(StreamhouseError):
        producer.close()
    assert isinstance(lost.exception(timeout=0), TableNotFoundError)
