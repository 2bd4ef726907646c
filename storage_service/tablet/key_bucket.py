"""One bucket of a primary key table: its changelog and its rows by key, which belong together.

Invariants:
- the rows are never ahead of what is durable in the log
- `rows.applied_offset` is `log.high_watermark` or, while a write is being published, beyond it
- the log keeps every change that the rows' own files do not have yet
"""

from __future__ import annotations

import logging
from pathlib import Path

import pyarrow as pa

from streamhouse.storage_service.errors import (
    CorruptDataError,
    StorageFailedError,
    StreamhouseError,
)
from streamhouse.storage_service.kv.kv_tablet import KvOptions, KvTablet
from streamhouse.storage_service.kv.write_input import TableRules
from streamhouse.storage_service.log.log_tablet import LogTablet
from streamhouse.storage_service.log.segment import StoredBatch
from streamhouse.storage_service.model.lake_values import LakeLimits
from streamhouse.storage_service.model.schema_change import read_stored
from streamhouse.storage_service.model.table import TableInfo

__all__ = ["KeyBucket", "open_rows", "table_rules"]

_logger = logging.getLogger(__name__)

_REPLAY_BYTES = 8 << 20


def table_rules(info: TableInfo) -> TableRules:
    """Return what planning writes needs to know of a primary key table."""
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
        limits=LakeLimits.of(info.descriptor),
        renews_unchanged=info.properties().datalake_ttl_ms is not None,
    )


def open_rows(
    path: Path, *, info: TableInfo, bucket: int, rules: TableRules, options: KvOptions
) -> KvTablet:
    """Open the rows at `path`, or make them empty; they are behind the log until `KeyBucket`."""
    return KvTablet(
        path,
        table_id=info.table_id,
        bucket=bucket,
        rules=rules,
        options=options,
    )


class KeyBucket:
    """A log and the rows that its changes make, brought up to date."""

    def __init__(self, log: LogTablet, rows: KvTablet, *, where: str, info: TableInfo) -> None:
        """Apply what the log has and the rows have not; raises CorruptDataError if it cannot be."""
        self.log = log
        self.rows = rows
        self.where = where
        self._failure = ""
        self._recover(info)
        self.row_count = rows.row_count
        """How many rows there are at the high watermark."""

    def _recover(self, info: TableInfo) -> None:
        applied, start, end = (
            self.rows.applied_offset,
            self.log.log_start_offset,
            self.log.log_end_offset,
        )
        assert applied >= start, "else the rows are restored first"
        if applied > end:
            raise CorruptDataError(
                f"{self.where}: the rows by key are there up to offset {applied}, but the log ends"
                f" at {end}; acknowledged changes are missing from the log"
            )
        while self.rows.applied_offset < end:
            for frame in self.log.read(self.rows.applied_offset, bytes_max=_REPLAY_BYTES):
                self.rows.replay(self._changes(frame, info), base_offset=frame.base_offset)
        if end > applied:
            _logger.info("event=replayed bucket=%r start=%d end=%d", self.where, applied, end)

    def _changes(self, frame: StoredBatch, info: TableInfo) -> pa.RecordBatch:
        try:
            return read_stored(frame.payload, info, stored_as=frame.schema_id)
        except CorruptDataError as error:
            raise CorruptDataError(
                f"{self.where}, offset {frame.base_offset}: {error.message}"
            ) from error

    @property
    def is_usable(self) -> bool:
        """Whether the rows can still be brought up to the log."""
        return not self._failure

    def check_usable(self) -> None:
        """Raise StorageFailedError once the rows can no longer be brought up to the log."""
        if self._failure:
            raise StorageFailedError(
                f"{self.where}: its rows are out of use, {self._failure}; restart the service"
            )

    def check_writable(self) -> None:
        """Raise StorageFailedError if nothing can be written until the service restarts."""
        self.check_usable()
        if self.log.is_read_only:
            raise StorageFailedError(
                f"{self.where} is read-only, because the disk failed; check the disk and restart"
                " the service"
            )

    def fail(self, reason: str) -> None:
        """Take the rows out of use: durable changes could not be applied to them."""
        _logger.error("event=rows_failed bucket=%r why=%r", self.where, reason)
        self._failure = self._failure or reason

    def publish(self, end_offset: int, *, row_count: int) -> None:
        """Make applied changes visible to fetches. Event loop only."""
        self.log.publish(end_offset)
        self.row_count = row_count

    def flush_before(self, offset: int) -> int:
        """Make the rows durable without the log up to `offset`, if needed; return how far they are.

        On the thread that writes the rows.
        """
        if self.rows.flushed_offset < offset:
            self.rows.flush()
        return self.rows.flushed_offset

    def close_rows(self, *, flush: bool) -> None:
        """Close the rows; what is not flushed comes back from the log."""
        if flush and not self._failure:
            try:
                self.rows.flush()
            except StreamhouseError as error:
                _logger.warning("event=flush_failed bucket=%r why=%r", self.where, error.message)
        try:
            self.rows.close()
        except StreamhouseError as error:
            # Of a dropped table the files are gone, which a flush on its way stumbles over.
            _logger.warning("event=close_failed bucket=%r why=%r", self.where, error.message)
