"""Writer threads of the torture test. Each goes on for ever while the gate is open.

A writer repeats an interrupted call until it is answered: idempotence makes that safe, and that is
what is tested. Only `ImpatientAppender` gives up and leaves an unknown outcome behind.
"""

from __future__ import annotations

import abc
import random
import threading
import time
from collections.abc import Iterable
from typing import Final, Protocol

import pyarrow as pa

from streamhouse.client import StorageClient
from streamhouse.core.errors import (
    OverloadedError,
    StorageFailedError,
    StreamhouseError,
    UnavailableError,
    UnknownOutcomeError,
)
from tests.torture.ledger import AppendLedger

__all__ = [
    "KEYS_ONLY",
    "KEYS_PER_WRITER",
    "KEY_SCHEMA",
    "LOG_SCHEMA",
    "PATIENCE_S",
    "Appender",
    "Gate",
    "Hold",
    "ImpatientAppender",
    "TransactionWriter",
    "Writer",
    "check_users",
    "key_rows",
    "patient_client",
]

LOG_SCHEMA: Final = pa.schema(
    [
        pa.field("writer", pa.int64(), nullable=False),
        pa.field("number", pa.int64(), nullable=False),
        pa.field("text", pa.string()),
    ]
)
KEY_SCHEMA: Final = pa.schema(
    [
        pa.field("key", pa.int64(), nullable=False),
        pa.field("version", pa.int64()),
        pa.field("text", pa.string()),
    ]
)
KEYS_ONLY: Final = pa.schema([KEY_SCHEMA.field("key")])
KEYS_PER_WRITER: Final = 300

PATIENCE_S: Final = 120.0
_IMPATIENCE_S: Final = 0.3
_DISAPPOINTMENTS: Final = (
    OverloadedError,
    StorageFailedError,
    UnavailableError,
    UnknownOutcomeError,
)


class _User(Protocol):
    name: str
    error: BaseException | None


def check_users(users: Iterable[_User]) -> None:
    """Raise what one of the threads has met."""
    for user in users:
        if user.error is not None:
            raise AssertionError(f"{user.name} failed") from user.error


class Gate:
    """Lets writers start a call or not, and knows when none is in a call."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_open = False
        self._is_over = False
        self._inside = 0

    def enter(self) -> bool:
        """Wait for the gate; False once everything is over."""
        with self._changed:
            while not self._is_open and not self._is_over:
                self._changed.wait()
            if self._is_over:
                return False
            self._inside += 1
            return True

    def leave(self) -> None:
        """Say that a call has ended."""
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()

    def open(self) -> None:
        """Let writers go on."""
        with self._changed:
            self._is_open = True
            self._changed.notify_all()

    def close(self) -> None:
        """Let no new call start."""
        with self._changed:
            self._is_open = False

    def wait_until_empty(self, timeout_s: float) -> bool:
        """Wait until no call is in progress; whether that came."""
        with self._changed:
            return self._changed.wait_for(lambda: self._inside == 0, timeout_s)

    def end(self) -> None:
        """Send everybody home."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()


class Hold:
    """A place between two calls of a writer, where it can be held."""

    def __init__(self) -> None:
        self._go_on, self._is_here = threading.Event(), threading.Event()
        self._go_on.set()

    def begin(self) -> None:
        """From now on hold who comes."""
        self._is_here.clear()
        self._go_on.clear()

    def wait(self, timeout_s: float) -> bool:
        """Wait for somebody to be held; whether that came."""
        return self._is_here.wait(max(timeout_s, 0.0))

    def end(self) -> None:
        """Let them go on."""
        self._go_on.set()

    def pass_by(self) -> None:
        """Go on, or be held."""
        self._is_here.set()
        self._go_on.wait()


class Writer(threading.Thread, abc.ABC):
    """One writer; `error` is what ended it, None while all is well."""

    def __init__(self, gate: Gate, *, endpoint: str, table: str, number: int, seed: int) -> None:
        super().__init__(name=f"{type(self).__name__}-{table}-{number}", daemon=True)
        self.gate = gate
        self.endpoint = endpoint
        self.table = table
        self.number = number
        self.random = random.Random(f"{seed}/{self.name}")
        self.calls = 0
        self.rows = 0
        self.error: BaseException | None = None
        self.is_inside = False

    def run(self) -> None:
        try:
            while self.gate.enter():
                self.is_inside = True
                try:
                    self.rows += self.write()
                    self.calls += 1
                finally:
                    self.is_inside = False
                    self.gate.leave()
        except BaseException as error:  # noqa: BLE001 - told to the main thread, which raises it
            self.error = error

    @abc.abstractmethod
    def write(self) -> int:
        """Make one call; return how many rows it wrote."""

    def text(self) -> str:
        """A text of some length, so that segments fill and batches differ."""
        return "x" * self.random.choice((0, 3, 40, 400))


