"""Reads of keys and of a log stay right while readers and the owner are killed and paused.

Every user reads by a kept connection, which moves to a reader after some lookups, what the user has
just written at the owner, and what others have written.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import random
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pyarrow as pa

from streamhouse.client import StorageClient
from tests.support.free_ports import free_port
from tests.support.linearizability import Call, History, find_contradiction
from tests.support.reader_world import RowConnection, reader_pids
from tests.support.service_process import ServiceProcess
from tests.support.waiting import wait_until
from tests.torture.era import Report
from tests.torture.reader_logs import LogUsers
from tests.torture.writers import check_users

__all__ = ["ReaderEra"]

SCHEMA: Final = pa.schema(
    [pa.field("id", pa.int64(), nullable=False), pa.field("version", pa.int64())]
)
_KEYS: Final = 5
_USERS: Final = 4
_HURT_A_LIFE: Final = 3
_NDJSON: Final = {"content-type": "application/x-ndjson"}


class _User(threading.Thread):
    """Writes keys, and reads each by a second connection, which moves to a reader."""

    def __init__(
        self, service: ServiceProcess, history: History, numbers: itertools.count[int], seed: int
    ) -> None:
        super().__init__(name="a user of the registers", daemon=True)
        self._service = service
        self._calls = history.part()
        self._numbers = numbers
        self._random = random.Random(seed)
        self.stop = threading.Event()
        self.answered_by: set[str] = set()
        """The processes that answered of late."""
        self.error: BaseException | None = None

    def run(self) -> None:
        reading, writing = (RowConnection(self._service, "registers") for _ in range(2))
        try:
            while not self.stop.is_set():
                key = self._random.randrange(_KEYS)
                try:
                    if self._random.random() < 0.5:
                        self._write(writing, key)
                    self._read(reading, key)
                except (http.client.HTTPException, OSError):
                    reading.close()
                    writing.close()
                    self.stop.wait(0.01)
        except BaseException as error:  # noqa: BLE001 - told to the main thread, which raises it
            self.error = error
        finally:
            reading.close()
            writing.close()

    def _write(self, connection: RowConnection, key: int) -> None:
        value = next(self._numbers)
        started_ns, answered_ns = time.monotonic_ns(), None
        line = json.dumps({"id": key, "version": value}).encode()
        try:
            status, _ = connection.request("POST", "/upsert", body=line, headers=_NDJSON)
            if status == 200:
                self.answered_by.add(connection.who)
                answered_ns = time.monotonic_ns()
        finally:
            self._calls.append(_call("write", key, value, started_ns, answered_ns))

    def _read(self, connection: RowConnection, key: int) -> None:
        started_ns = time.monotonic_ns()
        status, content = connection.request("GET", f"/rows/{key}")
        answered_ns, answer = time.monotonic_ns(), json.loads(content)
        if status == 200:
            value = answer["version"]
        elif status == 404 and answer["error"]["code"] == "row_not_found":
            value = None
        else:
            assert status == 503, content
            return
        self.answered_by.add(connection.who)
        self._calls.append(_call("read", key, value, started_ns, answered_ns))


def _call(kind: str, key: int, value: int | None, started_ns: int, end_ns: int | None) -> Call:
    return Call(
        key=key,
        kind="read" if kind == "read" else "write",
        value=value,
        started_ns=started_ns,
        answered_ns=end_ns,
    )


class ReaderEra:
    """One owner after the other on a directory, with two readers that are killed and paused."""

    def __init__(self, directory: Path, chance: random.Random, report: Report) -> None:
        self._data_dir = directory / "data"
        self._random = chance
        self._report = report
        self._port = str(free_port())

    def run(self, lives: int) -> None:
        """Live, die, and judge all calls at the end."""
        history, numbers = History(), itertools.count(1)
        service = self._service()
        with contextlib.ExitStack() as closing:
            closing.enter_context(service)
            with StorageClient(service.endpoint) as client:
                client.create_table(
                    "registers",
                    SCHEMA,
                    primary_key=["id"],
                    bucket_count=2,
                    properties={"table.datalake.enabled": "false"},
                )
            logs = LogUsers(service)
            closing.callback(logs.end)
            users = [_User(service, history, numbers, number) for number in range(_USERS)]
            closing.callback(_end, users)
            for user in users:
                user.start()
            for life in range(lives):
                for _ in range(_HURT_A_LIFE):
                    _wait_for_a_reader(users)
                    threading.Event().wait(self._random.uniform(0, 1))
                    self._hurt(self._random.choice(reader_pids(service)))
                _wait_for_a_reader(users)
                if life < lives - 1:
                    service.kill()
                    self._report.deaths["kill beside readers"] += 1
                    service = closing.enter_context(self._service())
            _end(users)
            logs.end()
            self._report.rows_judged += logs.judge(service)
        calls = history.calls()
        self._report.calls += len(calls)
        self._report.rows_judged += len(calls)
        contradiction = find_contradiction(calls)
        assert contradiction is None, f"lookups of readers are not linearizable: {contradiction}"

    def _service(self) -> ServiceProcess:
        return ServiceProcess(self._data_dir, "--readers", "2", "--port", self._port)

    def _hurt(self, pid: int) -> None:
        """Kill a reader, or pause the reader for a moment."""
        with contextlib.suppress(ProcessLookupError):
            if self._random.random() < 0.5:
                self._report.deaths["kill of a reader"] += 1
                os.kill(pid, signal.SIGKILL)
                return
            os.kill(pid, signal.SIGSTOP)
            threading.Event().wait(0.3)
            os.kill(pid, signal.SIGCONT)


def _end(users: Sequence[_User]) -> None:
    for user in users:
        user.stop.set()
    for user in users:
        user.join(60)
    check_users(users)


def _wait_for_a_reader(users: Sequence[_User]) -> None:
    """Return when two processes have answered: one of them is a reader."""
    for user in users:
        user.answered_by.clear()
    wait_until(
        lambda: len(set().union(*(tuple(user.answered_by) for user in users))) > 1,
        "an answer of a reader",
    )
