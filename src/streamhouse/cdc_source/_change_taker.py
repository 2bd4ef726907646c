"""One run of a stream: Debezium's events, committed by whole transactions of the source."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

from streamhouse.cdc_source._debezium_engine import EventKind, SourceEvent
from streamhouse.cdc_source._stream_progress import Progress, ProgressTable
from streamhouse.cdc_source._target_table import TargetTable
from streamhouse.cdc_source.stream_options import check_not_renamed
from streamhouse.core.errors import SchemaMismatchError

__all__ = ["ChangeTaker"]

_logger = logging.getLogger("streamhouse.cdc")


class ChangeTaker:
    """Commits changes on arrival. `keep_log` and `release_log` may be called by other threads.

    `column_numbers` reads a table's columns from the source again, and raises for a table that
    cannot be followed.
    """

    def __init__(
        self,
        positions: ProgressTable,
        progress: Progress,
        targets: Mapping[str, TargetTable],
        *,
        column_numbers: Callable[[str], Mapping[str, int]],
    ) -> None:
        assert progress.lsn is not None
        self._positions = positions
        self._targets = targets
        self._column_numbers = column_numbers
        self._lsn = progress.lsn
        self._in_transaction = False
        self._keeps_log = False
        # Replaced as a whole by the thread that reads new tables.
        self._ignored: frozenset[str] = frozenset()
        self._seen: set[str] = set()
        self.progress = progress
        self.commits = 0

    def keep_log(self, *, ignore: frozenset[str]) -> None:
        """Keep the source's log from now on, and leave the tables `ignore` to their snapshot."""
        self._ignored = ignore
        self._keeps_log = True

    def release_log(self) -> None:
        """Let the source drop what our tables have."""
        self._keeps_log = False

    def take(self, events: list[SourceEvent]) -> int | None:
        """Take events; return the place of the last event that may be dropped from the log.

        Raises `SchemaMismatchError` for a change that no table can follow, after a commit of all
        earlier changes.
        """
        try:
            applied = self._take(events)
        except SchemaMismatchError:
            self._commit()
            raise
        self._commit()
        return None if self._keeps_log else applied

    def _take(self, events: list[SourceEvent]) -> int | None:
        applied: int | None = None
        for at, event in enumerate(events):
            if event.kind is EventKind.CHANGE:
                self._in_transaction = True
                self._change(event)
            elif event.kind is EventKind.END:
                self._in_transaction = False
                self._lsn = event.lsn
                for target in self._targets.values():
                    target.end_transaction(event.lsn)
                applied = at
            elif not self._in_transaction:
                applied = at
        return applied

    def _change(self, event: SourceEvent) -> None:
        target = self._targets.get(event.table)
        if target is None or event.table in self._ignored:
            return
        if event.columns is not None:
            # The source describes a table again after an alteration, also of its replica identity.
            if event.table in self._seen or target.lacks_any(event.columns):
                self._look_at_columns(event.table)
            self._seen.add(event.table)
            target.follow_schema(event.columns)
        target.add(event.op, event.row or {}, event.text)

    def _look_at_columns(self, name: str) -> None:
        """Note which columns the source has now; raise if what seems new was renamed."""
        ours = self.progress.tables[name]
        numbers = self._column_numbers(name)
        check_not_renamed(name, ours, numbers)
        noted = replace(ours, columns={**ours.columns, **numbers})
        self.progress = replace(self.progress, tables={**self.progress.tables, name: noted})

    def _commit(self) -> None:
        if self._lsn == self.progress.lsn:
            return
        ignored = self._ignored
        count = 0
        for name, target in self._targets.items():
            if name not in ignored:
                count += target.commit(self._lsn)
        self.progress = replace(self.progress, lsn=self._lsn)
        self._positions.store(self.progress)
        self.commits += 1
        if count:
            _logger.info(
                "event=changes rows=%d position=%X/%X",
                count,
                self._lsn >> 32,
                self._lsn & 0xFFFFFFFF,
            )
