"""One segment file of a log: growing (the active, or one that others write), or sealed for ever.

Invariants:
- frames follow each other without a gap in bytes or offsets, from the file header on
- `size_bytes` and `end_offset` cover durable frames only; readers stay below them
- every frame returned by a read had its checksum verified by the same read
- a segment with the fingerprint at its base has the fingerprint of each of its offsets

Rolling, retention and the high watermark live in log_tablet.py.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from crc32c import crc32c

from streamhouse.core.errors import CorruptDataError
from streamhouse.storage_service.log.filesystem import Buffer, Filesystem, WritableFile
from streamhouse.storage_service.log.segments.segment_format import (
    FILE_HEADER_BYTES,
    FRAME,
    FRAME_HEADER_BYTES,
    FRAME_MAGIC,
    FRAME_VERSION,
    IndexHeader,
    MalformedError,
    fingerprint_after,
    fingerprint_within,
    frame_bytes,
)
from streamhouse.storage_service.log.segments.segment_index import (
    FrameStart,
    GrowingIndex,
    SparseIndex,
    decode_index,
    index_bytes,
)

__all__ = [
    "ActiveSegment",
    "Extent",
    "FollowedSegment",
    "SealedSegment",
    "Segment",
    "StoredBatch",
    "WrittenFrame",
]

_logger = logging.getLogger(__name__)

# Readers following a slowly growing log get the last frames from memory: mapping the file
# again takes longer than the remaining work of a read.
_TAIL_BYTES_MAX: Final = 8 * 1024
# Coarser than an index file: this index stays in memory until a restart writes a file.
_WALKED_INDEX_INTERVAL_BYTES: Final = 64 * 1024


class StoredBatch(NamedTuple):
    """One stored frame. `payload` is a view of the log's file, valid while referenced."""

    base_offset: int
    row_count: int
    timestamp_us: int
    schema_id: int
    payload: memoryview

    @property
    def end_offset(self) -> int:
        """The offset after the batch's last row."""
        return self.base_offset + self.row_count


class Extent(NamedTuple):
    """The size of consecutive batches."""

    row_count: int
    byte_count: int


class WrittenFrame(NamedTuple):
    """The facts of a frame written to a segment."""

    base_offset: int
    end_offset: int
    timestamp_us: int
    size_bytes: int
    header: Buffer


class _Frame(NamedTuple):
    """A frame read from its header: the chain is checked, the checksum is not."""

    position: int
    payload_bytes: int
    crc: int
    base_offset: int
    row_count: int
    schema_id: int
    timestamp_us: int


class _Stretch(NamedTuple):
    """Frames from `start` on, positioned in `view`; the frames take `size` bytes."""

    view: memoryview
    start: FrameStart
    size: int
    end_offset: int


