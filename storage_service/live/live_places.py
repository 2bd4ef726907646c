"""The places of one table's live cuts, durable for the deletion of old folders by the next owner.

A place is the location of a lake table. Invariants:
- a place is on disk before the first folder is made below, and stays until no folder is left
- the file of the places is one of the table's files: in the journal, and moved with the table

Event loop only; disk writes go to the runtime's threads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection

from streamhouse.core.errors import StreamhouseError
from streamhouse.core.model.table import TableInfo
from streamhouse.storage_service.directory.runtime import Runtime
from streamhouse.storage_service.directory.state_file import StateFile
from streamhouse.storage_service.engine.sidecar import Sidecar

__all__ = ["LivePlaces"]

_logger = logging.getLogger(__name__)


class LivePlaces(Sidecar):
    """The locations of a table's lake tables with folders of live cuts."""

    file_name = "live_places"

    def __init__(self, file: StateFile, info: TableInfo, runtime: Runtime) -> None:
        """Read `file`, which need not exist. Blocking.

        The places of a damaged file are forgotten until the next live cut.
        """
        self._file = file
        self._runtime = runtime
        self._lock = asyncio.Lock()
        self._end: StreamhouseError | None = None
        self._used_s: dict[str, float] = {}
        self.uris: frozenset[str] = frozenset()
        """The URIs of the places."""
        try:
            if file.exists():
                self.uris = frozenset(map(str, file.load()["places"]))
        except (StreamhouseError, KeyError, TypeError) as error:
            _logger.error("event=live_places_damaged table=%s why=%r", info.path, str(error))

    def used_s(self, uri: str) -> float:
        """Return when a folder was last made in a place, since the start; 0 for never."""
        return self._used_s.get(uri, 0.0)

    async def add(self, uri: str, *, now_s: float) -> None:
        """Add the place of folders to be made at `now_s`; on disk on return."""
        self._used_s[uri] = now_s
        await self._save(added={uri})

    async def remove(self, uris: Collection[str]) -> None:
        """Forget places without folders."""
        await self._save(removed=uris)

    async def end(self, error: StreamhouseError) -> None:
        """Return once no save is in progress; later saves raise `error`."""
        async with self._lock:
            self._end = error

    def go_on(self) -> None:
        """Allow saves again after `end`."""
        self._end = None

    async def _save(self, *, added: Collection[str] = (), removed: Collection[str] = ()) -> None:
        async with self._lock:
            uris = self.uris.difference(removed).union(added)
            if uris == self.uris:
                return
            if self._end is not None:
                raise type(self._end)(self._end.message)
            await self._runtime.run(self._file.save, {"places": sorted(uris)})
            self.uris = uris
