"""From a table's description to the running table: recover logs and rows, load the lake state.

A table may begin with an existing lake: the log starts at the end of the lake. Then the table id
becomes durable first, the table owns the lake tables, the directory is filled, and at last
service.json names the table. An earlier crash leaves no table, and lake tables that can be adopted
again: only their owner was written.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Protocol

from streamhouse.core.errors import (
    CorruptDataError,
    HistoryDivergedError,
    StorageFailedError,
    StreamhouseError,
)
from streamhouse.core.model.lake.facts import LakeState
from streamhouse.core.model.table import TableDescriptor, TableInfo
from streamhouse.reading.where.checks import Checks
from streamhouse.storage_service.config import ServiceConfig
from streamhouse.storage_service.directory.data_directory import DataDirectory
from streamhouse.storage_service.directory.format_upgrade import upgrade_files
from streamhouse.storage_service.directory.runtime import Runtime
from streamhouse.storage_service.directory.table_files import (
    load_lake_state,
    save_lake_state,
)
from streamhouse.storage_service.directory.table_registry import TableRegistry
from streamhouse.storage_service.engine._commit_clock import CommitClock
from streamhouse.storage_service.engine.consumers import Consumers
from streamhouse.storage_service.engine.keys._key_writer import KeyWriter
from streamhouse.storage_service.engine.keys.key_bucket import (
    Damage,
    KeyBucket,
    damage_of,
    table_rules,
)
from streamhouse.storage_service.engine.keys.key_recovery import (
    KeyRecovery,
    LostRows,
    clear_leftovers,
    remake_rows,
)
from streamhouse.storage_service.engine.keys.key_table import KeyTable
from streamhouse.storage_service.engine.lake_pins import LakePins
from streamhouse.storage_service.engine.open_table import LogTable, OpenTable
from streamhouse.storage_service.engine.sidecar import Sidecar
from streamhouse.storage_service.engine.tiering_desk.history_check import check_history, covered_by
from streamhouse.storage_service.engine.transactions.transaction_files import TransactionFiles
from streamhouse.storage_service.engine.wakeups import WaiterLimit, Wakeups
from streamhouse.storage_service.kv.kv_tablet import KvOptions, KvTablet
from streamhouse.storage_service.kv.rocksdb_store import is_damage
from streamhouse.storage_service.log.group_commit import Submit
from streamhouse.storage_service.log.log_tablet import LogOptions, LogTablet
from streamhouse.storage_service.log.replica import Replication
from streamhouse.storage_service.log.segments.segment_format import LogIdentity
from streamhouse.storage_service.log.segments.segment_roll import begin_log

__all__ = [
    "Adoptable",
    "NewTable",
    "TableOpener",
    "adopt_table",
    "begin_adopted",
    "close_tablets",
    "stop_tables",
    "take_over",
]


_logger = logging.getLogger(__name__)


class _OpenBucket(NamedTuple):
    tablet: LogTablet
    keys: KeyBucket | None


@dataclass(frozen=True, slots=True)
class NewTable:
    """A table with a directory; opening makes the remaining files."""

    info: TableInfo
    lake: LakeState
    truncated_at_us: int = 0


class TableOpener:
    """Opens the tables of one data directory, several buckets at a time."""

    def __init__(
        self,
        config: ServiceConfig,
        *,
        directory: DataDirectory,
        runtime: Runtime,
        waiter_limit: WaiterLimit,
        key_threads: Executor,
        submit: Submit,
        recovery: KeyRecovery,
        replication: Replication,
        sidecars: Sequence[type[Sidecar]],
    ) -> None:
        self._directory = directory
        self._sidecars = sidecars
        self._replication = replication
        self._runtime = runtime
        self._frame_bytes_max = config.batch_bytes_max
        self._waiter_limit = waiter_limit
        self._key_options = (
            KvOptions.shared(
                cache_bytes=config.key_cache_bytes_max, memory_bytes=config.key_memory_bytes_max
            )
            if recovery.warm is None
            else recovery.warm.options
        )
        self._key_threads = key_threads
        self._submit = submit
        self._recovery = recovery

    async def create(self, new: NewTable) -> OpenTable:
        """Make a table's files and return the table, not yet listed on disk; raises as `open`."""
        await self._runtime.run(self._make_files, new)
        return await self._open(new.info, new.lake, is_new=True)

    async def open(self, info: TableInfo) -> OpenTable:
        """Return the table with every acknowledged row visible.

        Raises an error that names the table, and then leaves nothing open.
        """
        if info.table_id in self._directory.former:
            await self._runtime.run(upgrade_files, self._directory, info)
        lake = await self._runtime.run(load_lake_state, self._directory, info)
        return await self._open(info, lake, is_new=info.table_id in self._directory.former)

    def _make_files(self, new: NewTable) -> None:
        table_id = new.info.table_id
        save_lake_state(self._directory, new.info, new.lake)
        TransactionFiles(
            self._directory.transactions(table_id),
            service_id=self._directory.service_id,
            table_id=table_id,
            filesystem=self._directory.filesystem,
        ).create(new.lake.truncated_offsets, new.truncated_at_us)

    async def _open(self, info: TableInfo, lake: LakeState, *, is_new: bool) -> OpenTable:
        """Open a table; with `is_new` some files may be missing."""
        pins = await self._runtime.run(self._load_pins, info)
        consumers = await self._runtime.run(self._load_consumers, info)
        sidecars = await self._runtime.run(self._load_sidecars, info)
        opened = await asyncio.gather(
            *(
                self._runtime.run(self._open_bucket, info, bucket, lake, is_new)
                for bucket in range(info.bucket_count)
            ),
            return_exceptions=True,
        )
        buckets = [bucket for bucket in opened if isinstance(bucket, _OpenBucket)]
        for error in opened:
            if isinstance(error, BaseException):
                await self._runtime.run(_close_buckets, buckets)
                raise error
        table = self._table(info, buckets, lake, pins, consumers, sidecars)
        try:
            await self._check_history(table)
        except BaseException:
            await table.stop(flush=False)
            await self._runtime.run(close_tablets, table.tablets)
            raise
        return table

    def _table(
        self,
        info: TableInfo,
        buckets: Sequence[_OpenBucket],
        lake: LakeState,
        pins: LakePins,
        consumers: Consumers,
        sidecars: Sequence[Sidecar],
    ) -> OpenTable:
        wakeups = Wakeups(self._waiter_limit)
        last_us = max(bucket.tablet.now_us() for bucket in buckets)
        clock = CommitClock(self._runtime.clock_us, last_us=last_us)
        keys = [bucket.keys for bucket in buckets if bucket.keys is not None]
        if not keys:
            tablets = [bucket.tablet for bucket in buckets]
            return LogTable(
                info,
                tablets,
                lake=lake,
                lake_pins=pins,
                consumers=consumers,
                sidecars=sidecars,
                wakeups=wakeups,
                clock=clock,
            )
        writer = KeyWriter(
            keys,
            table=str(info.path),
            submit=self._submit,
            clock=clock,
            executor=self._key_threads,
            on_published=wakeups.wake,
            frame_bytes_max=self._frame_bytes_max,
        )
        return KeyTable(
            info,
            keys,
            writer,
            lake=lake,
            lake_pins=pins,
            consumers=consumers,
            sidecars=sidecars,
            wakeups=wakeups,
            clock=clock,
        )

    async def _check_history(self, table: OpenTable) -> None:
        """Record durably if the logs differ from the logs of the saved lake state."""
        lake = table.lake
        if lake.diverged or lake.snapshot_id is None:
            return
        try:
            await self._runtime.run(check_history, table, (covered_by(lake),))
        except HistoryDivergedError as error:
            _logger.error("event=history_diverged table=%s why=%r", table.path, error.message)
            diverged = replace(lake, diverged=error.message)
            await self._runtime.run(save_lake_state, self._directory, table.info, diverged)
            table.keep_lake(diverged)

    def _load_pins(self, info: TableInfo) -> LakePins:
        return LakePins(
            self._directory.lake_pins_file(info.table_id),
            table=str(info.path),
            runtime=self._runtime,
        )

    def _load_consumers(self, info: TableInfo) -> Consumers:
        return Consumers(
            self._directory.consumers_file(info.table_id),
            table=str(info.path),
            runtime=self._runtime,
        )

    def _load_sidecars(self, info: TableInfo) -> list[Sidecar]:
        return [
            kind(self._directory.sidecar_file(info.table_id, kind.file_name), info, self._runtime)
            for kind in self._sidecars
        ]

    def _open_bucket(
        self, info: TableInfo, bucket: int, lake: LakeState, is_new: bool
    ) -> _OpenBucket:
        try:
            if not info.is_primary_key_table:
                # Parsed on this thread, and not by the first write.
                Checks.of_table(info)
                tiered_offset = lake.tiered_offsets[bucket]
                return _OpenBucket(self._open_tablet(info, bucket, tiered_offset, is_new), None)
            return self._open_key_bucket(info, bucket, lake, is_new)
        except StreamhouseError as error:
            raise type(error)(f"table '{info.path}' cannot be opened: {error.message}") from error

    def _open_key_bucket(
        self, info: TableInfo, bucket: int, lake: LakeState, is_new: bool
    ) -> _OpenBucket:
        path = self._directory.key_rows(info.table_id, bucket)
        open_rows_at = functools.partial(self._open_rows, info=info, bucket=bucket)
        clear_leftovers(path)
        with contextlib.ExitStack() as opened:
            rows: KvTablet | Damage | None = self._warm_rows(info, bucket)
            if rows is None:
                rows = self._found_rows(path, open_rows_at, info)
            if isinstance(rows, KvTablet):
                opened.callback(rows.close)
            # What was applied was durable in the log before.
            end_offset_min = max(lake.tiered_offsets[bucket], rows.applied_offset)
            tablet = self._open_tablet(info, bucket, end_offset_min, is_new)
            opened.callback(tablet.close)
            if isinstance(rows, KvTablet) and rows.applied_offset < tablet.log_start_offset:
                rows.close()
                rows = Damage("the rows by key are lost")
            if isinstance(rows, Damage):
                lost = self.lost_rows(info, bucket, tablet, lake)
                remake_rows(lost, why=rows.reason)
                rows = open_rows_at(path)
                opened.callback(rows.close)
            keys = KeyBucket(tablet, rows, where=_where(info, bucket), info=info)
            opened.pop_all()
        return _OpenBucket(tablet, keys)

    def _warm_rows(self, info: TableInfo, bucket: int) -> KvTablet | None:
        warm = self._recovery.warm
        rows = None if warm is None else warm.take(info, bucket)
        if rows is not None and info.path in self._recovery.rebuild:
            rows.close()
            return None
        if rows is not None:
            rows.hand_over_after(self._replication.wait_for_shown)
        return rows

    def _found_rows(
        self, path: Path, open_rows_at: Callable[[Path], KvTablet], info: TableInfo
    ) -> KvTablet | Damage:
        """Return the rows at `path`, or the reason for a rebuild."""
        if info.path in self._recovery.rebuild:
            return Damage("the rows by key are given up by --rebuild")
        damage = damage_of(path)
        if damage is not None:
            return damage
        try:
            return open_rows_at(path)
        except CorruptDataError as error:
            if is_damage(error):
                return Damage(f"the rows by key are damaged ({error.message})")
            raise CorruptDataError(
                f"{error.message}; start once with --rebuild {info.path}, which makes the rows by"
                " key again from changelog and lake"
            ) from error

    def lost_rows(self, info: TableInfo, bucket: int, log: LogTablet, lake: LakeState) -> LostRows:
        """Return the sources for a rebuild of a bucket's rows."""
        return LostRows(
            path=self._directory.key_rows(info.table_id, bucket),
            open_rows=functools.partial(self._open_rows, info=info, bucket=bucket),
            log=log,
            lake_rows=self._recovery.lake_rows,
            lake=lake,
            info=info,
            bucket=bucket,
            where=_where(info, bucket),
        )

    def _open_rows(self, path: Path, *, info: TableInfo, bucket: int) -> KvTablet:
        """Open the rows at `path`, or make empty rows; `KeyBucket` brings rows up to the log."""
        rows = KvTablet(
            path,
            table_id=info.table_id,
            bucket=bucket,
            rules=table_rules(info),
            options=self._key_options,
        )
        rows.hand_over_after(self._replication.wait_for_shown)
        return rows

    def _open_tablet(
        self, info: TableInfo, bucket: int, end_offset_min: int, is_new: bool
    ) -> LogTablet:
        """Open a log and store its contents in the replica: all rows may be shown and applied."""
        tablet = LogTablet.open(
            self._directory.bucket(info.table_id, bucket),
            table_id=info.table_id,
            bucket=bucket,
            filesystem=self._directory.filesystem,
            options=LogOptions(
                segment_bytes_max=info.properties().log_segment_bytes,
                frame_bytes_max=self._frame_bytes_max,
            ),
            clock_us=self._runtime.clock_us,
            end_offset_min=end_offset_min,
            must_exist=not is_new,
        )
        self._replication.wait_for_recorded()
        return tablet