class Segment(ABC):
    """Reading, common to both kinds. Safe from any thread during one write."""

    def __init__(
        self,
        *,
        path: Path,
        base_offset: int,
        base_fingerprint: bytes | None,
        filesystem: Filesystem,
    ) -> None:
        self.path = path
        self.base_offset = base_offset
        self.base_fingerprint = base_fingerprint
        self.end_offset = base_offset
        self.size_bytes = FILE_HEADER_BYTES
        self._filesystem = filesystem

    @abstractmethod
    def index(self) -> SparseIndex:
        """Return the sparse index; only for a segment with frames."""

    @property
    @abstractmethod
    def last_timestamp_us(self) -> int:
        """The timestamp of the last durable frame, the largest of the segment."""

    @property
    def first_timestamp_us(self) -> int:
        """The timestamp of the first durable frame; only for a segment with frames."""
        return self.index().timestamps[0]

    @property
    def is_empty(self) -> bool:
        """Whether the segment has no durable frame."""
        return self.end_offset == self.base_offset

    def read(
        self, *, offset: int, offset_max: int, bytes_max: int, at_least_one: bool
    ) -> list[StoredBatch]:
        """Return the frames with rows of [offset, offset_max), up to `bytes_max` of payload.

        With `at_least_one`, the first may be larger. The range is not empty. Damage raises
        CorruptDataError, but only for a read beginning at the damage: good frames before are
        returned.
        """
        batches: list[StoredBatch] = []
        bytes_left = bytes_max
        view, start, size, end_offset = self._stretch(offset)
        try:
            for frame in self._walk(view, start, offset_max=min(offset_max, end_offset), size=size):
                if frame.base_offset + frame.row_count <= offset:
                    continue
                if frame.payload_bytes > bytes_left and (batches or not at_least_one):
                    break
                bytes_left -= frame.payload_bytes
                batches.append(self._verified(view, frame))
        except CorruptDataError:
            if not batches:
                raise
        return batches

    def _stretch(self, offset: int) -> _Stretch:
        """Return frames including the frame with `offset`."""
        end_offset, size = self.end_offset, self.size_bytes
        view = self._filesystem.map(self.path, size)
        return _Stretch(view, self.index().at_or_before_offset(offset), size, end_offset)

    def extent(self, offset: int) -> Extent:
        """Return an upper bound of the batch with `offset`, plus some small batches before."""
        index = self.index()
        end = index.after_offset(offset) or FrameStart(self.end_offset, self.size_bytes)
        start = index.at_or_before_offset(offset)
        return Extent(end.offset - start.offset, end.position - start.position)

    def offset_for_timestamp(self, timestamp_us: int, *, offset_max: int) -> int | None:
        """Return the first frame's offset with at least this timestamp, below `offset_max`."""
        size = self.size_bytes
        view = self._filesystem.map(self.path, size)
        start = self.index().before_timestamp(timestamp_us)
        for frame in self._walk(view, start, offset_max=offset_max, size=size):
            if frame.timestamp_us >= timestamp_us:
                return self._verified(view, frame).base_offset
        return None

    def fingerprint(self, offset: int) -> bytes | None:
        """Return the fingerprint at an offset up to the segment's end; None without fingerprints.

        Computed from frame headers alone: a damaged payload changes nothing.
        """
        fingerprint = self.base_fingerprint
        if fingerprint is None or offset == self.base_offset:
            return fingerprint
        size = self.size_bytes
        view = self._filesystem.map(self.path, size)
        index = self.index()
        start = index.at_or_before_offset(offset)
        fingerprint = index.fingerprint_at(start)
        for frame in self._walk(view, start, offset_max=offset, size=size):
            header = bytes(view[frame.position : frame.position + FRAME_HEADER_BYTES])
            if offset < frame.base_offset + frame.row_count:
                return fingerprint_within(fingerprint, header, offset - frame.base_offset)
            fingerprint = fingerprint_after(fingerprint, header)
        return fingerprint

    def _walk(
        self, view: memoryview, start: FrameStart, *, offset_max: int, size: int
    ) -> Iterator[_Frame]:
        """Yield frames from `start` on beginning below `offset_max`, checking the chain."""
        expected, position = start
        # The view of a file that was cut is shorter.
        size = min(size, len(view))
        while expected < offset_max:
            if position + FRAME_HEADER_BYTES > size:
                raise self._corrupt(position, f"the file ends before offset {expected}")
            magic, crc, payload_bytes, version, _, _, base, rows, schema_id, timestamp, *_ = (
                FRAME.unpack_from(view, position)
            )
            if (magic, version, base) != (FRAME_MAGIC, FRAME_VERSION, expected) or rows == 0:
                raise self._corrupt(position, f"no frame of offset {expected} starts here")
            if position + FRAME_HEADER_BYTES + payload_bytes > size:
                raise self._corrupt(position, f"frame claims {payload_bytes} bytes of payload")
            yield _Frame(position, payload_bytes, crc, base, rows, schema_id, timestamp)
            position += frame_bytes(payload_bytes)
            expected += rows

    def _verified(self, view: memoryview, frame: _Frame) -> StoredBatch:
        start = frame.position + FRAME_HEADER_BYTES
        end = start + frame.payload_bytes
        if crc32c(view[frame.position + 8 : end]) != frame.crc:
            raise self._corrupt(frame.position, "frame checksum mismatch")
        return StoredBatch(
            frame.base_offset,
            frame.row_count,
            frame.timestamp_us,
            frame.schema_id,
            view[start:end],
        )

    def _corrupt(self, position: int, problem: str) -> CorruptDataError:
        return CorruptDataError(
            f"{self.path} at byte {position}: {problem}; restore the file from a copy"
        )


