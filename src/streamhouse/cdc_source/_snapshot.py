"""A snapshot of some tables at one position in the database's log, into the target tables.

Debezium creates a replication slot and reads the rows visible at the slot's start. A single commit
replaces each target table, with the position as its version: Debezium's later changes are skipped
up to the position, and applied after it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Final

from streamhouse.cdc_source._debezium_engine import (
    DebeziumEngine,
    EngineSettings,
    EventKind,
    SourceEvent,
)
from streamhouse.cdc_source._source_database import SourceDatabase
from streamhouse.cdc_source._target_table import TargetTable
from streamhouse.core.errors import SchemaMismatchError, UnavailableError

__all__ = ["read_snapshot"]

_STAGE_ROWS: Final = 20_000


def read_snapshot(
    settings: EngineSettings,
    targets: dict[str, TargetTable],
    *,
    stop: threading.Event,
    say: Callable[[str], None],
) -> int | None:
    """Make the target tables equal to the source; return the position, None after a stop.

    The slot remains, unread. A table with a value that has no form in the target is logged, and
    removed from `targets`. Raises `SchemaMismatchError` when no target remains, and
    `UnavailableError` if Debezium ends early.
    """
    snapshot = _Snapshot(settings, targets, say=say)
    try:
        engine = DebeziumEngine(settings, snapshot.take)
        why = engine.run(lambda: stop.is_set() or snapshot.is_whole)
    finally:
        snapshot.close()
    if snapshot.is_whole:
        return snapshot.lsn
    if stop.is_set():
        return None
    raise UnavailableError(f"{settings.address}: the tables were not read to their end: {why}")


class _Snapshot:
    """Takes rows until the first event of another kind; `lsn` is the position of the rows."""

    def __init__(
        self,
        settings: EngineSettings,
        targets: dict[str, TargetTable],
        *,
        say: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._targets = targets
        self._say = say
        self._waiting_rows = 0
        self._lsn: int | None = None
        self.is_whole = False

    @property
    def lsn(self) -> int:
        """The start of the slot, unchanged while the slot is unread."""
        if self._lsn is None:
            with SourceDatabase(self._settings.address) as source:
                slot = source.slot(self._settings.slot)
            if slot is None:
                raise UnavailableError(
                    f"{self._settings.address}: the replication slot went during a snapshot"
                )
            self._lsn = slot.confirmed_lsn
        return self._lsn

    def take(self, events: list[SourceEvent]) -> None:
        """Take events; the first event after the snapshot ends it, and later events are ignored."""
        for event in events:
            if self.is_whole:
                return
            if not event.is_snapshot:
                self._end()
            elif event.kind is EventKind.CHANGE:
                self._add(event)

    def _add(self, event: SourceEvent) -> None:
        target = self._targets.get(event.table)
        if target is None:
            return
        with self._refusing(event.table):
            if event.columns is not None:
                target.follow_schema(event.columns)
            target.add(event.op, event.row or {}, event.text)
        self._waiting_rows += 1
        if self._waiting_rows >= _STAGE_ROWS:
            self._waiting_rows = 0
            for name, each in list(self._targets.items()):
                with self._refusing(name):
                    if each.changes.has_open:
                        each.stage_snapshot(self.lsn)

    def _end(self) -> None:
        rows = 0
        for name, target in list(self._targets.items()):
            with self._refusing(name):
                rows += target.commit_snapshot(self.lsn)
        self.is_whole = True
        self._say(f"snapshot: {rows:,} rows of {len(self._targets)} tables")

    @contextlib.contextmanager
    def _refusing(self, name: str) -> Iterator[None]:
        """Remove a table with an unfit value; without any table the snapshot ends."""
        try:
            yield
        except SchemaMismatchError as error:
            self._targets.pop(name).abort_snapshot()
            if not self._targets:
                raise
            self._say(f"{name} is not followed: {error}")

    def close(self) -> None:
        """Drop what was staged and not committed."""
        for target in self._targets.values():
            try:
                target.abort_snapshot()
            except UnavailableError:
                # It times out by itself.
                return
