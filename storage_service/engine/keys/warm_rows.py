"""Rows by key of a directory that another process writes, kept up to date with the logs.

A standby keeps the rows open before a takeover, so that the takeover neither reads logs nor loads
RocksDB. Each bucket's log is read on from the last applied change. No log is opened for writing,
and only `kv` is changed.

A bucket that cannot be kept warm is closed, and opened as after any restart when needed: the normal
opening finds and reports the damage. One thread at a time.

A table with warm rows in all buckets is one of the `WarmTables`, where other threads look keys up.
Its visible ends are the ends of the changelogs after each call of `follow`. They stay while a
decided transaction has not stored its outcome: its rows are in some buckets only.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from streamhouse.core.errors import CorruptDataError, StreamhouseError
from streamhouse.core.model.table import TableInfo, TablePath
from streamhouse.storage_service.config import ServiceConfig
from streamhouse.storage_service.directory.data_directory import DataDirectory
from streamhouse.storage_service.directory.service_state import load_service_state
from streamhouse.storage_service.directory.table_files import read_table
from streamhouse.storage_service.engine.keys._unsettled_decisions import UnsettledDecisions
from streamhouse.storage_service.engine.keys.key_bucket import (
    damage_of,
    replay_log,
    table_rules,
)
from streamhouse.storage_service.engine.keys.warm_tables import WarmTable, WarmTables
from streamhouse.storage_service.kv.kv_tablet import KvOptions, KvTablet
from streamhouse.storage_service.log.followed_log import FollowedLog
from streamhouse.storage_service.log.segments.segment_format import offsets_of

__all__ = ["WarmRows"]

_logger = logging.getLogger(__name__)

_LOG_FILE: Final = re.compile(r"tables/(\d+)/bucket-(\d+)/\d{20}\.log")
_TABLE_FILE: Final = re.compile(r"tables/(\d+)/table\.json")
_TABLE: Final = re.compile(r"tables/(\d+)")
_LOAD_ROWS: Final = 20_000
_LOADED_PER_CHANGE: Final = 2


@dataclass(slots=True)
class _WarmBucket:
    rows: KvTablet
    log: FollowedLog
    """Published up to its end; rows of a checkpoint may be ahead of the log."""


class WarmRows:
    """See the module. `close` closes all rows without an owner."""

    def __init__(
        self,
        directory: DataDirectory,
        config: ServiceConfig,
        *,
        tables: WarmTables,
        is_committing: Callable[[DataDirectory, int, str], bool],
    ) -> None:
        """`is_committing` tells whether a decision, by table and file name, has no outcome yet."""
        self._directory = directory
        self._warm_tables = tables
        self.unsettled: Final = UnsettledDecisions(directory, is_committing)
        self.options: Final = KvOptions.shared(
            cache_bytes=config.key_cache_bytes_max, memory_bytes=config.key_memory_bytes_max
        )
        """Of whoever opens the other buckets of the same directory, too: they share memory."""
        self._tables: dict[int, TableInfo] = {}
        self._buckets: dict[tuple[int, int], _WarmBucket] = {}
        # Those that are let go are not tried again.
        self._cold: set[tuple[int, int]] = set()
        self.paths: dict[int, TablePath] = {}
        """The tables of service.json."""
        self._shown: dict[int, WarmTable] = {}

    def open_all(self) -> None:
        """Open the rows of the directory, and bring them up to the logs."""
        if not self._directory.service_file.exists():
            return
        self._read_paths()
        for table_id in sorted(self.paths):
            self._follow_table(table_id)
        self._show(self.paths)

    def _read_paths(self) -> None:
        try:
            state, _ = load_service_state(self._directory)
        except StreamhouseError as error:
            _logger.warning("event=not_warm why=%r", error.message)
            self.paths = {}
        else:
            self.paths = {table_id: entry.path for table_id, entry in state.tables.items()}

    def leave(self, path: str) -> None:
        """Close the rows of the directory at `path`, before the directory is moved or removed."""
        match = _TABLE.match(path)
        if match is not None:
            self._leave_table(int(match[1]))
            self.unsettled.forget(int(match[1]))

    def follow(self, paths: Iterable[str]) -> None:
        """Apply the changes of the files at these paths."""
        changed = set(paths)
        touched: set[int] = set()
        if "service.json" in changed:
            if self._directory.service_id:
                self._read_paths()
            else:
                self.open_all()
            touched.update(self._shown, self.paths)
        for path in sorted(changed):
            match = _TABLE_FILE.fullmatch(path)
            if match is not None:
                self._follow_table(int(match[1]))
                touched.add(int(match[1]))
        for path in sorted(changed):
            match = _LOG_FILE.fullmatch(path)
            if match is not None:
                self._follow_bucket(int(match[1]), int(match[2]))
                touched.add(int(match[1]))
        touched |= self.unsettled.note(changed) & self._shown.keys()
        # Only now: the files of a call are a moment of the owner, and none in between is.
        self._show(touched)

    def load_some(self) -> bool:
        """Load some more rows into memory; return whether more remain."""
        return any(bucket.rows.load_some(_LOAD_ROWS) for bucket in self._buckets.values())

    def take(self, info: TableInfo, bucket: int) -> KvTablet | None:
        """Hand the open rows of a bucket over to the caller, if there are any."""
        warm = self._buckets.pop((info.table_id, bucket), None)
        if warm is None:
            return None
        warm.log.close()
        try:
            _follow_rules(warm.rows, info)
        except StreamhouseError:
            warm.rows.close()
            raise
        return warm.rows

    def end_lookups(self) -> None:
        """Show no table any more; return when the last lookup has ended."""
        for table_id in list(self._shown):
            self._hide(table_id)
        self._warm_tables.on_change()

    def close(self) -> None:
        """Close all rows; unflushed changes come back from the logs."""
        self.end_lookups()
        for table_id in list(self._tables):
            self._leave_table(table_id)

    def _leave_table(self, table_id: int) -> None:
        info = self._tables.pop(table_id, None)
        for bucket in range(0 if info is None else info.bucket_count):
            self._let_go(table_id, bucket)

    def _show(self, table_ids: Iterable[int]) -> None:
        """Let lookups see these tables as of now."""
        for table_id in sorted(table_ids):
            self._show_table(table_id)
        self._warm_tables.on_change()

    def _show_table(self, table_id: int) -> None:
        info = self._tables.get(table_id)
        if info is None or self.paths.get(table_id) != info.path:
            return self._hide(table_id)
        buckets = [self._buckets.get((table_id, b)) for b in range(info.bucket_count)]
        warm = [bucket for bucket in buckets if bucket is not None]
        if len(warm) < info.bucket_count:
            return self._hide(table_id)
        table = self._shown.get(table_id)
        if table is None:
            table = self._shown[table_id] = WarmTable(info, [bucket.rows for bucket in warm])
        elif table.path != info.path:
            self._warm_tables.forget(table)
        table.follow(info)
        is_ahead = any(bucket.rows.applied_offset > bucket.log.high_watermark for bucket in warm)
        if not is_ahead and not self.unsettled.are_in(table_id):
            table.ends = [bucket.log.high_watermark for bucket in warm]
        self._warm_tables.put(table)
        return None

    def _hide(self, table_id: int) -> None:
        table = self._shown.pop(table_id, None)
        if table is not None:
            self._warm_tables.remove(table)

    def _let_go(self, table_id: int, bucket: int) -> None:
        self._hide(table_id)
        warm = self._buckets.pop((table_id, bucket), None)
        if warm is not None:
            warm.log.close()
            try:
                warm.rows.close()
            except StreamhouseError as error:
                _logger.warning("event=close_failed path='%s' why=%r", warm.rows.path, error)

    def _follow_table(self, table_id: int) -> None:
        if not self._directory.service_id:
            return
        try:
            info, _ = read_table(self._directory.table_file(table_id))
        except StreamhouseError as error:
            _logger.warning("event=not_warm table_id=%d why=%r", table_id, error.message)
            self._leave_table(table_id)
            return
        if not info.is_primary_key_table:
            return
        self._tables[table_id] = info
        for bucket in range(info.bucket_count):
            warm = self._buckets.get((table_id, bucket))
            if warm is not None:
                _follow_rules(warm.rows, info)
            self._follow_bucket(table_id, bucket)

    def _follow_bucket(self, table_id: int, bucket: int) -> None:
        info = self._tables.get(table_id)
        if info is None or (table_id, bucket) in self._cold:
            return
        try:
            warm = self._buckets.get((table_id, bucket)) or self._opened(info, bucket)
            if warm is not None:
                self._replay(warm, info)
        except StreamhouseError as error:
            _logger.warning(
                "event=not_warm table=%s bucket=%d why=%r", info.path, bucket, error.message
            )
            self._let_go(table_id, bucket)
            self._cold.add((table_id, bucket))

    def _opened(self, info: TableInfo, bucket: int) -> _WarmBucket | None:
        """Open a bucket with a log that has the changes missing from the rows."""
        path = self._directory.key_rows(info.table_id, bucket)
        filesystem = self._directory.filesystem
        log_directory = self._directory.bucket(info.table_id, bucket)
        bases = offsets_of(filesystem.list_names(log_directory), ".log")
        if not bases:
            # The log is about to come.
            return None
        if damage_of(path) is not None or (bases[0] > 0 and not path.exists()):
            raise CorruptDataError("the rows have to be made again")
        rows = KvTablet(
            path,
            table_id=info.table_id,
            bucket=bucket,
            rules=table_rules(info),
            options=self.options,
        )
        try:
            log = FollowedLog(
                log_directory,
                table_id=info.table_id,
                bucket=bucket,
                filesystem=filesystem,
                start_offset=rows.applied_offset,
                high_watermark=bases[-1],
            )
        except StreamhouseError:
            rows.close()
            raise
        warm = self._buckets[info.table_id, bucket] = _WarmBucket(rows, log)
        return warm

    def _replay(self, warm: _WarmBucket, info: TableInfo) -> None:
        log, rows = warm.log, warm.rows
        log.high_watermark = log.grow()
        count = replay_log(log, rows, info=info, where=str(log))
        # Whole segments of applied changes are let go: the owner removes their files.
        log.publish(rows.applied_offset, log.high_watermark)
        # Changes may never stop coming, and all rows are loaded nevertheless.
        rows.load_some(_LOADED_PER_CHANGE * count)


def _follow_rules(rows: KvTablet, info: TableInfo) -> None:
    rules = table_rules(info)
    if rules.schema_id != rows.rules.schema_id:
        rows.change_schema(rules)
    else:
        rows.follow(rules)