class SealedSegment(Segment):
    """An immutable segment; its index stays on disk and costs no memory."""

    def __init__(
        self,
        *,
        path: Path,
        index_path: Path,
        facts: IndexHeader,
        base_fingerprint: bytes | None,
        filesystem: Filesystem,
    ) -> None:
        super().__init__(
            path=path,
            base_offset=facts.base_offset,
            base_fingerprint=base_fingerprint,
            filesystem=filesystem,
        )
        self.end_offset = facts.end_offset
        self.size_bytes = facts.segment_bytes
        self._index_path = index_path
        self._facts = facts
        self._index_checked = False
        self._walked_index: GrowingIndex | None = None

    @property
    def last_timestamp_us(self) -> int:
        """See `Segment.last_timestamp_us`."""
        return self._facts.last_timestamp_us

    def index(self) -> SparseIndex:
        """See `Segment.index`; the checksum is verified at the first use.

        A damaged index costs speed, never data: a new index is built in memory from the frames, and
        the next restart writes a new file.
        """
        if self._walked_index is not None:
            return self._walked_index
        try:
            view = self._filesystem.map(self._index_path, index_bytes(self._facts))
            index = decode_index(view, header=self._facts, check=not self._index_checked)
        except (MalformedError, OSError) as error:
            _logger.warning("event=index_unusable path=%s why=%r", self.path, str(error))
            self._walked_index = self._index_by_walking()
            return self._walked_index
        self._index_checked = True
        return index

    def _index_by_walking(self) -> GrowingIndex:
        index = GrowingIndex(interval_bytes=_WALKED_INDEX_INTERVAL_BYTES)
        view = self._filesystem.map(self.path, self.size_bytes)
        start = FrameStart(self.base_offset, FILE_HEADER_BYTES)
        frames = self._walk(view, start, offset_max=self.end_offset, size=self.size_bytes)
        written = (_written(view, frame) for frame in frames)
        _index_frames(index, written, position=FILE_HEADER_BYTES, fingerprint=self.base_fingerprint)
        return index


class GrowingSegment(Segment):
    """A segment that gets frames; its index is in memory, and its last frames if they are few."""

    def __init__(
        self,
        *,
        path: Path,
        base_offset: int,
        base_fingerprint: bytes | None,
        created_timestamp_us: int,
        filesystem: Filesystem,
        index: GrowingIndex,
    ) -> None:
        super().__init__(
            path=path,
            base_offset=base_offset,
            base_fingerprint=base_fingerprint,
            filesystem=filesystem,
        )
        self.end_fingerprint = base_fingerprint
        """The fingerprint at `end_offset`; for the thread that adds frames."""
        self._growing_index = index
        self._last_timestamp_us = created_timestamp_us
        # The frames added last, if few.
        self._tail: _Stretch | None = None

    @property
    def last_timestamp_us(self) -> int:
        """See `Segment.last_timestamp_us`; for an empty segment, its creation time."""
        return self._last_timestamp_us

    def index(self) -> SparseIndex:
        """See `Segment.index`."""
        return self._growing_index

    def _stretch(self, offset: int) -> _Stretch:
        """See `Segment.read`; readers mostly want the last frames, kept in memory."""
        tail = self._tail
        if tail is not None and tail.start.offset <= offset < tail.end_offset:
            return tail
        return super()._stretch(offset)

    def _add(self, frames: Sequence[WrittenFrame], tail: Buffer) -> None:
        """Cover further frames; `tail` has their bytes, or none."""
        position, self.end_fingerprint = _index_frames(
            self._growing_index,
            frames,
            position=self.size_bytes,
            fingerprint=self.end_fingerprint,
        )
        self._last_timestamp_us = frames[-1].timestamp_us
        end_offset = frames[-1].end_offset
        start = FrameStart(self.end_offset, 0)
        self._tail = _Stretch(memoryview(tail), start, len(tail), end_offset) if tail else None
        self.size_bytes = position
        self.end_offset = end_offset


class FollowedSegment(GrowingSegment):
    """A segment to which others add frames. One thread at a time extends it."""

    def extend(self, end_offset: int, *, frames_max: int) -> int:
        """Cover the next frames below `end_offset`, a frame's end; return their number.

        0 at the end of the file. Only the headers are checked; each read verifies what it returns.
        Raises CorruptDataError for bytes that are no such frames, and OSError.
        """
        start = self.size_bytes
        size = self._filesystem.size_bytes(self.path)
        if size <= start or self.end_offset >= end_offset:
            return 0
        if size - start <= _TAIL_BYTES_MAX:
            data = self._filesystem.read(self.path, position=start, bytes_max=size - start)
            view, position, size = memoryview(data), 0, len(data)
        else:
            view, position = self._filesystem.map(self.path, size), start
        frames: list[WrittenFrame] = []
        first = FrameStart(self.end_offset, position)
        try:
            for frame in self._walk(view, first, offset_max=end_offset, size=size):
                frames.append(_written(view, frame))
                position = frame.position + frames[-1].size_bytes
                if position >= size or len(frames) >= frames_max:
                    break
        except CorruptDataError:
            if not frames:
                raise
        if frames[-1].end_offset > end_offset:
            raise self._corrupt(start, f"no frame ends at offset {end_offset}")
        self._add(frames, view[:position] if first.position == 0 else b"")
        return len(frames)


