"""The logs of a followed directory, opened for fetches and kept up to date.

A table's logs are opened once a fetch has asked for the table, log table or primary key table. The
thread that follows the journal opens and publishes them after whole objects of the journal, so the
files are a moment of the owner. Any thread reads them.

Promises:
- rows below a published end are rows that the owner shows, or shows in a moment and for ever
- ends and starts of a table stay while a decided transaction has no outcome: its rows are in some
  buckets only, and an overwrite ends the life of earlier rows in the same step
- a published start is at least the start of the log's files, and at least the last overwrite
- logs are closed once no read uses them, and no read returns a view of a file: the files of a
  closed log may be cut, when the directory is restored

Logs that cannot be read are closed, and not opened again.
"""

from __future__ import annotations

import functools
import logging
import re
import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from streamhouse.core.errors import CorruptDataError, StreamhouseError
from streamhouse.core.model.lake.facts import LakeState
from streamhouse.core.model.table import TableInfo, TablePath
from streamhouse.storage_service.directory.data_directory import DataDirectory
from streamhouse.storage_service.directory.table_files import read_table
from streamhouse.storage_service.engine.keys._lending import Lending, TablesByPath
from streamhouse.storage_service.engine.keys.warm_rows import WarmRows
from streamhouse.storage_service.engine.open_table import ReadableTable
from streamhouse.storage_service.engine.transactions.stored_decisions import rows_begin_at
from streamhouse.storage_service.engine.wakeups import WaiterLimit, Wakeups
from streamhouse.storage_service.log.followed_log import FollowedLog
from streamhouse.storage_service.log.segments.segment import StoredBatch
from streamhouse.storage_service.log.segments.segment_format import offsets_of

__all__ = ["FollowedLogs", "LogTables"]

_logger = logging.getLogger(__name__)

_FILE: Final = re.compile(r"tables/(\d+)/(?:bucket-(\d+)/|transactions/)?([^/]+)")
_TABLE: Final = re.compile(r"tables/(\d+)")
# Nobody takes what is asked for while a directory is made, which may last.
_ASKED_MAX: Final = 1_000


class _LentLog(FollowedLog):
    """A log whose reads are counted, and return copies."""

    def __init__(self, directory: Path, **more: Any) -> None:
        self._lending = Lending("the log is")
        super().__init__(directory, **more)

    def read(
        self, offset: int, *, bytes_max: int, end_offset: int | None = None
    ) -> list[StoredBatch]:
        """See `ReadableLog.read`."""
        with self._lending.use():
            stored = super().read(offset, bytes_max=bytes_max, end_offset=end_offset)
            return [frame._replace(payload=memoryview(bytes(frame.payload))) for frame in stored]

    def fingerprint(self, offset: int) -> bytes | None:
        """See `ReadableLog.fingerprint`."""
        with self._lending.use():
            return super().fingerprint(offset)

    def close(self) -> None:
        """Refuse further reads; return when the last read has ended."""
        self._lending.end()
        super().close()


class LogTables(TablesByPath[ReadableTable[FollowedLog]]):
    """The tables with published logs, and the tables that fetches have asked for."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._asked: set[TablePath] = set()

    def ask(self, path: TablePath) -> None:
        """Ask the following thread to open a table's logs; a few tables at a time."""
        with self._lock:
            if len(self._asked) < _ASKED_MAX:
                self._asked.add(path)

    def take_asked(self) -> set[TablePath]:
        """Return the tables that were asked for since the last call."""
        with self._lock:
            paths, self._asked = self._asked, set()
        return paths


@dataclass(slots=True)
class _Open:
    """A table with open logs."""

    table: ReadableTable[FollowedLog]
    begins_at: dict[int, int]
    """Where the rows of a bucket begin since the last overwrite."""
    unpublished: set[int] = field(default_factory=set)
    """The buckets whose files may have changed since they were published."""


