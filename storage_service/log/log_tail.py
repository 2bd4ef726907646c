"""The frames of a log that another process writes, read on from the last position.

Only frames below an offset that the other process has published are read: the bytes behind may be
half written, and may be replaced. Each checksum is verified. One thread at a time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from streamhouse.core.errors import CorruptDataError, StorageFailedError
from streamhouse.storage_service.log.segments.segment_format import (
    FILE_HEADER_BYTES,
    PAYLOAD_BYTES_LIMIT,
    LogIdentity,
    MalformedError,
    decode_segment_header,
    frame_bytes,
    offsets_of,
    segment_path,
)
from streamhouse.storage_service.log.segments.segment_scan import SegmentFile, SegmentFrame

__all__ = ["LogTail"]

# Most reads are for a few small frames.
_PIECE_BYTES: Final = 32 << 10
_PIECE_BYTES_MAX: Final = 4 << 20
_FRAME_BYTES_MAX: Final = frame_bytes(PAYLOAD_BYTES_LIMIT)


class LogTail:
    """See the module. `close` is idempotent."""

    def __init__(self, directory: Path, *, table_id: int, bucket: int) -> None:
        self._directory: Final = directory
        self._identity: Final = LogIdentity(table_id, bucket)
        self._file: int | None = None
        self._segment: SegmentFile | None = None
        # The place of the next frame: the offset, and the byte in the open segment.
        self._offset = -1
        self._position = 0

    def frames(self, start: int, end: int) -> Iterator[SegmentFrame]:
        """Yield the frames with the rows from `start` to `end`, which is the end of a frame.

        The first frame may begin before `start`. Raises `CorruptDataError` if the log has no such
        frames (any more).
        """
        try:
            if self._offset != start:
                self._seek(start)
            piece_bytes = _PIECE_BYTES
            while self._offset < end:
                before = self._offset
                yield from self._piece(end, piece_bytes)
                if self._offset == before:
                    if piece_bytes > _FRAME_BYTES_MAX or self._is_at_end():
                        self._open_next()
                    piece_bytes *= 2
                else:
                    piece_bytes = _PIECE_BYTES_MAX
        except (OSError, MalformedError) as error:
            raise StorageFailedError(
                f"the log of {self._identity} cannot be read: {error}"
            ) from error

    def close(self) -> None:
        """Close the segment."""
        file, self._file = self._file, None
        self._offset = -1
        if file is not None:
            os.close(file)

    def _piece(self, end: int, piece_bytes: int) -> Iterator[SegmentFrame]:
        """Yield the whole frames of the next bytes."""
        assert self._file is not None
        assert self._segment is not None
        start = self._position
        data = memoryview(os.pread(self._file, piece_bytes, start))
        segment = SegmentFile(self._segment.path, self._identity, self._segment.header, data)
        for frame in segment.frames(start=0):
            if self._offset >= end:
                return
            is_next = frame.base_offset == self._offset and frame.row_count > 0
            if not is_next or frame.end_offset > end or not frame.is_checksum_right:
                raise CorruptDataError(
                    f"{segment.path} at byte {start + frame.position}: no whole frame of offset"
                    f" {self._offset} below {end}"
                )
            self._offset = frame.end_offset
            self._position = start + frame.position + frame_bytes(len(frame.payload))
            yield frame

    def _seek(self, offset: int) -> None:
        """Go to the frame with `offset`, or to the end before `offset`."""
        bases = offsets_of((path.name for path in self._directory.iterdir()), ".log")
        base = max((base for base in bases if base <= offset), default=None)
        if base is None:
            raise CorruptDataError(f"the log of {self._identity} begins after offset {offset}")
        self._open(base)
        assert self._file is not None
        assert self._segment is not None
        while self._offset < offset:
            data = memoryview(os.pread(self._file, _PIECE_BYTES_MAX, self._position))
            start, before = self._position, self._offset
            segment = SegmentFile(self._segment.path, self._identity, self._segment.header, data)
            for frame in segment.frames(start=0):
                if frame.end_offset > offset:
                    return
                self._offset = frame.end_offset
                self._position = start + frame.position + frame_bytes(len(frame.payload))
            if self._offset == before:
                return

    def _is_at_end(self) -> bool:
        assert self._file is not None
        return os.fstat(self._file).st_size <= self._position

    def _open_next(self) -> None:
        assert self._segment is not None
        if self._segment.header.base_offset == self._offset:
            raise CorruptDataError(f"{self._segment.path} has no whole frame of {self._offset}")
        self._open(self._offset)

    def _open(self, base_offset: int) -> None:
        self.close()
        path = segment_path(self._directory, base_offset)
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        data = os.pread(self._file, FILE_HEADER_BYTES, 0)
        header = decode_segment_header(data, identity=self._identity)
        self._segment = SegmentFile(path, self._identity, header, memoryview(b""))
        self._offset, self._position = base_offset, FILE_HEADER_BYTES
