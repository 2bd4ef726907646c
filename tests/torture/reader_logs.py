"""Users of a log beside readers: every acknowledged row is fetched, none twice, none that is not.

A follower appends at the owner, and fetches by a kept connection, which moves to a reader, what was
acknowledged. A committer does so with transactions, and reads how far the log is. A subscriber gets
all rows in order, and goes on at its position after each end.
"""

from __future__ import annotations

import abc
import contextlib
import http.client
import itertools
import json
import random
import threading
from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import quote

import pyarrow as pa

from streamhouse.client import StorageClient
from streamhouse.core.errors import StreamhouseError
from tests.support.reader_world import LogConnection
from tests.support.service_process import ServiceProcess
from tests.torture.writers import check_users

__all__ = ["LogUsers"]

_TABLE: Final = "events"
_SCHEMA: Final = pa.schema([pa.field("id", pa.int64(), nullable=False)])
_NDJSON: Final = {"content-type": "application/x-ndjson"}
_FOLLOWERS: Final = 2
_COMMITTED: Final = 40
_BROKEN: Final = (http.client.HTTPException, OSError)


class _Rows:
    """What was seen of the log by anybody, and what was acknowledged: offset -> id."""

    def __init__(self) -> None:
        self.seen: dict[int, int] = {}
        self.acknowledged: dict[int, int] = {}
        self._lock = threading.Lock()

    def see(self, first_offset: int, ids: list[int]) -> None:
        """Note rows; an offset names one row for life."""
        with self._lock:
            for offset, number in enumerate(ids, first_offset):
                assert self.seen.setdefault(offset, number) == number, f"two rows at {offset}"


class _User(threading.Thread, abc.ABC):
    def __init__(self, service: ServiceProcess, rows: _Rows, table_id: int) -> None:
        super().__init__(name="a user of the log", daemon=True)
        self._service = service
        self._table_id = table_id
        self._rows = rows
        self.stop = threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            while not self.stop.is_set():
                with contextlib.suppress(*_BROKEN), self._connection() as connection:
                    self._use(connection)
                self.stop.wait(0.01)
        except BaseException as error:  # noqa: BLE001 - told to the main thread, which raises it
            self.error = error

    @contextlib.contextmanager
    def _connection(self) -> Iterator[LogConnection]:
        with contextlib.closing(LogConnection(self._service, _TABLE, timeout_s=20)) as connection:
            connection.known_id = self._table_id
            yield connection

    @abc.abstractmethod
    def _use(self, connection: LogConnection) -> None: ...


class _Follower(_User):
    def __init__(
        self,
        service: ServiceProcess,
        rows: _Rows,
        table_id: int,
        *,
        numbers: itertools.count[int],
        seed: int,
    ) -> None:
        super().__init__(service, rows, table_id)
        self._numbers = numbers
        self._random = random.Random(seed)

    def _use(self, connection: LogConnection) -> None:
        with self._connection() as writing:
            while not self.stop.is_set():
                number = next(self._numbers)
                line = json.dumps({"id": number}).encode()
                status, content = writing.request("POST", "/append", body=line, headers=_NDJSON)
                if status != 200:
                    continue
                ((offset, _),) = json.loads(content)["buckets"].values()
                self._rows.acknowledged[offset] = number
                for _ in range(5):
                    ids = self._fetched(connection, offset)
                    assert ids is None or ids[0] == number, f"{number} at {offset} is {ids}"
                self._fetched(connection, self._random.randint(0, offset))

    def _fetched(self, connection: LogConnection, offset: int) -> list[int] | None:
        status, content = connection.fetch(offset, max_wait_ms=0, max_bytes=10_000)
        if status == 503:
            return None
        assert status == 200, content
        ids = [json.loads(line)["id"] for line in content.splitlines()]
        assert ids, f"no row at {offset}, which is acknowledged"
        self._rows.see(offset, ids)
        return ids


