"""Writes that the service refuses for what is no fault of theirs: stored once, or said to be."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from streamhouse.client import AppendWriter, Producer, StorageClient
from streamhouse.client.http._http_connection import Answer
from streamhouse.core.errors import (
    OutOfOrderSequenceError,
    SchemaMismatchError,
    StreamhouseError,
    UnknownOutcomeError,
)
from tests.support.held_step import around
from tests.support.in_process_service import EVENTS, table_descriptor

LOST = UnknownOutcomeError("lost")
FORGOTTEN = OutOfOrderSequenceError("not known here")
CHANGED = SchemaMismatchError("other columns")


class Table:
    """Table `db.t` as a service would have it; `refuse` says what comes of the next attempts.

    Each is `(error, whether it was stored)`; None is answered.
    """

    def __init__(self) -> None:
        self.attempts: list[tuple[StreamhouseError, bool] | None] = []
        self.stored: list[int] = []
        self.writers: dict[str, int] = {}
        self.changes = 0

    def describe(self) -> dict[str, Any]:
        more = {"table_id": 1, "schema_id": 0, "created_at_us": self.changes, "adopted_from": {}}
        self.changes += 1
        return table_descriptor("db.t").to_json() | more | {"nodes": {}}

    def append(self, query: dict[str, str], body: Any) -> Answer:
        attempt = self.attempts.pop(0) if self.attempts else None
        if attempt is not None and not attempt[1]:
            raise attempt[0]
        with pa.ipc.open_stream(body) as reader:
            batch, metadata = reader.read_next_batch_with_custom_metadata()
        sequence, writer = int(metadata[b"sequence"]), query["writer_id"]
        last = self.writers.get(writer, 0)
        if sequence not in (last, last + 1):
            raise FORGOTTEN
        if sequence == last + 1:
            self.writers[writer] = sequence
            self.stored += batch.column("id").to_pylist()
        if attempt is not None:
            raise attempt[0]
        end = len(self.stored)
        answer = {"buckets": {"0": [end - batch.num_rows, end]}}
        return Answer(200, {}, json.dumps(answer).encode())


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Table:
    table = Table()

    def send(*args: Any, query: Any, body: Any, **_: Any) -> Answer:
        if "GET" in args:
            return Answer(200, {}, json.dumps(table.describe()).encode())
        return table.append(query, body)

    around(monkeypatch, "request-sending", send)
    return table


@pytest.fixture
def client() -> Iterator[StorageClient]:
    with StorageClient("http://127.0.0.1:1,http://127.0.0.1:2") as client:
        yield client


def _rows(start: int, end: int) -> pa.Table:
    ids = range(start, end)
    return pa.table({"id": ids, "name": [str(i) for i in ids]}, EVENTS)


def _producer(client: StorageClient) -> Producer:
    return Producer(client, "db.t", linger_ms=0)


def test_a_table_that_changes_between_two_requests_gets_no_row_twice(
    table: Table, client: StorageClient
) -> None:
    client.describe_table("db.t")
    table.attempts = [None, (CHANGED, False)]

    ranges = client.append("db.t", _rows(0, 100_000))

    assert table.stored == list(range(100_000))
    assert ranges == {0: (0, 100_000)}


def test_rows_that_may_be_stored_are_not_sent_under_another_writer(
    table: Table, client: StorageClient
) -> None:
    client.append("db.t", _rows(0, 1))
    table.attempts = [(LOST, True), (CHANGED, False)]

    with pytest.raises(UnknownOutcomeError, match="other columns"):
        client.append("db.t", _rows(1, 2))

    assert table.stored == [0, 1]


def test_a_writer_that_was_forgotten_is_another_one_from_then_on(
    table: Table, client: StorageClient
) -> None:
    client.append("db.t", _rows(0, 1))
    table.writers.clear()
    client.append("db.t", _rows(1, 2))
    client.append("db.t", _rows(2, 3))

    assert table.stored == [0, 1, 2]
    assert len(table.writers) == 1


def test_a_forgotten_writer_of_the_callers_own_is_told(table: Table, client: StorageClient) -> None:
    """Its caller may be repeating what was stored before."""
    writer = AppendWriter()
    client.append("db.t", _rows(0, 1), writer=writer)
    table.writers.clear()

    with pytest.raises(OutOfOrderSequenceError):
        client.append("db.t", _rows(1, 2), writer=writer)

    assert table.stored == [0]


def test_a_producer_goes_on_when_its_writer_was_forgotten(
    table: Table, client: StorageClient
) -> None:
    with _producer(client) as producer:
        producer.send(_rows(0, 1)).result()
        table.writers.clear()
        producer.send(_rows(1, 2)).result()
        producer.send(_rows(2, 3)).result()

    assert table.stored == [0, 1, 2]


def test_a_producer_that_is_refused_as_another_writer_too_ends(
    table: Table, client: StorageClient
) -> None:
    table.attempts = [(FORGOTTEN, False)] * 2
    producer = _producer(client)
    refused = producer.send(_rows(0, 1))
    with pytest.raises(OutOfOrderSequenceError):
        refused.result()
    with pytest.raises(OutOfOrderSequenceError):
        producer.close()

    assert table.stored == []


@pytest.mark.parametrize("refusal", [FORGOTTEN, CHANGED])
def test_a_producer_says_what_may_be_stored_and_goes_on(
    table: Table, client: StorageClient, refusal: StreamhouseError
) -> None:
    with _producer(client) as producer:
        producer.send(_rows(0, 1)).result()
        table.attempts = [(LOST, True), (refusal, False), (refusal, False)]
        maybe = producer.send(_rows(1, 2))
        with pytest.raises(UnknownOutcomeError):
            maybe.result()
        producer.send(_rows(2, 3)).result()
        with pytest.raises(UnknownOutcomeError):
            producer.flush()

    assert table.stored == [0, 1, 2]