def _where(info: TableInfo, bucket: int) -> str:
    return f"table '{info.path}', bucket {bucket}"


def _close_buckets(buckets: Iterable[_OpenBucket]) -> None:
    for bucket in buckets:
        if bucket.keys is not None:
            bucket.keys.close_rows(flush=False)
        bucket.tablet.close()


async def stop_tables(tables: Sequence[OpenTable]) -> None:
    """Save the readers' positions and end the writers, each whatever another raises."""
    saves = (table.consumers.save(is_last=True) for table in tables)
    await asyncio.gather(*saves, return_exceptions=True)  # what fails is said again
    stops = [asyncio.ensure_future(table.stop(flush=True)) for table in tables]
    await asyncio.gather(*stops, return_exceptions=True)
    await asyncio.gather(*stops)


def close_tablets(tablets: Iterable[LogTablet]) -> None:
    """Close logs, each whatever another raises, waiting for a commit under way."""
    with contextlib.ExitStack() as closing:
        for tablet in tablets:
            closing.callback(tablet.close)


class Adoptable(Protocol):
    """Existing lake tables that can become a table of this service. Blocking."""

    @property
    def descriptor(self) -> TableDescriptor:
        """The description of the table."""

    @property
    def owner_id(self) -> int:
        """The table id of the lake tables' present owner; the new id must be larger."""

    def last_commit_us(self) -> int:
        """Return a time that is not before the time of any commit in the lake tables."""

    def take_over(self, table_id: int, *, now_us: int) -> tuple[TableInfo, LakeState]:
        """Give the lake tables to the table with this id, and return the table."""


