"""A running primary key table: rows by key beside each bucket's log, and the writer of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from streamhouse.core.errors import InvalidRequestError
from streamhouse.core.model.casts.written_rows import (
    current_columns,
    in_current_version,
    read_before_change,
)
from streamhouse.core.model.lake.facts import LakeState
from streamhouse.core.model.table import TableInfo
from streamhouse.core.traces.stages import stage_ended
from streamhouse.storage_service.directory.runtime import clock_us
from streamhouse.storage_service.engine._commit_clock import CommitClock
from streamhouse.storage_service.engine.consumers import Consumers
from streamhouse.storage_service.engine.keys._key_writer import KeyWriter
from streamhouse.storage_service.engine.keys.key_bucket import KeyBucket, table_rules
from streamhouse.storage_service.engine.keys.key_lookup import KeyLookup, LookupTable
from streamhouse.storage_service.engine.lake_pins import LakePins
from streamhouse.storage_service.engine.open_table import Appended, OpenTable
from streamhouse.storage_service.engine.sidecar import Sidecar
from streamhouse.storage_service.engine.wakeups import Wakeups
from streamhouse.storage_service.kv.plan.write_plan import KeyWrite
from streamhouse.storage_service.log.log_tablet import LogTablet

__all__ = ["KeyTable"]


class KeyTable(OpenTable, LookupTable):
    """A table with a changelog as its log, which an enabled or disabled lake needs."""

    def __init__(
        self,
        info: TableInfo,
        buckets: Sequence[KeyBucket],
        writer: KeyWriter,
        *,
        lake: LakeState,
        lake_pins: LakePins,
        consumers: Consumers,
        sidecars: Sequence[Sidecar],
        wakeups: Wakeups,
        clock: CommitClock,
    ) -> None:
        logs = [bucket.log for bucket in buckets]
        super().__init__(
            info,
            logs,
            lake=lake,
            lake_pins=lake_pins,
            consumers=consumers,
            sidecars=sidecars,
            wakeups=wakeups,
            clock=clock,
        )
        self.key_buckets = tuple(buckets)
        self.key_writer = writer
        self.lookup = KeyLookup(info, self.key_buckets)

    @property
    def row_count(self) -> int:
        """The number of keys with a row."""
        return sum(bucket.row_count for bucket in self.key_buckets)

    def count_rows(self) -> int:
        """See `LookupTable.count_rows`; a consistent count over all buckets."""
        for bucket in self.key_buckets:
            bucket.check_usable()
        return self.row_count

    def shows(self, ends: Mapping[int, int]) -> bool:
        """Whether fetches see the changes below these ends."""
        return all(self.key_buckets[b].log.high_watermark >= end for b, end in ends.items())

    @property
    def key_folders(self) -> Sequence[Path]:
        """The directories of the rows by key, in the order of the buckets."""
        return [bucket.rows.path for bucket in self.key_buckets]

    @property
    def failures(self) -> list[str]:
        """The reasons why rows by key are out of use."""
        return [bucket.failure for bucket in self.key_buckets if bucket.failure]

    @property
    def can_store(self) -> bool:
        """Whether no log is read-only, and all rows by key are in use."""
        return super().can_store and all(bucket.is_usable for bucket in self.key_buckets)

    @property
    def logs_of_writers(self) -> Sequence[LogTablet]:
        """All logs: a change is visible once its row can be looked up."""
        return self.tablets

    def check_writable(self, bucket: int) -> None:
        """Raise if the bucket accepts no changes, because its disk or its rows failed."""
        self.key_buckets[bucket].check_writable()

    async def write(
        self, writes: Sequence[KeyWrite], *, columns: Sequence[str] | None, writer_id: int
    ) -> Appended:
        """Store all of `writes` or nothing; durable and visible on return."""
        if not writes:
            return Appended(ranges={}, timestamp_us=clock_us())
        await self.gate.enter()
        stage_ended("gate")
        try:
            # The schema cannot change from here on.
            if any(write.schema_id not in (None, self.info.schema_id) for write in writes):
                writes, columns = self._current(writes, columns)
            return await self.key_writer.write(writes, columns=columns, writer_id=writer_id)
        except InvalidRequestError as error:
            # They may be right for the schema there is now, and are read by it then.
            if all(write.schema_id in (None, self.info.schema_id) for write in writes):
                raise
            raise read_before_change(str(self.info.path), str(error.message)) from error
        finally:
            # A write whose caller has gone goes on: commits wait for it by `settle`.
            self.gate.leave()

    def _current(
        self, writes: Sequence[KeyWrite], columns: Sequence[str] | None
    ) -> tuple[Sequence[KeyWrite], Sequence[str] | None]:
        """Return writes read with an earlier schema in the form of the current schema."""
        current = []
        for write in writes:
            schema_id = self.info.schema_id if write.schema_id is None else write.schema_id
            rows = in_current_version(
                self.info,
                write.rows,
                schema_id=schema_id,
                is_partial=columns is not None,
                deletes=write.deletes,
            )
            current.append(write._replace(rows=rows))
        if columns is not None:
            columns = current_columns(self.info, columns, schema_id=schema_id)
        return current, columns

    async def settle(self) -> None:
        """Return when all accepted writes are answered."""
        await self.key_writer.settle()

    async def stop(self, *, flush: bool) -> None:
        """Finish the waiting writes, accept no more, close the rows; the logs stay open."""
        await self.key_writer.stop(flush=flush)

    async def follow(self) -> None:
        """Write with the table's current properties from now on."""
        await super().follow()
        rules = table_rules(self.info)

        def change() -> None:
            for bucket in self.key_buckets:
                bucket.rows.follow(rules)

        await self.key_writer.on_thread(change)

    async def change_schema(self, info: TableInfo) -> None:
        """Change the rows by key to the schema of `info`, which is durable.

        The caller holds the table's write gate. Stored rows stay unchanged.
        """
        await self.settle()
        rules = table_rules(info)

        def change() -> None:
            for bucket in self.key_buckets:
                # Those that are out of use are made again with the schema there is then.
                if bucket.is_usable:
                    bucket.rows.change_schema(rules)

        await self.key_writer.on_thread(change)
        self.info = info
        self.lookup = KeyLookup(info, self.key_buckets)

    async def forgettable(self, bucket: int, *, timestamp_us_before: int) -> int:
        """Return the offset below which changes may leave the log: all their rows are durable.

        Flushes rows if only the flush keeps expired changes in the log.
        """
        keys = self.key_buckets[bucket]
        if not keys.is_usable:
            # They may have to be made again, from all of the log.
            return 0
        offset_max = self._covered_by_lake(bucket)
        # A bucket that nobody writes to gives back here what others need now.
        await self.key_writer.on_thread(keys.rows.keep_to_budget)

        def flush() -> int:
            expired = keys.log.offset_for_timestamp(timestamp_us_before)
            if keys.rows.flushed_offset < min(offset_max, expired):
                keys.rows.flush()
            return keys.rows.flushed_offset

        return min(offset_max, await self.key_writer.on_thread(flush))
