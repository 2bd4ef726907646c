"""Reading what has left the log for consumers: on threads of its own, because stores are slow.

A store that does not answer holds up who reads history, and nobody else, and a history that cannot
be opened is told to them alone. What the lake has is believed only if it is of the same history as
the log.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeAlias, TypeVar

from streamhouse.core.errors import (
    OverloadedError,
    SnapshotNotFoundError,
    StreamhouseError,
)
from streamhouse.core.model.lake.coverage import CoveredOffsets
from streamhouse.core.model.lake.older_rows import LakeHistory, OlderRows, WrittenAt
from streamhouse.core.model.table import TableInfo
from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.engine.tiering_desk.lake_history import check_history
from streamhouse.storage_service.server.history._lake_cursors import LakeCursors
from streamhouse.storage_service.server.history.failures import failure_of

__all__ = ["LakeReads", "Older", "OlderReads"]

_logger = logging.getLogger(__name__)
_T = TypeVar("_T")

_THREADS: Final = 2
_READS_MAX: Final = 100
_ATTEMPTS_MAX: Final = 4
_CLOSE_IDLE_EVERY_S: Final = 15.0


class OlderReads:
    """What is read by functions that `LakeReads.run` runs. Blocking."""

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
        """Return rows of a bucket from `offset` on, which is below what the lake has.

        Rows that moved while they were looked for are looked for again.
        """
        return _again_if_moved(
            table,
            lambda: self._cursors.read(
                *(info, table.lake, bucket),
                offset=offset,
                rows_max=rows_max,
                bytes_max=bytes_max,
                check=lambda covered: _check(table, covered),
            ),
        )

    def give_back(self, info: TableInfo, bucket: int, rest: OlderRows, *, offset: int) -> None:
        """See `LakeCursors.give_back`."""
        self._cursors.give_back(info, bucket, rest, offset=offset)

    def first_since(
        self, table: OpenTable, info: TableInfo, bucket: int, timestamp_us: int, *, offset: int
    ) -> WrittenAt | None:
        """Return the first row from `offset` on that was written so late, if the lake has one."""
        return _again_if_moved(
            table,
            lambda: self._cursors.first_since(
                info, table.lake, bucket, timestamp_us, offset=offset
            ),
        )


Older: TypeAlias = OlderReads | StreamhouseError
"""What reads rows that have left the log, or why nothing does."""


class LakeReads:
    """Event loop only. The history is opened at the first read: most services have no consumer that
    far behind.
    """

    def __init__(self, open_history: Callable[[], LakeHistory]) -> None:
        self._open_history = open_history
        self._cursors: LakeCursors | None = None
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="streamhouse-history")
        self._reads = 0
        self._timer: asyncio.TimerHandle | None = None

    async def run(self, function: Callable[[Older], _T]) -> _T:
        """Run a function that reads, once it has a thread; it is given what reads.

        That is an error where the history cannot be opened: who reads nothing of it needs none.
        Raises `OverloadedError` when too many wait for a thread.
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
        """Close what is open; reads under way end by themselves."""
        if self._timer is not None:
            self._timer.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._cursors is not None:
            self._cursors.close()

    async def _opened(self) -> Older:
        if self._cursors is None:
            loop = asyncio.get_running_loop()
            try:
                # Its library takes a second to load, and is loaded once.
                history = await loop.run_in_executor(self._threads, self._open_history)
            except Exception as error:  # noqa: BLE001 - of a library, or a configuration
                return failure_of(error, "opening the history of the lake")
            self._use(history)
            assert self._cursors is not None, "just opened"
        return OlderReads(self._cursors)

    def _use(self, history: LakeHistory) -> None:
        # Two may have opened one at a time: the first is kept.
        if self._cursors is None:
            self._cursors = LakeCursors(history)

    def _close_idle(self) -> None:
        self._timer = None
        if self._cursors is not None and self._cursors.held_bytes:
            self._cursors.close_idle()
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_CLOSE_IDLE_EVERY_S, self._close_idle)


def _again_if_moved(table: OpenTable, read: Callable[[], _T]) -> _T:
    for _ in range(_ATTEMPTS_MAX - 1):
        try:
            return read()
        except SnapshotNotFoundError as error:
            _logger.info("event=read_again table=%s why=%r", table.path, str(error))
    return read()


def _check(table: OpenTable, covered: CoveredOffsets) -> None:
    """Raise `HistoryDivergedError` if the lake as it was found has another history than the log.

    What the service has registered was compared when it was.
    """
    lake = table.lake
    known = lake.changelog if table.info.is_primary_key_table else lake
    if known is None or (
        covered.tiered_offsets == known.tiered_offsets
        and all(
            known.fingerprints.get(bucket, said) == said
            for bucket, said in covered.fingerprints.items()
        )
    ):
        return
    check_history(table, [covered])