class _Committer(_User):
    """Commits transactions, and reads by a kept connection how far the log is, and the rows."""

    def __init__(
        self, service: ServiceProcess, rows: _Rows, table_id: int, *, numbers: itertools.count[int]
    ) -> None:
        super().__init__(service, rows, table_id)
        self._numbers = numbers

    def _use(self, connection: LogConnection) -> None:
        with StorageClient(self._service.endpoint) as client:
            while not self.stop.is_set():
                ids = [next(self._numbers) for _ in range(_COMMITTED)]
                with contextlib.suppress(StreamhouseError):
                    self._commit(client, connection, ids)

    def _commit(self, client: StorageClient, connection: LogConnection, ids: list[int]) -> None:
        rows = pa.table({"id": ids}, schema=_SCHEMA)
        with client.begin_transaction(_TABLE) as transaction:
            result = transaction.commit(
                [transaction.stage(rows.slice(0, 1)), transaction.stage(rows.slice(1))]
            )
        ((start, end),) = result.ranges.values()
        self._rows.acknowledged.update(zip(range(start, end), ids, strict=True))
        for _ in range(5):
            status, content = connection.request("GET", "/state")
            if status == 200:
                shown = json.loads(content)["positions"]["0"]["high_watermark"]
                assert shown >= end, f"a reader's log ends at {shown}, after a commit to {end}"
            status, content = connection.fetch(int(start), max_wait_ms=0, max_bytes=100_000)
            if status == 200:
                found = [json.loads(line)["id"] for line in content.splitlines()]
                assert found[:_COMMITTED] == ids, f"{ids} at {start} are {found}"


class _Subscriber(_User):
    position = 0
    """The next offset."""

    def _use(self, connection: LogConnection) -> None:
        start = quote(json.dumps({"0": self.position}))
        query = f"start={start}&table_id={self._table_id}&format=sse"
        with connection.open("GET", f"/subscribe?{query}") as answer:
            if answer.status != 200:
                assert answer.status == 503, answer.read()
                return
            for line in answer:
                if line.startswith(b"data: ") and b'"rows"' in line:
                    self._take(json.loads(line[6:]))
                if self.stop.is_set():
                    return

    def _take(self, page: dict[str, Any]) -> None:
        assert page["first_offset"] == self.position, (page["first_offset"], self.position)
        self._rows.see(self.position, [row["id"] for row in page["rows"]])
        self.position = page["next_offset"]


class LogUsers:
    """Followers and a subscriber of a log; all go on over the deaths of readers and owners."""

    def __init__(self, service: ServiceProcess) -> None:
        with StorageClient(service.endpoint) as client:
            table = client.create_table(
                _TABLE,
                _SCHEMA,
                bucket_count=1,
                properties={
                    "table.datalake.enabled": "false",
                    "table.log.segment-bytes": "64KiB",
                },
            )
        self._rows = _Rows()
        numbers = itertools.count(1)
        self._subscriber = _Subscriber(service, self._rows, table.table_id)
        self._users: list[_User] = [
            *(
                _Follower(service, self._rows, table.table_id, numbers=numbers, seed=seed)
                for seed in range(_FOLLOWERS)
            ),
            _Committer(service, self._rows, table.table_id, numbers=numbers),
            self._subscriber,
        ]
        for user in self._users:
            user.start()

    def end(self) -> None:
        """Stop all; raises what a user has met."""
        for user in self._users:
            user.stop.set()
        for user in self._users:
            user.join(60)
        check_users(self._users)

    def judge(self, service: ServiceProcess) -> int:
        """Compare all that was seen with the log; return the number of rows seen."""
        rows, log = self._rows, list[int]()
        with contextlib.closing(LogConnection(service, _TABLE)) as connection:
            while page := connection.ids(len(log)):
                log += page
        present = dict(enumerate(log))
        assert rows.acknowledged.items() <= present.items(), "an acknowledged row is lost"
        assert rows.seen.items() <= present.items(), "a row was seen that is not in the log"
        assert len(log) == len(set(log)), "a row is there twice"
        assert rows.seen, "nobody has seen a row"
        assert self._subscriber.position > 0, "the subscriber got nothing"
        return len(rows.seen)
