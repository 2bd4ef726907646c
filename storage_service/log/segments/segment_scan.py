"""Reading a segment from its first byte without trust: its whole frames, and the bytes behind.

`scan_frames` stops at the first byte outside of the chain of whole, checksummed frames. The
decision between torn tail and damage is `durable_offset_after`: a later frame saying "rows below
offset D were durable before this frame was written" proves all rows below D existed.

`open_segment` shows the frames of one file to tools for files.
"""

from __future__ import annotations

import mmap
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from crc32c import crc32c

from streamhouse.core.errors import CorruptDataError, StorageFailedError
from streamhouse.storage_service.log.segments.segment_format import (
    FILE_HEADER_BYTES,
    FRAME,
    FRAME_HEADER_BYTES,
    FRAME_MAGIC,
    FRAME_VERSION,
    PAYLOAD_BYTES_LIMIT,
    LogIdentity,
    MalformedError,
    SegmentHeader,
    decode_segment_header,
    fingerprint_after,
    fingerprint_within,
    frame_bytes,
    identity_of_segment,
)
from streamhouse.storage_service.log.segments.segment_index import GrowingIndex
from streamhouse.storage_service.log.writer_state import WriterStates

__all__ = [
    "ScanResult",
    "SegmentFile",
    "SegmentFrame",
    "durable_offset_after",
    "open_segment",
    "scan_frames",
]

_MAGIC_BYTES = FRAME_MAGIC.to_bytes(4, "little")


class ScanResult(NamedTuple):
    """The end of the chain of whole frames; `problem` is empty at the file's end."""

    end_offset: int
    end_position: int
    last_timestamp_us: int
    problem: str
    fingerprint: bytes | None


# A frame with a correct checksum: payload bytes, base offset, row count (0 if not readable
# otherwise), timestamp, writer id, sequence, durable offset. A restart makes a tuple per frame.
_RawFrame = tuple[int, int, int, int, int, int, int]


def scan_frames(
    view: memoryview,
    *,
    base_offset: int,
    timestamp_us: int,
    index: GrowingIndex | None,
    writers: WriterStates | None,
    fingerprint: bytes | None = None,
) -> ScanResult:
    """Verify frames from the file header on; add each whole frame to `index` and `writers`.

    `timestamp_us` is the segment's creation time: no frame is older. `fingerprint` is the
    fingerprint at `base_offset`, if known; then the result has the fingerprint at the end.
    """
    position = FILE_HEADER_BYTES
    expected = base_offset
    last_timestamp = timestamp_us
    size = len(view)
    problem = ""
    while position < size:
        frame = _frame_at(view, position)
        if isinstance(frame, str):
            problem = frame
            break
        payload_bytes, base, row_count, frame_timestamp, writer_id, sequence, _ = frame
        if not row_count:
            problem = "a whole frame that this release cannot read"
            break
        if base != expected:
            problem = f"frame of offset {base} where {expected} was expected"
            break
        if frame_timestamp < last_timestamp:
            problem = f"timestamp {frame_timestamp} after {last_timestamp}"
            break
        end_offset = expected + row_count
        last_timestamp = frame_timestamp
        if index is not None:
            index.add(
                offset=expected,
                position=position,
                timestamp_us=last_timestamp,
                fingerprint=fingerprint,
            )
        if writers is not None and writer_id:
            writers.record(writer_id, (sequence, expected, end_offset, last_timestamp))
        if fingerprint is not None:
            header = view[position : position + FRAME_HEADER_BYTES]
            fingerprint = fingerprint_after(fingerprint, header)
        expected = end_offset
        position += frame_bytes(payload_bytes)
    return ScanResult(expected, min(position, size), last_timestamp, problem, fingerprint)


def durable_offset_after(view: memoryview, position: int, *, offset_min: int) -> int:
    """Return the largest durable offset vouched for by a whole frame from `position` on.

    0 if no frame follows. Only frames of `offset_min` or later count. Frames start at multiples of
    8 bytes.
    """
    proven = 0
    for candidate in _magic_positions(view, position):
        frame = _frame_at(view, candidate)
        if isinstance(frame, str):
            continue
        _, base, *_, durable = frame
        if base >= offset_min:
            proven = max(proven, durable)
    return proven


