"""All running tables of one service: opening, creating, dropping, appending, publishing.

Invariants:
- tables, high watermarks and lake states change only on the event loop; worker threads write to
  disk first, so every visible change is durable
- changes of the set of tables and of the set of files happen one at a time
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from streamhouse.core.backoff import Backoff
from streamhouse.core.errors import (
    StorageFailedError,
    StreamhouseError,
    UnavailableError,
    UnknownOutcomeError,
)
from streamhouse.core.model.lake.facts import LakeState
from streamhouse.core.model.table import TableDescriptor, TableInfo, TablePath
from streamhouse.core.rows.companion import companion_of, in_opening_order
from streamhouse.core.threads import Pool
from streamhouse.storage_service.config import ServiceConfig
from streamhouse.storage_service.directory.damaged_table import DamagedTable
from streamhouse.storage_service.directory.data_directory import DataDirectory
from streamhouse.storage_service.directory.runtime import Runtime
from streamhouse.storage_service.directory.table_files import save_lake_state
from streamhouse.storage_service.directory.table_registry import TableRegistry
from streamhouse.storage_service.engine._opener import (
    Adoptable,
    NewTable,
    TableOpener,
    adopt_table,
    begin_adopted,
    close_tablets,
    stop_tables,
    take_over,
)
from streamhouse.storage_service.engine.added_checks import AddedChecks
from streamhouse.storage_service.engine.keys._key_copies import key_copier
from streamhouse.storage_service.engine.keys._key_mending import KeyMending
from streamhouse.storage_service.engine.keys.key_recovery import KeyRecovery
from streamhouse.storage_service.engine.keys.key_table import KeyTable
from streamhouse.storage_service.engine.open_table import Appended, Away, LogTable, OpenTable
from streamhouse.storage_service.engine.sidecar import Sidecar
from streamhouse.storage_service.engine.tiering_desk.tiering_coordinator import TieringCoordinator
from streamhouse.storage_service.engine.transactions._transaction_coordinator import (
    TransactionCoordinator,
)
from streamhouse.storage_service.engine.upkeep._retention import retain
from streamhouse.storage_service.engine.upkeep._row_expiry import RowExpiry
from streamhouse.storage_service.engine.upkeep.disk_budget import DiskBudget
from streamhouse.storage_service.engine.upkeep.jobs import Upkeep, upkeep_jobs
from streamhouse.storage_service.engine.wakeups import WaiterLimit
from streamhouse.storage_service.kv.plan.write_plan import KeyWrite
from streamhouse.storage_service.log.append_queue import RoutedBatch
from streamhouse.storage_service.log.group_commit import (
    CommitGroup,
    CommitLimits,
    GroupCommitter,
)
from streamhouse.storage_service.log.log_tablet import LogTablet
from streamhouse.storage_service.log.replica import Replication
from streamhouse.storage_service.ownership.journal.restore.journal_file import (
    refuse_without_journal,
)
from streamhouse.storage_service.ownership.shards.directory import ShardDirectory

__all__ = ["Appended", "TabletManager"]

_logger = logging.getLogger(__name__)


class TabletManager:
    """The tables of one data directory. Event loop only."""

    def __init__(
        self,
        config: ServiceConfig,
        *,
        directory: DataDirectory,
        registry: TableRegistry,
        runtime: Runtime,
        recovery: KeyRecovery,
        replication: Replication,
        sidecars: Sequence[type[Sidecar]] = (),
    ) -> None:
        self._config, self.directory, self.runtime = config, directory, runtime
        self.registry: Final = registry
        self._loop, self.upkeep = asyncio.get_running_loop(), Upkeep()
        self._tables: dict[TablePath, OpenTable] = {}
        self.away: Final[dict[TablePath, Away]] = {}  # being moved: nobody serves them
        self._places: dict[LogTablet, tuple[OpenTable, int]] = {}
        self.waiter_limit = WaiterLimit(config.waiting_fetches_max)
        limits = CommitLimits(bytes_max=config.commit_queue_bytes_max)
        self._committer = GroupCommitter(self._publish_soon, limits=limits, replication=replication)
        self._leaving: dict[TablePath, OpenTable] = {}  # of `away`: they are still read here
        self._deferred: set[LogTablet] = set()  # of keys and transactions: writers publish them
        self._key_threads = Pool("keys", config.key_threads)
        self._opener = TableOpener(
            config,
            directory=directory,
            runtime=runtime,
            waiter_limit=self.waiter_limit,
            key_threads=self._key_threads,
            submit=self._committer.submit,
            recovery=recovery,
            replication=replication,
            sidecars=sidecars,
        )
        self.copy_keys = key_copier(self.open_tables, self._loop)
        """Copies rows by key for a checkpoint of the journal; not called on the event loop."""
        tables = self.open_tables
        self.mending = KeyMending(tables=tables, find_lost=self._opener.lost_rows, runtime=runtime)
        self.transactions = TransactionCoordinator(
            config,
            directory=directory,
            submit=self._committer.submit,
            deferred=self._deferred,
            runtime=runtime,
            registry=registry,
        )
        self.tiering = TieringCoordinator(
            tables=self.open_tables,
            save=self._save_lake_state,
            wait_for_shown=replication.wait_for_shown,
            runtime=runtime,
            lease_ms=config.tiering_lease_ms,
            backoff=Backoff(
                first_s=config.tiering_backoff_ms_min / 1000,
                most_s=config.tiering_backoff_ms_max / 1000,
            ),
        )
        self.disk_budget = DiskBudget(
            config.disk_bytes_max,
            tables=self.open_tables,
            other_bytes=lambda: self.transactions.staged_bytes,
            on_pressure=self._tier_early,
            runtime=runtime,
        )
        self.row_expiry = RowExpiry(
            tables=tables, directory=directory, check_room=self.disk_budget.check, runtime=runtime
        )

    @classmethod
    async def open(
        cls,
        config: ServiceConfig,
        *,
        runtime: Runtime,
        recovery: KeyRecovery | None = None,
        names: ShardDirectory | None = None,
        directory: DataDirectory | None = None,
        replication: Replication | None = None,
        sidecars: Sequence[type[Sidecar]] = (),
    ) -> TabletManager:
        """Lock the data directory and recover every table; all acknowledged rows are visible.

        An open `directory` becomes the manager's. With a journal of the filesystem's changes,
        `replication` tells which writes wait for the journal.

        A table that cannot be opened is damaged; the remaining tables are served, unless the
        configuration is strict. A shard among several has its `names` in the shard directory.
        """
        recovery = recovery or KeyRecovery()
        is_journalled = directory is not None
        directory = directory or DataDirectory.open(config.data_dir)
        try:
            if not is_journalled:
                refuse_without_journal(directory.path)
            opening = functools.partial(
                TableRegistry,
                directory,
                databases_max=config.databases_max,
                tables_max=config.tables_max,
                buckets_max=config.buckets_max,
                names=names,
            )
            registry = await runtime.run(opening)
            recovery.check(registry.table)
            manager = cls(
                config,
                directory=directory,
                registry=registry,
                runtime=runtime,
                recovery=recovery,
                replication=replication or Replication(),
                sidecars=sidecars,
            )
        except BaseException:
            directory.close()
            raise
        try:
            for info in in_opening_order(registry.tables()):
                await manager._open_known(info)
            for damaged in registry.damaged():
                manager.transactions.keep_linked(damaged.path)
            await manager.runtime.run(registry.upgraded)
        except BaseException:
            await manager.close()
            raise
        jobs = upkeep_jobs(
            config,
            retention=functools.partial(retain, manager.open_tables, runtime),
            row_expiry=manager.row_expiry.look,
            mending=manager.mending.mend,
            transaction_timeouts=manager.transactions.drop_expired,
            disk_budget=manager.disk_budget.look,
        )
        manager.upkeep.start(jobs)
        return manager

    async def _open_known(self, info: TableInfo) -> None:
        """Open an existing table; a table that cannot be opened is set aside as damaged."""
        table = None
        try:
            table = await self._opener.open(info)
            self._add(table)
            await self.transactions.open(table)
        except Exception as error:  # whatever it is, the other tables are served
            is_full = isinstance(error, StorageFailedError) and error.is_for_want_of_room
            if self._config.is_strict or is_full:
                raise
            if not isinstance(error, StreamhouseError):
                _logger.exception("event=bug table=%s", info.path)
            if table is not None:
                self._remove(table)
                await self.give_up(table)
            self._set_damaged(DamagedTable.of(info.path, info.table_id, error))

    def _set_damaged(self, damaged: DamagedTable) -> None:
        why = (damaged.code, damaged.reason)
        _logger.error("event=table_damaged table=%s code=%s why=%r", damaged.path, *why)
        self.registry.set_damaged(damaged)
        self.transactions.keep_linked(damaged.path)

    @property
    def service_id(self) -> str:
        """The id of the data directory, made at its creation."""
        return self.registry.service_id

    @property
    def may_lose_rows(self) -> bool:
        """Whether readers see rows that would be lost with this machine."""
        return self._committer.shows_unstored

    @property
    def queued_bytes(self) -> int:
        """Appended bytes waiting for the disk."""
        return self._committer.queued_bytes

    # -- databases and tables ------------------------------------------------------------------

    def databases(self) -> list[str]:
        """The names of all databases, sorted."""
        return self.registry.databases()

    async def create_database(self, name: str) -> None:
        """Create a database."""
        async with self.runtime.changing_files:
            await self.runtime.run(self.registry.create_database, name)

    async def drop_database(self, name: str) -> None:
        """Drop an empty database."""
        async with self.runtime.changing_files:
            await self.runtime.run(self.registry.drop_database, name)

    def open_tables(self) -> Iterable[OpenTable]:
        """All tables."""
        return tuple(self._tables.values())

    def list_tables(self, database: str | None) -> list[TablePath]:
        """The paths of all tables, or of a database's tables, sorted, with damaged tables."""
        return self.registry.paths(database)

    def has_table(self, path: TablePath) -> bool:
        """Whether a table of this name exists, damaged or not."""
        return self.registry.has(path)

    def damaged_tables(self) -> list[DamagedTable]:
        """The damaged tables, sorted by path."""
        return self.registry.damaged()

    async def release_names(self) -> None:
        """Release the names of dropped tables that the shard directory still has."""
        async with self.runtime.changing_files:
            await self.runtime.run(self.registry.release_names)

    def table(self, path: TablePath) -> OpenTable:
        """Return a table; raises as `TableRegistry`, `UnavailableError` for a closed table."""
        table = self._tables.get(path)
        if table is None:
            self._check_not_away(path)
            self.registry.table(path)
            raise self.registry.not_open(path)
        return table

    def check_open(self, table: OpenTable) -> None:
        """Raise `UnavailableError` for a moved table, `TableNotFoundError` after a durable drop."""
        if table.is_dropped:
            self._check_not_away(table.path)
            self.registry.check_dropped(table.path, table.info.table_id)
            error = self.registry.not_found(table.path)
            error.table = str(table.path)
            raise error

    def _check_not_away(self, path: TablePath) -> None:
        if path in self.away:
            raise UnavailableError(self.away[path].why.message)

    async def create_table(self, descriptor: TableDescriptor) -> OpenTable:
        """Create a table with empty logs; durable on return."""
        async with self.runtime.changing_files:
            prepare = functools.partial(
                self.registry.prepare_table, created_at_us=self.runtime.clock_us()
            )
            info = await self.runtime.run(prepare, descriptor)
            nothing = LakeState(tiered_offsets=dict.fromkeys(range(info.bucket_count), 0))
            return await self._open_new(NewTable(info, nothing))

    async def adopt_table(self, find: Callable[[], Adoptable]) -> OpenTable:
        """Create the table of the lake found by `find`, as `adopt_table`; durable on return."""
        async with self.runtime.changing_files:
            run = self.runtime.run(
                adopt_table, find, self.registry, self.directory, self.runtime.clock_us()
            )
            return await self._open_new(await run)

    async def replace_by_lake(self, table: OpenTable, find: Callable[[], Adoptable]) -> OpenTable:
        """Replace a diverged table by the lake found by `find`; the former files are kept.

        First the new table owns the lake, then the old directory gets another name, then the new
        table begins. A crash after the first step leaves the old table, after the second step no
        table; a repeated adoption completes both.
        """
        async with self.runtime.changing_files:
            self.check_open(table)
            lake_tables, now_us = await self.runtime.run(find), table.clock.next_us()
            adopted = await self.runtime.run(take_over, lake_tables, self.registry, now_us)
            async with self._leaving_for_good([table]):
                await self.runtime.run(self.registry.set_aside, table.path)
            await self.give_up(table)
            begin = self.runtime.run(begin_adopted, adopted, self.registry, self.directory, now_us)
            return await self._open_new(await begin)

    async def _open_new(self, new: NewTable) -> OpenTable:
        table = None
        try:
            table = await self._opener.create(new)
            await self.transactions.open(table)
            await self.runtime.run(self.registry.add_table, new.info)
        except BaseException as error:
            if table is not None:
                await self.give_up(table)
            # No disk space or no files left: half a table would be in everybody's way.
            if isinstance(error, StreamhouseError) and not isinstance(error, UnknownOutcomeError):
                await self.runtime.run(self.registry.withdraw_table, new.info)
            raise
        self._add(table)
        return table

    async def alter_properties(
        self,
        path: TablePath,
        *,
        updates: Mapping[str, str],
        removals: Sequence[str],
        added: AddedChecks | None = None,
    ) -> TableInfo:
        """Set and remove properties in one step. `added` has judged rows that left the log."""
        alter = functools.partial(self.registry.with_properties, updates=updates, removals=removals)
        added = added or AddedChecks(self.table(path), alter(path), self.runtime)
        await added.prepare(self.transactions.of(self.table(path)))
        async with self.runtime.changing_files:
            table, info = self.table(path), alter(path)
            taking_effect = added.taking_effect(table, info, self.transactions.of(table))
            async with self.tiering.changing(table, info), taking_effect:
                table.info = await self.runtime.run(self.registry.replace_table, info)
                await table.follow()
            return info

    async def alter_partitioning(self, path: TablePath, fields: Sequence[str]) -> TableInfo:
        """Change the lake partitioning of rows tiered from now on."""
        async with self.runtime.changing_files:
            table = self.table(path)
            table.info = await self.runtime.run(self.registry.alter_partitioning, path, fields)
            await table.follow()
            return table.info

    async def alter_schema(
        self, path: TablePath, changes: Sequence[Mapping[str, Any]]
    ) -> TableInfo:
        """Change the schema, all changes or none; stored rows stay unchanged."""
        async with self.runtime.changing_files:
            table, alter = self.table(path), (self.registry.alter_schema, path, changes)
            if isinstance(table, KeyTable):
                self.transactions.of(table).check_none_open()
                async with table.gate.alone():
                    await table.change_schema(await self.runtime.run(*alter))
            else:
                table.info = await self.runtime.run(*alter)
            return table.info

    async def drop_table(self, path: TablePath) -> None:
        """Drop a table and its table of rejected rows, durably, with all files."""
        async with self.runtime.changing_files:
            tables = [self.table(path), *self._companions(path)]
            async with self._leaving_for_good(tables):
                streams = self.transactions.of(tables[0]).outcomes.streams
                await self.runtime.run(self.registry.drop_table, [t.path for t in tables], streams)
            for table in tables:
                await self.give_up(table)
                await self.runtime.run(self.registry.purge, table.info.table_id)

    def _companions(self, path: TablePath) -> list[OpenTable]:
        """Return the table of a table's rejected rows, if usable."""
        if (companion := companion_of(path)) is None:
            return []
        self._check_not_away(companion)
        return [self._tables[companion]] if companion in self._tables else []

    @contextlib.asynccontextmanager
    async def _leaving_for_good(self, tables: Sequence[OpenTable]) -> AsyncIterator[None]:
        for table in tables:
            # Gone for new requests first: none of them may meet a half-dropped table.
            self._remove(table)
            await self.mending.leave(table)
            # A file that is saved where the directory was would be in the journal for good.
            await self.tiering.leave(table)
            await table.end_saves(self.registry.not_open(table.path))
        try:
            yield
        except StreamhouseError:
            registered = {info.path for info in self.registry.tables()}
            for table in tables:
                if table.path in registered:
                    self._add(table)
                    table.go_on_saving()
            raise

    # -- tables that move to another shard, or come from one; see `table_moves.py` ----------------

    def readable(self, path: TablePath) -> OpenTable:
        """Return a table for reads only: the files of the table may be frozen."""
        return self._leaving.get(path) or self.table(path)

    def check_readable(self, table: OpenTable) -> None:
        """Raise as `check_open` if `table` can no longer be read."""
        if not self.is_readable(table):
            self.check_open(table)

    def is_readable(self, table: OpenTable) -> bool:
        """Whether `table` can still be read."""
        return not table.is_dropped or self._leaving.get(table.path) is table

    def hide(self, table: OpenTable, why: UnavailableError) -> None:
        """Allow only reads of `table`, until `end_reads`; all other calls raise `why`."""
        self.away[table.path], self._leaving[table.path] = Away(why, table.info), table
        self._remove(table)
        table.wakeups.wake_all()
        self.tiering.forget(table)

    def end_reads(self, table: OpenTable) -> None:
        """Forbid new reads of a frozen table; reads under way are still answered."""
        if self._leaving.get(table.path) is table:
            del self._leaving[table.path]
            table.wakeups.wake_all()

    async def put_back(self, info: TableInfo) -> None:
        """Serve a frozen table that `give_up` has closed."""
        if info.path in self.away:
            await self.show(None, info)

    async def open_arrived(self, info: TableInfo) -> OpenTable:
        """Open a table with complete files; `show` makes the table served."""
        table = await self._opener.open(info)
        try:
            await self.transactions.open(table)
        except BaseException:
            await self.give_up(table)
            raise
        return table

    async def give_up(self, table: OpenTable) -> None:
        """Close an open table that is not served: first the work for the table, then the logs."""
        table.wakeups.wake_all()
        await self.transactions.forget(table)
        await table.stop(flush=False)
        self._deferred.difference_update(table.tablets)
        await self.runtime.run(close_tablets, table.tablets)

    async def show(self, table: OpenTable | None, info: TableInfo) -> None:
        """Serve an opened table of this shard; with None the table is away until opened."""
        try:
            if table is None:
                return await self._open_known(info)
            self._add(table)
        finally:
            self.away.pop(info.path, None)

    async def drop_damaged(self, path: TablePath) -> None:
        """Drop a damaged table and its table of rejected rows; the files of both stay."""
        async with self.runtime.changing_files:
            companions = self._companions(path)
            set_aside = functools.partial(self.registry.set_aside, is_free=True)
            await self.runtime.run(self.registry.drop_damaged, path)
            async with self._leaving_for_good(companions):
                for table in companions:
                    await self.runtime.run(set_aside, table.path)
            for table in companions:
                await self.give_up(table)

    # -- rows ----------------------------------------------------------------------------------

    async def append(self, table: LogTable, batches: Sequence[RoutedBatch]) -> Appended:
        """Append all batches or none; see `LogTable.append`."""
        try:
            return await table.append(batches, submit=self._committer.submit)
        except StreamhouseError:
            # The log of a table dropped meanwhile is closed, which is not what the caller asked.
            self.check_open(table)
            raise

    async def write_keys(
        self,
        table: KeyTable,
        writes: Sequence[KeyWrite],
        *,
        columns: Sequence[str] | None,
        writer_id: int,
    ) -> Appended:
        """Upsert and delete all of `writes` or nothing; durable and visible on return."""
        try:
            return await table.write(writes, columns=columns, writer_id=writer_id)
        except StreamhouseError:
            self.check_open(table)
            raise

    def _publish_soon(self, group: CommitGroup) -> None:
        self._loop.call_soon_threadsafe(self._publish, group)

    def _publish(self, group: CommitGroup) -> None:
        """Make a commit group visible in one step, then wake the waiting readers."""
        group.complete(deferred=self._deferred)
        times = group.times
        seconds = times.synced_s - times.begun_s
        self.runtime.observer.committed(units=len(group.outcomes), seconds=seconds)
        touched: dict[OpenTable, list[int]] = {}
        for tablet, _ in group.ends:
            place = self._places.get(tablet)
            if place is not None and tablet not in self._deferred:
                touched.setdefault(place[0], []).append(place[1])
        for table, buckets in touched.items():
            table.wakeups.wake(buckets)

    def wake_all(self) -> None:
        """Wake all waiting readers."""
        for table in self._tables.values():
            table.wakeups.wake_all()

    async def close(self) -> None:
        """Commit the queued units, close all logs, unlock the directory: each, whatever fails."""
        self.mending.stop()
        tables = (*self.open_tables(), *self._leaving.values())
        tablets = [tablet for table in tables for tablet in table.tablets]
        async with contextlib.AsyncExitStack() as closing:  # the last addition is done first
            closing.callback(self.directory.close)
            closing.callback(self._key_threads.shutdown)
            closing.push_async_callback(self.runtime.run, close_tablets, tablets)
            closing.push_async_callback(asyncio.sleep, 0)  # completes the last commit groups
            closing.push_async_callback(self.runtime.run, self._committer.stop)
            closing.push_async_callback(stop_tables, tables)
            closing.push_async_callback(self.transactions.stop)
            closing.push_async_callback(self.upkeep.stop)

    # -- inside --------------------------------------------------------------------------------

    def _add(self, table: OpenTable) -> None:
        table.is_dropped = False
        self._tables[table.path] = table
        self._places |= {tablet: (table, bucket) for bucket, tablet in enumerate(table.tablets)}
        self._deferred.update(table.logs_of_writers)

    def _remove(self, table: OpenTable) -> None:
        del self._tables[table.path]
        for tablet in table.tablets:
            del self._places[tablet]
        table.is_dropped = True

    def _tier_early(self, is_early: bool) -> None:
        self.tiering.is_early = is_early

    def _save_lake_state(self, table: OpenTable, lake: LakeState) -> None:
        save_lake_state(self.directory, table.info, lake)
