"""The files of a log: their names, the bytes of segment, index and durable mark, fingerprints.

Encodes and decodes only.

All integers are little endian. Every file starts with a 64-byte header whose last four bytes are
the CRC-32C of the sixty before them. docs/storage_format.md draws the same tables.

Segment file `<base offset, 20 digits>.log`: the header, then frames to the end of the file.

    0 magic 'SHLG' | 4 version u16 | 6 header bytes u16 | 8 table id u64 | 16 bucket u32
    20 zero u32 | 24 base offset u64 | 32 created timestamp us i64
    40 fingerprint at the base offset, 8 bytes (version 1: zero) | 48 zeros | 60 crc u32

Frame: a 64-byte header, the payload, and zeros up to a multiple of 8 bytes.

    0 magic 'SHFR' | 4 crc u32 of bytes 8 to the end of the payload | 8 payload bytes u32
    12 version u8 | 13 flags u8 | 14 zero u16 | 16 base offset u64 | 24 row count u32
    28 schema id u32 | 32 timestamp us i64 | 40 writer id u64 | 48 sequence u64
    56 durable offset u64: rows below it were durable before this frame was written

Index file `<base offset>.index` of a sealed segment: the header, the fingerprint at the end offset
(8 bytes), then four columns of entries: offsets u64[n], positions u64[n], timestamps i64[n],
fingerprints 8 bytes[n]. Version 1 has no fingerprints, neither the one nor the column.

    0 magic 'SHIX' | 4 version u16 | 6 header bytes u16 | 8 table id u64 | 16 bucket u32
    20 entry count n u32 | 24 base offset u64 | 32 end offset u64 | 40 segment bytes u64
    48 last timestamp us i64 | 56 crc u32 of what follows the header | 60 crc u32

Durable mark `durable.mark`: the header only, written to the first and the second 64 bytes in turn.

    0 magic 'SHDM' | 4 version u16 | 6 header bytes u16 | 8 table id u64 | 16 bucket u32
    20 zero u32 | 24 durable offset u64 | 32 start offset u64 | 40 forgotten offset u64 | 48 zeros
    60 crc u32

A file name is the base offset in twenty digits and the kind, so that names sort as offsets.

The running fingerprint of a log identifies in 8 bytes the frames below an offset. The fingerprint
after a frame is a hash of the fingerprint before and the frame's header (payload's checksum,
offsets, time, writer). So two copies of one log have equal fingerprints at an offset
exactly if the frames below are equal, however the logs are cut into segments. An offset within a
frame has a fingerprint, too: a hash of the fingerprint before, the header and the rows before.

A log begun by an earlier release has no fingerprint below the offset of this release's first open:
fingerprints begin there, as for a log beginning at the offset. Version 1 of segments and indexes
belongs to logs without fingerprints.
"""

from __future__ import annotations

import re
import struct
import sys
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from typing import Final, NamedTuple

from crc32c import crc32c

from streamhouse.storage_service.log.filesystem import Buffer

__all__ = [
    "FILE_HEADER_BYTES",
    "FRAME",
    "FRAME_HEADER_BYTES",
    "FRAME_MAGIC",
    "FRAME_VERSION",
    "INDEX_START_BYTES",
    "PAYLOAD_BYTES_LIMIT",
    "IndexHeader",
    "LogIdentity",
    "MalformedError",
    "MarkFacts",
    "OtherFormatError",
    "SegmentHeader",
    "decode_durable_mark",
    "decode_index_header",
    "decode_segment_header",
    "encode_durable_mark",
    "encode_frame",
    "encode_index_header",
    "encode_segment_header",
    "fingerprint_after",
    "fingerprint_within",
    "first_fingerprint",
    "frame_bytes",
    "identity_of_segment",
    "index_path",
    "offsets_of",
    "seal_header",
    "segment_path",
    "unseal_header",
    "writers_path",
]

FORMAT_VERSION: Final = 1
FINGERPRINTED_VERSION: Final = 2
"""The version of segments and indexes with fingerprints."""
FILE_HEADER_BYTES: Final = 64
INDEX_START_BYTES: Final = FILE_HEADER_BYTES + 8
"""The bytes of an index before its entries."""
FRAME_HEADER_BYTES: Final = 64
FRAME_VERSION: Final = 1
FRAME_MAGIC: Final = int.from_bytes(b"SHFR", "little")
# No version of this format has a larger frame; a claim of more is damage, whatever the options say.
PAYLOAD_BYTES_LIMIT: Final = 1 << 30

# magic, crc, payload bytes, version, flags, zero, base offset, row count, schema id, timestamp,
# writer id, sequence, durable offset
FRAME: Final = struct.Struct("<IIIBBHQIIqQQQ")
_FRAME_START: Final = struct.Struct("<II")
_FRAME_CHECKED: Final = struct.Struct("<IBBHQIIqQQQ")
_NAME: Final = re.compile(r"(\d{20})(\.log|\.index|\.writers)")
_PADDING: Final = tuple(bytes(count) for count in range(8))

