"""Users of tables that read from any process: what a standby answers is judged as they go.

A key user writes versions of its own keys, in order, by upserts and transactions. It must find its
own versions at once, and never an older version of another user's key than it has found: versions
are written in the order of their numbers, so finding one means that all before it are there. A log
user appends rows and reads ranges: an offset has one row for life, the one that was acknowledged.
A user of a table that comes and goes never finds rows of the table that it has dropped.

Who has met an error does nothing more, until `forget`: it is right where rows may be lost.
"""

from __future__ import annotations

import abc
import contextlib
import http.client
import random
import threading
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa

from streamhouse.api.client import StreamhouseClient
from streamhouse.client import StorageClient
from streamhouse.core.errors import (
    LogCutError,
    NotFoundError,
    OffsetOutOfRangeError,
    StreamhouseError,
    UnknownOutcomeError,
)
from tests.support.journal_machines import Machine
from tests.torture.writers import Gate, check_users

__all__ = ["StandbyAnswers", "StandbyUsers"]

_KEYED: Final = "read_anywhere"
_LOG: Final = "fetched_anywhere"
_PASSING: Final = "passing"
_KEYS: Final = pa.schema(
    [
        pa.field("key", pa.int64(), nullable=False),
        pa.field("version", pa.int64()),
        pa.field("user", pa.int64()),
    ]
)
_ROWS: Final = pa.schema(
    [pa.field("id", pa.int64(), nullable=False), pa.field("text", pa.string())]
)
_BUCKETS: Final = 2
_KEY_USERS: Final = 3
_LOG_USERS: Final = 2
_KEYS_EACH: Final = 5
_RANGE_MAX: Final = 3_000
_NO_LAKE: Final = {"table.datalake.enabled": "false", "table.log.segment-bytes": "64kb"}
_KINDS: Final[Mapping[str, Sequence[str]]] = {"lookups": ("row", "lookup"), "fetches": ("fetch",)}
_PAUSE_S: Final = 0.002
_PATIENCE_S: Final = 60.0


class StandbyAnswers:
    """How many lookups and fetches standbys have answered: those before the last `note` at least.

    A process that answers as a standby counts, until it owns the shard or ends.
    """

    def __init__(self) -> None:
        # By process and kind.
        self._counts: dict[tuple[int, str], int] = {}

    def note(self, machines: Iterable[Machine]) -> None:
        """Ask those that are no owners; call while none is paused."""
        for machine in machines:
            process = machine.process
            if process is None or process.has_ended() or machine.is_owner():
                continue
            with contextlib.suppress(OSError, http.client.HTTPException):
                for kind, routes in _KINDS.items():
                    self._counts[process.pid, kind] = machine.answers(*routes)

    @property
    def by_kind(self) -> Counter[str]:
        """The answers by kind."""
        counts: Counter[str] = Counter()
        for (_, kind), count in self._counts.items():
            counts[kind] += count
        return counts


class _Versions:
    """The acknowledged writes of one key user, in order: which keys each has changed."""

    def __init__(self) -> None:
        self.by_key: dict[int, list[int]] = {}

    def least(self, key: int, version: int) -> int:
        """Return the version of a key that is there once `version` of any key is found."""
        written = self.by_key.get(key, [])
        at = bisect_right(written, version)
        return written[at - 1] if at else 0


class _Shared:
    """What all users know."""

    def __init__(self) -> None:
        self.versions = [_Versions() for _ in range(_KEY_USERS)]
        self.rows: dict[tuple[int, int], int] = {}
        """Bucket and offset -> id."""
        self.lock = threading.Lock()

    def note_row(self, bucket: int, offset: int, number: int) -> None:
        """Note a row at an offset, which has had this row or none."""
        known = self.rows.setdefault((bucket, offset), number)
        assert known == number, f"{_LOG}, bucket {bucket}, offset {offset}: {number}, was {known}"


