"""Reading rows that have left the log, on separate threads, because stores are slow.

A store that does not answer delays only readers of history, and only these readers get an error if
the history cannot be opened. Rows of the lake are used only if log and lake have the same history.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

from streamhouse.core.errors import (
    OverloadedError,
    SnapshotNotFoundError,
    StreamhouseError,
)
from streamhouse.core.model.lake.coverage import CoveredOffsets
from streamhouse.core.model.lake.older_rows import OlderRows, WrittenAt
from streamhouse.core.model.table import TableInfo
from streamhouse.core.threads import Pool
from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.engine.tiering_desk.history_check import check_history
from streamhouse.storage_service.server.history._lake_cursors import LakeCursors
from streamhouse.storage_service.server.history.failures import failure_of

if TYPE_CHECKING:
    # Loading the lake library takes a second, and most services never read the lake.
    from streamhouse.reading.lake_only.lake_history import IcebergHistory

__all__ = ["LakeReads", "Older", "OlderReads"]

_logger = logging.getLogger(__name__)
_T = TypeVar("_T")

_THREADS: Final = 2
_READS_MAX: Final = 100
_ATTEMPTS_MAX: Final = 4
_CLOSE_IDLE_EVERY_S: Final = 15.0


class OlderReads:
    """The reads available to functions that `LakeReads.run` runs. Blocking."""

    def __init__(self, cursors: LakeCursors) -> None:
        self._cursors = cursors

    def read(
        self,
        table: OpenTable,
        info: TableInfo,
        bucket: int,
        *,
        offset: int,
        rows_max: int,
        bytes_max: int,
    ) -> OlderRows:
        """Return rows of a bucket from `offset` on; `offset` is below the end of the lake's rows.

        If a snapshot expires during the read, the read is repeated.
        """
        return _retry_if_moved(
            table,
            lambda: self._cursors.read(
                *(info, table.lake, bucket),
                offset=offset,
                rows_max=rows_max,
                bytes_max=bytes_max,
                check=lambda covered: _check(table, covered),
            ),
        )

    def give_back(self, info: TableInfo, bucket: int, unread: OlderRows, *, offset: int) -> None:
        """See `LakeCursors.give_back`."""
        self._cursors.give_back(info, bucket, unread, offset=offset)

    def first_since(
        self, table: OpenTable, info: TableInfo, bucket: int, timestamp_us: int, *, offset: int
    ) -> WrittenAt | None:
        """Return the lake's first row from `offset` on written at `timestamp_us` or later."""
        return _retry_if_moved(
            table,
            lambda: self._cursors.first_since(
                info, table.lake, bucket, timestamp_us, offset=offset
            ),
        )


Older: TypeAlias = OlderReads | StreamhouseError
"""The reads of rows that have left the log, or the error of opening the history."""


class LakeReads:
    """Runs reads of the lake. Event loop only.

    The history is opened at the first read: most services have no consumer so far behind.
    """

    def __init__(self, open_history: Callable[[], IcebergHistory]) -> None:
        self._open_history = open_history
        self._cursors: LakeCursors | None = None
        self._threads = Pool("streamhouse-history", _THREADS)
        self._reads = 0
        self._timer: asyncio.TimerHandle | None = None

    async def run(self, function: Callable[[Older], _T]) -> _T:
        """Run a function on a thread for reads of history; the function gets the `OlderReads`.

        If the history cannot be opened, the function gets the error: not every call reads history.
        Raises `OverloadedError` when too many reads wait for a thread.
        """
        if self._reads >= _READS_MAX:
            raise OverloadedError(
                f"{_READS_MAX} reads of rows that left the log are in progress; try again later"
            )
        self._reads += 1
        loop = asyncio.get_running_loop()
        try:
            older = await self._opened()
            return await loop.run_in_executor(self._threads, function, older)
        finally:
            self._reads -= 1
            if self._timer is None:
                self._timer = loop.call_later(_CLOSE_IDLE_EVERY_S, self._close_idle)

    def close(self) -> None:
        """Close the waiting cursors; reads in progress finish on their threads."""
        if self._timer is not None:
            self._timer.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._cursors is not None:
            self._cursors.close()

    async def _opened(self) -> Older:
        if self._cursors is None:
            loop = asyncio.get_running_loop()
            try:
                # The lake library takes a second to load, once.
                history = await loop.run_in_executor(self._threads, self._open_history)
            except Exception as error:  # noqa: BLE001 - of a library, or a configuration
                return failure_of(error, "opening the history of the lake")
            self._use(history)
            assert self._cursors is not None, "just opened"
        return OlderReads(self._cursors)

    def _use(self, history: IcebergHistory) -> None:
        # Two callers may have opened the history at the same time: the first history is used.
        if self._cursors is None:
            self._cursors = LakeCursors(history)

    def _close_idle(self) -> None:
        self._timer = None
        if self._cursors is not None and self._cursors.held_bytes:
            self._cursors.close_idle()
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_CLOSE_IDLE_EVERY_S, self._close_idle)


def _retry_if_moved(table: OpenTable, read: Callable[[], _T]) -> _T:
    for _ in range(_ATTEMPTS_MAX - 1):
        try:
            return read()
        except SnapshotNotFoundError as error:
            _logger.info("event=read_again table=%s why=%r", table.path, str(error))
    return read()


def _check(table: OpenTable, covered: CoveredOffsets) -> None:
    """Raise `HistoryDivergedError` if the opened lake has a different history than the log.

    A registered lake state needs no check: the registration compared the histories.
    """
    lake = table.lake
    registered = lake.changelog if table.info.is_primary_key_table else lake
    if registered is None or (
        covered.tiered_offsets == registered.tiered_offsets
        and all(
            registered.fingerprints.get(bucket, fingerprint) == fingerprint
            for bucket, fingerprint in covered.fingerprints.items()
        )
    ):
        return
    check_history(table, [covered])
