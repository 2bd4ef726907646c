"""What one fetch reads: partition after partition, until there are enough bytes.

What goes wrong with a partition, whatever it is, ends the reading of that one. What was read of it
before is answered, and the next request begins at what is wrong. Blocking, on any thread.
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

__all__ = ["FoundRecords", "Part", "read_parts"]

_logger = logging.getLogger(__name__)

# The log's index has an entry for so many bytes of small batches, or a few more.
_SMALL_EXTENT_BYTES: Final = 8 << 10
_UNKNOWN_BYTES: Final = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A partition as it is read: what the event loop knew of it at one moment."""

    number: int
    """Its place in the request."""
    partition: int
    offset: int
    bytes_max: int
    open_table: OpenTable
    table: TableRecords
    tablet: LogTablet
    has: ReadableOffsets

    @property
    def is_in_lake(self) -> bool:
        """Whether what is wanted of it has left the log."""
        return self.offset < self.has.log_start

    def large_batch_bytes(self) -> int:
        """Return about how large the first stored batch is that is read of the log; 0 if small."""
        try:
            byte_count = self.tablet.extent(self.offset).byte_count
        except StreamhouseError:
            # Reading it says what is wrong.
            return _UNKNOWN_BYTES
        return byte_count if byte_count > _SMALL_EXTENT_BYTES else 0


@dataclass(frozen=True, slots=True)
class FoundRecords:
    """What was read, by number of the partition in the request."""

    writers: Mapping[int, RecordsWriter] = field(default_factory=dict)
    errors: Mapping[int, StreamhouseError] = field(default_factory=dict)

    @property
    def byte_count(self) -> int:
        """How many bytes of records were read."""
        return sum(writer.byte_count for writer in self.writers.values())

    @property
    def row_count(self) -> int:
        """How many rows were read."""
        return sum(writer.row_count for writer in self.writers.values())


def read_parts(parts: Sequence[Part], bytes_max: int, older: Older | None = None) -> FoundRecords:
    """Read about `bytes_max` bytes of records, at least one if there is any.

    `older` reads what has left the log, if any of the parts has.
    """
    writers: dict[int, RecordsWriter] = {}
    errors: dict[int, StreamhouseError] = {}
    bytes_left = bytes_max
    for part in parts:
        if bytes_left <= 0:
            break
        writer = writers[part.number] = RecordsWriter(
            table=part.table,
            first_offset=part.offset,
            bytes_max=min(part.bytes_max, bytes_left),
            is_first=bytes_left == bytes_max,
        )
        try:
            _read_part(part, writer, older)
        except Exception as error:  # noqa: BLE001 - outermost for a partition
            wrong = failure_of(
                error,
                f"reading table '{part.open_table.path}', bucket {part.partition} at offset"
                f" {writer.next_offset} for a consumer",
            )
            # What was read before it is answered; the next request begins at it.
            if not writer.pieces:
                errors[part.number] = wrong
        writer.cover_gap()
        bytes_left -= writer.byte_count
    return FoundRecords(writers, errors)


def _read_part(part: Part, writer: RecordsWriter, older: Older | None) -> None:
    if writer.next_offset < part.has.log_start and writer.has_room:
        assert older is not None, "else the log has all that is readable"
        if isinstance(older, StreamhouseError):
            raise older
        _read_older(part, writer, older)
    if writer.next_offset >= part.has.log_start:
        try:
            writer.write_log(part.tablet, end=part.has.end)
        except OffsetOutOfRangeError:
            # Retention took them just now: the next request finds them in the lake.
            _logger.info(
                "event=rows_left_the_log table=%s bucket=%d offset=%d",
                *(part.open_table.path, part.partition, writer.next_offset),
            )


def _read_older(part: Part, writer: RecordsWriter, older: OlderReads) -> None:
    read = functools.partial(older.read, part.open_table, part.table.info, part.partition)
    try:
        while writer.older_offset < part.has.log_start and writer.has_room:
            found = read(
                offset=writer.older_offset,
                rows_max=writer.rows_wanted,
                bytes_max=writer.bytes_wanted,
            )
            before = None
            if writer.lacks_before(found) and writer.next_offset > part.has.start:
                before = read(offset=writer.next_offset - 1, rows_max=1, bytes_max=1)
            writer.write_older(found, before=before)
        writer.pass_over(part.has.log_start)
    finally:
        if writer.rest is not None:
            info, offset = part.table.info, writer.next_offset
            older.give_back(info, part.partition, writer.rest, offset=offset)
