"""The disk space of the service's rows, and the measures against a full disk.

Above 80 % of the budget, tables are tiered before they are due, and log rows present in the lake
are deleted before their age. Above the whole budget, writes get a retriable error until there is
space. Rows that are only in the log are never deleted: a budget costs freshness of the log, not
rows. Event loop only.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from streamhouse.core.errors import OverloadedError
from streamhouse.storage_service.directory.runtime import Runtime
from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.engine.upkeep._retention import retain

__all__ = ["DiskBudget", "bytes_below"]

_logger = logging.getLogger(__name__)

_EARLY_PERCENT: Final = 80


class DiskBudget:
    """The budget of one service; without `bytes_max` nothing is measured or refused."""

    def __init__(
        self,
        bytes_max: int | None,
        *,
        tables: Callable[[], Iterable[OpenTable]],
        other_bytes: Callable[[], int],
        on_pressure: Callable[[bool], None],
        runtime: Runtime,
    ) -> None:
        self.bytes_max = bytes_max
        self._tables = tables
        self._other_bytes = other_bytes
        self._on_pressure = on_pressure
        self._runtime = runtime
        self._is_full = False
        self.bytes_used = 0

    def check(self) -> None:
        """Raise `OverloadedError` while rows exceed the budget."""
        if self._is_full:
            raise OverloadedError(
                f"the rows of this service take {self.bytes_used} of {self.bytes_max} bytes"
                " (--disk-max); writes are taken again when tiering has made room, or give it more"
            )

    async def look(self) -> None:
        """Measure, delete rows that the lake has, and decide about writes."""
        if self.bytes_max is None:
            return
        self.bytes_used = await self._measure()
        is_early = self.bytes_used * 100 > self.bytes_max * _EARLY_PERCENT
        self._on_pressure(is_early)
        if is_early:
            await retain(self._tables, self._runtime, is_early=True)
            self.bytes_used = await self._measure()
        is_full = self.bytes_used > self.bytes_max
        if is_full != self._is_full:
            _logger.warning(
                "event=disk_budget is_full=%s used=%d max=%d",
                is_full,
                self.bytes_used,
                self.bytes_max,
            )
        self._is_full = is_full

    async def _measure(self) -> int:
        tables = list(self._tables())
        folders = [folder for table in tables for folder in table.key_folders]
        key_bytes = sum(await self._runtime.run(bytes_below, folders)) if folders else 0
        log_bytes = sum(tablet.size_bytes for table in tables for tablet in table.tablets)
        return log_bytes + key_bytes + self._other_bytes()


def bytes_below(folders: Iterable[Path]) -> list[int]:
    """Return the present size of each folder's contents. Blocking."""
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
