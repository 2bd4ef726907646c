"""The sparse index of a segment: where every so many bytes a frame starts.

A lookup finds the last entry at or before what is wanted; the caller walks frames from there.
The first frame of a segment always has an entry.
"""

from __future__ import annotations

import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from crc32c import crc32c

from streamhouse.storage_service.log.filesystem import Buffer
from streamhouse.storage_service.log.segment_format import (
    FILE_HEADER_BYTES,
    IndexHeader,
    LogIdentity,
    MalformedError,
    decode_index_header,
    encode_index_header,
)

__all__ = ["FrameStart", "GrowingIndex", "SparseIndex", "decode_index", "encode_index"]

_ENTRY_BYTES = 24


class FrameStart(NamedTuple):
    """Where a frame starts: its base offset and its byte in the segment file."""

    offset: int
    position: int


class SparseIndex:
    """Three columns in frame order, searched by bisection; the columns may be views of a file."""

    __slots__ = ("offsets", "positions", "timestamps")

    def __init__(
        self, *, offsets: Sequence[int], positions: Sequence[int], timestamps: Sequence[int]
    ) -> None:
        self.offsets = offsets
        self.positions = positions
        self.timestamps = timestamps

    def at_or_before_offset(self, offset: int) -> FrameStart:
        """Return a frame start at or before `offset`, which is in the segment."""
        # The timestamps column grows last, so its length is safe to use beside a writer.
        entry = bisect_right(self.offsets, offset, 0, len(self.timestamps)) - 1
        return FrameStart(self.offsets[entry], self.positions[entry])

    def before_timestamp(self, timestamp_us: int) -> FrameStart:
        """Return a frame start no later than the first frame stamped `timestamp_us` or more."""
        entry = max(0, bisect_left(self.timestamps, timestamp_us) - 1)
        return FrameStart(self.offsets[entry], self.positions[entry])


class GrowingIndex(SparseIndex):
    """The index of a segment that is being written or scanned: 24 bytes of memory an entry."""

    __slots__ = ("_interval_bytes", "_next_position", "_offsets", "_positions", "_timestamps")

    def __init__(self, *, interval_bytes: int) -> None:
        self._offsets = array.array("Q")
        self._positions = array.array("Q")
        self._timestamps = array.array("q")
        self._interval_bytes = interval_bytes
        self._next_position = 0
        super().__init__(
            offsets=self._offsets, positions=self._positions, timestamps=self._timestamps
        )

    def add(self, *, offset: int, position: int, timestamp_us: int) -> None:
        """Tell of the next frame; it gets an entry when the last one is far enough behind."""
        if position >= self._next_position:
            self._offsets.append(offset)
            self._positions.append(position)
            self._timestamps.append(timestamp_us)
            self._next_position = position + self._interval_bytes

    def columns(self) -> list[Buffer]:
        """Return the columns' bytes, as an index file holds them."""
        return [self._offsets.tobytes(), self._positions.tobytes(), self._timestamps.tobytes()]

    def __len__(self) -> int:
        return len(self._timestamps)


def encode_index(
    index: GrowingIndex,
    *,
    identity: LogIdentity,
    base_offset: int,
    end_offset: int,
    segment_bytes: int,
    last_timestamp_us: int,
) -> list[Buffer]:
    """Return the contents of the index file of a sealed, non-empty segment."""
    assert len(index) > 0
    columns = index.columns()
    entries_crc = 0
    for column in columns:
        entries_crc = crc32c(column, entries_crc)
    header = IndexHeader(
        entry_count=len(index),
        base_offset=base_offset,
        end_offset=end_offset,
        segment_bytes=segment_bytes,
        last_timestamp_us=last_timestamp_us,
        entries_crc=entries_crc,
    )
    return [encode_index_header(header, identity=identity), *columns]


def decode_index(view: memoryview, *, header: IndexHeader, check: bool) -> SparseIndex:
    """Return an index over the file's own bytes; raises MalformedError.

    `check` verifies the checksum of the entries, which reads all of them.
    """
    end = FILE_HEADER_BYTES + header.entry_count * _ENTRY_BYTES
    if header.entry_count == 0 or len(view) != end:
        raise MalformedError(f"index of {header.entry_count} entries has {len(view)} bytes")
    entries = view[FILE_HEADER_BYTES:end]
    if check and crc32c(entries) != header.entries_crc:
        raise MalformedError("index entries checksum mismatch")
    column_bytes = header.entry_count * 8
    return SparseIndex(
        offsets=entries[:column_bytes].cast("Q"),
        positions=entries[column_bytes : 2 * column_bytes].cast("Q"),
        timestamps=entries[2 * column_bytes :].cast("q"),
    )


def read_index_header(data: Buffer, *, identity: LogIdentity, base_offset: int) -> IndexHeader:
    """Read the header of the index of the segment at `base_offset`; raises MalformedError."""
    header = decode_index_header(data, identity=identity)
    if header.base_offset != base_offset or header.end_offset <= base_offset:
        raise MalformedError(
            f"index says [{header.base_offset}, {header.end_offset}) for segment {base_offset}"
        )
    return header
