"""Row values in memory, appended to segments and read by location.

A location is a number: segment, position in the segment, length. Rows are immutable. A segment can
be dropped once its rows are no longer requested; its memory is released with the last reader.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from itertools import groupby
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from streamhouse.core.model.hashing.byte_runs import binary_parts, validity_buffer
from streamhouse.storage_service.kv.rows.row_codec import VALUE_BYTES_MIN

__all__ = ["SEGMENT_BYTES_MAX", "RowArena"]

# segment 16 bits | position in it 24 bits | length 24 bits
_POSITION_BITS: Final = 24
_SEGMENT_SHIFT: Final = 48
_LOW_24: Final = (1 << 24) - 1
_POSITION: Final = np.uint64(_LOW_24 << _POSITION_BITS)
_TO_HIGH_HALF: Final = np.uint64(32 - _POSITION_BITS)
SEGMENT_BYTES_MAX: Final = 1 << _POSITION_BITS
_SEGMENT_BYTES_MIN: Final = 256 << 10
_HUGE_PAGE_BYTES: Final = 2 << 20

Locations = npt.NDArray[np.uint64]
Segments = tuple[pa.Buffer, ...]


class RowArena:
    """Segments of rows. One thread changes it.

    Readers of single rows must be kept out of `drop`; the rows of `segments` can always be read.

    A segment has up to `segment_bytes`, or as much as a longer row needs, up to SEGMENT_BYTES_MAX.
    """

    def __init__(self, *, segment_bytes: int = SEGMENT_BYTES_MAX) -> None:
        assert 0 < segment_bytes <= SEGMENT_BYTES_MAX
        self._segment_bytes: Final = segment_bytes
        # Replaced, never changed: holders can read rows dropped later.
        self._buffers: Segments = ()
        self._views: list[memoryview] = []
        self._free: list[int] = []
        # Oldest first; the last one is being filled.
        self._order: deque[int] = deque()
        self._used: dict[int, int] = {}
        self._live: dict[int, int] = {}
        self.memory_bytes = 0
        """The bytes written to segments that are not dropped."""

    @property
    def segments(self) -> Segments:
        """Return the segments with the rows at all current locations, valid after later drops."""
        return self._buffers

    def append(self, values: pa.Array) -> Locations:
        """Copy `values` (without nulls) in; return their locations."""
        data, offsets = binary_parts(values)
        starts = offsets.astype(np.int64)
        lengths = np.diff(starts).astype(np.uint64)
        locations = np.empty(len(values), dtype=np.uint64)
        first = 0
        while first < len(values):
            segment = self._segment_with(int(lengths[first]))
            position = self._used[segment]
            # As many rows as fit, copied in one go.
            end = starts[first] + len(self._buffers[segment]) - position
            last = int(np.searchsorted(starts, end, side="right")) - 1
            size = int(starts[last] - starts[first])
            target = np.frombuffer(self._buffers[segment], dtype=np.uint8)
            target[position : position + size] = data[starts[first] : starts[last]]
            positions = (starts[first:last] - starts[first] + position).astype(np.uint64)
            locations[first:last] = (
                (segment << _SEGMENT_SHIFT) | (positions << _POSITION_BITS) | lengths[first:last]
            )
            self._used[segment] += size
            self._live[segment] += size
            self.memory_bytes += size
            first = last
        return locations

    def append_few(self, rows: Sequence[bytes]) -> tuple[list[int], set[int]]:
        """As `append`, for few rows; return also the segments."""
        locations = []
        segments = set()
        for row in rows:
            size = len(row)
            segment = self._segment_with(size)
            position = self._used[segment]
            self._views[segment][position : position + size] = row
            locations.append((segment << _SEGMENT_SHIFT) | (position << _POSITION_BITS) | size)
            self._used[segment] = position + size
            self._live[segment] += size
            self.memory_bytes += size
            segments.add(segment)
        return locations, segments

    def release_few(self, locations: Iterable[int]) -> None:
        """As `release`, for few rows."""
        for location in locations:
            self._live[location >> _SEGMENT_SHIFT] -= location & _LOW_24

    def release(self, locations: Locations) -> None:
        """Count the rows at `locations` as superseded."""
        lengths = (locations & _LOW_24).astype(np.float64)
        totals = np.bincount((locations >> _SEGMENT_SHIFT).astype(np.int64), weights=lengths)
        for segment in np.flatnonzero(totals).tolist():
            self._live[segment] -= int(totals[segment])

    def rows_at(self, locations: Locations) -> pa.Array:
        """Return copies of the rows at `locations`, as a binary array; null at location 0."""
        return _copied(self._buffers, locations)

    @staticmethod
    def rows_in(parts: Sequence[tuple[Segments, Locations]]) -> pa.Array:
        """As `rows_at`, for locations valid at the time of their `segments`."""
        rows = []
        # Segments come and go rarely: nearly always one copy has all rows.
        for _, same in groupby(parts, key=lambda part: id(part[0])):
            segments, locations = zip(*same, strict=True)
            rows.append(_copied(segments[0], np.concatenate(locations)))
        return rows[0] if len(rows) == 1 else pa.concat_arrays(rows)

    @staticmethod
    def bytes_at(locations: Locations) -> int:
        """Return the number of bytes of the rows at `locations`."""
        return int((locations & _LOW_24).sum())

    @staticmethod
    def bytes_of(location: int) -> int:
        """Return the number of bytes of the row at `location`; 0 for location 0, no row."""
        return location & _LOW_24

    def row_at(self, location: int) -> bytes:
        """Return a copy of one row."""
        position = (location >> _POSITION_BITS) & _LOW_24
        row = self._views[location >> _SEGMENT_SHIFT][position : position + (location & _LOW_24)]
        return row.tobytes()

    def few_rows_at(self, locations: Iterable[int]) -> list[bytes | None]:
        """As `rows_at`, for few rows."""
        return [self.row_at(location) if location else None for location in locations]

    def oldest(self, *, except_: Collection[int]) -> int | None:
        """Return the segment filled first, if full and not excepted."""
        if len(self._order) < 2 or self._order[0] in except_:
            return None
        return self._order[0]

    def sparsest(self, *, below: float) -> int | None:
        """Return the full segment with the least share of live rows, if `below` the limit."""
        full = list(self._order)[:-1]
        if not full:
            return None
        share = {segment: self._live[segment] / self._used[segment] for segment in full}
        best = min(share, key=share.__getitem__)
        return best if share[best] < below else None

    @staticmethod
    def segments_of(locations: Locations) -> set[int]:
        """Return the segments of locations appended in this order."""
        segments = locations >> _SEGMENT_SHIFT
        begun = segments[1:][segments[1:] != segments[:-1]]
        return {*segments[:1].tolist(), *begun.tolist()}

    @staticmethod
    def in_segment(locations: Locations, segment: int) -> npt.NDArray[np.int64]:
        """Return the positions of the locations in `segment`; 0 is no location."""
        low, high = np.uint64(segment << _SEGMENT_SHIFT), np.uint64((segment + 1) << _SEGMENT_SHIFT)
        return np.flatnonzero((locations > low) & (locations < high))

    def drop(self, segment: int) -> None:
        """Forget a segment; its rows must not be requested any more."""
        self._order.remove(segment)
        self._replace_buffer(segment, _NOTHING)
        self._views[segment] = memoryview(_NOTHING)
        self.memory_bytes -= self._used.pop(segment)
        del self._live[segment]
        self._free.append(segment)

    def _segment_with(self, room: int) -> int:
        """Return the segment to append to, a new one if the last has not enough room."""
        assert VALUE_BYTES_MIN <= room < SEGMENT_BYTES_MAX
        if self._order:
            last = self._order[-1]
            if len(self._buffers[last]) - self._used[last] >= room:
                return last
        # A bucket of few rows needs little memory: segments grow with the bucket.
        size = min(self._segment_bytes, max(self.memory_bytes // 4, _SEGMENT_BYTES_MIN))
        memory = _private_memory(max(size, room))
        if self._free:
            segment = self._free.pop()
            self._replace_buffer(segment, pa.py_buffer(memory))
            self._views[segment] = memoryview(memory)
        else:
            segment = len(self._buffers)
            assert segment < 1 << 15, "half a terabyte of rows"
            self._buffers = (*self._buffers, pa.py_buffer(memory))
            self._views.append(memoryview(memory))
        self._order.append(segment)
        self._used[segment] = self._live[segment] = 0
        return segment

    def _replace_buffer(self, segment: int, buffer: pa.Buffer) -> None:
        self._buffers = (*self._buffers[:segment], buffer, *self._buffers[segment + 1 :])


_NOTHING: Final = pa.py_buffer(b"")


def _private_memory(size: int) -> mmap.mmap:
    """Return memory of our own, given back to the system when the last buffer over it goes."""
    # Python's default is memory shared with children, which the system never backs by large pages.
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= _HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _copied(segments: Segments, locations: Locations) -> pa.Array:
    # Arrow's views point into buffers; only values of up to 12 bytes would lie in the view. Each is
    # length u32, four bytes that nobody reads, buffer u32, position in it u32.
    views = np.empty((len(locations), 2), dtype=np.uint64)
    np.bitwise_and(locations, _LOW_24, out=views[:, 0])
    positions = (locations & _POSITION) << _TO_HIGH_HALF
    np.bitwise_or(locations >> _SEGMENT_SHIFT, positions, out=views[:, 1])
    buffers = [validity_buffer(locations != 0), pa.py_buffer(views), *segments]
    return pa.Array.from_buffers(pa.binary_view(), len(locations), buffers).cast(pa.binary())