class Appender(Writer):
    """Appends with an idempotent writer, until it is told where the rows are."""

    def __init__(self, gate: Gate, ledger: AppendLedger, **common: object) -> None:
        super().__init__(gate, **common)  # type: ignore[arg-type]
        self.ledger = ledger
        self._client = patient_client(self.endpoint)
        self._sent = 0

    def write(self) -> int:
        count = self.random.choice((1, 2, 10, 100))
        rows = [(self.number, self._sent + i) for i in range(count)]
        self._sent += count
        self.ledger.sending(rows)
        data = pa.table(
            {
                "writer": [writer for writer, _ in rows],
                "number": [number for _, number in rows],
                "text": [self.text()] * count,
            },
            schema=LOG_SCHEMA,
        )
        offsets = self._client.append(self.table, data)
        # Rows of one call go to one bucket when they are few: then their places are told.
        places = dict.fromkeys(rows, (-1, -1))
        if len(offsets) == 1:
            ((bucket, (start, _)),) = offsets.items()
            places = {row: (bucket, start + i) for i, row in enumerate(rows)}
        self.ledger.stored(places)
        return count


class ImpatientAppender(Appender):
    """Gives up at once: an append it was not told about is there once or not at all."""

    def write(self) -> int:
        with StorageClient(self.endpoint, timeout_s=_IMPATIENCE_S) as self._client:
            try:
                return super().write()
            except _DISAPPOINTMENTS:
                return 0


class TransactionWriter(Writer):
    """Stages parts and commits them as one transaction, again and again until it is told.

    Row (writer, number): `number` is the transaction's; each has `TRANSACTION_ROWS` rows.
    """

    def __init__(self, gate: Gate, ledger: AppendLedger, **common: object) -> None:
        super().__init__(gate, **common)  # type: ignore[arg-type]
        self.ledger = ledger
        self._client = patient_client(self.endpoint)
        self._version = 0
        self.hold = Hold()

    def write(self) -> int:
        self._version += 1
        row = (self.number, self._version)
        self.ledger.sending([row])
        deadline_s = time.monotonic() + PATIENCE_S
        pause = threading.Event()
        while True:
            try:
                return self._try(row)
            except StreamhouseError:
                # Its transaction may be gone; the version decides whether it happened.
                if time.monotonic() > deadline_s:
                    raise
            pause.wait(0.1)

    def _try(self, row: tuple[int, int]) -> int:
        transaction = self._client.begin_transaction(
            self.table,
            operation=self.OPERATION,
            app_id=f"torture-{self.number}",
            version=self._version,
        )
        part_count = self.parts_of(row[1])
        if not transaction.is_skipped:
            parts = [transaction.stage(self._rows(row)) for _ in range(part_count)]
            # A part that is not named is dropped.
            transaction.stage(self._rows((self.number, -self._version)))
            if self.random.random() < 0.1:
                transaction.abort()
                return self._try(row)
            self.hold.pass_by()
            transaction.commit(parts)
        self.ledger.stored({row: (-1, -1)})
        return part_count * self.ROWS

    OPERATION = "append"
    PARTS: Final = 3
    ROWS: Final = 40

    def parts_of(self, version: int) -> int:
        """Return of how many parts a transaction is."""
        return self.PARTS

    def _rows(self, row: tuple[int, int]) -> pa.Table:
        columns = {"writer": [row[0]], "number": [row[1]], "text": [self.text()]}
        return pa.table({name: values * self.ROWS for name, values in columns.items()}, LOG_SCHEMA)


def patient_client(endpoint: str) -> StorageClient:
    """Return a client that rides out restarts: it does so once it has reached the service."""
    client = StorageClient(endpoint, timeout_s=PATIENCE_S)
    client.list_databases()
    return client


def key_rows(keys: list[int], version: int, text: str) -> pa.Table:
    """Return rows of these keys."""
    count = len(keys)
    columns = {"key": keys, "version": [version] * count, "text": [text] * count}
    return pa.table(columns, schema=KEY_SCHEMA)
