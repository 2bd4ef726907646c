"""One bucket of a primary key table: the changelog, and the rows by key that the changelog makes.

Invariants:
- the rows are never ahead of the durable log
- `rows.applied_offset` is `log.high_watermark` or, during the publication of a write, larger; the
  offset of damaged rows stays, while the log shows the changes on their way to the rows
- the log keeps every change missing from the rows' own files
- rows with damaged files are neither looked up nor changed until they are made again. A mark beside
  the rows tells the next start, which makes the rows again instead of meeting the damage. The
  changelog stays readable
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from streamhouse.core.errors import (
    CorruptDataError,
    StorageFailedError,
    StreamhouseError,
)
from streamhouse.core.model.lake.limits import LakeLimits
from streamhouse.core.model.schema_change import read_stored
from streamhouse.core.model.table import TableInfo
from streamhouse.reading.where.checks import Checks
from streamhouse.storage_service.directory.state_file import read_json, replace_json
from streamhouse.storage_service.kv.kv_tablet import KvTablet
from streamhouse.storage_service.kv.plan.upsert_plan import PlannedWrite
from streamhouse.storage_service.kv.plan.write_plan import KeyWrite
from streamhouse.storage_service.kv.table_rules import TableRules
from streamhouse.storage_service.log.append_queue import AppendResult
from streamhouse.storage_service.log.filesystem import LocalFilesystem
from streamhouse.storage_service.log.log_tablet import LogTablet
from streamhouse.storage_service.log.readable_log import ReadableLog

__all__ = [
    "AppliedRows",
    "Damage",
    "KeyBucket",
    "damage_of",
    "mark_damaged",
    "replay_log",
    "table_rules",
]

_logger = logging.getLogger(__name__)

_DAMAGE_FILE: Final = "damaged.json"

_REPLAY_BYTES = 8 << 20


def table_rules(info: TableInfo) -> TableRules:
    """Return the facts about a primary key table that planning needs."""
    return TableRules(
        table=str(info.path),
        schema=info.schema,
        primary_key=info.descriptor.primary_key,
        merge=info.descriptor.merge_rules(),
        schema_id=info.schema_id,
        earlier={
            schema_id: schema
            for schema_id, schema in info.schema_versions.items()
            if schema_id != info.schema_id
        },
        limits=LakeLimits.of_table(info, info.schema_id),
        checks=Checks.of_table(info),
        renews_unchanged=info.properties().datalake_ttl_ms is not None,
    )


def replay_log(
    log: ReadableLog,
    rows: KvTablet,
    *,
    info: TableInfo,
    where: str,
    go_on: Callable[[], None] = lambda: None,
) -> int:
    """Apply the visible changes of `log` missing from `rows`, and return their number.

    An error of `go_on` ends the replay. Durable changes above the high watermark may be incomplete,
    or about to be published.
    """
    start = rows.applied_offset
    while rows.applied_offset < log.high_watermark:
        go_on()
        for frame in log.read(rows.applied_offset, bytes_max=_REPLAY_BYTES):
            try:
                changes = read_stored(frame.payload, info, stored_as=frame.schema_id)
            except CorruptDataError as error:
                place = f"{where}, offset {frame.base_offset}"
                raise CorruptDataError(f"{place}: {error.message}") from error
            rows.replay(changes, base_offset=frame.base_offset)
    return rows.applied_offset - start


class AppliedRows(NamedTuple):
    """The rows of a bucket after an applied write, ready to be published."""

    end_offset: int
    row_count: int
    needs_upkeep: bool


class KeyBucket:
    """A log and the rows of its changes, up to date."""

    def __init__(self, log: LogTablet, rows: KvTablet, *, where: str, info: TableInfo) -> None:
        """Apply the visible changes missing from the rows, or raise CorruptDataError."""
        self.log = log
        self.rows = rows
        self.where = where
        self._failure: StreamhouseError | None = None
        self._take(rows, info)
        self.row_count = rows.row_count
        """How many rows there are at the high watermark."""

    def _take(self, rows: KvTablet, info: TableInfo) -> None:
        log, where = self.log, self.where
        rows.report_damage(self._damaged)
        assert rows.applied_offset >= log.log_start_offset, "else the rows are restored first"
        if rows.applied_offset > log.log_end_offset:
            raise CorruptDataError(
                f"{where}: the rows by key are there up to offset {rows.applied_offset}, but the"
                f" log ends at {log.log_end_offset}; acknowledged changes are missing from the log"
            )
        count = replay_log(log, rows, info=info, where=where)
        if count:
            _logger.info(
                "event=replayed bucket=%r changes=%d end=%d", where, count, rows.applied_offset
            )

    def replace_rows(self, rows: KvTablet, info: TableInfo) -> None:
        """Replace the damaged, closed rows by `rows`, which were made again.

        For the holder of the rows, without a write under way; off the event loop.
        """
        assert self.is_damaged
        self.rows = rows
        self._take(rows, info)
        self._failure = None

    @property
    def is_usable(self) -> bool:
        """Whether lookups are possible, and the rows can still follow the log."""
        return self._failure is None

    @property
    def failure(self) -> str:
        """The reason why the rows are out of use; empty for usable rows."""
        return "" if self._failure is None else self._failure.message

    @property
    def is_damaged(self) -> bool:
        """Whether the rows are out of use because of damage of their files."""
        return isinstance(self._failure, CorruptDataError)

    def check_usable(self) -> None:
        """Raise for damaged rows, and for rows that can no longer follow the log."""
        if self._failure is not None:
            raise type(self._failure)(self._failure.message)

    def check_writable(self) -> None:
        """Raise StorageFailedError if no write is possible until a restart."""
        self.check_usable()
        if self.log.is_read_only:
            raise StorageFailedError(
                f"{self.where} is read-only, because the disk failed; check the disk and restart"
                " the service"
            )

    def repetition_of(self, write: KeyWrite, writer_id: int) -> AppendResult | None:
        """Return the stored batch that `write` repeats, if any.

        Raises if the bucket takes no writes, and for a sequence out of order.
        """
        self.check_writable()
        if not writer_id:
            return None
        return self.log.find_batch(writer_id, sequence=write.sequence, continuity=write.continuity)

    def apply(self, write: PlannedWrite) -> AppliedRows | None:
        """Apply a durable write, unless it is applied; for the holder of the rows.

        Returns None once durable changes cannot be applied any more. Changes of damaged rows are
        published all the same: the rows are made again from the changelog.
        """
        end, needs_upkeep = write.end_offset, False
        try:
            self.check_usable()
            if end > self.rows.applied_offset:
                needs_upkeep = self.rows.apply(write)
        except (CorruptDataError, StorageFailedError) as error:
            if self.is_damaged:
                return AppliedRows(end, self.row_count, False)
            if self.is_usable:
                self.fail(f"a durable change was not applied: {error.message}")
            return None
        return AppliedRows(end, self.rows.row_count, needs_upkeep)

    def fail(self, reason: str) -> None:
        """Take the rows out of use: durable changes could not be applied to them."""
        self._failure = self._failure or StorageFailedError(
            f"{self.where}: its rows are out of use, {reason}; restart the service"
        )
        _logger.error("event=rows_failed bucket=%r why=%r", self.where, reason)

    def _damaged(self, error: CorruptDataError) -> CorruptDataError:
        """Take the rows out of use, for the next start as well; on any thread."""
        ours = CorruptDataError(
            f"{self.where}: its rows by key are damaged ({error.message}) and out of use until the"
            " service has made them again from changelog and lake; its log says if it cannot"
        )
        # Of a dropped table the files go while readers are still at them.
        if self._failure is not None or not self.rows.path.exists():
            return ours
        self._failure = ours
        _logger.error("event=rows_damaged bucket=%r why=%r", self.where, error.message)
        applied_offset = 0
        with contextlib.suppress(StreamhouseError):
            # Not known while the rows are being closed.
            applied_offset = self.rows.flushed_offset
        try:
            mark_damaged(self.rows.path, error.message, applied_offset=applied_offset)
        except StreamhouseError as failure:
            # Then the next start meets the damage as this one did.
            _logger.warning("event=mark_failed bucket=%r why=%r", self.where, failure.message)
        return CorruptDataError(ours.message)

    def publish(self, end_offset: int, *, row_count: int) -> None:
        """Make applied changes visible to fetches. Event loop only."""
        self.log.publish(end_offset)
        self.row_count = row_count

    def close_rows(self, *, flush: bool) -> None:
        """Close the rows; unflushed changes come back from the log."""
        if flush and self.is_usable:
            try:
                self.rows.flush()
            except StreamhouseError as error:
                _logger.warning("event=flush_failed bucket=%r why=%r", self.where, error.message)
        try:
            self.rows.close()
        except StreamhouseError as error:
            # Of a dropped table the files are gone, which a flush on its way stumbles over.
            _logger.warning("event=close_failed bucket=%r why=%r", self.where, error.message)


class Damage(NamedTuple):
    """The damage of the rows, and the offset up to which the rows had the changelog."""

    reason: str
    applied_offset: int = 0


def mark_damaged(rows: Path, reason: str, *, applied_offset: int) -> None:
    """Mark the rows at `rows`; durable on return."""
    replace_json(
        LocalFilesystem(), rows / _DAMAGE_FILE, {"reason": reason, "applied_offset": applied_offset}
    )


def damage_of(rows: Path) -> Damage | None:
    """Return the mark of the rows at `rows`; None without a mark."""
    file = rows / _DAMAGE_FILE
    if not file.exists():
        return None
    try:
        mark = read_json(file)
        return Damage(
            f"the rows by key are damaged ({mark['reason']})", int(mark["applied_offset"])
        )
    except (CorruptDataError, KeyError, TypeError, ValueError):
        # That there is one says enough.
        return Damage(f"the rows by key are damaged, as {file} says")