class _User(threading.Thread, abc.ABC):
    """`error` is what ended it, None while all is well."""

    def __init__(self, gate: Gate, endpoint: str, shared: _Shared, number: int) -> None:
        super().__init__(name=f"{type(self).__name__}-{number}", daemon=True)
        self._gate = gate
        self._endpoint = endpoint
        self.number = number
        self.shared = shared
        self.random = random.Random(number)
        self.error: BaseException | None = None
        self.is_inside = False
        self.reads = 0
        self.client = self._opened()

    def run(self) -> None:
        pause = threading.Event()
        while self._gate.enter():
            self.is_inside = True
            try:
                if self.error is None:
                    self.use()
            except BaseException as error:  # noqa: BLE001 - told to the main thread
                self.error = error
            finally:
                self.is_inside = False
                self._gate.leave()
            pause.wait(_PAUSE_S)

    def _opened(self) -> StorageClient:
        endpoint = f"{self._endpoint}#failover_s={_PATIENCE_S:g}"
        return StorageClient(endpoint, timeout_s=_PATIENCE_S, read_from="any")

    def forget(self) -> None:
        """Begin anew, as another client."""
        self.error = None
        self.client.close()
        self.client = self._opened()

    @abc.abstractmethod
    def use(self) -> None:
        """Make some calls."""


class _KeyUser(_User):
    """See the module."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._version = 0
        # User -> the highest version found of any of its keys.
        self._found: dict[int, int] = {}
        self._own = self.shared.versions[self.number]

    def use(self) -> None:
        if self.random.random() < 0.4:
            self._write()
        for _ in range(3):
            self._read(self.number)
            self._read(self.random.randrange(_KEY_USERS))

    def _write(self) -> None:
        self._version += 1
        mine = [self.number * _KEYS_EACH + n for n in range(_KEYS_EACH)]
        is_transaction = self.random.random() < 0.3
        keys = mine if is_transaction else [self.random.choice(mine)]
        changes = [{"key": key, "version": self._version, "user": self.number} for key in keys]
        rows = pa.Table.from_pylist(changes, schema=_KEYS)
        if is_transaction:
            self._commit(rows)
        else:
            self.client.upsert(_KEYED, rows)
        for key in keys:
            self._own.by_key.setdefault(key, []).append(self._version)
        self._found[self.number] = self._version

    def _commit(self, rows: pa.Table) -> None:
        """Commit once, also if a commit is not answered."""
        deadline_s = time.monotonic() + _PATIENCE_S
        while True:
            try:
                with self.client.begin_transaction(
                    _KEYED, operation="upsert", app_id=self.name, version=self._version
                ) as transaction:
                    if not transaction.is_skipped:
                        transaction.commit([transaction.stage(rows)])
                return
            except StreamhouseError as error:
                # The version decides whether it has happened.
                if isinstance(error, LogCutError) or time.monotonic() > deadline_s:
                    raise

    def _read(self, user: int) -> None:
        keys = [user * _KEYS_EACH + n for n in range(_KEYS_EACH)]
        if self.random.random() < 0.5:
            keys = [self.random.choice(keys)]
        before = self._found.get(user, 0)
        if len(keys) == 1 and self.random.random() < 0.7:
            found = [self.client.lookup_one(_KEYED, key=keys[0])]
        else:
            rows = self.client.lookup(_KEYED, pa.table({"key": keys})).to_pylist()
            found = [row if row["__found"] else None for row in rows]
        self.reads += len(keys)
        for key, row in zip(keys, found, strict=True):
            version = 0 if row is None else row["version"]
            least = self.shared.versions[user].least(key, before)
            assert version >= least, (
                f"user {self.number} finds version {version} of key {key}, and has found"
                f" {before} of user {user}: {least} at least"
            )
            if key in self._own.by_key:
                assert version == least, f"key {key} has version {version}, {least} was written"
            self._found[user] = max(self._found.get(user, 0), version)

    def forget(self) -> None:
        super().forget()
        self._found.clear()
        self._own.by_key.clear()
        # What is there is older, or is lost: all keys get a version again.
        self._found[self.number] = 0


class _LogUser(_User):
    """See the module."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._numbers = self.number * 10**12

    def use(self) -> None:
        if self.random.random() < 0.5:
            self._write()
        self._read()

    def _write(self) -> None:
        count = self.random.choice((1, 5, 200))
        text = "x" * self.random.choice((0, 30))
        ids = list(range(self._numbers, self._numbers + count))
        self._numbers += count
        rows = pa.table({"id": ids, "text": [text] * count}, schema=_ROWS)
        try:
            ranges = self.client.append(_LOG, rows)
        except UnknownOutcomeError:
            return
        if len(ranges) == 1:
            ((bucket, (start, _)),) = ranges.items()
            with self.shared.lock:
                for offset, number in enumerate(ids, int(start)):
                    self.shared.note_row(bucket, offset, number)

    def _read(self) -> None:
        info = self.client.describe_table(_LOG)
        for bucket, at in self.client.positions(_LOG).items():
            start = self.random.randint(int(at.log_start_offset), int(at.high_watermark))
            end = min(start + self.random.randint(1, _RANGE_MAX), int(at.high_watermark))
            position = start
            try:
                for batch in self.client.read_range(
                    _LOG, bucket, start, end, page_bytes=20_000, table_id=info.table_id
                ):
                    assert batch.base_offset == position, f"{batch} after {position}"
                    position = batch.end_offset
                    with self.shared.lock:
                        for offset, number in enumerate(
                            batch.data["id"].to_pylist(), int(batch.base_offset)
                        ):
                            self.shared.note_row(bucket, offset, number)
            except OffsetOutOfRangeError:
                # Retention has removed the rows meanwhile.
                continue
            self.reads += 1
            assert position == end, f"bucket {bucket} ends at {position}, not at {end}"