# magic, version, header bytes, table id, bucket, zero, base offset, created timestamp, fingerprint
_SEGMENT: Final = struct.Struct("<4sHHQIIQq8s12x")
# ..., entry count, base offset, end offset, segment bytes, last timestamp, crc of the entries
_INDEX: Final = struct.Struct("<4sHHQIIQQQqI")
# ..., zero, durable offset, start offset, forgotten offset
_MARK: Final = struct.Struct("<4sHHQIIQQQ12x")
_HEADER_CRC: Final = struct.Struct("<I")

FINGERPRINT_BYTES: Final = 8
_BEGINNING: Final = struct.Struct("<8sQIQ")
_ROWS: Final = struct.Struct("<Q")

assert FRAME.size == FRAME_HEADER_BYTES
assert {_SEGMENT.size, _INDEX.size, _MARK.size} == {FILE_HEADER_BYTES - _HEADER_CRC.size}
# Index columns are read in place, as the machine's own integers.
assert sys.byteorder == "little", "Streamhouse stores little-endian data and needs such a machine"


class MalformedError(ValueError):
    """Bytes break this format. Internal: the caller adds the file, as a CorruptDataError."""


class OtherFormatError(MalformedError):
    """A whole header with a version unknown to this release: no damage."""


class LogIdentity(NamedTuple):
    """The table and bucket of a log; stored in every file header."""

    table_id: int
    bucket: int

    def __str__(self) -> str:
        return f"bucket {self.bucket} of table {self.table_id}"


class SegmentHeader(NamedTuple):
    """The facts of a segment's file header; without fingerprints `fingerprint` is None."""

    base_offset: int
    created_timestamp_us: int
    fingerprint: bytes | None = None


class IndexHeader(NamedTuple):
    """An index file's facts about its sealed segment."""

    entry_count: int
    base_offset: int
    end_offset: int
    segment_bytes: int
    last_timestamp_us: int
    entries_crc: int
    end_fingerprint: bytes | None = None


def frame_bytes(payload_bytes: int) -> int:
    """Return the distance to the next frame after a frame with this payload."""
    return FRAME_HEADER_BYTES + ((payload_bytes + 7) & ~7)


def encode_frame(
    payload: Buffer,
    *,
    base_offset: int,
    row_count: int,
    schema_id: int,
    timestamp_us: int,
    writer_id: int,
    sequence: int,
    durable_offset: int,
) -> list[Buffer]:
    """Return the buffers of one frame; the payload is not copied."""
    payload_bytes = len(payload)
    assert 0 < payload_bytes <= PAYLOAD_BYTES_LIMIT
    assert row_count > 0
    assert durable_offset <= base_offset
    checked = _FRAME_CHECKED.pack(
        payload_bytes,
        FRAME_VERSION,
        0,
        0,
        base_offset,
        row_count,
        schema_id,
        timestamp_us,
        writer_id,
        sequence,
        durable_offset,
    )
    crc = crc32c(payload, crc32c(checked))
    header = _FRAME_START.pack(FRAME_MAGIC, crc) + checked
    padding = -payload_bytes & 7
    return [header, payload, _PADDING[padding]] if padding else [header, payload]


def seal_header(body: bytes) -> bytes:
    """Return a file header: `body` and its checksum."""
    return body + _HEADER_CRC.pack(crc32c(body))


def unseal_header(
    header: Buffer, *, magic: bytes, what: str, version_max: int = FORMAT_VERSION
) -> bytes:
    """Return the body of a file header after checking length, checksum, magic and version."""
    if len(header) < FILE_HEADER_BYTES:
        raise MalformedError(f"{what} header has {len(header)} of {FILE_HEADER_BYTES} bytes")
    body = bytes(header[: FILE_HEADER_BYTES - _HEADER_CRC.size])
    if body[:4] != magic:
        raise MalformedError(f"{what} starts with {body[:4]!r} instead of {magic!r}")
    if _HEADER_CRC.unpack_from(header, len(body))[0] != crc32c(body):
        raise MalformedError(f"{what} header checksum mismatch")
    version, header_bytes = struct.unpack_from("<HH", body, 4)
    if not FORMAT_VERSION <= version <= version_max or header_bytes != FILE_HEADER_BYTES:
        raise OtherFormatError(
            f"{what} has format version {version}, which this release cannot read"
        )
    return body


def _check_identity(identity: LogIdentity, expected: LogIdentity, *, what: str) -> None:
    if identity != expected:
        raise MalformedError(f"{what} belongs to {identity}, not to {expected}")


def encode_segment_header(header: SegmentHeader, *, identity: LogIdentity) -> bytes:
    """Return the first 64 bytes of a segment file."""
    return seal_header(
        _SEGMENT.pack(
            b"SHLG",
            _version_of(header.fingerprint),
            FILE_HEADER_BYTES,
            identity.table_id,
            identity.bucket,
            0,
            header.base_offset,
            header.created_timestamp_us,
            header.fingerprint or b"",
        )
    )


def _version_of(fingerprint: bytes | None) -> int:
    return FORMAT_VERSION if fingerprint is None else FINGERPRINTED_VERSION


