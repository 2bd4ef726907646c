"""The bytes are those that docs/storage_format.md draws, and damage is noticed."""

from __future__ import annotations

import struct

import pytest
from crc32c import crc32c

from streamhouse.storage_service.log.segments import segment_format
from streamhouse.storage_service.log.segments.segment_format import (
    FRAME,
    IndexHeader,
    LogIdentity,
    MalformedError,
    SegmentHeader,
    encode_frame,
    frame_bytes,
)

_IDENTITY = LogIdentity(table_id=0x0102030405060708, bucket=0x11121314)


def _frame(payload: bytes) -> bytes:
    return b"".join(
        encode_frame(
            payload,
            base_offset=100,
            row_count=5,
            schema_id=3,
            timestamp_us=-7,
            writer_id=1 << 63,
            sequence=9,
            durable_offset=90,
        )
    )


def test_frame_fields_are_where_the_drawing_says() -> None:
    frame = _frame(b"payload!")

    assert frame[:4] == b"SHFR"
    assert frame[64:] == b"payload!"
    fields = {
        "crc": ("<I", 4, crc32c(frame[8:])),
        "payload bytes": ("<I", 8, 8),
        "version": ("<B", 12, 1),
        "flags": ("<B", 13, 0),
        "base offset": ("<Q", 16, 100),
        "row count": ("<I", 24, 5),
        "schema id": ("<I", 28, 3),
        "timestamp": ("<q", 32, -7),
        "writer id": ("<Q", 40, 1 << 63),
        "sequence": ("<Q", 48, 9),
        "durable offset": ("<Q", 56, 90),
    }
    for name, (code, position, expected) in fields.items():
        assert struct.unpack_from(code, frame, position)[0] == expected, name


@pytest.mark.parametrize("payload_bytes", range(1, 20))
def test_frames_are_padded_to_eight_bytes_outside_the_checksum(payload_bytes: int) -> None:
    frame = _frame(b"x" * payload_bytes)

    assert len(frame) == frame_bytes(payload_bytes)
    assert len(frame) % 8 == 0
    assert frame[64 + payload_bytes :].strip(b"\0") == b""
    assert FRAME.unpack_from(frame)[1] == crc32c(frame[8 : 64 + payload_bytes])


@pytest.mark.parametrize("fingerprint", [None, b"8 bytes."])
def test_headers_round_trip(fingerprint: bytes | None) -> None:
    segment = SegmentHeader(12, -1, fingerprint)
    index = IndexHeader(
        entry_count=1,
        base_offset=2,
        end_offset=3,
        segment_bytes=4,
        last_timestamp_us=-5,
        entries_crc=6,
        end_fingerprint=fingerprint,
    )

    encoded_segment = segment_format.encode_segment_header(segment, identity=_IDENTITY)
    encoded_index = segment_format.encode_index_header(index, identity=_IDENTITY)
    encoded_mark = segment_format.encode_durable_mark(
        segment_format.MarkFacts(1 << 60, 1 << 59, 1 << 58), identity=_IDENTITY
    )

    assert {len(encoded_segment), len(encoded_mark)} == {64}
    assert len(encoded_index) == 64 + len(fingerprint or b"")
    assert segment_format.decode_segment_header(encoded_segment, identity=_IDENTITY) == segment
    assert segment_format.decode_index_header(encoded_index, identity=_IDENTITY) == index
    assert segment_format.decode_durable_mark(encoded_mark, identity=_IDENTITY) == (
        1 << 60,
        1 << 59,
        1 << 58,
    )


def test_every_flipped_bit_of_a_header_is_noticed() -> None:
    header = segment_format.encode_segment_header(SegmentHeader(1, 2), identity=_IDENTITY)

    for position in range(64):
        for bit in range(8):
            damaged = bytearray(header)
            damaged[position] ^= 1 << bit
            with pytest.raises(MalformedError):
                segment_format.decode_segment_header(bytes(damaged), identity=_IDENTITY)


def test_a_short_header_is_noticed() -> None:
    with pytest.raises(MalformedError, match="63 of 64 bytes"):
        segment_format.decode_segment_header(bytes(63), identity=_IDENTITY)


def test_a_file_of_another_bucket_is_refused() -> None:
    header = segment_format.encode_segment_header(SegmentHeader(1, 2), identity=_IDENTITY)

    with pytest.raises(MalformedError, match="not to bucket 1 of table 2"):
        segment_format.decode_segment_header(header, identity=LogIdentity(2, 1))


def test_a_newer_format_version_is_named() -> None:
    header = segment_format.encode_segment_header(SegmentHeader(1, 2), identity=_IDENTITY)
    newer = segment_format.seal_header(header[:4] + struct.pack("<H", 3) + header[6:60])

    with pytest.raises(MalformedError, match="format version 3"):
        segment_format.decode_segment_header(newer, identity=_IDENTITY)
