"""Deleting rows of primary key tables without a write for `table.datalake.ttl`.

The delete is an ordinary delete: a `-D` in the changelog, which lookups, streams, both lake layouts
and the full history follow. A delete is planned between other writes, and takes effect only on the
old version of a row, so a row written meanwhile is kept. After a crash the next look finds the
remaining rows.

A row leaves between its time and a tenth of the time later, if the disk keeps up: a look at all
rows of a bucket is expensive.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final
from weakref import WeakKeyDictionary

from streamhouse.core.errors import RequestTooLargeError, StreamhouseError
from streamhouse.storage_service.directory.data_directory import DataDirectory
from streamhouse.storage_service.directory.runtime import Runtime
from streamhouse.storage_service.engine.keys._older_keys import older_keys
from streamhouse.storage_service.engine.keys.key_table import KeyTable
from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.engine.upkeep.row_ages import RowAges
from streamhouse.storage_service.kv.plan.write_plan import KeyWrite, delete_of, halves

__all__ = ["RowExpiry"]

_logger = logging.getLogger(__name__)

_LOOKS_PER_TTL: Final = 24
# Looking takes at most this part of a processor, whatever the time to live. Waiting does not count:
# for the turn of a bucket whose rows are loaded, or on a machine that has other things to do.
_BUSY_PART_MAX: Final = 0.02
# Other writes have their turn after so much, which takes some milliseconds.
_PIECE_BYTES: Final = 256 << 10


@dataclass
class _Looked:
    """The state of one table with the time to live `ttl_ms`."""

    ttl_ms: int
    ages: RowAges
    next_s: float = 0.0
    ends: dict[int, int] = field(default_factory=dict)
    """bucket -> below which offset every row was looked at."""
    deleted: int = 0
    looking_s: float = 0.0
    """What the last look did, and what it took of the processor."""


class RowExpiry:
    """Expires the rows of all tables of one service. Event loop only."""

    def __init__(
        self,
        *,
        tables: Callable[[], Iterable[OpenTable]],
        directory: DataDirectory,
        check_room: Callable[[], None],
        runtime: Runtime,
    ) -> None:
        self._tables = tables
        self._directory = directory
        self._check_room = check_room
        self._runtime = runtime
        self._looked: WeakKeyDictionary[KeyTable, _Looked] = WeakKeyDictionary()

    async def look(self) -> None:
        """Delete the expired rows of due tables."""
        for table in tuple(self._tables()):
            ttl_ms = table.properties.datalake_ttl_ms
            if ttl_ms is None or not isinstance(table, KeyTable) or table.lake.diverged:
                continue
            try:
                await self._look_at(table, ttl_ms)
            except StreamhouseError as error:
                if not table.is_dropped:
                    _logger.warning("event=expiry_failed table=%s why=%r", table.path, error)
            except Exception as error:  # outermost loop: other tables go on
                _logger.error("event=bug table=%s", table.path, exc_info=error)

    async def _look_at(self, table: KeyTable, ttl_ms: int) -> None:
        looked = self._looked.get(table)
        if looked is None or looked.ttl_ms != ttl_ms:
            file = self._directory.row_ages_file(table.info.table_id)
            ages = await self._runtime.run(RowAges, file)
            looked = self._looked[table] = _Looked(ttl_ms, ages)
        now_us, age_us = self._runtime.clock_us(), ttl_ms * 1_000

        def advance() -> None:
            looked.ages.advance(table.tablets, now_us=now_us, age_us=age_us)

        # Nothing may be lost of what the log knows, whether or not it is time to look.
        async with self._runtime.changing_files:
            if table.is_dropped:
                return
            await self._runtime.run(advance)
        if self._runtime.monotonic_s() < looked.next_s:
            return
        ends = await self._runtime.run(_ends_before, table, looked.ages, now_us - age_us)
        due = {b: end for b, end in ends.items() if end > looked.ends.get(b, 0)}
        if not due:
            return
        await self._sweep_all(table, looked, due)

    async def _sweep_all(self, table: KeyTable, looked: _Looked, due: Mapping[int, int]) -> None:
        """Sweep the buckets of `due` up to their ends; raises after the last bucket."""
        looked.deleted, looked.looking_s = 0, 0.0
        failed: StreamhouseError | None = None
        for bucket, end in due.items():
            try:
                await self._sweep(table, looked, bucket, end)
            except StreamhouseError as error:
                # One that takes no writes keeps no other from its turn.
                failed = failed or error
                continue
            if not _is_asked_for(table, looked.ttl_ms):
                break
            looked.ends[bucket] = end
        else:
            # Only of looking there can be less: the rows that are old are deleted once, whenever.
            pause_s = looked.looking_s / _BUSY_PART_MAX
            if failed is None:
                pause_s = max(looked.ttl_ms / 1_000 / _LOOKS_PER_TTL, pause_s)
            looked.next_s = self._runtime.monotonic_s() + pause_s
        if looked.deleted:
            _logger.info("event=expired table=%s rows=%d", table.path, looked.deleted)
        if failed is not None:
            raise failed

    async def _sweep(self, table: KeyTable, looked: _Looked, bucket: int, end: int) -> None:
        """Delete every row of a bucket with a version below `end`, while the expiry is enabled."""
        self._check_room()
        rows = table.key_buckets[bucket].rows

        def measured(step: Callable[[], None]) -> None:
            started_s = self._runtime.thread_s()
            try:
                step()
            finally:
                looked.looking_s += self._runtime.thread_s() - started_s

        pieces = older_keys(table.key_writer, rows, end, bytes_max=_PIECE_BYTES, measured=measured)
        async with contextlib.aclosing(pieces):
            while True:
                keys = await anext(pieces, None)
                # The owner may have said otherwise while rows were looked at.
                if keys is None or not _is_asked_for(table, looked.ttl_ms):
                    return
                if keys.num_rows:
                    self._check_room()
                    count = await _delete(table, delete_of(bucket, keys, written_below=end))
                    self._runtime.observer.rows_expired(count)
                    looked.deleted += count


def _is_asked_for(table: KeyTable, ttl_ms: int) -> bool:
    return table.properties.datalake_ttl_ms == ttl_ms and not table.is_dropped


def _ends_before(table: KeyTable, ages: RowAges, old_us: int) -> dict[int, int]:
    return {
        bucket: ages.end_before(bucket, tablet, old_us)
        for bucket, tablet in enumerate(table.tablets)
    }


async def _delete(table: KeyTable, write: KeyWrite) -> int:
    try:
        appended = await table.write([write], columns=None, writer_id=0)
    except RequestTooLargeError:
        # A delete carries its row into the changelog.
        if write.rows.num_rows == 1:
            raise
        return sum([await _delete(table, half) for half in halves(write)])
    start, end = appended.ranges[write.bucket]
    return end - start