def identity_of_segment(data: Buffer) -> LogIdentity:
    """Return the log identity in a segment file's header; raises MalformedError."""
    _, _, _, table_id, bucket, *_ = _SEGMENT.unpack(_segment_body(data))
    return LogIdentity(table_id, bucket)


def _segment_body(data: Buffer) -> bytes:
    return unseal_header(data, magic=b"SHLG", what="segment", version_max=FINGERPRINTED_VERSION)


def decode_segment_header(data: Buffer, *, identity: LogIdentity) -> SegmentHeader:
    """Read a segment file's header; raises MalformedError."""
    _, version, _, table_id, bucket, _, base_offset, created, fingerprint = _SEGMENT.unpack(
        _segment_body(data)
    )
    _check_identity(LogIdentity(table_id, bucket), identity, what="segment")
    is_known = version >= FINGERPRINTED_VERSION
    return SegmentHeader(base_offset, created, fingerprint if is_known else None)


def encode_index_header(header: IndexHeader, *, identity: LogIdentity) -> bytes:
    """Return the bytes of an index file before its entries."""
    *facts, end_fingerprint = header
    sealed = seal_header(
        _INDEX.pack(
            b"SHIX",
            _version_of(end_fingerprint),
            FILE_HEADER_BYTES,
            identity.table_id,
            identity.bucket,
            *facts,
        )
    )
    return sealed + (end_fingerprint or b"")


def decode_index_header(data: Buffer, *, identity: LogIdentity) -> IndexHeader:
    """Read an index file's first `INDEX_START_BYTES`; raises MalformedError."""
    body = unseal_header(data, magic=b"SHIX", what="index", version_max=FINGERPRINTED_VERSION)
    _, version, _, table_id, bucket, *facts = _INDEX.unpack(body)
    _check_identity(LogIdentity(table_id, bucket), identity, what="index")
    header = IndexHeader(*facts)
    if version < FINGERPRINTED_VERSION:
        return header
    end_fingerprint = bytes(data[FILE_HEADER_BYTES:INDEX_START_BYTES])
    if FILE_HEADER_BYTES + len(end_fingerprint) != INDEX_START_BYTES:
        raise MalformedError(f"index has {len(data)} bytes")
    return header._replace(end_fingerprint=end_fingerprint)


class MarkFacts(NamedTuple):
    """The facts of a durable mark: rows below `durable_offset` were durable.

    Retention never deleted a row at `start_offset` or above; rows below `forgotten_offset` may be
    missing from both log and lake. Marks of earlier releases have zeros for both.
    """

    durable_offset: int
    start_offset: int = 0
    forgotten_offset: int = 0


def encode_durable_mark(facts: MarkFacts, *, identity: LogIdentity) -> bytes:
    """Return the contents of a durable mark."""
    return seal_header(
        _MARK.pack(
            b"SHDM",
            FORMAT_VERSION,
            FILE_HEADER_BYTES,
            identity.table_id,
            identity.bucket,
            0,
            *facts,
        )
    )


def decode_durable_mark(data: Buffer, *, identity: LogIdentity) -> MarkFacts:
    """Read a durable mark; raises MalformedError."""
    body = unseal_header(data, magic=b"SHDM", what="durable mark")
    _, _, _, table_id, bucket, _, *facts = _MARK.unpack(body)
    _check_identity(LogIdentity(table_id, bucket), identity, what="durable mark")
    return MarkFacts(*facts)


def segment_path(directory: Path, base_offset: int) -> Path:
    """Return the path of the segment starting at `base_offset`."""
    return directory / f"{base_offset:020d}.log"


def index_path(directory: Path, base_offset: int) -> Path:
    """Return the path of the sealed segment's index."""
    return directory / f"{base_offset:020d}.index"


def writers_path(directory: Path, offset: int) -> Path:
    """Return the path of the writer state before `offset`."""
    return directory / f"{offset:020d}.writers"


def offsets_of(names: Iterable[str], suffix: str) -> list[int]:
    """Return the offsets in the names ending in `suffix`, ascending; other names are ignored."""
    matches = (_NAME.fullmatch(name) for name in names)
    return sorted(int(match[1]) for match in matches if match and match[2] == suffix)


def first_fingerprint(identity: LogIdentity, offset: int) -> bytes:
    """Return the fingerprint at the offset where a log, or its known part, begins."""
    beginning = _BEGINNING.pack(b"SHLOGFP1", identity.table_id, identity.bucket, offset)
    return blake2b(beginning, digest_size=FINGERPRINT_BYTES).digest()


def fingerprint_after(fingerprint: bytes, header: Buffer) -> bytes:
    """Return the fingerprint after a frame with these 64 bytes of header."""
    return blake2b(fingerprint + header, digest_size=FINGERPRINT_BYTES).digest()


def fingerprint_within(fingerprint: bytes, header: bytes, row_count: int) -> bytes:
    """Return the fingerprint `row_count` rows into a frame, before the frame's end."""
    whole = fingerprint + header + _ROWS.pack(row_count)
    return blake2b(whole, digest_size=FINGERPRINT_BYTES).digest()
