"""Other engines at the lake of two tables, while rounds run and the service dies.

They commit through the service's catalog and past it. From the log table `outside_log` they delete
rows, and compact it. Of the primary key table `outside_keys` they may only compact: a delete
through the catalog is refused, and one past it stops the rounds until it is taken back. Nothing
that readers of the service see of that table ever changes by it.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa
from pyiceberg.catalog import load_catalog
from pyiceberg.exceptions import ForbiddenError
from pyiceberg.table import Table
from pyiceberg.typedef import Properties

from streamhouse.api.client import StreamhouseClient
from streamhouse.core.errors import OffsetOutOfRangeError, SnapshotNotFoundError
from tests.support.foreign_deletes import commit_compaction
from tests.torture.checkers import lake_table
from tests.torture.ledger import AppendLedger, KeyLedger, RowId
from tests.torture.writers import PATIENCE_S, Gate, Writer, patient_client

__all__ = ["Engine", "OutsideCompactor", "OutsideDeleter", "OutsideLedger", "OutsideLogChecker"]

_ATTEMPTS: Final = 10
# Stock pyiceberg writes all rows anew.
_COMPACTED_ROWS_MAX: Final = 20_000
_PAUSES_S: Final = (0.05, 0.3, 1.0)


@dataclass
class OutsideLedger(AppendLedger):
    """Appends, and what another engine deleted from the lake: rows surely, numbers perhaps."""

    deleted: set[RowId] = field(default_factory=set)
    in_doubt: set[int] = field(default_factory=set)
    _deletes: threading.Lock = field(default_factory=threading.Lock)

    def deleting(self, numbers: Iterable[int]) -> None:
        """Note the numbers of rows that a commit names, before it is sent."""
        with self._deletes:
            self.in_doubt.update(numbers)

    def has_deleted(self, rows: Iterable[RowId]) -> None:
        """Note that the commit has landed."""
        with self._deletes:
            self.deleted.update(rows)

    def known(self) -> tuple[set[RowId], set[int]]:
        """Return the rows that are surely gone, and the numbers of all that may be."""
        with self._deletes:
            return set(self.deleted), set(self.in_doubt)


class Engine(Writer):
    """Another engine, with a catalog of its own: that of the service, or the one behind it."""

    def __init__(self, gate: Gate, ledger: OutsideLedger | KeyLedger, **common: object) -> None:
        super().__init__(gate, **common)  # type: ignore[arg-type]
        self._known = ledger
        self._client = patient_client(self.endpoint)
        self.done: Counter[str] = Counter()
        """What it tried, by what became of it."""

    def _opened(self, *, is_through: bool) -> Table | None:
        """Open the lake table; None if it is not there yet, or cannot be reached."""
        catalog = self._client.lake_catalog()
        properties: Properties = dict(catalog.properties)
        if is_through:
            # Of an owner and its standby one answers.
            host = self.random.choice(self.endpoint.partition("#")[0].split(","))
            properties = {"type": "rest", "uri": f"{host}/iceberg"}
        else:
            properties["uri"] += "?timeout=120"
        try:
            return load_catalog(catalog.name, **properties).load_table(f"default.{self.table}")
        except Exception:  # noqa: BLE001 - each catalog says it in its own way
            return None

    def _pause(self) -> None:
        threading.Event().wait(self.random.choice(_PAUSES_S))


class OutsideCompactor(Engine):
    """Puts all rows into one file, as an engine that compacts does."""

    def write(self) -> int:
        self._pause()
        table = self._opened(is_through=self.random.random() < 0.5)
        if table is None or not 0 < _rows_in(table) < _COMPACTED_ROWS_MAX:
            return 0
        # A round came between, the service died, or another engine was refused its delete.
        with suppress(Exception):
            commit_compaction(table)
            self.done["compacted"] += 1
        return 0


class OutsideDeleter(Engine):
    """Deletes rows of the log table; of the other one it tries, and takes back what it did."""

    def write(self) -> int:
        self._pause()
        is_through = self.random.random() < 0.5
        table = self._opened(is_through=is_through)
        if table is None or table.current_snapshot() is None:
            return 0
        if isinstance(self._known, OutsideLedger):
            self._delete_rows(table, self._known)
        elif is_through:
            self._be_refused(table)
        else:
            self._delete_and_take_back(table)
        return 0

    def _delete_rows(self, table: Table, ledger: OutsideLedger) -> None:
        first = self.random.randrange(max(1, ledger.newest()))
        numbers = range(first, first + self.random.choice((1, 7, 50)))
        where = f"number >= {numbers.start} and number < {numbers.stop}"
        rows = set(_row_ids(table.scan(row_filter=where, selected_fields=_ROW).to_arrow()))
        # What a repetition of the commit finds beside the rows is not known here.
        ledger.deleting(numbers)
        try:
            table.delete(where)
        except Exception:  # noqa: BLE001 - it has landed, or not
            return
        ledger.has_deleted(rows)
        self.done["deleted"] += 1

    def _be_refused(self, table: Table) -> None:
        keys = _keys_in(table)
        if not keys:
            return
        # The service may die, a round may come between, or delete the key itself.
        try:
            table.delete(f"key == {self.random.choice(keys)}")
        except ForbiddenError:
            self.done["refused"] += 1
        except Exception:  # noqa: BLE001 - any of these
            self.done["failed"] += 1
        past = self._opened(is_through=False)
        taken = None if past is None else _oldest_of_others(past)
        assert taken is None, f"{self.table}: an outside delete through the catalog was taken"

    def _delete_and_take_back(self, table: Table) -> None:
        keys = _keys_in(table)
        if not keys:
            return
        try:
            table.delete(f"key == {self.random.choice(keys)}")
        except Exception:  # noqa: BLE001 - a round came between, and it was given up
            return
        self._pause()
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            assert time.monotonic() < deadline_s, f"{self.table}: it cannot be set back"
            # Another engine compacts meanwhile.
            with suppress(Exception):
                oldest = _oldest_of_others(table.refresh())
                if oldest is None:
                    self.done["taken back"] += 1
                    return
                table.manage_snapshots().set_current_snapshot(oldest).commit()


_ROW: Final = ("writer", "number")


def _oldest_of_others(table: Table) -> int | None:
    """Return the snapshot before the first delete of others since the last round; None: none."""
    by_id = {snapshot.snapshot_id: snapshot for snapshot in table.metadata.snapshots}
    snapshot, before = table.current_snapshot(), None
    while snapshot is not None and snapshot.summary is not None:
        if "streamhouse.table-id" in snapshot.summary.additional_properties:
            return before
        if snapshot.summary.operation.value != "replace":
            before = snapshot.parent_snapshot_id
        snapshot = by_id.get(snapshot.parent_snapshot_id or 0)
    return before


def _rows_in(table: Table) -> int:
    snapshot = table.current_snapshot()
    summary: Any = None if snapshot is None else snapshot.summary
    return 0 if summary is None else int(summary.get("total-records") or 0)


def _keys_in(table: Table) -> list[int]:
    keys: list[int] = table.scan(selected_fields=("key",)).to_arrow()["key"].to_pylist()
    return keys


def _row_ids(rows: pa.Table) -> list[RowId]:
    return list(zip(*(rows.column(name).to_pylist() for name in _ROW), strict=True))


class OutsideLogChecker:
    """Every acknowledged row is there once, unless it was deleted; no deleted row comes back."""

    def __init__(self, table: str, ledger: OutsideLedger) -> None:
        self.table = table
        self.ledger = ledger
        self._acknowledged: set[RowId] = set()

    def check(self, client: StreamhouseClient, *, is_quiet: bool) -> int:
        """Judge all rows; return how many."""
        judged = self.check_cut(client)
        if is_quiet:
            rows, count = self._read(client), client.count(self.table)
            assert len(rows) == count, f"{self.table}: count is {count}, but {len(rows)} are read"
        return judged

    def check_cut(self, client: StreamhouseClient) -> int:
        """Judge a read: what was gone before it is not in it, what came before it is."""
        self._acknowledged |= self.ledger.take_acknowledged().keys()
        gone, _ = self.ledger.known()
        rows = self._read(client)
        _, in_doubt = self.ledger.known()
        self._judge("a read", rows, gone, in_doubt)
        return len(rows)

    def _judge(self, where: str, rows: list[RowId], gone: set[RowId], in_doubt: set[int]) -> None:
        counts = Counter(rows)
        twice = [row for row, count in counts.items() if count > 1]
        assert not twice, f"{self.table}: {where} has rows twice: {sorted(twice)[:5]}"
        invented = self.ledger.unsent(counts)
        assert not invented, f"{self.table}: {where} has rows nobody sent: {invented[:5]}"
        back = gone & counts.keys()
        assert not back, f"{self.table}: {where} has rows that were deleted: {sorted(back)[:5]}"
        missing = self._acknowledged - counts.keys()
        lost = {row for row in missing if row[1] not in in_doubt}
        assert not lost, f"{self.table}: {where} has lost rows: {sorted(lost)[:5]}"

    def _read(self, client: StreamhouseClient) -> list[RowId]:
        for attempt in range(_ATTEMPTS):
            try:
                return _row_ids(client.read(self.table, columns=list(_ROW)))
            except (OffsetOutOfRangeError, SnapshotNotFoundError):
                if attempt + 1 == _ATTEMPTS:
                    raise
        raise AssertionError("unreachable")

    def check_lake(self, client: StreamhouseClient) -> None:
        """The lake, with all rows in it, has what reads have."""
        gone, in_doubt = self.ledger.known()
        found = _row_ids(lake_table(client, self.table).scan(selected_fields=_ROW).to_arrow())
        self._judge("the lake", found, gone, in_doubt)
        assert sorted(found) == sorted(self._read(client)), f"{self.table}: the lake differs"

    def check_at_end(self, client: StreamhouseClient) -> None:
        """Judge everything again."""
        self.check(client, is_quiet=True)
