"""The deletion of old folders of live cuts, below the lake tables of every served table.

The name of a folder has the time of the folder's making, so the sweep needs no list of folders. The
owner of a table deletes the folders of earlier processes, too, however a process ended. Event loop
only; separate threads call the stores.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Executor
from typing import Final

from streamhouse.core.errors import StreamhouseError
from streamhouse.lake.files.lake_filesystem import LakeFilesystem
from streamhouse.lake.files.live_folders import READABLE_S, SweptFolders, delete_expired
from streamhouse.storage_service.engine.manager import TabletManager
from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.live.live_places import LivePlaces

__all__ = ["LiveSweep"]

_logger = logging.getLogger(__name__)


class LiveSweep:
    """Sweeps the places of all tables, and of tables dropped or moved since the start."""

    def __init__(self, manager: TabletManager, files: LakeFilesystem, threads: Executor) -> None:
        self._manager = manager
        self._files = files
        self._threads: Final = threads
        self._places: set[str] = set()
        self._failing: set[str] = set()
        self.folder_count = 0
        """The number of readable folders at the last sweep."""
        self.size_bytes = 0
        """The bytes of readable folders at the last sweep, and of files written since."""

    async def look(self, *, now_s: float) -> None:
        """Delete the old folders of all places; forget places without folders."""
        tables = [(table, table.sidecar(LivePlaces)) for table in self._manager.open_tables()]
        self._places.update(*(places.uris for _, places in tables))
        loop = asyncio.get_running_loop()
        folder_count = size_bytes = 0
        empty: set[str] = set()
        for uri in sorted(self._places):
            try:
                folders = await loop.run_in_executor(self._threads, self._swept, uri, now_s)
            except StreamhouseError as error:
                if uri not in self._failing:
                    _logger.warning(
                        "event=live_folders_stay lake_table='%s' why=%r", uri, error.message
                    )
                self._failing.add(uri)
                continue
            self._failing.discard(uri)
            folder_count += folders.folder_count
            size_bytes += folders.size_bytes
            if not folders.folder_count:
                empty.add(uri)
        self.folder_count, self.size_bytes = folder_count, size_bytes
        await self._forget(tables, empty, now_s=now_s)

    def _swept(self, uri: str, now_s: float) -> SweptFolders:
        return delete_expired(self._files, uri, now_s=now_s)

    async def _forget(
        self, tables: list[tuple[OpenTable, LivePlaces]], empty: set[str], *, now_s: float
    ) -> None:
        in_use: set[str] = set()
        for table, places in tables:
            # A build may be about to make a folder in a place that it has just kept.
            unused = {uri for uri in empty & places.uris if places.used_s(uri) + READABLE_S < now_s}
            in_use |= places.uris - unused
            if unused and not table.is_dropped:
                try:
                    await places.remove(unused)
                except StreamhouseError as error:
                    _logger.info(
                        "event=live_places_stay table=%s why=%r", table.path, error.message
                    )
        self._places -= empty - in_use
