"""How much disk the service's rows may take, and what happens as it fills up.

Over 80 % of the budget, tables are tiered before they are due, and log that the lake has is deleted
before its age. Over all of it, writes are refused with a retriable error until there is room.
Rows that are only in the log are never deleted: a budget costs freshness of the log, not rows.
Event loop only.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from streamhouse.storage_service.engine.blocking import RunBlocking
from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.engine.upkeep.retention import RetentionObserver, apply_retention
from streamhouse.storage_service.errors import OverloadedError, StreamhouseError

__all__ = ["DiskBudget", "bytes_below"]

_logger = logging.getLogger(__name__)

_EARLY_PERCENT: Final = 80


class DiskBudget:
    """The budget of one service; without `bytes_max` it looks at nothing and refuses nothing."""

    def __init__(
        self,
        bytes_max: int | None,
        *,
        tables: Callable[[], Iterable[OpenTable]],
        other_bytes: Callable[[], int],
        key_folders: Callable[[OpenTable], Iterable[Path]],
        on_pressure: Callable[[bool], None],
        run_blocking: RunBlocking,
        clock_us: Callable[[], int],
        observer: RetentionObserver,
        changing_files: asyncio.Lock,
    ) -> None:
        self._bytes_max = bytes_max
        self._tables = tables
        self._other_bytes = other_bytes
        self._key_folders = key_folders
        self._on_pressure = on_pressure
        self._run_blocking = run_blocking
        self._clock_us = clock_us
        self._observer = observer
        self._changing_files = changing_files
        self._is_full = False
        self.bytes_used = 0

    def check(self) -> None:
        """Raise `OverloadedError` while rows take more than they may."""
        if self._is_full:
            raise OverloadedError(
                f"the rows of this service take {self.bytes_used} of {self._bytes_max} bytes"
                " (--disk-max); writes are taken again when tiering has made room, or give it more"
            )

    async def run(self, *, interval_ms: int) -> None:
        """Look each `interval_ms`, for ever."""
        while self._bytes_max is not None:
            await self.look()
            await asyncio.sleep(interval_ms / 1000)

    async def look(self) -> None:
        """Measure, make room where that loses nothing, and decide whether writes are taken."""
        assert self._bytes_max is not None
        self.bytes_used = await self._measure()
        is_early = self.bytes_used * 100 > self._bytes_max * _EARLY_PERCENT
        self._on_pressure(is_early)
        if is_early:
            await self._trim()
            self.bytes_used = await self._measure()
        is_full = self.bytes_used > self._bytes_max
        if is_full != self._is_full:
            _logger.warning(
                "event=disk_budget is_full=%s used=%d max=%d",
                is_full,
                self.bytes_used,
                self._bytes_max,
            )
        self._is_full = is_full

    async def _measure(self) -> int:
        tables = list(self._tables())
        folders = [
            folder
            for table in tables
            if table.key_writer is not None
            for folder in self._key_folders(table)
        ]
        key_bytes = sum(await self._run_blocking(bytes_below, folders)) if folders else 0
        log_bytes = sum(tablet.size_bytes for table in tables for tablet in table.tablets)
        return log_bytes + key_bytes + self._other_bytes()

    async def _trim(self) -> None:
        for table in list(self._tables()):
            # Without a lake the log is all there is: its age is a promise.
            if not table.properties.datalake_enabled:
                continue
            try:
                async with self._changing_files:
                    deleted = await apply_retention(
                        table,
                        now_us=self._clock_us(),
                        run_blocking=self._run_blocking,
                        ttl_ms=0,
                    )
            except StreamhouseError as error:
                if not table.is_dropped:
                    _logger.warning("event=trim_failed table=%s why=%r", table.path, error)
                continue
            if deleted:
                self._observer.segments_deleted(deleted)


def bytes_below(folders: Iterable[Path]) -> list[int]:
    """Return the size of everything in each folder, as it is found. Blocking."""
    # What goes away meanwhile counts for nothing: RocksDB and dropped tables delete files.
    return [
        sum(_size(Path(parent, name)) for parent, _, names in os.walk(folder) for name in names)
        for folder in folders
    ]


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0
