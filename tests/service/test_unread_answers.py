"""Clients that ask for much and read nothing: memory stays bounded, and others are served."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import time
from collections.abc import Iterator
from urllib.parse import quote, urlsplit

import pyarrow as pa
import pytest
import urllib3

from streamhouse.client import StorageClient
from streamhouse.storage_service.server.access._grants import token_hash
from tests.support.expired_log import EXPIRING, expire_log
from tests.support.fetch_world import FETCH, fetch_values
from tests.support.in_process_service import append_body
from tests.support.kafka_group import LibrdkafkaMember
from tests.support.kafka_world import request_bytes
from tests.support.pipelined import send_without_reading
from tests.support.service_process import ServiceProcess
from tests.support.tier_once import tier_once
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("text", pa.string())])
PARTS = pa.schema([pa.field("part", pa.int64(), nullable=False), *SCHEMA])
_MIB = 1 << 20
_BUDGET = 96 * _MIB
_GREEDY, _MODEST, _OWNER = "greedy-token", "modest-token", "owner-token"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    """A service with 24 MiB of rows in a log table, in primary key tables and in a lake alone."""
    folder = tmp_path_factory.mktemp("unread")
    grants, token = folder / "grants.toml", folder / "token"
    grants.write_text("".join(
        f'[[token]]\nname = "{name}"\nsha256 = "{token_hash(name.encode())}"\n'
        'grants = ["read:*"]\n'
        for name in (_GREEDY, _MODEST)
    ))  # fmt: skip
    token.write_text(_OWNER)
    for path in (grants, token):
        path.chmod(0o600)
    arguments = (
        "--answers-bytes-max", str(_BUDGET),
        "--answer-stall-timeout-ms", "1s",
        "--grants", str(grants),
        "--token-file", str(token),
        "--kafka-port", "0",
        "--retention-interval-ms", "100",
    )  # fmt: skip
    with ServiceProcess(folder / "data", *arguments) as started:
        with StorageClient(started.endpoint, token=_OWNER) as client:
            client.create_table("t", SCHEMA)
            client.create_table("k", SCHEMA, primary_key=["id"])
            client.create_table("p", PARTS, primary_key=["part", "id"])
            client.create_table("years", SCHEMA, properties=EXPIRING)
            for start in range(0, 24_000, 8_000):
                rows = pa.table(
                    {"id": range(start, start + 8_000), "text": ["x" * 1_000] * 8_000},
                    schema=SCHEMA,
                )
                client.append("t", rows)
                client.append("years", rows)
                client.upsert("k", rows)
                client.upsert("p", rows.add_column(0, PARTS.field("part"), [[1] * 8_000]))
            tier_once(client, "years", token=_OWNER)
            expire_log(client, "years")
        yield started


def _request(method: str, target: str, token: str, body: bytes = b"") -> bytes:
    head = (
        f"{method} {target} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {token}\r\n"
        f"content-type: application/vnd.apache.arrow.stream\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def _keys(field: pa.Field, ids: range) -> bytes:
    schema = pa.schema([field])
    keys = pa.record_batch([pa.array(ids, pa.int64())], schema=schema)
    return append_body(schema, [(None, 0, keys)])


@contextlib.contextmanager
def _unread(endpoint: str, requests: list[bytes]) -> Iterator[list[socket.socket]]:
    """Send each request over its own connection, and read nothing of the answers."""
    parts = urlsplit(endpoint)
    opened = []
    try:
        for request in requests:
            connection = socket.socket()
            # What the system holds of an answer is not the service's.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            connection.connect((parts.hostname, parts.port))
            connection.sendall(request)
            opened.append(connection)
        yield opened
    finally:
        for connection in opened:
            connection.close()


def _metric(endpoint: str, name: str) -> float:
    answer = urllib3.request(
        "GET", f"{endpoint}/metrics", headers={"authorization": f"Bearer {_OWNER}"}, timeout=60
    )
    found = re.search(rf"^{name} (\S+)$", answer.data.decode(), re.M)
    assert found is not None
    return float(found[1])


def _until(endpoint: str, name: str, wanted: str) -> None:
    """Wait until a metric is `zero` or `more`."""
    wait_until(
        lambda: (_metric(endpoint, name) > 0) == (wanted == "more"),
        lambda: f"{name} is {_metric(endpoint, name)}",
    )


def _memory_mib(service: ServiceProcess) -> float:
    return service.anonymous_bytes / _MIB


_FETCH = f"/v1/tables/t/buckets/0/fetch?offset=0&columns={quote(json.dumps(['text']))}"
_FLOODS = {
    "fetch of columns": _request("GET", f"{_FETCH}&max_bytes={32 * _MIB}", _GREEDY),
    "fetch": _request("GET", "/v1/tables/t/buckets/0/fetch?offset=0", _GREEDY),
    "lookup": _request("POST", "/v1/tables/k/lookup", _GREEDY, _keys(PARTS[1], range(20_000))),
    "prefix lookup": _request(
        "POST",
        "/v1/tables/p/prefix_lookup?limit=20000",
        _GREEDY,
        _keys(PARTS[0], range(1, 2)),
    ),
    "subscribe": _request("GET", "/v1/tables/t/subscribe?start=earliest", _GREEDY),
}
_SHORT = {"fetch", "lookup"}


@pytest.mark.parametrize(
    "kind",
    [
        *sorted(_SHORT),
        *(pytest.param(kind, marks=pytest.mark.long) for kind in sorted({*_FLOODS} - _SHORT)),
    ],
)
def test_answers_that_nobody_reads_hold_a_share_of_the_memory_and_no_more(
    service: ServiceProcess, kind: str
) -> None:
    """Of 30 requests for up to 24 MiB, 720 MiB together, each by the same caller."""
    before = _memory_mib(service)
    with (
        StorageClient(service.endpoint, token=_MODEST) as others,
        _unread(service.endpoint, [_FLOODS[kind]] * 30),
    ):
        _until(service.endpoint, "streamhouse_answer_bytes", "more")
        for _ in range(5):
            assert _metric(service.endpoint, "streamhouse_answer_bytes") <= _BUDGET * 2 / 3
            keys = pa.table({"id": [1, 2, 3]}, schema=pa.schema([SCHEMA.field("id")]))
            assert others.lookup("k", keys).num_rows == 3
            fetched = others.fetch("t", 0, 0, max_bytes=8 * _MIB)
            assert sum(log_batch.data.num_rows for log_batch in fetched) >= 7_000
        assert _memory_mib(service) - before < 5 * _BUDGET / _MIB
        # Nobody reads: each is cut off, and what it held is free again.
        _until(service.endpoint, "streamhouse_answer_bytes", "zero")
        _until(service.endpoint, "streamhouse_answers_waiting", "zero")


def _kafka_fetch(topic: str) -> bytes:
    """Return what a Kafka client sends that shows its token and asks for 32 MiB."""
    fetched = fetch_values({topic: {0: 0}}, max_bytes=32 * _MIB, each=32 * _MIB)
    return (
        request_bytes(17, 1, {"mechanism": "PLAIN"})
        + request_bytes(36, 1, {"auth_bytes": f"\0me\0{_GREEDY}".encode()})
        + request_bytes(FETCH, 11, fetched)
    )


@pytest.mark.parametrize("topic", ["t", "years"])
def test_kafka_consumers_that_never_read_hold_a_share_of_the_memory_and_no_more(
    service: ServiceProcess, topic: str
) -> None:
    """Sixty of them, of rows in the log and of rows that are in the lake alone."""
    before = _memory_mib(service)
    sasl = {
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "PLAIN",
        "sasl.username": "me",
        "sasl.password": _MODEST,
    }
    with _unread(f"http://{service.kafka_address}", [_kafka_fetch(topic)] * 60):
        _until(service.endpoint, "streamhouse_answer_bytes", "more")
        reader = LibrdkafkaMember(service.kafka_address, topic, f"modest-{topic}", **sasl)
        found = 0
        give_up = time.monotonic() + 120
        while found < 10_000:
            assert time.monotonic() < give_up, found
            found += len(reader.poll())
            assert _metric(service.endpoint, "streamhouse_answer_bytes") <= _BUDGET
        reader.close()
        assert _memory_mib(service) - before < 5 * _BUDGET / _MIB
        _until(service.endpoint, "streamhouse_answer_bytes", "zero")
        _until(service.endpoint, "streamhouse_answers_waiting", "zero")


@pytest.mark.parametrize("door", ["health", "refused", "registry", "kafka"])
def test_requests_that_arrive_behind_others_take_no_memory(
    service: ServiceProcess, door: str
) -> None:
    """Three clients without a token send many small requests and read no answer."""
    before = _memory_mib(service)
    request, endpoint = {
        "health": (_request("GET", "/health", ""), service.endpoint),
        "refused": (_request("GET", "/v1/tables/t/buckets/0/fetch", ""), service.endpoint),
        "registry": (_request("GET", "/kafka/registry/subjects", ""), service.endpoint),
        "kafka": (request_bytes(18, 0, {}), f"http://{service.kafka_address}"),
    }[door]
    parts = urlsplit(endpoint)
    assert parts.hostname is not None
    assert parts.port is not None
    reader = StorageClient(service.endpoint, token=_OWNER)

    send_without_reading(
        (parts.hostname, parts.port),
        [request] * 3,
        between=lambda: reader.describe_table("t"),
    )

    reader.close()
    assert _memory_mib(service) - before < 48


def test_what_was_refused_is_retriable_and_says_why(service: ServiceProcess) -> None:
    fetch = _FLOODS["fetch of columns"]
    with _unread(service.endpoint, [fetch] * 3) as stuck:
        _until(service.endpoint, "streamhouse_answer_bytes", "more")
        answer = urllib3.request(
            "GET",
            f"{service.endpoint}{_FETCH}",
            headers={"authorization": f"Bearer {_GREEDY}"},
            retries=False,
            timeout=60,
        )
        for connection in stuck:
            connection.close()
    if answer.status != 200:
        error = json.loads(answer.data)["error"]
        assert (answer.status, error["code"], error["retriable"]) == (503, "overloaded", True)
        assert "(answers_bytes_max)" in error["message"]
        assert answer.headers["retry-after"] == "1"
    _until(service.endpoint, "streamhouse_answer_bytes", "zero")


def test_memory_goes_back_after_a_burst(service: ServiceProcess) -> None:
    requests = [_FLOODS["lookup"], _FLOODS["fetch of columns"]] * 20
    with _unread(service.endpoint, requests):
        _until(service.endpoint, "streamhouse_answer_bytes", "more")
    _until(service.endpoint, "streamhouse_answer_bytes", "zero")
    # Of it the lake's library and Kafka's messages, which this service reads and speaks, have 80.
    wait_until(lambda: _memory_mib(service) <= 480, lambda: f"{_memory_mib(service)} MiB are kept")
