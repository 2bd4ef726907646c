"""Positions of a table that is dropped and created again under its name, and who holds them.

Whoever reads on from a position reads the rows of its own table, each in its place, and is refused
once another table has the name; so is who commits what it read, or rows that it computed from that.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from streamhouse.client import StorageClient, Subscription
from streamhouse.core.errors import (
    CommitConflictError,
    StreamhouseError,
    TableNotFoundError,
)
from streamhouse.core.model.offsets import Offset, table_of_offsets
from tests.torture.checkers import is_unreachable
from tests.torture.recreated import GenerationLedger
from tests.torture.writers import LOG_SCHEMA, PATIENCE_S, Gate, Writer, patient_client

__all__ = ["PositionHolder"]

_POLL_S: Final = 0.2
_MADE_AGAIN: Final = "dropped and created again"
_KINDS: Final = ("subscription", "consumer", "subscription from offsets", "fetches", "range")


@dataclass
class _Held:
    """A position in one table: all rows below `ends` were read, or were there before."""

    kind: str
    table_id: int
    read_offsets: Mapping[int, int]
    """Where the table stood when the position was taken."""
    ends: dict[int, int]
    subscription: Subscription[Any] | None

    def read(self, client: StorageClient, table: str) -> list[Any]:
        """Return what comes next, perhaps nothing."""
        if self.subscription is not None:
            return self.subscription.poll(timeout_s=_POLL_S)
        if self.kind == "fetches":
            pages = [client.fetch(table, b, end, max_wait_ms=50) for b, end in self.ends.items()]
            return [batch for page in pages for batch in page]
        ranges = {bucket: (self.ends[bucket], end) for bucket, end in self.read_offsets.items()}
        found = [
            batch
            for bucket, (start, end) in ranges.items()
            for batch in client.read_range(table, bucket, start, end)
        ]
        # From here on as far as the table is then.
        self.read_offsets = _ends(client, table, self.table_id)
        return found


class PositionHolder(Writer):
    """Holds one position after another: each call reads on from it, or is refused with it."""

    def __init__(self, gate: Gate, ledger: GenerationLedger, **common: object) -> None:
        super().__init__(gate, **common)  # type: ignore[arg-type]
        self.ledger = ledger
        self.done: Counter[str] = Counter()
        """What was refused of dropped tables."""
        self._client = patient_client(self.endpoint)
        self._consumer = f"holder-{self.number}"
        self._held: _Held | None = None
        # Table id -> bucket -> offset, of the consumer.
        self._read: dict[int, dict[int, int]] = {}
        self._committed: dict[int, dict[int, int]] = {}
        self._seen: set[int] = set()

    def write(self) -> int:
        if self._held is None:
            with suppress(TableNotFoundError):
                self._held = self._taken(self.random.choice(_KINDS))
            return 0
        held = self._held
        try:
            self._go_on(held)
        except TableNotFoundError as error:
            self._drop(held)
            self._refused(held, error)
        except StreamhouseError as error:
            if not is_unreachable(error):
                raise
            self._drop(held)
        self._check_consumer()
        return 0

    def _taken(self, kind: str) -> _Held | None:
        """Take a position; None if the table was made again meanwhile."""
        table_id = self._client.describe_table(self.table).table_id
        ends = _ends(self._client, self.table, table_id)
        start: dict[int, int] = {bucket: Offset(0, table_id) for bucket in ends}
        subscription = None
        if kind == "subscription":
            subscription = self._client.subscribe(self.table, start="earliest")
        elif kind == "consumer":
            start |= self._committed.get(table_id, {})
            subscription = self._client.subscribe(
                self.table, start="committed", consumer=self._consumer
            )
        elif kind == "subscription from offsets":
            start = dict(ends)
            subscription = self._client.subscribe(self.table, start=start)
        self._seen = set()
        if self._table_id() == table_id:
            return _Held(kind, table_id, ends, start, subscription)
        if subscription is not None:
            subscription.close()
        return None

    def _go_on(self, held: _Held) -> None:
        """Read on; all that is there if the table is whole, until it is refused if it is gone."""
        deadline_s = time.monotonic() + PATIENCE_S
        generation, count = self.ledger.known()
        is_whole = self.ledger.of_table(held.table_id) == (generation, count)
        is_gone = self._table_id() != held.table_id
        while True:
            for batch in held.read(self._client, self.table):
                self._judge(held, batch)
            if held.kind == "consumer":
                self._commit(held)
            if not is_gone and (not is_whole or sum(held.ends.values()) == count):
                return
            assert time.monotonic() < deadline_s, (
                f"{self.table}: a {held.kind} of table {held.table_id} is at {held.ends}, and is"
                f" not refused{'' if is_gone else f'; {count} rows are there'}"
            )

    def _judge(self, held: _Held, batch: Any) -> None:
        where = f"{self.table}: a {held.kind} of table {held.table_id}, bucket {batch.bucket}"
        end = held.ends[batch.bucket]
        of_table = table_of_offsets([batch.base_offset], what=where)
        assert of_table == held.table_id, f"{where}: rows of table {of_table}"
        assert batch.base_offset == end, f"{where}: goes on at {batch.base_offset} after {end}"
        generation, count = self.ledger.of_table(held.table_id)
        rows = pa.table(batch.data)
        generations = set(rows.column("writer").to_pylist())
        assert generations == {generation}, f"{where}: rows of {generations}, not {generation}"
        numbers = rows.column("number").to_pylist()
        new = set(numbers) - self._seen
        assert len(new) == len(numbers), f"{where}: a row twice"
        assert new <= set(range(count)), f"{where}: rows nobody sent"
        self._seen |= new
        held.ends[batch.bucket] = batch.end_offset

    def _commit(self, held: _Held) -> None:
        assert held.subscription is not None
        self._read[held.table_id] = dict(held.ends)
        held.subscription.commit()
        self._committed[held.table_id] = dict(held.ends)

    def _check_consumer(self) -> None:
        """The consumer has not committed what it never read, and forgets nothing it committed."""
        with suppress(TableNotFoundError):
            offsets = self._client.committed(self.table, self._consumer) or {}
            table_id = table_of_offsets(offsets.values(), what="committed") or 0
            read, least = (said.get(table_id, {}) for said in (self._read, self._committed))
            assert all(least.get(b, 0) <= at <= read.get(b, 0) for b, at in offsets.items()), (
                f"{self.table}: {self._consumer} has committed {offsets} of table {table_id}; it"
                f" committed {least} and read {read}"
            )

    def _refused(self, held: _Held, error: TableNotFoundError) -> None:
        """Nothing that is of the dropped table may be committed to the new one."""
        is_told = "does not exist" in error.message or _MADE_AGAIN in error.message
        assert is_told, error.message
        self.done[f"{held.kind} refused"] += 1
        self._refuse(
            "report", lambda: self._client.report_position(self.table, "nobody", held.ends)
        )
        self._refuse("commit", lambda: self._commit_rows(held.read_offsets))

    def _refuse(self, what: str, call: Callable[[], object]) -> None:
        try:
            call()
        except (CommitConflictError, TableNotFoundError) as error:
            if _MADE_AGAIN in error.message:
                self.done[f"{what} refused"] += 1
        except StreamhouseError:
            # The service died meanwhile, and a transaction with it.
            return
        else:
            raise AssertionError(f"{self.table}: a {what} with offsets of a dropped table is taken")

    def _commit_rows(self, read_offsets: Mapping[int, int]) -> None:
        is_keyed = self._client.describe_table(self.table).is_primary_key_table
        row = pa.table({"writer": [-1], "number": [-1], "text": ["old"]}, schema=LOG_SCHEMA)
        operation = "upsert" if is_keyed else "append"
        with self._client.begin_transaction(self.table, operation=operation) as transaction:
            transaction.commit([transaction.stage(row)], read_offsets=read_offsets)

    def _table_id(self) -> int | None:
        try:
            return self._client.describe_table(self.table).table_id
        except TableNotFoundError:
            return None

    def _drop(self, held: _Held) -> None:
        self._held = None
        if held.subscription is not None:
            held.subscription.close()


def _ends(client: StorageClient, table: str, table_id: int) -> dict[int, int]:
    """Return where this table stands, or nothing of the one that has its name now."""
    state = client.table_state(table)
    if state.table.table_id != table_id:
        raise TableNotFoundError(f"table '{table}' was {_MADE_AGAIN}")
    return {bucket: at.high_watermark for bucket, at in state.positions.items()}