class ActiveSegment(GrowingSegment):
    """The segment receiving frames. Writing belongs to one thread at a time.

    A frame is first written, then synced, and only then covered by `end_offset` and `size_bytes`.
    """

    def __init__(
        self,
        *,
        path: Path,
        base_offset: int,
        base_fingerprint: bytes | None,
        created_timestamp_us: int,
        filesystem: Filesystem,
        file: WritableFile,
        index: GrowingIndex,
    ) -> None:
        super().__init__(
            path=path,
            base_offset=base_offset,
            base_fingerprint=base_fingerprint,
            created_timestamp_us=created_timestamp_us,
            filesystem=filesystem,
            index=index,
        )
        self._file = file
        self._unsynced: list[WrittenFrame] = []
        self._unsynced_bytes = b""
        self._needs_sync = False
        # Whether a reader came since the write before: only then frames are kept as the tail.
        self._is_followed = False

    def restore(
        self,
        *,
        end_offset: int,
        size_bytes: int,
        last_timestamp_us: int,
        end_fingerprint: bytes | None,
    ) -> None:
        """Set the durable end found by recovery; the index covers these frames already."""
        self.end_offset = end_offset
        self.end_fingerprint = end_fingerprint
        self.size_bytes = size_bytes
        self._last_timestamp_us = max(self._last_timestamp_us, last_timestamp_us)

    @property
    def needs_sync(self) -> bool:
        """Whether the file was possibly changed since the last sync."""
        return self._needs_sync

    @property
    def unsynced_count(self) -> int:
        """The number of frames written but not synced."""
        return len(self._unsynced)

    @property
    def growing_index(self) -> GrowingIndex:
        """The index to be written when the segment is sealed."""
        return self._growing_index

    def _stretch(self, offset: int) -> _Stretch:
        """See `Segment.read`."""
        self._is_followed = True
        return super()._stretch(offset)

    def write(self, buffers: Sequence[Buffer], frames: list[WrittenFrame]) -> None:
        """Write frames after the durable ones; on OSError call `rollback`."""
        assert not self._unsynced
        self._unsynced_bytes = b""
        if self._is_followed and sum(map(len, buffers)) <= _TAIL_BYTES_MAX:
            self._unsynced_bytes = b"".join(buffers)
            buffers = [self._unsynced_bytes]
        self._is_followed = False
        self._unsynced = frames
        self._needs_sync = True
        self._file.write(buffers, position=self.size_bytes)

    def sync(self) -> None:
        """Make written frames, or a truncation, durable, then advance the end."""
        self._file.sync()
        self._needs_sync = False
        if self._unsynced:
            self._add(self._unsynced, self._unsynced_bytes)
            self._unsynced = []

    def rollback(self) -> None:
        """Truncate bytes written since the last sync; durable after the next `sync`."""
        if self._unsynced:
            self._unsynced = []
            self._file.truncate(self.size_bytes)

    def close(self) -> None:
        """Release the file; reads still work."""
        self._file.close()


def _written(view: memoryview, frame: _Frame) -> WrittenFrame:
    return WrittenFrame(
        frame.base_offset,
        frame.base_offset + frame.row_count,
        frame.timestamp_us,
        frame_bytes(frame.payload_bytes),
        bytes(view[frame.position : frame.position + FRAME_HEADER_BYTES]),
    )


def _index_frames(
    index: GrowingIndex,
    frames: Iterable[WrittenFrame],
    *,
    position: int,
    fingerprint: bytes | None,
) -> tuple[int, bytes | None]:
    """Index frames, the first at `position` behind `fingerprint`; return both at their end."""
    for frame in frames:
        index.add(
            offset=frame.base_offset,
            position=position,
            timestamp_us=frame.timestamp_us,
            fingerprint=fingerprint,
        )
        position += frame.size_bytes
        if fingerprint is not None:
            fingerprint = fingerprint_after(fingerprint, frame.header)
    return position, fingerprint
