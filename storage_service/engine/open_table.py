"""A running table: the buckets' logs, the lake state and the waiting readers.

Owned by the event loop: `info`, `lake` and `is_dropped` change only on the loop, and high
watermarks are published only on the loop. Values read between two awaits are therefore a consistent
cut.
"""

from __future__ import annotations

import abc
import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import pyarrow as pa

from streamhouse.core.errors import (
    BucketNotFoundError,
    HistoryDivergedError,
    StorageFailedError,
    StreamhouseError,
    UnavailableError,
)
from streamhouse.core.model.lake.facts import LakeState, SideLakeState
from streamhouse.core.model.offsets import BucketPositions
from streamhouse.core.model.properties import TableProperties
from streamhouse.core.model.schema_change import read_stored
from streamhouse.core.model.table import TableInfo, TablePath
from streamhouse.core.model.table_state import TableState
from streamhouse.core.traces.stages import STAGES, stage_ended
from streamhouse.core.wire.arrow_body import decode_payload
from streamhouse.storage_service.directory.runtime import clock_us
from streamhouse.storage_service.engine._commit_clock import CommitClock
from streamhouse.storage_service.engine._write_gate import WriteGate
from streamhouse.storage_service.engine.consumers import Consumer, Consumers
from streamhouse.storage_service.engine.lake_pins import LakePins
from streamhouse.storage_service.engine.sidecar import Sidecar
from streamhouse.storage_service.engine.wakeups import Wakeups
from streamhouse.storage_service.log.append_queue import RoutedBatch
from streamhouse.storage_service.log.group_commit import CommitOutcome, Submit
from streamhouse.storage_service.log.log_tablet import LogTablet, StoredBatch
from streamhouse.storage_service.log.readable_log import ReadableLog

__all__ = ["Appended", "Away", "LogTable", "OpenTable", "ReadableTable"]

_S = TypeVar("_S", bound=Sidecar)
_Log = TypeVar("_Log", bound=ReadableLog, covariant=True)

