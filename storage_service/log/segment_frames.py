"""The frames of a segment file, for whoever looks at files and not at tables."""

from __future__ import annotations

import mmap
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from crc32c import crc32c

from streamhouse.storage_service.errors import CorruptDataError, StorageFailedError
from streamhouse.storage_service.log.fingerprint import fingerprint_after, fingerprint_within
from streamhouse.storage_service.log.segment_format import (
    FILE_HEADER_BYTES,
    FRAME,
    FRAME_HEADER_BYTES,
    FRAME_MAGIC,
    LogIdentity,
    MalformedError,
    SegmentHeader,
    decode_segment_header,
    frame_bytes,
    identity_of_segment,
)

__all__ = ["SegmentFile", "SegmentFrame", "open_segment"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentFrame:
    """One frame as it lies in the file; `payload` is a record batch message."""

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
        """The offset after its last row."""
        return self.base_offset + self.row_count


@dataclass(frozen=True, slots=True)
class SegmentFile:
    """A segment whose header is whole, mapped into memory."""

    path: Path
    identity: LogIdentity
    header: SegmentHeader
    view: memoryview

    def frames(self) -> Iterator[SegmentFrame]:
        """Yield frames until the first bytes that can be none, without judging what they say."""
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
        """Return those of `offsets` that the segment has, if it has fingerprints at all.

        They are made of the frames' headers alone: no checksum is looked at.
        """
        before = self.header.fingerprint
        wanted = sorted(offset for offset in offsets if offset >= self.header.base_offset)
        found: dict[int, bytes] = {}
        position, end = FILE_HEADER_BYTES, self.header.base_offset
        while before is not None and wanted:
            if wanted[0] == end:
                found[wanted.pop(0)] = before
                continue
            header = bytes(self.view[position : position + FRAME_HEADER_BYTES])
            if len(header) < FRAME_HEADER_BYTES:
                break
            magic, _, payload_bytes, _, _, _, base, rows, *_ = FRAME.unpack(header)
            if magic != FRAME_MAGIC or base != end:
                break
            end += rows
            while wanted and wanted[0] < end:
                offset = wanted.pop(0)
                found[offset] = fingerprint_within(before, header, offset - base)
            before = fingerprint_after(before, header)
            position += frame_bytes(payload_bytes)
        return found


def open_segment(path: Path, *, identity: LogIdentity | None = None) -> SegmentFile:
    """Map a segment file; `identity` None takes what its header says.

    Raises `CorruptDataError` for a header that is damaged or another log's.
    """
    try:
        with path.open("rb") as file:
            data = file.read(FILE_HEADER_BYTES)
            found = identity or identity_of_segment(data)
            header = decode_segment_header(data, identity=found)
            view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except MalformedError as error:
        raise CorruptDataError(f"{path}: {error}") from error
    except (OSError, ValueError) as error:
        raise StorageFailedError(f"{path} cannot be read: {error}") from error
    return SegmentFile(path, found, header, view)