def adopt_table(
    find: Callable[[], Adoptable], registry: TableRegistry, directory: DataDirectory, now_us: int
) -> NewTable:
    """Fill the directory of the table found by `find`, to be opened and added. Blocking.

    The log of the table is empty.
    """
    rows = find()
    registry.check_new(rows.descriptor)
    return begin_adopted(take_over(rows, registry, now_us), registry, directory, now_us)


class TakenOver(NamedTuple):
    """Lake tables owned by a new table, and the new table.

    No commit in the lake tables is later than `last_commit_us`.
    """

    info: TableInfo
    lake: LakeState
    last_commit_us: int


def take_over(found: Adoptable, registry: TableRegistry, now_us: int) -> TakenOver:
    """Give lake tables to a new table, which begins later. Blocking."""
    last_commit_us = found.last_commit_us()
    table_id = registry.reserve_table_id(above=found.owner_id)
    return TakenOver(*found.take_over(table_id, now_us=now_us), last_commit_us)


def begin_adopted(
    taken: TakenOver, registry: TableRegistry, directory: DataDirectory, now_us: int
) -> NewTable:
    """Fill the directory of the new owner of lake tables. Blocking.

    The new table's commits are later than every commit in the lake tables, and than `now_us`.
    """
    info, lake, last_commit_us = taken
    table_id = info.table_id
    registry.make_directory(info)
    try:
        for bucket, end in lake.tiered_offsets.items():
            begin_log(
                directory.bucket(table_id, bucket),
                first_offset=end,
                identity=LogIdentity(table_id, bucket),
                filesystem=directory.filesystem,
                now_us=max(now_us, last_commit_us),
            )
    except OSError as error:
        registry.withdraw_table(info)
        raise StorageFailedError(f"cannot create table '{info.path}': {error.strerror}") from error
    return NewTable(info, lake, truncated_at_us=now_us)