# So few who wait for rows are woken before the writer is answered: its client would take the
# processor for the next request while they are on their way (measured: an eighth of their time).
_READERS_FIRST_MAX: Final = 4
# The attributes whose changes are reported, besides published offsets: what a table is, and what
# `ReadableTable.state` tells.
_REPORTED: Final = frozenset(("info", "is_dropped", "lake", "truncated_at_us"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Appended:
    """The offsets of the rows of one write: bucket -> (start, end).

    For an upsert or delete these are the offsets of the changes; a bucket without a change has an
    empty range.
    """

    ranges: Mapping[int, tuple[int, int]]
    timestamp_us: int


@dataclass(frozen=True, slots=True)
class Away:
    """A table on its way from one shard to another: the reason and the table's description.

    `info` is None in a process that started meanwhile and has not read the description.
    """

    why: UnavailableError
    info: TableInfo | None


class ReadableTable(Generic[_Log]):
    """A table whose log can be read, in the process of its writer or beside that process."""

    def __init__(
        self, info: TableInfo, tablets: Sequence[_Log], *, lake: LakeState, wakeups: Wakeups
    ) -> None:
        assert len(tablets) == info.bucket_count, "every bucket has its log"
        self._log_schemas: dict[int, pa.Schema] = {}
        self.info = info
        self.tablets = tuple(tablets)
        self.lake = lake
        self.wakeups = wakeups
        self.truncated_offsets: dict[int, int] = {}
        """Of a log table that was overwritten, where the rows of each bucket begin."""
        self.truncated_at_us = 0
        """When it was."""
        self.read_rows = 0
        """How many rows were sent to readers since the process started."""

    @property
    def path(self) -> TablePath:
        """The table's path."""
        return self.info.path

    def tablet(self, bucket: int) -> _Log:
        """Return the log of `bucket`; raises `BucketNotFoundError` with the valid buckets."""
        if not 0 <= bucket < len(self.tablets):
            raise BucketNotFoundError(
                f"table '{self.path}' has no bucket {bucket}; its buckets are"
                f" 0..{len(self.tablets) - 1}"
            )
        return self.tablets[bucket]

    def log_schema_of(self, schema_id: int) -> pa.Schema:
        """Return the Arrow schema of log rows in this version of the table's schema."""
        schema = self._log_schemas.get(schema_id)
        if schema is None:
            # Made for every fetch it would cost more than a small fetch.
            schema = self._log_schemas[schema_id] = self.info.log_schema_of(schema_id)
        return schema

    def rows_of(
        self,
        stored: StoredBatch,
        info: TableInfo,
        *,
        schema_id: int,
        columns: Sequence[str] | None = None,
    ) -> pa.RecordBatch:
        """Return a stored batch's rows in this version of the schema. On any thread.

        `info` has the versions of the batch and of the read.
        """
        if stored.schema_id == schema_id:
            rows = decode_payload(stored.payload, self.log_schema_of(schema_id))
        else:
            rows = read_stored(stored.payload, info, stored_as=stored.schema_id, read_as=schema_id)
        return rows if columns is None else rows.select(list(columns))

    def positions(self) -> dict[int, BucketPositions]:
        """Return the positions of all buckets: one consistent cut."""
        tiered = self.lake.tiered_offsets
        return {
            bucket: BucketPositions(
                log_start_offset=tablet.log_start_offset,
                high_watermark=tablet.high_watermark,
                tiered_offset=tiered.get(bucket, 0),
                truncated_offset=self.truncated_offsets.get(bucket, 0),
                expired_offset=self.lake.expired_offsets.get(bucket, 0),
            )
            for bucket, tablet in enumerate(self.tablets)
        }

    def state(self) -> TableState:
        """Return the table, its positions and its lake snapshot: one consistent cut."""
        truncated_at_us = self.truncated_at_us if any(self.truncated_offsets.values()) else 0
        return TableState(
            table=self.info,
            positions=self.positions(),
            lake=self.lake,
            truncated_at_us=truncated_at_us,
        )


class OpenTable(ReadableTable[LogTablet], abc.ABC):
    """The common parts of log tables and primary key tables."""

    on_change: Callable[[str], None] | None = None
    """Called with the attribute when the table is described anew, dropped or moved, or has another
    lake state or was overwritten; no caller is answered yet."""

    def __init__(
        self,
        info: TableInfo,
        tablets: Sequence[LogTablet],
        *,
        lake: LakeState,
        lake_pins: LakePins,
        consumers: Consumers,
        sidecars: Sequence[Sidecar],
        wakeups: Wakeups,
        clock: CommitClock,
    ) -> None:
        super().__init__(info, tablets, lake=lake, wakeups=wakeups)
        self.lake_pins = lake_pins
        self.consumers = consumers
        self._sidecars = {type(sidecar): sidecar for sidecar in sidecars}
        self.clock = clock
        self.gate = WriteGate()
        """Passed by every write."""
        self.keep_lake(lake)
        self.truncation_count = 0
        """How often since the service started."""
        self.is_dropped = False
        self.broken_rows: Counter[tuple[str, str]] = Counter()
        """Rows that broke a constraint since the service started: (constraint, how) -> rows.

        `how` is `refused` or `rejected`.
        """
        self._properties = (info, info.properties())
        self._next_spread_bucket = 0
        # bucket -> (first offset that is not tiered, its timestamp)
        self._untiered_since: dict[int, tuple[int, int]] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute, and report it if `_REPORTED`; properties would slow all reads."""
        super().__setattr__(name, value)
        if name in _REPORTED and self.on_change is not None:
            self.on_change(name)

    @property
    def properties(self) -> TableProperties:
        """The table's properties, parsed once."""
        parsed_of, properties = self._properties
        if parsed_of is not self.info:
            properties = self.info.properties()
            self._properties = (self.info, properties)
        return properties

    def sidecar(self, kind: type[_S]) -> _S:
        """Return a door's state of the table; the service was started with that door."""
        sidecar = self._sidecars[kind]
        assert isinstance(sidecar, kind)
        return sidecar

    def keep_lake(self, lake: LakeState) -> None:
        """Continue with a durable lake state; a diverged lake ends all writes."""
        self.lake = lake
        if lake.diverged:
            self.gate.stop(HistoryDivergedError(lake.diverged))
        else:
            self.gate.resume()

    def check_versions(self, batches: Sequence[RoutedBatch]) -> None:
        """Raise unless rows about to be written were made and judged for the table as it is.

        Columns may have been replaced since, and constraints added. A door that does not judge its
        rows is refused here.
        """
        checks = self.info.descriptor.checks
        if checks and any(not checks <= batch.judged_by for batch in batches):
            raise UnavailableError(
                f"table '{self.path}' has got another constraint just now, which the rows were not"
                " judged by; send the rows again"
            )
        versions = self.info.schema_versions
        if any(batch.schema_id not in versions for batch in batches):
            raise UnavailableError(
                f"table '{self.path}' has got other columns just now, those of a schema that was"
                " registered; send the rows again"
            )

    def count_rejected(self, rows: Mapping[str, int]) -> None:
        """Count rejected rows by constraint; a constraint dropped since has no count."""
        for text in self.info.descriptor.checks:
            if count := rows.get(text.name, 0):
                self.broken_rows[text.name, "rejected"] += count

    def truncate(self, offsets: Mapping[int, int], *, timestamp_us: int) -> None:
        """End the life of all rows below `offsets`, in the step that publishes the new rows."""
        for bucket, offset in offsets.items():
            self.tablets[bucket].truncate(offset)
            self.truncated_offsets[bucket] = max(self.truncated_offsets.get(bucket, 0), offset)
        self.truncated_at_us = max(self.truncated_at_us, timestamp_us)
        self.truncation_count += 1

    @property
    def is_truncation_pending(self) -> bool:
        """Whether the lake has overwritten rows."""
        is_known = self.lake.truncated_offsets == self.truncated_offsets
        return self.lake.snapshot_id is not None and not is_known

    def readers(self) -> list[Consumer]:
        """Return the consumers with a recent report."""
        return self.consumers.current(self.properties.log_consumers_ttl_ms)

    @property
    def is_log_kept_in_lake(self) -> bool:
        """Whether the lake has every row that has left the log, for readers of old rows."""
        if self.info.is_primary_key_table:
            return self.properties.datalake_changelog
        return self.properties.datalake_enabled

    def next_spread_bucket(self, count: int) -> int:
        """Return the first bucket for spreading `count` parts, round robin."""
        bucket = self._next_spread_bucket
        self._next_spread_bucket = (bucket + count) % len(self.tablets)
        return bucket

    def oldest_untiered_us(self) -> int | None:
        """Return the time of the oldest change missing from the lake; None without one.

        As `untiered_since_us`; an overwrite is a change, too.
        """
        times = [*self.untiered_since_us().values()]
        if self.is_truncation_pending:
            times.append(self.truncated_at_us)
        return min(times, default=None)

    def untiered_since_us(self) -> dict[int, int]:
        """Return the write time of each bucket's oldest row missing from the lake.

        Reads a batch of each bucket, on any thread, and each batch only once: call off the event
        loop unless `is_age_known`.
        """
        times = {}
        for bucket, offset in self._first_untiered():
            known_offset, timestamp_us = self._untiered_since.get(bucket, (-1, 0))
            if known_offset != offset:
                timestamp_us = self.tablets[bucket].read(offset, bytes_max=1)[0].timestamp_us
                self._untiered_since[bucket] = (offset, timestamp_us)
            times[bucket] = timestamp_us
        return times

    @property
    def known_untiered_since_us(self) -> int | None:
        """As `oldest_untiered_us`, for rows with known ages: reads nothing."""
        known = (
            (offset, *self._untiered_since.get(bucket, (-1, 0)))
            for bucket, offset in self._first_untiered()
        )
        return min((time for offset, first, time in known if first == offset), default=None)

    @property
    def is_age_known(self) -> bool:
        """Whether `oldest_untiered_us` reads nothing."""
        return all(
            self._untiered_since.get(bucket, (-1, 0))[0] == offset
            for bucket, offset in self._first_untiered()
        )

    def _first_untiered(self) -> list[tuple[int, int]]:
        """The buckets with rows missing from the lake, each with the first missing offset."""
        return [
            (bucket, offset)
            for bucket, tablet in enumerate(self.tablets)
            # Retention takes rows that are not tiered only while the lake is switched off.
            if (offset := max(self.lake.tiered_offsets.get(bucket, 0), tablet.log_start_offset))
            < tablet.high_watermark
        ]

    @property
    def lacks_batch_rows(self) -> bool:
        """Whether the table has a batch layout with other rows than the visible rows."""
        if not self.info.properties().has_batch_layout:
            return False
        batch = self.lake.batch
        if batch is not None and batch.truncated_offsets != self.truncated_offsets:
            return True
        ends = {} if batch is None else batch.tiered_offsets
        starts = self.truncated_offsets
        return any(
            t.high_watermark > max(ends.get(b, 0), starts.get(b, 0))
            for b, t in enumerate(self.tablets)
        )

    @property
    @abc.abstractmethod
    def row_count(self) -> int:
        """The number of rows in a read of the whole table."""

    @property
    def key_folders(self) -> Sequence[Path]:
        """The directories of rows by key; empty without a primary key."""
        return ()

    @property
    def failures(self) -> list[str]:
        """The reasons why rows by key are out of use; empty without failures."""
        return []

    @property
    def can_store(self) -> bool:
        """Whether a write to any bucket may succeed before a restart."""
        return not any(tablet.is_read_only for tablet in self.tablets)

    @property
    def logs_of_writers(self) -> Sequence[LogTablet]:
        """The logs published by the table's own writer instead of commit groups."""
        return ()

    @abc.abstractmethod
    def check_writable(self, bucket: int) -> None:
        """Raise if the bucket refuses writes until a restart."""

    async def end_saves(self, why: StreamhouseError) -> None:
        """Return when no pin, consumer or schema is being saved; `why` refuses later saves."""
        await self.lake_pins.end(why)
        await self.consumers.end(why)
        for sidecar in self._sidecars.values():
            await sidecar.end(why)

    def go_on_saving(self) -> None:
        """Accept pins, reports and schemas again after `end_saves`."""
        self.lake_pins.go_on()
        self.consumers.go_on()
        for sidecar in self._sidecars.values():
            sidecar.go_on()

    @abc.abstractmethod
    async def settle(self) -> None:
        """Return when all accepted writes are done; for the holder of the gate."""

    @abc.abstractmethod
    async def stop(self, *, flush: bool) -> None:
        """End the table's writers before the logs are closed."""

    async def follow(self) -> None:
        """Write with the table's current properties from now on."""
        for tablet in self.tablets:
            tablet.change_segment_bytes_max(self.properties.log_segment_bytes)

    @abc.abstractmethod
    async def forgettable(self, bucket: int, *, timestamp_us_before: int) -> int:
        """Return the offset below which older rows may leave the log."""

    def _covered_by_lake(self, bucket: int) -> int:
        """Return the offset below which the lake has all required rows of the bucket."""
        lake, properties = self.lake, self.properties
        end = min(self.tablets[bucket].high_watermark, lake.tiered_offsets.get(bucket, 0))
        if properties.datalake_changelog:
            end = min(end, _covered(lake.changelog, bucket))
        if properties.has_batch_layout:
            end = min(end, _covered(lake.batch, bucket))
        return end

    @property
    def untiered_rows(self) -> int:
        """The number of visible rows missing from the lake."""
        return sum(
            at.high_watermark - max(at.tiered_offset, at.truncated_offset)
            for at in self.positions().values()
        )


class LogTable(OpenTable):
    """A table without a primary key: rows in the order of their appends."""

    async def append(self, batches: Sequence[RoutedBatch], *, submit: Submit) -> Appended:
        """Append all batches or none; durable and visible on return.

        A submitted append happens without its caller. A commit of a transaction in the table goes
        first.
        """
        if not batches:
            return Appended(ranges={}, timestamp_us=clock_us())
        tablets = [self.tablet(batch.bucket) for batch in batches]
        loop = asyncio.get_running_loop()
        committed: asyncio.Future[CommitOutcome] = loop.create_future()

        def answer(outcome: CommitOutcome) -> None:
            if not committed.done():
                committed.set_result(outcome)

        def on_done(outcome: CommitOutcome) -> None:
            self.gate.leave()
            if 0 < self.wakeups.count <= _READERS_FIRST_MAX:
                loop.call_soon(answer, outcome)
            elif not committed.done():
                committed.set_result(outcome)

        await self.gate.enter()
        stage_ended("gate")
        try:
            self.check_versions(batches)
            submit(list(zip(tablets, self.clock.stamped(batches), strict=True)), on_done)
        except BaseException:
            self.gate.leave()
            raise
        outcome = await committed
        stages = STAGES.get()
        if stages is not None and outcome.times is not None:
            outcome.tell(stages)
            stages.end("publish")
        if outcome.error is not None:
            raise outcome.error
        ranges: dict[int, tuple[int, int]] = {}
        timestamp_us = 0
        for batch, result in zip(batches, outcome.results, strict=True):
            timestamp_us = max(timestamp_us, result.timestamp_us)
            start, end = ranges.get(batch.bucket, (result.base_offset, result.end_offset))
            ranges[batch.bucket] = (min(start, result.base_offset), max(end, result.end_offset))
        return Appended(ranges=ranges, timestamp_us=timestamp_us)

    @property
    def row_count(self) -> int:
        """The number of rows neither overwritten nor expired."""
        return sum(at.high_watermark - at.first_offset for at in self.positions().values())

    def check_writable(self, bucket: int) -> None:
        """Raise `StorageFailedError` if the disk failed."""
        if self.tablets[bucket].is_read_only:
            raise StorageFailedError(
                f"table '{self.path}', bucket {bucket} is read-only, because the disk failed; check"
                " the disk and restart the service"
            )

    async def settle(self) -> None:
        """Return at once: a write leaves the gate when its rows are visible."""

    async def stop(self, *, flush: bool) -> None:
        """Do nothing: the commit thread serves all tables."""

    async def forgettable(self, bucket: int, *, timestamp_us_before: int) -> int:  # noqa: ARG002
        """Return the offset below which rows may leave the log; without a lake by age."""
        if self.properties.datalake_enabled:
            return self._covered_by_lake(bucket)
        return self.tablets[bucket].high_watermark


def _covered(side: SideLakeState | None, bucket: int) -> int:
    return 0 if side is None else side.tiered_offsets.get(bucket, 0)