def _frame_at(view: memoryview, position: int) -> _RawFrame | str:
    """Return the whole frame at `position`, or the problem of the bytes there."""
    size = len(view)
    if position + FRAME_HEADER_BYTES > size:
        return f"{size - position} bytes of a frame header"
    magic, crc, payload_bytes, version, flags, zero, base, rows, _, timestamp, writer, seq, dur = (
        FRAME.unpack_from(view, position)
    )
    if magic != FRAME_MAGIC:
        return "no frame starts here"
    if payload_bytes > PAYLOAD_BYTES_LIMIT or position + frame_bytes(payload_bytes) > size:
        return f"frame claims {payload_bytes} bytes of payload, past the end of the file"
    if crc32c(view[position + 8 : position + FRAME_HEADER_BYTES + payload_bytes]) != crc:
        return "frame checksum mismatch"
    is_known_version = version == FRAME_VERSION and not flags and not zero
    if not is_known_version or not rows or not payload_bytes or dur > base:
        # Whole, hence no torn write. The frame vouches for itself, so recovery refuses to truncate.
        return payload_bytes, base, 0, timestamp, writer, seq, base + 1
    return payload_bytes, base, rows, timestamp, writer, seq, dur


def _magic_positions(view: memoryview, position: int) -> Iterator[int]:
    # Searched in pieces, because `find` needs bytes and the tail may be a whole segment.
    piece_bytes = 1 << 20
    for start in range(position, len(view), piece_bytes):
        piece = bytes(view[start : start + piece_bytes + 3])
        index = piece.find(_MAGIC_BYTES)
        while 0 <= index < piece_bytes:
            if (start + index) % 8 == 0:
                yield start + index
            index = piece.find(_MAGIC_BYTES, index + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentFrame:
    """One frame of a file; `payload` is a record batch message."""

    position: int
    base_offset: int
    row_count: int
    schema_id: int
    timestamp_us: int
    writer_id: int
    sequence: int
    durable_offset: int
    is_checksum_right: bool
    payload: memoryview

    @property
    def end_offset(self) -> int:
        """The offset after the frame's last row."""
        return self.base_offset + self.row_count


@dataclass(frozen=True, slots=True)
class SegmentFile:
    """A segment with a whole header, mapped into memory."""

    path: Path
    identity: LogIdentity
    header: SegmentHeader
    view: memoryview

    def frames(self) -> Iterator[SegmentFrame]:
        """Yield frames until the first bytes unlike a frame, without judging their content."""
        position = FILE_HEADER_BYTES
        while position + FRAME_HEADER_BYTES <= len(self.view):
            (
                magic,
                crc,
                payload_bytes,
                *_,
                base,
                rows,
                schema_id,
                time,
                writer,
                sequence,
                durable,
            ) = FRAME.unpack_from(self.view, position)
            end = position + FRAME_HEADER_BYTES + payload_bytes
            if magic != FRAME_MAGIC or end > len(self.view):
                return
            yield SegmentFrame(
                position=position,
                base_offset=base,
                row_count=rows,
                schema_id=schema_id,
                timestamp_us=time,
                writer_id=writer,
                sequence=sequence,
                durable_offset=durable,
                is_checksum_right=crc32c(self.view[position + 8 : end]) == crc,
                payload=self.view[position + FRAME_HEADER_BYTES : end],
            )
            position += frame_bytes(payload_bytes)

    def fingerprints(self, offsets: Collection[int]) -> dict[int, bytes]:
        """Return the fingerprints at `offsets`, as far as the segment has them.

        Computed from the frames' headers alone: no checksum is verified.
        """
        fingerprint = self.header.fingerprint
        wanted_offsets = sorted(offset for offset in offsets if offset >= self.header.base_offset)
        fingerprints: dict[int, bytes] = {}
        position, end = FILE_HEADER_BYTES, self.header.base_offset
        while fingerprint is not None and wanted_offsets:
            if wanted_offsets[0] == end:
                fingerprints[wanted_offsets.pop(0)] = fingerprint
                continue
            header = bytes(self.view[position : position + FRAME_HEADER_BYTES])
            if len(header) < FRAME_HEADER_BYTES:
                break
            magic, _, payload_bytes, _, _, _, base, rows, *_ = FRAME.unpack(header)
            if magic != FRAME_MAGIC or base != end:
                break
            end += rows
            while wanted_offsets and wanted_offsets[0] < end:
                offset = wanted_offsets.pop(0)
                fingerprints[offset] = fingerprint_within(fingerprint, header, offset - base)
            fingerprint = fingerprint_after(fingerprint, header)
            position += frame_bytes(payload_bytes)
        return fingerprints


def open_segment(path: Path, *, identity: LogIdentity | None = None) -> SegmentFile:
    """Map a segment file; with `identity` None the header's identity is used.

    Raises `CorruptDataError` for a damaged header or another log's.
    """
    try:
        with path.open("rb") as file:
            data = file.read(FILE_HEADER_BYTES)
            file_identity = identity or identity_of_segment(data)
            header = decode_segment_header(data, identity=file_identity)
            view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except MalformedError as error:
        raise CorruptDataError(f"{path}: {error}") from error
    except (OSError, ValueError) as error:
        raise StorageFailedError(f"{path} cannot be read: {error}") from error
    return SegmentFile(path, file_identity, header, view)
