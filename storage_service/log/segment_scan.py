"""Reading a segment from its first byte with nothing trusted: what is whole, and what follows.

`scan_frames` stops at the first byte that does not continue the chain of whole, checksummed frames.
Whether that is a torn tail or damage is decided by `durable_offset_after`: a later frame that says
"rows below offset D were durable before I was written" proves that everything below D was there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from crc32c import crc32c

from streamhouse.storage_service.log.fingerprint import fingerprint_after
from streamhouse.storage_service.log.segment_format import (
    FILE_HEADER_BYTES,
    FRAME,
    FRAME_HEADER_BYTES,
    FRAME_MAGIC,
    FRAME_VERSION,
    PAYLOAD_BYTES_LIMIT,
    frame_bytes,
)
from streamhouse.storage_service.log.segment_index import GrowingIndex
from streamhouse.storage_service.log.writer_state import WriterStates

__all__ = ["ScanResult", "durable_offset_after", "scan_frames"]

_MAGIC_BYTES = FRAME_MAGIC.to_bytes(4, "little")


class ScanResult(NamedTuple):
    """Where the chain of whole frames ends, and why; `problem` is empty at the end of the file."""

    end_offset: int
    end_position: int
    last_timestamp_us: int
    problem: str
    fingerprint: bytes | None


# A frame whose checksum is right: payload bytes, base offset, row count (0 if nothing else can be
# made of it), timestamp, writer id, sequence, durable offset. A restart makes one of each frame.
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
    """Verify frames from the file header on; tell `index` and `writers` of each whole one.

    `timestamp_us` is when the segment was created: no frame of it is older. `fingerprint` is that
    at `base_offset`, if it is known; then the result has the one at its end.
    """
    position = FILE_HEADER_BYTES
    expected = base_offset
    last_timestamp = timestamp_us
    size = len(view)
    problem = ""
    while position < size:
        found = _frame_at(view, position)
        if isinstance(found, str):
            problem = found
            break
        payload_bytes, base, row_count, frame_timestamp, writer_id, sequence, _ = found
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
    """Return the largest durable offset that a whole frame from byte `position` on vouches for.

    0 if no frame follows. Only frames of `offset_min` or later count; frames start at multiples
    of 8 bytes, so nothing else is looked at.
    """
    proven = 0
    for candidate in _magic_positions(view, position):
        found = _frame_at(view, candidate)
        if isinstance(found, str):
            continue
        _, base, *_, durable = found
        if base >= offset_min:
            proven = max(proven, durable)
    return proven


def _frame_at(view: memoryview, position: int) -> _RawFrame | str:
    """Return the whole frame at `position`, or what is wrong with the bytes there."""
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
    known = version == FRAME_VERSION and not flags and not zero
    if not known or not rows or not payload_bytes or dur > base:
        # Whole, hence no torn write. Vouching for itself makes recovery refuse, not cut it off.
        return payload_bytes, base, 0, timestamp, writer, seq, base + 1
    return payload_bytes, base, rows, timestamp, writer, seq, dur


def _magic_positions(view: memoryview, position: int) -> Iterator[int]:
    # Searched in pieces, because `find` needs bytes and the tail may be a whole segment.
    piece_bytes = 1 << 20
    for start in range(position, len(view), piece_bytes):
        piece = bytes(view[start : start + piece_bytes + 3])
        found = piece.find(_MAGIC_BYTES)
        while 0 <= found < piece_bytes:
            if (start + found) % 8 == 0:
                yield start + found
            found = piece.find(_MAGIC_BYTES, found + 1)
