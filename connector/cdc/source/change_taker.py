"""One run of a stream: what Debezium hands over, committed by whole transactions of the source."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

from streamhouse.connector.cdc.source.debezium_engine import EventKind, SourceEvent
from streamhouse.connector.cdc.source.progress import Progress, ProgressTable
from streamhouse.connector.cdc.source.target_table import TargetTable

__all__ = ["ChangeTaker"]

_logger = logging.getLogger("streamhouse.cdc")


class ChangeTaker:
    """Commits changes as they come. `keep_log` and `release_log` may be called by other threads."""

    def __init__(
        self, positions: ProgressTable, progress: Progress, targets: Mapping[str, TargetTable]
    ) -> None:
        assert progress.lsn is not None
        self._positions = positions
        self._targets = targets
        self._lsn = progress.lsn
        self._in_transaction = False
        self._keeps_log = False
        # Replaced as a whole by the thread that reads new tables.
        self._ignored: frozenset[str] = frozenset()
        self.progress = progress
        self.commits = 0

    def keep_log(self, *, ignore: frozenset[str]) -> None:
        """Let the source drop nothing of its log, and leave these tables to somebody else."""
        self._ignored = ignore
        self._keeps_log = True

    def release_log(self) -> None:
        """Let the source drop what our tables have."""
        self._keeps_log = False

    def take(self, events: list[SourceEvent]) -> int | None:
        """Take events; return the place of the last of them that needs not come again."""
        done: int | None = None
        for at, event in enumerate(events):
            if event.kind is EventKind.CHANGE:
                self._in_transaction = True
                self._change(event)
            elif event.kind is EventKind.END:
                self._in_transaction = False
                self._lsn = event.lsn
                for target in self._targets.values():
                    target.end_transaction(event.lsn)
                done = at
            elif not self._in_transaction:
                done = at
        self._commit()
        return None if self._keeps_log else done

    def _change(self, event: SourceEvent) -> None:
        target = self._targets.get(event.table)
        if target is None or event.table in self._ignored:
            return
        if event.columns is not None:
            target.follow_schema(event.columns)
        target.add(event.op, event.row or {}, event.text)

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
            _logger.info("%d changes, up to %X/%X", count, self._lsn >> 32, self._lsn & 0xFFFFFFFF)
