"""A few keys that many write and read at once: whether lookups stay linearizable over takeovers.

Writers have no key of their own and do not wait long: a write without an answer may take effect at
any later time, once, or never. Readers ask one process each, or all: one that was paused and has
lost its shard must not answer what it had.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Sequence
from typing import Final

import pyarrow as pa

from streamhouse.api.client import StreamhouseClient
from streamhouse.client import StorageClient
from streamhouse.core.errors import StreamhouseError, UnknownOutcomeError
from tests.support.linearizability import Call, History, find_contradiction
from tests.torture.writers import KEY_SCHEMA, KEYS_ONLY, Gate, check_users

__all__ = ["Registers"]

_TABLE: Final = "registers"
_KEYS: Final = 6
_WRITERS: Final = 3
_PAUSE_S: Final = 0.003
_TIMEOUT_S: Final = 2.0


class Registers:
    """The table and the threads on it; `judge` is for when no call is under way."""

    def __init__(self, gate: Gate, endpoint: str, single_endpoints: Sequence[str]) -> None:
        self._history = History()
        self._numbers = itertools.count(1)
        endpoint = f"{endpoint}#failover_s={_TIMEOUT_S:g}"
        self._users = [_User(gate, endpoint, self._history, n) for n in range(_WRITERS + 1)]
        self._users += [
            _User(gate, single, self._history, len(self._users) + n)
            for n, single in enumerate(single_endpoints)
        ]
        for user in self._users[:_WRITERS]:
            user.numbers = self._numbers

    def create(self, client: StreamhouseClient) -> None:
        """Create the table."""
        client.create_table(
            _TABLE,
            KEY_SCHEMA,
            primary_key=["key"],
            bucket_count=2,
            properties={"table.datalake.enabled": "false"},
        )

    def start(self) -> None:
        """Let the threads wait for the gate."""
        for user in self._users:
            user.start()

    def judge(self) -> int:
        """Raise AssertionError if what was read fits no order; return how many calls there are."""
        check_users(self._users)
        calls = self._history.calls()
        found = find_contradiction(calls)
        assert found is None, f"lookups are not linearizable: {found}"
        return len(calls)


class _User(threading.Thread):
    """Writes a key or reads some, again and again; writes only if it has `numbers` to write."""

    def __init__(self, gate: Gate, endpoint: str, history: History, number: int) -> None:
        super().__init__(name=f"registers-{number}", daemon=True)
        self._gate = gate
        self._endpoint = endpoint
        self._calls = history.part()
        self._random = random.Random(number)
        self.numbers: itertools.count[int] | None = None
        self.error: BaseException | None = None

    def run(self) -> None:
        pause = threading.Event()
        try:
            with StorageClient(self._endpoint, timeout_s=_TIMEOUT_S) as client:
                while self._gate.enter():
                    try:
                        if self.numbers is None or self._random.random() < 0.2:
                            self._read(client)
                        else:
                            self._write(client)
                    finally:
                        self._gate.leave()
                    pause.wait(_PAUSE_S)
        except BaseException as error:  # noqa: BLE001 - told to the main thread, which raises it
            self.error = error

    def _write(self, client: StorageClient) -> None:
        assert self.numbers is not None
        key = self._random.randrange(_KEYS)
        value = None if self._random.random() < 0.2 else next(self.numbers)
        started_ns = time.monotonic_ns()
        answered_ns: int | None = None
        try:
            if value is None:
                client.delete(_TABLE, pa.table({"key": [key]}, schema=KEYS_ONLY))
            else:
                row = {
                    "key": [key],
                    "version": [value],
                    "text": ["x" * self._random.choice((0, 50))],
                }
                client.upsert(_TABLE, pa.table(row, schema=KEY_SCHEMA))
        except StreamhouseError as error:
            _raise_if_wrong(error)
        else:
            answered_ns = time.monotonic_ns()
        self._calls.append(
            Call(
                key=key,
                kind="write",
                value=value,
                started_ns=started_ns,
                answered_ns=answered_ns,
            )
        )

    def _read(self, client: StorageClient) -> None:
        keys = self._random.sample(range(_KEYS), self._random.choice((1, _KEYS)))
        started_ns = time.monotonic_ns()
        try:
            rows = client.lookup(_TABLE, pa.table({"key": keys}, schema=KEYS_ONLY))
        except StreamhouseError as error:
            _raise_if_wrong(error)
            return
        answered_ns = time.monotonic_ns()
        for key, value in zip(keys, rows.column("version").to_pylist(), strict=True):
            self._calls.append(
                Call(
                    key=key,
                    kind="read",
                    value=value,
                    started_ns=started_ns,
                    answered_ns=answered_ns,
                )
            )


def _raise_if_wrong(error: StreamhouseError) -> None:
    """Raise an error that is not about a service that is not there."""
    if not (error.retriable or isinstance(error, UnknownOutcomeError)):
        raise error
