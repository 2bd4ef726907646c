"""The sparse index of a segment: frame starts at a byte interval.

A lookup returns the last entry at or before the target; the caller walks frames from there. The
first frame of a segment always has an entry. In a log with fingerprints every entry has the
fingerprint at its offset.
"""

from __future__ import annotations

import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from crc32c import crc32c

from streamhouse.storage_service.log.filesystem import Buffer
from streamhouse.storage_service.log.segments.segment_format import (
    FILE_HEADER_BYTES,
    INDEX_START_BYTES,
    IndexHeader,
    LogIdentity,
    MalformedError,
    decode_index_header,
    encode_index_header,
)

__all__ = [
    "FrameStart",
    "GrowingIndex",
    "SparseIndex",
    "decode_index",
    "encode_index",
    "index_bytes",
]

_COLUMN_BYTES = 8


class FrameStart(NamedTuple):
    """The start of a frame: its base offset and its byte in the segment file."""

    offset: int
    position: int


class SparseIndex:
    """Columns in frame order, searched by bisection; the columns may be views of a file.

    `fingerprints` has 8 bytes an entry, or is empty.
    """

    __slots__ = ("fingerprints", "offsets", "positions", "timestamps")

    def __init__(
        self,
        *,
        offsets: Sequence[int],
        positions: Sequence[int],
        timestamps: Sequence[int],
        fingerprints: bytearray | memoryview,
    ) -> None:
        self.offsets = offsets
        self.positions = positions
        self.timestamps = timestamps
        self.fingerprints = fingerprints

    def at_or_before_offset(self, offset: int) -> FrameStart:
        """Return a frame start at or before `offset`; `offset` is in the segment."""
        # The timestamps column grows last, so its length is safe to use beside a writer.
        entry = bisect_right(self.offsets, offset, 0, len(self.timestamps)) - 1
        return FrameStart(self.offsets[entry], self.positions[entry])

    def after_offset(self, offset: int) -> FrameStart | None:
        """Return the first indexed frame start above `offset`, if any."""
        count = len(self.timestamps)
        entry = bisect_right(self.offsets, offset, 0, count)
        return None if entry == count else FrameStart(self.offsets[entry], self.positions[entry])

    def fingerprint_at(self, start: FrameStart) -> bytes:
        """Return the fingerprint at an entry; only in a log with fingerprints."""
        entry = bisect_left(self.offsets, start.offset) * _COLUMN_BYTES
        return bytes(self.fingerprints[entry : entry + _COLUMN_BYTES])

    def before_timestamp(self, timestamp_us: int) -> FrameStart:
        """Return a frame start no later than the first frame stamped `timestamp_us` or more."""
        entry = max(0, bisect_left(self.timestamps, timestamp_us) - 1)
        return FrameStart(self.offsets[entry], self.positions[entry])


class GrowingIndex(SparseIndex):
    """The index of a segment being written or scanned: 32 bytes of memory an entry."""

    __slots__ = (
        "_fingerprints",
        "_interval_bytes",
        "_next_position",
        "_offsets",
        "_positions",
        "_timestamps",
    )

    def __init__(self, *, interval_bytes: int) -> None:
        self._offsets = array.array("Q")
        self._positions = array.array("Q")
        self._timestamps = array.array("q")
        self._fingerprints = bytearray()
        self._interval_bytes = interval_bytes
        self._next_position = 0
        super().__init__(
            offsets=self._offsets,
            positions=self._positions,
            timestamps=self._timestamps,
            fingerprints=self._fingerprints,
        )

    def add(
        self, *, offset: int, position: int, timestamp_us: int, fingerprint: bytes | None = None
    ) -> None:
        """Add the next frame; frames far enough behind the last entry get an entry.

        `fingerprint` is the fingerprint at `offset`; all frames of a log have one, or none.
        """
        if position >= self._next_position:
            if fingerprint is not None:
                self._fingerprints += fingerprint
            self._offsets.append(offset)
            self._positions.append(position)
            self._timestamps.append(timestamp_us)
            self._next_position = position + self._interval_bytes

    def columns(self) -> list[Buffer]:
        """Return the columns' bytes, as an index file holds them."""
        columns = (self._offsets, self._positions, self._timestamps)
        return [*(column.tobytes() for column in columns), bytes(self._fingerprints)]

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
    end_fingerprint: bytes | None = None,
) -> list[Buffer]:
    """Return the contents of the index file of a sealed, non-empty segment.

    The first buffer is everything before the entries.
    """
    assert len(index) > 0
    assert len(index.fingerprints) == (0 if end_fingerprint is None else len(index) * _COLUMN_BYTES)
    columns = index.columns()
    entries_crc = crc32c(end_fingerprint or b"")
    for column in columns:
        entries_crc = crc32c(column, entries_crc)
    header = IndexHeader(
        entry_count=len(index),
        base_offset=base_offset,
        end_offset=end_offset,
        segment_bytes=segment_bytes,
        last_timestamp_us=last_timestamp_us,
        entries_crc=entries_crc,
        end_fingerprint=end_fingerprint,
    )
    return [encode_index_header(header, identity=identity), *columns]


def index_bytes(header: IndexHeader) -> int:
    """Return the length of the index file with this header."""
    columns = 3 if header.end_fingerprint is None else 4
    return _entries_start(header) + columns * header.entry_count * _COLUMN_BYTES


def _entries_start(header: IndexHeader) -> int:
    return FILE_HEADER_BYTES if header.end_fingerprint is None else INDEX_START_BYTES


def decode_index(view: memoryview, *, header: IndexHeader, check: bool) -> SparseIndex:
    """Return an index over the file's own bytes; raises MalformedError.

    `check` verifies the checksum of the entries, which reads all of them.
    """
    count, has_fingerprints = header.entry_count, header.end_fingerprint is not None
    column_bytes = count * _COLUMN_BYTES
    start, end = _entries_start(header), index_bytes(header)
    if count == 0 or len(view) != end:
        raise MalformedError(f"index of {count} entries has {len(view)} bytes")
    if check and crc32c(view[FILE_HEADER_BYTES:end]) != header.entries_crc:
        raise MalformedError("index entries checksum mismatch")
    columns = [view[at : at + column_bytes] for at in range(start, end, column_bytes)]
    return SparseIndex(
        offsets=columns[0].cast("Q"),
        positions=columns[1].cast("Q"),
        timestamps=columns[2].cast("q"),
        fingerprints=columns[3] if has_fingerprints else view[end:end],
    )


def read_index_header(data: Buffer, *, identity: LogIdentity, base_offset: int) -> IndexHeader:
    """Read the header of the index of the segment at `base_offset`; raises MalformedError."""
    header = decode_index_header(data, identity=identity)
    if header.base_offset != base_offset or header.end_offset <= base_offset:
        raise MalformedError(
            f"index says [{header.base_offset}, {header.end_offset}) for segment {base_offset}"
        )
    return header