class FollowedLogs:
    """See the module. One thread at a time, the one of `rows`."""

    def __init__(self, directory: DataDirectory, *, rows: WarmRows, tables: LogTables) -> None:
        """`rows` follows the same directory; call this class after `rows`."""
        self._directory = directory
        self._rows = rows
        self._tables = tables
        self._open: dict[int, _Open] = {}
        self._unreadable: set[int] = set()

    def open_asked(self) -> None:
        """Open the logs of the tables that fetches have asked for; call between objects."""
        paths = self._tables.take_asked()
        if not paths:
            return
        for table_id, path in self._rows.paths.items():
            if path in paths and table_id not in self._open and table_id not in self._unreadable:
                self._try(table_id, functools.partial(self._open_table, table_id))
        self._tables.on_change()

    def follow(self, changed: Iterable[str]) -> None:
        """Publish the changes of the files at these paths."""
        if not self._open:
            return
        touched: dict[int, set[str]] = {}
        for path in changed:
            if path == "service.json":
                for table_id in self._open:
                    touched.setdefault(table_id, set())
            match = _FILE.fullmatch(path)
            if match is not None and (opened := self._open.get(int(match[1]))) is not None:
                touched.setdefault(int(match[1]), set()).add(match[3])
                if match[2] is not None:
                    opened.unpublished.add(int(match[2]))
        for table_id, names in touched.items():
            self._try(table_id, functools.partial(self._follow_table, table_id, names))
        if touched:
            self._tables.on_change()

    def leave(self, path: str) -> None:
        """Close the logs of the directory at `path`, before the directory is moved or removed."""
        match = _TABLE.match(path)
        if match is not None:
            self._close(int(match[1]))

    def close(self) -> None:
        """Show no table any more; return when the last read has ended."""
        for table_id in list(self._open):
            self._close(table_id)
        self._tables.on_change()

    def _try(self, table_id: int, step: Callable[[], None]) -> None:
        try:
            step()
        except StreamhouseError as error:
            _logger.warning("event=log_unreadable table_id=%d why=%r", table_id, error.message)
            self._unreadable.add(table_id)
            self._close(table_id)

    def _open_table(self, table_id: int) -> None:
        info = self._info(table_id)
        directories = [self._directory.bucket(table_id, b) for b in range(info.bucket_count)]
        bases = [self._bases(directory) for directory in directories]
        if info.path != self._rows.paths[table_id] or not all(bases):
            # The rest is about to come.
            return
        logs: list[_LentLog] = []
        try:
            for number, (directory, starts) in enumerate(zip(directories, bases, strict=True)):
                log = _LentLog(
                    directory,
                    table_id=table_id,
                    bucket=number,
                    filesystem=self._directory.filesystem,
                    start_offset=starts[0],
                    high_watermark=starts[-1],
                )
                logs.append(log)
            names = self._directory.filesystem.list_names(self._directory.transactions(table_id))
            begins_at = rows_begin_at(self._directory, table_id, names)
        except BaseException:
            for log in logs:
                log.close()
            raise
        # Fetches wait for changes of any table here, and need no lake.
        table = ReadableTable[FollowedLog](
            info, logs, lake=LakeState(), wakeups=Wakeups(WaiterLimit(0))
        )
        self._open[table_id] = _Open(table, begins_at, set(range(info.bucket_count)))
        self._publish(table_id)

    def _follow_table(self, table_id: int, names: Collection[str]) -> None:
        opened = self._open[table_id]
        if "table.json" in names:
            opened.table.info = self._info(table_id)
        if self._rows.paths.get(table_id) != opened.table.info.path:
            # Dropped or renamed: a fetch by its new name opens it anew.
            return self._close(table_id)
        begins_at = rows_begin_at(self._directory, table_id, names)
        if begins_at:
            for bucket, offset in begins_at.items():
                opened.begins_at[bucket] = max(opened.begins_at.get(bucket, 0), offset)
            opened.unpublished.update(begins_at)
        return self._publish(table_id)

    def _publish(self, table_id: int) -> None:
        if self._rows.unsettled.are_in(table_id):
            return
        opened = self._open[table_id]
        ranges = {}
        for bucket in opened.unpublished:
            bases = self._bases(self._directory.bucket(table_id, bucket))
            if not bases:
                raise CorruptDataError(f"bucket {bucket} has no log")
            end = opened.table.tablets[bucket].grow()
            ranges[bucket] = (max(opened.begins_at.get(bucket, 0), bases[0]), end)
        for bucket, (start, end) in ranges.items():
            opened.table.tablets[bucket].publish(start, end)
        opened.unpublished.clear()
        self._tables.put(opened.table)

    def _close(self, table_id: int) -> None:
        opened = self._open.pop(table_id, None)
        if opened is not None:
            self._tables.forget(opened.table)
            for log in opened.table.tablets:
                log.close()

    def _info(self, table_id: int) -> TableInfo:
        info, _ = read_table(self._directory.table_file(table_id))
        return info

    def _bases(self, directory: Path) -> list[int]:
        """Return the first offsets of the segments of a log, in order."""
        return offsets_of(self._directory.filesystem.list_names(directory), ".log")
