"""The reads of one fetch: partition after partition, until the answer has enough bytes.

An error ends the reading of the partition only. Records from before the error are answered, and the
next request begins at the error. Blocking, on any thread.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from streamhouse.core.errors import OffsetOutOfRangeError, StreamhouseError
from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.kafka_door.fetching._partition_records import (
    RecordsWriter,
    TableRecords,
)
from streamhouse.storage_service.log.log_tablet import LogTablet
from streamhouse.storage_service.server.history.failures import failure_of
from streamhouse.storage_service.server.history.lake_reads import Older, OlderReads
from streamhouse.storage_service.server.history.readable_offsets import ReadableOffsets

__all__ = ["FetchedRecords", "Part", "read_parts"]

_logger = logging.getLogger(__name__)

# The log's index has an entry for about as many bytes of small batches.
_SMALL_EXTENT_BYTES: Final = 8 << 10
_UNKNOWN_BYTES: Final = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A partition to read, as the event loop last saw the partition."""

    number: int
    """The position of the partition in the request."""
    partition: int
    offset: int
    bytes_max: int
    open_table: OpenTable
    table: TableRecords
    tablet: LogTablet
    readable: ReadableOffsets

    @property
    def is_in_lake(self) -> bool:
        """Whether the requested offset has left the log."""
        return self.offset < self.readable.log_start

    def large_batch_bytes(self) -> int:
        """Return about the size of the first stored batch of the log; 0 if small."""
        try:
            byte_count = self.tablet.extent(self.offset).byte_count
        except StreamhouseError:
            # The read will raise the error.
            return _UNKNOWN_BYTES
        return byte_count if byte_count > _SMALL_EXTENT_BYTES else 0


@dataclass(frozen=True, slots=True)
class FetchedRecords:
    """The records by the number of the partition in the request."""

    writers: Mapping[int, RecordsWriter] = field(default_factory=dict)
    errors: Mapping[int, StreamhouseError] = field(default_factory=dict)

    @property
    def byte_count(self) -> int:
        """The bytes of records that were read."""
        return sum(writer.byte_count for writer in self.writers.values())

    @property
    def row_count(self) -> int:
        """The rows that were read."""
        return sum(writer.row_count for writer in self.writers.values())


def read_parts(parts: Sequence[Part], bytes_max: int, older: Older | None = None) -> FetchedRecords:
    """Read about `bytes_max` bytes of records, at least one record if any is readable.

    `older` reads rows that have left the log.
    """
    writers: dict[int, RecordsWriter] = {}
    errors: dict[int, StreamhouseError] = {}
    remaining_bytes = bytes_max
    for part in parts:
        if remaining_bytes <= 0:
            break
        writer = writers[part.number] = RecordsWriter(
            table=part.table,
            first_offset=part.offset,
            bytes_max=min(part.bytes_max, remaining_bytes),
            is_first=remaining_bytes == bytes_max,
        )
        try:
            _read_part(part, writer, older)
        except Exception as error:  # noqa: BLE001 - outermost for a partition
            failure = failure_of(
                error,
                f"reading table '{part.open_table.path}', bucket {part.partition} at offset"
                f" {writer.next_offset} for a consumer",
            )
            # Records from before the error are answered; the next request begins at the error.
            if not writer.pieces:
                errors[part.number] = failure
        writer.cover_gap()
        remaining_bytes -= writer.byte_count
    return FetchedRecords(writers, errors)


def _read_part(part: Part, writer: RecordsWriter, older: Older | None) -> None:
    if writer.next_offset < part.readable.log_start and writer.has_room:
        assert older is not None, "else the log has all readable rows"
        if isinstance(older, StreamhouseError):
            raise older
        _read_older(part, writer, older)
    if writer.next_offset >= part.readable.log_start:
        try:
            writer.write_log(part.tablet, end=part.readable.end)
        except OffsetOutOfRangeError:
            # Retention has just removed the rows; the next request finds the rows in the lake.
            _logger.info(
                "event=rows_left_the_log table=%s bucket=%d offset=%d",
                *(part.open_table.path, part.partition, writer.next_offset),
            )


def _read_older(part: Part, writer: RecordsWriter, older: OlderReads) -> None:
    read = functools.partial(older.read, part.open_table, part.table.info, part.partition)
    try:
        while writer.older_offset < part.readable.log_start and writer.has_room:
            rows = read(
                offset=writer.older_offset,
                rows_max=writer.rows_estimate,
                bytes_max=writer.bytes_estimate,
            )
            replaced_row = None
            if writer.lacks_replaced_row(rows) and writer.next_offset > part.readable.start:
                replaced_row = read(offset=writer.next_offset - 1, rows_max=1, bytes_max=1)
            writer.write_older(rows, replaced_row=replaced_row)
        writer.pass_over(part.readable.log_start)
    finally:
        if writer.pending_rows is not None:
            info, offset = part.table.info, writer.next_offset
            older.give_back(info, part.partition, writer.pending_rows, offset=offset)
