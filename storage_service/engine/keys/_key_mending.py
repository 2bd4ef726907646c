"""Making damaged rows by key again while the service runs.

A bucket with damaged rows refuses lookups and writes. The rows are made again in a separate
directory, from changelog and lake, for as long as necessary. Then, during a short pause of all
writes to the table, the new rows replace the damaged rows. A failed rebuild is logged once, and
left to the operator and the next start.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Final
from weakref import WeakKeyDictionary

from streamhouse.core.errors import (
    CorruptDataError,
    HistoryDivergedError,
    StreamhouseError,
    UnavailableError,
)
from streamhouse.core.model.lake.facts import LakeState
from streamhouse.core.model.table import TableInfo
from streamhouse.storage_service.directory.runtime import Runtime
from streamhouse.storage_service.engine.keys.key_recovery import (
    LostRows,
    make_rows,
    put_in_place,
)
from streamhouse.storage_service.engine.keys.key_table import KeyTable
from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.log.log_tablet import LogTablet

__all__ = ["KeyMending"]

_logger = logging.getLogger(__name__)


FindLost = Callable[[TableInfo, int, LogTablet, LakeState], LostRows]
"""Says what can be made again of a bucket; `TableOpener.lost_rows`."""


class KeyMending:
    """Mends the tables of one service, one bucket at a time. Event loop only."""

    def __init__(
        self,
        *,
        tables: Callable[[], Iterable[OpenTable]],
        find_lost: FindLost,
        runtime: Runtime,
    ) -> None:
        self._tables: Final = tables
        self._find_lost: Final = find_lost
        self._runtime: Final = runtime
        self._is_stopping = False
        self._given_up: WeakKeyDictionary[OpenTable, set[int]] = WeakKeyDictionary()
        self._busy_with: OpenTable | None = None
        self._is_idle = asyncio.Event()

    def stop(self) -> None:
        """End a running rebuild soon, without any change."""
        self._is_stopping = True

    async def leave(self, table: OpenTable) -> None:
        """Return when the rebuild no longer touches a table being dropped."""
        assert table.is_dropped
        if self._busy_with is table:
            await self._is_idle.wait()

    async def mend(self) -> None:
        """Make the damaged rows of all tables again, where possible."""
        for table in [table for table in self._tables() if isinstance(table, KeyTable)]:
            for number, bucket in enumerate(table.key_buckets):
                given_up = self._given_up.setdefault(table, set())
                if not bucket.is_damaged or number in given_up or table.is_dropped:
                    continue
                try:
                    await self._mend(table, number)
                except (CorruptDataError, HistoryDivergedError) as error:
                    given_up.add(number)
                    _logger.error("event=mending_given_up why=%r", error.message)
                except StreamhouseError as error:
                    if not table.is_dropped:
                        _logger.warning("event=mending_failed why=%r", error.message)
                except Exception as error:  # outermost loop: other tables go on
                    given_up.add(number)
                    _logger.error("event=bug table=%s", table.path, exc_info=error)

    @contextlib.contextmanager
    def _touching(self, table: OpenTable) -> Iterator[None]:
        self._busy_with = table
        self._is_idle.clear()
        try:
            yield
        finally:
            self._busy_with = None
            self._is_idle.set()

    async def _mend(self, table: KeyTable, number: int) -> None:
        bucket = table.key_buckets[number]

        def go_on() -> None:
            if self._is_stopping or table.is_dropped:
                raise UnavailableError(f"{bucket.where} is being closed")

        lost = self._find_lost(table.info, number, bucket.log, table.lake)
        make = functools.partial(make_rows, lost, why="the rows by key are damaged", go_on=go_on)
        _check_all_is_shown(table, number)
        with self._touching(table):
            await self._runtime.run(make)
        async with table.gate.alone():
            await table.key_writer.settle()
            go_on()
            _check_all_is_shown(table, number)
            await self._swap(table, number)

    async def _swap(self, table: KeyTable, number: int) -> None:
        bucket = table.key_buckets[number]

        # The schema may be another one than when they were made.
        info = table.info
        lost = self._find_lost(info, number, bucket.log, table.lake)

        def swap() -> None:
            bucket.close_rows(flush=False)
            put_in_place(lost.path)
            bucket.replace_rows(lost.open_rows(lost.path), info)

        with self._touching(table):
            await table.key_writer.on_thread(swap)
        bucket.publish(bucket.rows.applied_offset, row_count=bucket.rows.row_count)
        table.key_writer.load_rows()
        _logger.warning("event=mended bucket=%r rows=%d", bucket.where, bucket.row_count)


def _check_all_is_shown(table: KeyTable, number: int) -> None:
    """Raise while the log has hidden changes: a transaction, or an unknown outcome.

    Only the next start decides about hidden changes.
    """
    log = table.tablet(number)
    if log.high_watermark != log.log_end_offset:
        raise UnavailableError(
            f"{table.key_buckets[number].where}: its log has changes that are not visible yet; if"
            " this stays, restart the service, which makes the damaged rows by key again"
        )