class _PassingUser(_User):
    """Drops and makes a table again, and alters it: it finds only what it has written since."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._generation = 0
        self._is_there = False
        self._columns: list[str] = []

    def use(self) -> None:
        try:
            self._change()
        except UnknownOutcomeError:
            self._is_there = False
        if self._is_there:
            self._read()

    def _change(self) -> None:
        client, chance = self.client, self.random.random()
        if not self._is_there:
            self._make()
        elif chance < 0.2:
            self._drop()
        elif chance < 0.4:
            name = f"more{self._generation}_{len(self._columns)}"
            client.alter_schema(_PASSING, [{"add": name, "type": "bigint"}])
            self._columns.append(name)

    def _read(self) -> None:
        for row in (
            self.client.lookup_one(_PASSING, key=1),
            self.client.lookup(_PASSING, pa.table({"key": [1]})).to_pylist()[0],
        ):
            assert row is not None, "the row is not found"
            assert row["version"] == self._generation, (row, self._generation)
            assert set(self._columns) <= row.keys(), (row, self._columns)

    def _make(self) -> None:
        self._generation += 1
        self._columns = []
        # A call without an answer may have left the table.
        self.client.drop_table(_PASSING, if_exists=True)
        self.client.create_table(
            _PASSING, _KEYS, primary_key=["key"], bucket_count=_BUCKETS, properties=_NO_LAKE
        )
        rows = pa.table({"key": [1], "version": [self._generation], "user": [0]}, schema=_KEYS)
        self.client.upsert(_PASSING, rows)
        self._is_there = True

    def _drop(self) -> None:
        self.client.drop_table(_PASSING, if_exists=True)
        self._is_there = False
        try:
            row = self.client.lookup_one(_PASSING, key=1)
        except NotFoundError:
            return
        raise AssertionError(f"a dropped table has {row}")

    def forget(self) -> None:
        super().forget()
        # Nobody knows what of its last changes is there.
        self._is_there = False


class StandbyUsers:
    """The tables and the threads on them."""

    def __init__(self, gate: Gate, endpoint: str) -> None:
        shared = self.shared = _Shared()
        self._users: list[_User] = [
            *(_KeyUser(gate, endpoint, shared, n) for n in range(_KEY_USERS)),
            *(_LogUser(gate, endpoint, shared, n) for n in range(_LOG_USERS)),
            _PassingUser(gate, endpoint, shared, 0),
        ]

    def create(self, client: StreamhouseClient) -> None:
        """Create the tables."""
        client.create_table(
            _KEYED, _KEYS, primary_key=["key"], bucket_count=_BUCKETS, properties=_NO_LAKE
        )
        properties = {**_NO_LAKE, "table.log.ttl": "5s"}
        client.create_table(_LOG, _ROWS, bucket_count=_BUCKETS, properties=properties)

    def start(self) -> None:
        """Let the threads wait for the gate."""
        for user in self._users:
            user.start()

    def judge(self) -> int:
        """Raise what a user has met; return how many rows or ranges were judged."""
        check_users(self._users)
        return sum(user.reads for user in self._users)

    @property
    def inside(self) -> list[str]:
        """The users with a call in progress."""
        return [user.name for user in self._users if user.is_inside]

    def forget(self) -> None:
        """Judge from now on what is there now; call while no call is in progress."""
        for user in self._users:
            user.forget()
        self.shared.rows.clear()
