"""SIGTERM under writers of every kind: nothing acknowledged is lost, the rest may be retried."""

from __future__ import annotations

import itertools
import json
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from streamhouse.client import StorageClient
from streamhouse.core.errors import StreamhouseError
from tests.support.service_process import ServiceProcess

pytestmark = pytest.mark.slow

EVENTS = pa.schema([("writer", pa.int64()), ("n", pa.int64())])
USERS = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("n", pa.int64())])
ROWS_A_CALL = 30


def _events(writer: int, call: int) -> pa.Table:
    return pa.table({"writer": [writer] * ROWS_A_CALL, "n": [call] * ROWS_A_CALL}, schema=EVENTS)


def _append(client: StorageClient, writer: int, call: int) -> None:
    client.append("events", _events(writer, call))


def _commit(client: StorageClient, writer: int, call: int) -> None:
    transaction = client.begin_transaction("events")
    transaction.commit([transaction.stage(_events(writer, call))])


def _upsert(client: StorageClient, writer: int, call: int) -> None:
    ids = [writer * 1_000 + i for i in range(ROWS_A_CALL)]
    client.upsert("users", pa.table({"id": ids, "n": [call] * ROWS_A_CALL}, schema=USERS))


KINDS: tuple[Callable[[StorageClient, int, int], None], ...] = (_append, _commit, _upsert) * 2


class _Load:
    """A thread a writer; each stops at its first refusal and remembers it."""

    def __init__(self, endpoint: str) -> None:
        self.acknowledged = [0] * len(KINDS)
        self.refusals: list[StreamhouseError] = []
        self.are_writing = threading.Barrier(len(KINDS) + 1)
        self._endpoint = endpoint
        self._threads = [
            threading.Thread(target=self._run, args=(number,)) for number in range(len(KINDS))
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, number: int) -> None:
        with StorageClient(self._endpoint, timeout_s=4) as client:
            for call in itertools.count(1):
                try:
                    KINDS[number](client, number, call)
                except StreamhouseError as error:
                    self.refusals.append(error)
                    return
                self.acknowledged[number] = call
                if call == 5:
                    self.are_writing.wait(60)

    def join(self) -> None:
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()


def test_nothing_acknowledged_is_lost_and_the_rest_may_be_retried(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path) as service:
        with StorageClient(service.endpoint) as client:
            client.create_table("events", EVENTS, bucket_count=2)
            client.create_table("users", USERS, primary_key=["id"], bucket_count=2)
        load = _Load(service.endpoint)
        load.are_writing.wait(60)
        assert service.terminate() == 0
        load.join()
        assert "Traceback" not in service.log_text()

    # Refused for now, or cut off on the way: never a reason to give up, never an internal error.
    codes = {error.code for error in load.refusals}
    assert len(load.refusals) == len(KINDS)
    assert codes <= {"unavailable", "unknown_outcome", "overloaded"}
    assert all(e.retriable or e.code == "unknown_outcome" for e in load.refusals)

    with ServiceProcess(tmp_path) as service, StorageClient(service.endpoint) as client:
        calls: Counter[tuple[int, int]] = Counter()
        for bucket, positions in client.positions("events").items():
            for batch in client.read_range("events", bucket, 0, positions.high_watermark):
                calls.update(
                    zip(*(column.to_pylist() for column in batch.data.columns), strict=True)
                )
        assert set(calls.values()) <= {ROWS_A_CALL}, "half of a call, or a call twice"
        for number, kind in enumerate(KINDS):
            last = load.acknowledged[number]
            if kind is _upsert:
                row = client.lookup_one("users", id=number * 1_000)
                assert row is not None
                assert row["n"] in (last, last + 1)
            else:
                assert {n for writer, n in calls if writer == number} >= set(range(1, last + 1))


@pytest.mark.parametrize(
    ("arguments", "code"),
    [((), "unavailable"), (("--drain-timeout-ms", "1"), "unknown_outcome")],
    ids=["patient", "cut-short"],
)
def test_a_body_that_stalls_delays_no_stop_and_its_sender_is_told(
    tmp_path: Path, arguments: tuple[str, ...], code: str
) -> None:
    """The stop waits for no body that has stopped; one that is cut short answers all the same."""
    with ServiceProcess(tmp_path, *arguments) as service:
        host, port = service.endpoint.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=60) as stalled:
            stalled.sendall(
                b"POST /v1/tables HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 9\r\n"
                b"content-type: application/json\r\nexpect: 100-continue\r\n\r\n"
            )
            # The service reads the body.
            assert stalled.recv(100).startswith(b"HTTP/1.1 100")
            started = time.monotonic()
            service.send(signal.SIGTERM)
            answer = b"".join(iter(lambda: stalled.recv(10_000), b""))
        assert service.wait() == 0
        assert time.monotonic() - started < 10  # `drain_timeout_ms` is 15 s
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 5")
    assert json.loads(body)["error"]["code"] == code
