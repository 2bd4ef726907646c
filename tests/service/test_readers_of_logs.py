"""Readers beside the owner answer fetches: every acknowledged row, and no hidden one."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
import urllib.parse
from collections.abc import Iterator
from http.client import HTTPResponse
from itertools import islice
from typing import Any

import pytest
import urllib3

from streamhouse.client import StorageClient
from streamhouse.core.model.table_state import TieringAssignment
from tests.support.reader_world import NO_LAKE, SCHEMA, LogConnection, rows
from tests.support.service_process import ServiceProcess
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with ServiceProcess(tmp_path_factory.mktemp("readers"), "--readers", "2") as process:
        yield process


@pytest.fixture
def client(client: StorageClient) -> StorageClient:
    client.create_table("t", SCHEMA, bucket_count=1, properties=NO_LAKE)
    client.append("t", rows(*range(10)))
    return client


@pytest.fixture
def moved(service: ServiceProcess, client: StorageClient) -> Iterator[LogConnection]:
    """A connection that a reader has."""
    connection = LogConnection(service, "t")
    connection.move()
    yield connection
    connection.close()


def test_a_reader_has_every_acknowledged_row(client: StorageClient, moved: LogConnection) -> None:
    reader = moved.who
    for number in range(10, 40):
        client.append("t", rows(number))
        assert moved.ids(number) == [number]
        assert moved.who == reader
    assert moved.ids(0) == list(range(40))


def test_a_reader_gives_pages_and_parts_of_batches(
    client: StorageClient, moved: LogConnection
) -> None:
    reader = moved.who
    client.append("t", rows(*range(10, 50_000)))

    assert moved.ids(49_000) == list(range(49_000, 50_000))
    assert moved.ids(3, end_offset=7) == [3, 4, 5, 6]
    status, content = moved.fetch(0, columns="name")
    assert status == 200
    assert {json.loads(line)["name"] for line in content.splitlines()} == {"first"}
    assert moved.who == reader


def test_the_changes_of_a_key_table_are_fetched(
    service: ServiceProcess, client: StorageClient
) -> None:
    client.create_table("k", SCHEMA, primary_key=["id"], bucket_count=1, properties=NO_LAKE)
    client.upsert("k", rows(1, 2))
    connection = LogConnection(service, "k")
    reader = connection.move()
    client.upsert("k", rows(2, name="second"))

    assert connection.ids(0) == [1, 2, 2, 2]
    assert connection.who == reader
    connection.close()


def test_a_fetch_waits_for_rows(client: StorageClient, moved: LogConnection) -> None:
    reader, answers = moved.who, list[list[int]]()

    def wait() -> None:
        for number in range(10, 30):
            answers.append(moved.ids(number, max_wait_ms=60_000))

    waiting = threading.Thread(target=wait)
    waiting.start()
    for number in range(10, 30):
        client.append("t", rows(number))
    waiting.join(60)

    assert [ids[0] for ids in answers] == list(range(10, 30))
    assert moved.who == reader


def test_a_wait_without_rows_ends_in_time(moved: LogConnection) -> None:
    reader = moved.who

    assert moved.ids(10, max_wait_ms=50) == []
    assert moved.who == reader


@contextlib.contextmanager
def _subscribed(service: ServiceProcess) -> Iterator[tuple[Iterator[int], str]]:
    """Subscribe to all rows; yield the ids that are pushed, and the process that pushes them."""
    with contextlib.closing(LogConnection(service, "t")) as connection:
        answer = connection.open("GET", "/subscribe?start=earliest&format=sse")
        assert answer.status == 200
        with answer:
            yield _pushed_ids(answer), connection.who


def _pushed_ids(answer: HTTPResponse) -> Iterator[int]:
    for line in answer:
        if line.startswith(b"data: ") and b'"rows"' in line:
            yield from (row["id"] for row in json.loads(line[6:])["rows"])


def _owner(service: ServiceProcess) -> str:
    answer = urllib3.request("GET", f"{service.endpoint}/v1/tables/t")
    return answer.headers["x-request-id"].partition("-")[0]


@pytest.mark.usefixtures("moved")
def test_a_subscription_begins_at_a_reader(service: ServiceProcess, client: StorageClient) -> None:
    with _subscribed(service) as (ids, who):
        assert list(islice(ids, 10)) == list(range(10))
        for number in range(10, 40):
            client.append("t", rows(number))
            assert next(ids) == number
        assert who != _owner(service)
        wait_until(
            lambda: "\nstreamhouse_subscriptions 1.0" in _metrics(service), "a counted subscription"
        )


def _metrics(service: ServiceProcess) -> str:
    return urllib3.request("GET", f"{service.endpoint}/metrics").data.decode()


@pytest.mark.usefixtures("moved")
def test_a_subscription_ends_with_the_tables_form(
    service: ServiceProcess, client: StorageClient
) -> None:
    with _subscribed(service) as (ids, _):
        assert next(ids) == 0

        client.add_column("t", "more", "bigint")

        assert list(ids) == list(range(1, 10))


def test_a_slow_subscriber_gets_no_rows_that_were_overwritten_meanwhile(
    service: ServiceProcess, client: StorageClient
) -> None:
    """A row of bucket 0 does not fit into the sockets, and bucket 1 has its turn afterwards."""
    client.create_table("wide", SCHEMA, bucket_count=2, bucket_key="id", properties=NO_LAKE)
    client.append("wide", rows(*range(20)))
    buckets = {
        identifier: bucket
        for bucket in (0, 1)
        for batch in client.fetch("wide", bucket, 0)
        for identifier in batch.data.column("id").to_pylist()
    }
    start = {b: int(at.high_watermark) for b, at in client.positions("wide").items()}
    large, small = (next(i for i in buckets if buckets[i] == bucket) for bucket in (0, 1))
    client.append("wide", rows(large, name="x" * (10 << 20)))
    client.append("wide", rows(small, name="overwritten"))
    moved = LogConnection(service, "wide")
    moved.move("/state")
    place = urllib.parse.quote(json.dumps(start))
    path = f"/subscribe?start={place}&format=sse&table_id={moved.table_id()}"
    with moved.open("GET", path) as answer:
        assert answer.read(1)
        with client.begin_transaction("wide", operation="overwrite") as transaction:
            transaction.commit([transaction.stage(rows(-1, name="new"))])

        assert not any(b"overwritten" in line for line in answer)
    moved.close()


def test_a_subscription_of_a_moved_connection_is_answered_there(moved: LogConnection) -> None:
    reader = moved.who

    with moved.open("GET", "/subscribe?start=earliest&format=sse") as answer:
        assert list(islice(_pushed_ids(answer), 10)) == list(range(10))

    assert moved.who == reader


def test_the_state_is_the_owners(client: StorageClient, moved: LogConnection) -> None:
    reader = moved.who
    for number in range(10, 20):
        client.append("t", rows(number))
        status, content = moved.request("GET", "/state")
        assert (status, moved.who) == (200, reader)
        state = json.loads(content)
        assert state["positions"]["0"]["high_watermark"] == number + 1
        assert state == client.table_state("t").to_json()
    status, content = moved.request(
        "GET",
        f"/state?after=%7B%220%22%3A20%7D&max_wait_ms=50&table_id={state['table']['table_id']}",
    )
    assert (status, json.loads(content), moved.who) == (200, state, reader)


def test_another_state_of_the_lake_is_answered_at_once(
    service: ServiceProcess, client: StorageClient
) -> None:
    table = client.create_table("lake", SCHEMA, bucket_count=1)
    client.append("lake", rows(1))
    connection = LogConnection(service, "lake")
    reader = connection.move()
    epochs = set()
    for number in range(3):
        assignment = client.claim_tiering(f"w{number}", tables=["lake"], force=True)
        assert isinstance(assignment, TieringAssignment)
        epochs.add(_state(connection)["lake"]["tiering_epoch"])
        client.fail_tiering("lake", table_id=table.table_id, epoch=assignment.epoch, error="test")
        assert _state(connection) == client.table_state("lake").to_json()
        assert connection.who == reader
    assert len(epochs) == 3
    connection.close()


def _state(connection: LogConnection) -> dict[str, Any]:
    status, content = connection.request("GET", "/state")
    assert status == 200, content
    state: dict[str, Any] = json.loads(content)
    return state


def test_errors_are_the_owners(moved: LogConnection) -> None:
    reader = moved.who

    status, content = moved.fetch(99)

    assert status == 416
    assert json.loads(content)["error"]["code"] == "offset_out_of_range"
    assert moved.who != reader


def test_hidden_rows_of_a_transaction_are_not_fetched(
    client: StorageClient, moved: LogConnection
) -> None:
    reader = moved.who
    with client.begin_transaction("t") as transaction:
        part = transaction.stage(rows(*range(100, 120)))
        assert moved.ids(0) == list(range(10))
        transaction.commit([part])

    assert moved.ids(0) == [*range(10), *range(100, 120)]
    assert moved.who == reader


def test_an_overwrite_hides_rows_at_once(client: StorageClient, moved: LogConnection) -> None:
    with client.begin_transaction("t", operation="overwrite") as transaction:
        transaction.commit([transaction.stage(rows(7, name="new"))])

    status, content = moved.fetch(0)
    assert json.loads(content)["error"]["code"] == "offset_out_of_range", (status, content)
    moved.move("/state")
    assert _state(moved) == client.table_state("t").to_json()


def test_another_schema_and_another_table_are_answered_at_once(
    client: StorageClient, moved: LogConnection
) -> None:
    client.add_column("t", "more", "bigint")
    status, content = moved.fetch(0)
    assert status == 200
    assert json.loads(content.splitlines()[0])["more"] is None
    moved.move()

    client.drop_table("t")
    status, content = moved.fetch(0)
    assert (status, json.loads(content)["error"]["code"]) == (404, "table_not_found")

    client.create_table("t", SCHEMA, bucket_count=1, properties=NO_LAKE)
    assert moved.ids(0) == []
    client.append("t", rows(5))
    assert moved.ids(0) == [5]
    moved.move()
    assert moved.ids(0) == [5]


def test_who_waits_for_a_dropped_table_is_told(client: StorageClient, moved: LogConnection) -> None:
    answers = list[tuple[int, bytes]]()
    waiting = threading.Thread(target=lambda: answers.append(moved.fetch(10, max_wait_ms=60_000)))
    waiting.start()
    time.sleep(0.1)  # sleep: nobody tells that a request waits in another process

    client.drop_table("t")
    waiting.join(60)

    # 503 from the owner while the drop is in progress.
    assert answers[0][0] in (404, 503)


@pytest.mark.parametrize(
    ("version", "rest", "is_kept"),
    [
        (b"1.1", b"\r\n", True),
        (b"1.1", b"Content-Length: 5\r\n\r\nhello", True),
        (b"1.1", b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n", True),
        (b"1.0", b"\r\n", False),
    ],
)
def test_a_subscription_in_another_form_is_answered_beside_readers(
    service: ServiceProcess, client: StorageClient, version: bytes, rest: bytes, *, is_kept: bool
) -> None:
    """A request goes to a reader by its head: a body would be missed there."""
    for _ in range(2):
        with _subscribed(service) as (ids, _):
            assert next(ids) == 0
    host, port = service.endpoint.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        line = b"GET /v1/tables/t/subscribe?start=earliest HTTP/%b\r\n" % version
        connection.sendall(line + b"Host: localhost\r\n" + rest)
        head = b""
        while b"\r\n\r\n" not in head:
            piece = connection.recv(1_000)
            assert piece
            head += piece

    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert (b"\r\nconnection: close\r\n" in head) != is_kept
