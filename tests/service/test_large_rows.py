"""Rows as large as they may be go through everything, and larger ones are refused as a whole."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pyarrow as pa
import pytest

from streamhouse.api.client import StreamhouseClient
from streamhouse.core.errors import RequestTooLargeError
from tests.support.in_process_service import append_body
from tests.support.service_process import ServiceProcess
from tests.support.tier_once import tier_once

pytestmark = pytest.mark.slow

MIB = 1 << 20
SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("text", pa.binary())])


@pytest.fixture
def client(tmp_path: Path) -> Iterator[StreamhouseClient]:
    with ServiceProcess(tmp_path) as service, StreamhouseClient(service.endpoint) as opened:
        yield opened


def _rows(first: int, *sizes: int) -> pa.Table:
    texts = [b"x" * size for size in sizes]
    return pa.table({"id": range(first, first + len(sizes)), "text": texts}, schema=SCHEMA)


def _sizes(rows: pa.Table) -> list[tuple[int, int]]:
    return sorted((row["id"], len(row["text"])) for row in rows.to_pylist())


def _post(client: StreamhouseClient, path: str, rows: pa.Table) -> tuple[int, str]:
    """Send rows to the log by plain HTTP; return status and what the error says."""
    (batch,) = rows.combine_chunks().to_batches()
    parts = urlsplit(client.endpoint)
    connection = http.client.HTTPConnection(parts.netloc, timeout=60)
    try:
        body = append_body(SCHEMA, [(0, 0, batch)])
        headers = {"content-type": "application/vnd.apache.arrow.stream"}
        connection.request("POST", path, body, headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read()).get("error", {}).get("message", "")
    finally:
        connection.close()


def test_a_row_just_below_the_limit_goes_through_everything(client: StreamhouseClient) -> None:
    size = 32 * MIB - 4_096
    client.create_table("large", SCHEMA)
    client.append("large", _rows(0, 5, size))
    status, message = _post(client, "/v1/tables/large/append", _rows(2, size))
    assert status == 200, message
    with client.begin_transaction("large") as transaction:
        transaction.commit([transaction.stage(_rows(3, size, 7))])
    expected = [(0, 5), (1, size), (2, size), (3, size), (4, 7)]

    assert _sizes(client.read("large")) == expected
    seen: list[tuple[int, int]] = []
    for batch in client.subscribe("large", start="earliest"):
        seen += _sizes(batch.data)
        if len(seen) == len(expected):
            break
    assert sorted(seen) == expected
    assert tier_once(client, "large") == 5
    client.append("large", _rows(5, size))
    assert _sizes(client.read("large")) == [*expected, (5, size)]


def test_a_row_by_key_just_below_the_limit_goes_through_everything(
    client: StreamhouseClient,
) -> None:
    size = 8 * MIB - 4_096
    client.create_table("large", SCHEMA, primary_key=["id"])
    client.upsert("large", _rows(0, size, size, 3))
    client.upsert("large", _rows(1, size - 1))
    status, message = _post(client, "/v1/tables/large/upsert", _rows(3, size))
    assert status == 200, message
    expected = [(0, size), (1, size - 1), (2, 3), (3, size)]

    assert _sizes(client.lookup("large", pa.table({"id": pa.array(range(4))}))) == expected
    one = client.lookup_one("large", id=1)
    assert one is not None
    assert len(one["text"]) == size - 1
    assert _sizes(client.read("large")) == expected
    tier_once(client, "large")
    client.upsert("large", _rows(2, size))
    assert _sizes(client.read("large")) == [*expected[:2], (2, size), expected[3]]


def test_a_larger_row_is_refused_and_nothing_of_its_call_is_written(
    client: StreamhouseClient,
) -> None:
    client.create_table("log", SCHEMA)
    # The rows before it would fill requests of their own.
    rows = pa.concat_tables([_rows(0, 20 * MIB, 20 * MIB), _rows(2, 32 * MIB)])
    message = r"^table 'default\.log': row 2 has \d+ bytes; at most 33554432: keep larger"

    with pytest.raises(RequestTooLargeError, match=message):
        client.append("log", rows)
    with (
        client.begin_transaction("log") as transaction,
        pytest.raises(RequestTooLargeError, match=message),
    ):
        transaction.stage(rows)
    status, refused = _post(client, "/v1/tables/log/append", _rows(0, 32 * MIB))
    assert status == 413
    assert "append to 'default.log': a record batch has" in refused
    assert client.positions("log")[0].high_watermark == 0

    client.create_table("keyed", SCHEMA, primary_key=["id"])
    message = r"table 'default\.keyed': row 1 has \d+ bytes; at most 8\d+: keep larger"
    with pytest.raises(RequestTooLargeError, match=message):
        client.upsert("keyed", _rows(0, 3, 9 * MIB))
    status, refused = _post(client, "/v1/tables/keyed/upsert", _rows(0, 8 * MIB))
    assert (status, "row 0 has" in refused) == (413, True)
    with (
        client.begin_transaction("keyed", operation="upsert") as transaction,
        pytest.raises(RequestTooLargeError, match=message),
    ):
        transaction.stage(_rows(0, 3, 9 * MIB))
    assert client.count("keyed") == 0
