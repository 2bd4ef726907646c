"""A service on a disk that is really full: RocksDB's files and SQLite's too meet it.

Needs a small disk of its own, which only root may mount; skipped elsewhere.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from streamhouse.api.client import StreamhouseClient
from streamhouse.core.errors import (
    OverloadedError,
    StorageFailedError,
    UnknownOutcomeError,
)
from tests.support.command_line import streamhouse
from tests.support.service_process import DiedAtStart, ServiceProcess

pytestmark = pytest.mark.slow

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("text", pa.string())])
DISK_BYTES, BALLAST_BYTES, ROWS = 48 << 20, 24 << 20, 2_000


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "disk"
    path.mkdir()
    mount = ("mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(path))
    try:
        done = subprocess.run(mount, capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount here")
    if done.returncode:
        pytest.skip("only root may mount a disk for this test")
    yield path
    subprocess.run(("umount", "--lazy", str(path)), check=True)


def _rows(number: int) -> pa.Table:
    first = number * ROWS // 2
    texts = [f"{number}" * 200] * ROWS
    return pa.table({"id": range(first, first + ROWS), "text": texts}, schema=SCHEMA)


def test_rows_by_key_outlive_a_full_disk_and_go_on_once_there_is_room(disk: Path) -> None:
    ballast, rest = disk / "ballast", disk / "rest"
    ballast.write_bytes(bytes(BALLAST_BYTES))
    with (
        _served(disk) as service,
        StreamhouseClient(service.endpoint) as patient,
        StreamhouseClient(service.endpoint, timeout_s=0.5) as client,
    ):
        patient.create_table("keys", SCHEMA, primary_key=["id"], bucket_count=2)
        patient.create_table("log", SCHEMA)
        stored = _upsert_until_refused(client, 0)
        _fill(rest)
        with pytest.raises(StorageFailedError):
            _answered(lambda: client.append("log", _rows(0)))
        with pytest.raises((StorageFailedError, OverloadedError)):
            _answered(lambda: client.upsert("keys", _rows(stored)))
        _check(patient, stored)

        ballast.unlink()
        stored = _upsert_more(service, stored)
        # Full again, and now it is killed.
        ballast.touch()
        _fill(rest)
        service.kill()
    # A start makes files; it ends with a sentence that says which it could not.
    with pytest.raises(
        DiedAtStart, match=r"streamhouse: table 'default\..*No space left on device"
    ):
        _served(disk).__enter__()
    rest.unlink()
    with _served(disk) as service:
        stored = _upsert_more(service, stored)
        assert service.terminate() == 0
    streamhouse("check", "--data-dir", disk / "data")


def _served(disk: Path) -> ServiceProcess:
    # A budget so small that rows are handed to RocksDB all the time, and read from it.
    arguments = ("--key-memory-bytes-max", "16mb", "--key-cache-bytes-max", "1mb")
    return ServiceProcess(disk / "data", *arguments)


def _upsert_until_refused(client: StreamhouseClient, number: int) -> int:
    while True:
        try:
            _answered(lambda n=number: client.upsert("keys", _rows(n)))  # type: ignore[misc]
        except (StorageFailedError, OverloadedError):
            return number
        number += 1


def _answered(call: Callable[[], object]) -> None:
    """Make a call again to which a client that waits for half a second had no answer."""
    while True:
        with contextlib.suppress(UnknownOutcomeError):
            call()
            return


def _upsert_more(service: ServiceProcess, stored: int) -> int:
    # A patient client's retries meet the moment at which RocksDB has seen the room too.
    with StreamhouseClient(service.endpoint, timeout_s=60) as client:
        for number in range(stored, stored + 3):
            client.upsert("keys", _rows(number))
        client.append("log", _rows(0))
        _check(client, stored + 3)
    return stored + 3


def _fill(path: Path) -> None:
    """Take all the room that is left."""
    with path.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def _check(client: StreamhouseClient, stored: int) -> None:
    """Each key has the last text that was acknowledged."""
    count = (stored + 1) * ROWS // 2
    assert client.count("keys") == count
    keys = pa.table({"id": range(count)}, schema=pa.schema([SCHEMA.field("id")]))
    found = client.lookup("keys", keys)["text"].to_pylist()
    expected = {}
    for number in range(stored):
        expected |= dict.fromkeys(_rows(number)["id"].to_pylist(), f"{number}" * 200)
    assert found == [expected[key] for key in range(count)]
