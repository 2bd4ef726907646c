"""The client against a real service process: what it stores, what it retries, what it says."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa
import pytest

from streamhouse.api.client import StreamhouseClient
from streamhouse.client import AppendWriter, LogBatch, StorageClient
from streamhouse.core.errors import (
    InvalidRequestError,
    OffsetOutOfRangeError,
    SchemaMismatchError,
    TableNotFoundError,
    UnavailableError,
    UnknownColumnError,
)
from streamhouse.core.model.bucketing import buckets_for_rows
from tests.support.flaky_proxy import FlakyProxy
from tests.support.service_process import ServiceProcess

pytestmark = pytest.mark.slow

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string())])


def _rows(count: int, *, first: int = 0) -> pa.Table:
    ids = np.arange(first, first + count)
    return pa.table({"id": ids, "name": [f"n{i}" for i in ids.tolist()]})


def _stored_ids(client: StorageClient, path: str) -> dict[int, list[int]]:
    return {
        bucket: [
            row
            for batch in client.read_range(path, bucket, p.log_start_offset, p.high_watermark)
            for row in batch.data.column("id").to_pylist()
        ]
        for bucket, p in client.positions(path).items()
    }


@pytest.fixture
def client(service: ServiceProcess) -> Iterator[StorageClient]:
    with StorageClient(service.endpoint) as opened:
        yield opened


def test_rows_with_a_bucket_key_are_stored_in_their_bucket_in_order(client: StorageClient) -> None:
    client.create_table("keyed", SCHEMA, bucket_count=4, bucket_key=["id"])
    rows = _rows(1_000)

    offsets = client.append("keyed", rows)

    buckets = buckets_for_rows(rows.combine_chunks().to_batches()[0], ["id"], 4)
    expected = {b: np.flatnonzero(buckets == b).tolist() for b in range(4)}
    assert offsets == {b: (0, len(ids)) for b, ids in expected.items()}
    assert _stored_ids(client, "keyed") == expected


def test_rows_without_a_key_spread_over_all_buckets(client: StorageClient) -> None:
    client.create_table("spread", SCHEMA, bucket_count=4)

    for i in range(8):
        client.append("spread", _rows(10, first=10 * i))

    stored = _stored_ids(client, "spread")
    assert {len(ids) for ids in stored.values()} == {20}
    assert sorted(id_ for ids in stored.values() for id_ in ids) == list(range(80))


def test_a_large_table_is_sent_in_requests_below_the_limits(client: StorageClient) -> None:
    client.create_table("large", SCHEMA, bucket_count=2)
    row_count = 300_000

    offsets = client.append("large", _rows(row_count))

    assert sum(end - start for start, end in offsets.values()) == row_count
    stored = _stored_ids(client, "large")
    assert sorted(id_ for ids in stored.values() for id_ in ids) == list(range(row_count))


def test_appending_no_rows_changes_nothing(client: StorageClient) -> None:
    client.create_table("empty", SCHEMA)

    assert client.append("empty", _rows(0)) == {}
    assert client.positions("empty")[0].high_watermark == 0


def test_a_lost_answer_is_retried_without_storing_rows_twice(service: ServiceProcess) -> None:
    port = urlsplit(service.endpoint).port
    assert port is not None
    with FlakyProxy(port) as proxy, StorageClient(proxy.endpoint) as client:
        client.create_table("flaky", SCHEMA, bucket_count=2, bucket_key=["id"])
        for i in range(10):
            proxy.answers_to_lose = 2
            offsets = client.append("flaky", _rows(50, first=50 * i))
            assert sum(end - start for start, end in offsets.values()) == 50

        assert proxy.answers_lost == 20
        stored = _stored_ids(client, "flaky")
    assert sorted(id_ for ids in stored.values() for id_ in ids) == list(range(500))


def test_threads_share_a_client(client: StorageClient) -> None:
    client.create_table("threads", SCHEMA, bucket_count=3)
    failures: list[BaseException] = []

    def write(first: int) -> None:
        try:
            for i in range(20):
                client.append("threads", _rows(5, first=first + 5 * i))
        except BaseException as error:  # noqa: BLE001 - handed to the test's own thread
            failures.append(error)

    threads = [threading.Thread(target=write, args=(1_000 * t,)) for t in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert failures == []
    stored = sorted(id_ for ids in _stored_ids(client, "threads").values() for id_ in ids)
    assert stored == sorted(1_000 * t + n for t in range(8) for n in range(100))


def test_appends_and_a_subscription_ride_out_a_restart(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path) as first:
        endpoint = first.endpoint
        client = StorageClient(endpoint)
        client.create_table("lasting", SCHEMA)
        client.append("lasting", _rows(10))
        events = client.subscribe("lasting", start="earliest")
        received = [next(events)]
        first.kill()
    with ServiceProcess(tmp_path, "--port", endpoint.rsplit(":", 1)[1]):
        client.append("lasting", _rows(10, first=10))
        while received[-1].end_offset < 20:
            received.append(next(events))
        events.close()
        client.close()

    ids = [id_ for batch in received for id_ in batch.data.column("id").to_pylist()]
    assert ids == list(range(20))


def test_a_writer_given_by_the_caller_numbers_across_clients(service: ServiceProcess) -> None:
    writer = AppendWriter(77)
    with StorageClient(service.endpoint) as one, StorageClient(service.endpoint) as two:
        one.create_table("numbered", SCHEMA)
        one.append("numbered", _rows(3), writer=writer)
        two.append("numbered", _rows(3, first=3), writer=writer)
        repeated = one.append("numbered", _rows(3), writer=AppendWriter(77))

        assert repeated == {0: (0, 3)}
        assert _stored_ids(one, "numbered") == {0: list(range(6))}


def test_subscribe_starts_where_it_is_told(client: StorageClient) -> None:
    client.create_table("followed", SCHEMA, bucket_count=2, bucket_key=["id"])
    client.append("followed", _rows(100))
    positions = client.positions("followed")

    from_two = client.subscribe("followed", start={0: 2}, columns=["name"])
    first = next(from_two)
    from_two.close()
    latest = client.subscribe("followed")
    got: list[LogBatch] = []
    reader = threading.Thread(target=lambda: got.append(next(latest)))
    reader.start()
    while reader.is_alive():
        # `latest` is resolved by the reader's first step, so rows must come after that.
        client.append("followed", _rows(1, first=1_000))
        reader.join(timeout=0.05)
    latest.close()

    assert (first.bucket, first.base_offset, first.data.schema.names) == (0, 2, ["name"])
    assert got[0].base_offset >= positions[got[0].bucket].high_watermark
    assert got[0].data.column("id").to_pylist() == [1_000] * got[0].data.num_rows


@pytest.mark.parametrize("name", ["a,b", "a`b", "`c`"])
def test_columns_may_have_commas_and_backticks_in_their_names(
    client: StorageClient, name: str
) -> None:
    client.create_table("marks", pa.schema([(name, pa.int64()), ("c", pa.int64())]))
    client.append("marks", pa.table({name: [1], "c": [2]}))

    (batch,) = client.fetch("marks", 0, 0, columns=[name])
    followed = next(client.subscribe("marks", start="earliest", columns=[name]))
    with StreamhouseClient(client.endpoint) as reader:
        read = reader.read("marks", columns=[name])
    client.drop_table("marks")

    assert batch.data.to_pylist() == followed.data.to_pylist() == read.to_pylist() == [{name: 1}]


def test_read_range_pages_through_exactly_the_range(client: StorageClient) -> None:
    client.create_table("paged", SCHEMA)
    for i in range(30):
        client.append("paged", _rows(100, first=100 * i))

    batches = list(client.read_range("paged", 0, 150, 2_750, page_bytes=4_096))

    assert batches[0].base_offset == 150
    assert [id_ for b in batches for id_ in b.data.column("id").to_pylist()] == list(
        range(150, 2_750)
    )
    assert all(a.end_offset == b.base_offset for a, b in pairwise(batches))


def test_a_recreated_table_is_noticed(service: ServiceProcess) -> None:
    with StorageClient(service.endpoint) as old, StorageClient(service.endpoint) as other:
        old.create_table("reborn", SCHEMA, bucket_count=4)
        old.append("reborn", _rows(4))
        other.drop_table("reborn")
        other.create_table("reborn", pa.schema([("x", pa.string())]))

        assert old.append("reborn", pa.table({"x": ["a"]})) == {0: (0, 1)}


def test_refused_appends_store_nothing(client: StorageClient) -> None:
    client.create_table("strict", SCHEMA, bucket_count=2)
    bad_row = pa.table({"id": pa.array([1, None], pa.int64()), "name": ["a", "b"]})

    with pytest.raises(
        SchemaMismatchError, match=r"'default.strict'.*'id' must not be null.*row 1"
    ):
        client.append("strict", bad_row)
    with pytest.raises(UnknownColumnError, match="did you mean 'name'"):
        client.append("strict", pa.table({"id": [1], "nmae": ["a"]}))
    with pytest.raises(SchemaMismatchError, match="column 'name' is missing"):
        client.append("strict", pa.table({"id": [1]}))

    assert all(p.high_watermark == 0 for p in client.positions("strict").values())


def test_errors_say_where_and_what_to_do(client: StorageClient, tmp_path: Path) -> None:
    client.create_table("errors", SCHEMA)
    client.append("errors", _rows(5))

    with pytest.raises(TableNotFoundError, match=r"'default.eror'.*did you mean 'default.errors'"):
        client.describe_table("eror")
    with pytest.raises(OffsetOutOfRangeError, match=r"offset 9 .* 0 to 5"):
        client.fetch("errors", 0, 9)
    with pytest.raises(InvalidRequestError, match="start must be full, earliest, latest, comm"):
        next(client.subscribe("errors", start="newest"))
    with (
        pytest.raises(UnavailableError, match=r"http://127.0.0.1:9: .*streamhouse serve"),
        StorageClient("http://127.0.0.1:9") as nowhere,
    ):
        nowhere.list_tables()
    with pytest.raises(InvalidRequestError, match="is not a URL like"):
        StorageClient("localhost:8765")


def test_a_pinned_lake_snapshot_is_known_until_it_is_let_go(client: StorageClient) -> None:
    client.create_table("pinned", SCHEMA)

    client.pin_snapshot("pinned", 5781947118336215154, holder="query:1", ttl_s=600)
    client.pin_snapshot("pinned", 7, holder="query@2", ttl_s=0.5)
    client.pin_snapshot("pinned", 8, holder="query@2", ttl_s=600)
    assert client.pinned_snapshots("pinned") == {"query:1": 5781947118336215154, "query@2": 8}

    client.unpin_snapshot("pinned", holder="query:1")
    client.unpin_snapshot("pinned", holder="query:1")
    assert client.pinned_snapshots("default.pinned") == {"query@2": 8}
    with pytest.raises(InvalidRequestError, match="the holder of a lake pin"):
        client.pin_snapshot("pinned", 7, holder="a b", ttl_s=1)
