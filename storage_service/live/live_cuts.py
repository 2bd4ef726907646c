"""Live cuts of the service's tables: one build at a time of each lake table, shared by waiters.

Guarantees:
- a cut has every row acknowledged before the request for the cut, and transactions as a whole: the
  offsets of all buckets are read in one step of the event loop
- the lake snapshot below a cut is pinned for as long as the cut may be read
- a separate process writes the files, and only with room in the memory of answers, in the disk
  budget and in `live_bytes_max`
Event loop only, except `close`.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from streamhouse.core.errors import (
    OverloadedError,
    StreamhouseError,
)
from streamhouse.core.model.lake.facts import SERVICE_ID_PROPERTY, LakeRole, LakeState
from streamhouse.core.model.table import TablePath
from streamhouse.core.threads import Pool
from streamhouse.lake.files.lake_filesystem import LakeFilesystem
from streamhouse.lake.files.live_folders import READABLE_S
from streamhouse.lake.guards.served_tables import ServedTable
from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.engine.upkeep.jobs import Job
from streamhouse.storage_service.live._build_messages import Build, Opening
from streamhouse.storage_service.live._cut_builder import CutBuilder
from streamhouse.storage_service.live._live_sweep import LiveSweep
from streamhouse.storage_service.live._service_log import ServiceLog
from streamhouse.storage_service.live.live_places import LivePlaces
from streamhouse.storage_service.server.http.answer_memory import Answered
from streamhouse.storage_service.server.service import Service
from streamhouse.storage_service.server.service_tables import served_table

if TYPE_CHECKING:
    # Loading the lake library takes a second, and most services show no live tables.
    from streamhouse.reading.live.live_table import LiveCut

__all__ = ["LiveCuts"]

_CACHED_MAX: Final = 64
_SWEEP_MS: Final = 60_000
_ATTEMPTS_MAX: Final = 4
# Rows are read, sorted and written in pieces, of which several are in memory.
_MEMORY_FACTOR: Final = 4
_PIN_OWNER: Final = "(live tables)"
# A pin lasts for more cuts than one: few pins are written.
_PIN_MS: Final = int(1.5 * READABLE_S * 1_000)


class LiveCuts:
    """The live cuts of one service.

    A process of its own makes the cuts; see `CutBuilder`.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._threads = Pool("live", service.config.catalog_threads)
        self._cached: OrderedDict[tuple[int, LakeRole], _CachedTable] = OrderedDict()
        self._moments = itertools.count()
        self._numbers = itertools.count()
        catalog = service.config.lake_catalog()
        identity = {SERVICE_ID_PROPERTY: service.manager.service_id}
        opening = Opening(
            described=replace(catalog, properties={**catalog.properties, **identity}),
            service_id=service.manager.service_id,
            data_directory=str(service.config.data_dir.absolute()),
        )
        self._builder = CutBuilder(opening, builds_max=self._threads.bound)
        self._sweep = LiveSweep(service.manager, LakeFilesystem(catalog.properties), self._threads)
        service.door_gauges["live_tables"] = (
            "Lake tables with a live cut in memory.",
            lambda: len(self._cached),
        )
        service.door_gauges["live_folders"] = (
            "Folders of live cuts that may still be read.",
            lambda: self._sweep.folder_count,
        )
        service.door_gauges["live_bytes"] = (
            "Bytes of live cuts' files that are not deleted yet.",
            lambda: self._sweep.size_bytes,
        )

        service.door_gauges["live_process_bytes"] = (
            "Resident memory of the process that makes live cuts.",
            self._builder.memory_bytes,
        )

    def state_of(self, table: OpenTable) -> dict[str, int] | None:
        """Return the latest cut of a table's rows for the status, None without a cut in memory."""
        cached = self._cached.get((table.info.table_id, LakeRole.ROWS))
        if cached is None or cached.cut is None:
            return None
        cut = cached.cut
        return {
            "made_us": int(cut.made_s * 1_000_000),
            "rows_written": cut.rows_written,
            "bytes_written": cut.bytes_written,
            "rows_since": sum(
                tablet.high_watermark - cut.end_offsets.get(bucket, 0)
                for bucket, tablet in enumerate(table.tablets)
            ),
        }

    def jobs(self) -> list[Job]:
        """Return the job for deleting old folders of live cuts."""
        return [Job(name="live_sweep", every_ms=_SWEEP_MS, look=self._look, is_eager=True)]

    def close(self) -> None:
        """Wait for the builds in progress. Blocking; not on the event loop."""
        self._threads.shutdown()
        self._builder.close()

    async def cut(self, exchange: Answered, path: TablePath, role: LakeRole) -> LiveCut:
        """Return a cut with every row of the table acknowledged before the call.

        `exchange` holds the memory of a build. Raises as `Service.readable` and
        `LiveLakeTable.cut`, and `OverloadedError` without room for the rows.
        """
        request_moment = next(self._moments)
        self._service.metrics.live_loads.inc()
        table = self._service.readable(str(path))
        cached = self._cached_table(table, role)
        async with cached.turn:
            if cached.moment < request_moment:
                await self._build(exchange, cached)
            if cached.error is not None:
                raise type(cached.error)(cached.error.message) from cached.error
            assert cached.cut is not None
            return cached.cut

    def _cached_table(self, table: OpenTable, role: LakeRole) -> _CachedTable:
        key = (table.info.table_id, role)
        cached = self._cached.get(key)
        if cached is None or cached.table is not table:
            cached = self._cached[key] = _CachedTable(next(self._numbers), table, role)
        self._cached.move_to_end(key)
        for key in list(self._cached)[: len(self._cached) - _CACHED_MAX]:
            if not self._cached[key].turn.locked():
                del self._cached[key]
        return cached

    async def _build(self, exchange: Answered, cached: _CachedTable) -> None:
        """Make the next cut of a table, from the table's present state."""
        table, manager = cached.table, self._service.manager
        for attempts_left in reversed(range(_ATTEMPTS_MAX)):
            manager.check_readable(table)
            moment, served = next(self._moments), served_table(table)
            await self._pin(table, served.lake.snapshot_id)
            await self._service.answers.hold(exchange, self._memory_bytes(cached, served))
            try:
                await self._make(cached, served)
                cached.moment, cached.error = moment, None
                return
            except StreamhouseError as error:
                manager.check_readable(table)
                # A round that ended meanwhile may have taken the snapshot, or rows from the log;
                # without rounds retention takes rows.
                if attempts_left and _has_moved(table, served):
                    continue
                cached.moment, cached.error = moment, error
                return
            finally:
                if exchange.hold is not None:
                    exchange.hold.release()
                    exchange.hold = None

    async def _make(self, cached: _CachedTable, served: ServedTable) -> None:
        loop, began_s = asyncio.get_running_loop(), time.perf_counter()
        new_cut = await loop.run_in_executor(self._threads, self._new_cut, cached, served, loop)
        await self._pin(cached.table, new_cut.base_snapshot_id)
        if new_cut is not cached.cut:
            seconds = time.perf_counter() - began_s
            self._service.metrics.live_cut_made(
                new_cut.rows_written, new_cut.bytes_written, seconds
            )
            self._sweep.size_bytes += new_cut.bytes_written
        cached.cut, cached.lake = new_cut, served.lake

    def _new_cut(
        self, cached: _CachedTable, served: ServedTable, loop: asyncio.AbstractEventLoop
    ) -> LiveCut:
        """Return the cut of `served`. Blocking; on a thread of `_threads`."""
        table = cached.table

        def prepare_writing(place: str) -> None:
            asyncio.run_coroutine_threadsafe(self._check_room(table, place), loop).result()

        # The turn of a request that was cancelled may be over before its build is.
        with cached.building:
            shown = cached.cut
            build = Build(
                number=cached.number,
                role=cached.role,
                served=served,
                now_s=self._now_s(),
                shown_at=None if shown is None else shown.metadata_location,
            )
            made = self._builder.cut(build, ServiceLog(table, served.info), prepare_writing)
            cut = shown if made is None else made
            assert cut is not None
            return cut

    async def _check_room(self, table: OpenTable, place: str) -> None:
        """Raise `OverloadedError` without room on the disk; else record a place of folders."""
        self._service.manager.disk_budget.check()
        bytes_max = self._service.config.live_bytes_max
        if self._sweep.size_bytes >= bytes_max:
            raise OverloadedError(
                f"the files of live cuts take {self._sweep.size_bytes} of {bytes_max} bytes"
                " (live_bytes_max); the oldest are deleted 30 minutes after they were made: try"
                " again later, or read the committed snapshot from the catalog's other warehouse"
            )
        await table.sidecar(LivePlaces).add(place, now_s=self._now_s())

    async def _pin(self, table: OpenTable, snapshot_id: int | None) -> None:
        """Keep a lake snapshot for as long as a cut handed out now is readable."""
        if snapshot_id is None:
            return
        holder = f"live:{snapshot_id}"
        until_us = int((self._now_s() + READABLE_S) * 1_000_000)
        if not any(
            (pin.owner, pin.holder) == (_PIN_OWNER, holder) and pin.expires_timestamp_us >= until_us
            for pin in table.lake_pins.current()
        ):
            try:
                await table.lake_pins.pin(
                    holder, owner=_PIN_OWNER, snapshot_id=snapshot_id, ttl_ms=_PIN_MS
                )
            except OverloadedError:
                # After very many rounds within the time of a pin, the age keeps a snapshot as long.
                if table.properties.datalake_snapshot_max_age_ms < _PIN_MS:
                    raise

    def _memory_bytes(self, cached: _CachedTable, served: ServedTable) -> int:
        """Return the memory for a build of the rows missing from the present cut."""
        start: Mapping[int, int] = {}
        if cached.cut is not None and cached.lake is served.lake:
            start = cached.cut.end_offsets
        side = {LakeRole.CHANGES: served.lake.changelog, LakeRole.BATCH: served.lake.batch}
        lake = side.get(cached.role, served.lake)
        tiered = {} if lake is None else lake.tiered_offsets
        log_bytes = sum(
            cached.table.tablets[bucket].bytes_estimate(
                at.high_watermark
                - max(start.get(bucket, 0), tiered.get(bucket, 0), at.log_start_offset)
            )
            for bucket, at in served.positions.items()
        )
        return min(log_bytes * _MEMORY_FACTOR, self._service.answers.answer_bytes_max)

    def _now_s(self) -> float:
        return self._service.manager.runtime.clock_us() / 1_000_000

    async def _look(self) -> None:
        for key, cached in list(self._cached.items()):
            if cached.table.is_dropped and not cached.turn.locked():
                del self._cached[key]
        await asyncio.to_thread(self._builder.look)
        await self._sweep.look(now_s=self._now_s())


def _has_moved(table: OpenTable, served: ServedTable) -> bool:
    """Whether the lake or the beginnings of the log are others by now."""
    starts = {bucket: at.log_start_offset for bucket, at in served.positions.items()}
    present = {bucket: tablet.log_start_offset for bucket, tablet in enumerate(table.tablets)}
    return table.lake is not served.lake or starts != present


class _CachedTable:
    """One lake table with its latest cut, or the error of the latest attempt."""

    def __init__(self, number: int, table: OpenTable, role: LakeRole) -> None:
        self.number = number
        self.table = table
        self.role = role
        self.turn = asyncio.Lock()
        self.building = threading.Lock()
        self.moment = -1
        """The number of the latest attempt, in one sequence with all requests."""
        self.cut: LiveCut | None = None
        self.lake: LakeState | None = None
        """The registered lake state below the cut."""
        self.error: StreamhouseError | None = None
