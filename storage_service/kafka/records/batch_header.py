"""The header of a record batch of magic 2 (KIP-98; Kafka's DefaultRecordBatch), all big endian.

byte  0  base offset            i64 | offset of the first record; set by the broker
byte  8  batch bytes            i32 | of everything that follows
byte 12  partition leader epoch i32 | set by the broker
byte 16  magic                  i8  | 2
byte 17  CRC-32C                u32 | of everything that follows
byte 21  attributes             i16 | bits 0-2 compression, 3 whose timestamps, 4 transactional,
                                    | 5 control
byte 23  last offset delta      i32 | offset of the last record, from the base offset
byte 27  base timestamp         i64 | of the first record, milliseconds
byte 35  max timestamp          i64
byte 43  producer id            i64 | -1 is none
byte 51  producer epoch         i16
byte 53  base sequence          i32 | of the first record
byte 57  record count           i32
byte 61  records, compressed as one
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

import crc32c

from streamhouse.storage_service.kafka.protocol_errors import InvalidRecordsError, RecordsFault
from streamhouse.storage_service.kafka.records._compression import Compression

__all__ = [
    "HEADER_BYTES",
    "NO_PRODUCER",
    "BatchHeader",
    "claimed_record_count",
    "claims_compression",
    "header_bytes",
    "open_batch",
]

_HEADER: Final = struct.Struct(">qiibIhiqqqhii")
HEADER_BYTES: Final = _HEADER.size
_PREFIX: Final = struct.Struct(">qi")
_MAGIC_AT: Final = 16
_MAGIC: Final = 2
_CRC_AT: Final = 17
_CRC_FROM: Final = 21
_COMPRESSION_MASK: Final = 0x07
_IS_APPEND_TIME: Final = 0x08
_IS_TRANSACTIONAL: Final = 0x10
_IS_CONTROL: Final = 0x20
NO_PRODUCER: Final = -1


class BatchHeader(NamedTuple):
    """The header before the records of a batch."""

    base_offset: int
    """A producer's value means nothing, and is mostly 0."""
    compression: Compression
    is_append_time: bool
    """Whether the max timestamp of the batch replaces the timestamp of every record."""
    is_transactional: bool
    is_control: bool
    """Whether the records mark the end of a transaction; only brokers write such batches."""
    last_offset_delta: int
    """The offset of the original last record, relative to the base offset."""
    base_timestamp_ms: int
    max_timestamp_ms: int
    producer_id: int
    """`NO_PRODUCER` for a batch without idempotence."""
    producer_epoch: int
    base_sequence: int
    record_count: int

    @property
    def is_dense(self) -> bool:
        """Return whether every offset of the batch has a record, as in a new batch."""
        return self.last_offset_delta == self.record_count - 1


def open_batch(
    data: memoryview, *, is_damaged: bool = False
) -> tuple[BatchHeader, memoryview, memoryview]:
    """Return the header and the records of the first batch in `data`, and the bytes behind.

    Raises InvalidRecordsError unless all bytes of the batch arrived, with the right checksum. With
    `is_damaged` the checksum is not verified. The header's claims about records are not verified.
    """
    # The magic has the same place in every version, and decides about all other fields.
    if len(data) > _MAGIC_AT and data[_MAGIC_AT] != _MAGIC:
        raise InvalidRecordsError(
            f"records of message format {data[_MAGIC_AT]} are not taken, only of {_MAGIC}:"
            " clients write it since Kafka 0.11",
            fault=RecordsFault.OLD_FORMAT,
        )
    if len(data) < HEADER_BYTES:
        raise _corrupt(f"{len(data)} bytes are no record batch, its header has {HEADER_BYTES}")
    _, batch_bytes = _PREFIX.unpack_from(data)
    end = _PREFIX.size + batch_bytes
    if not HEADER_BYTES <= end <= len(data):
        raise _corrupt(f"a record batch of {end} bytes has {len(data)}")
    (base_offset, _, _, _, crc, attributes, *fields) = _HEADER.unpack_from(data)
    checksum = crc32c.crc32c(data[_CRC_FROM:end])
    if checksum != crc and not is_damaged:
        raise _corrupt(f"the record batch has checksum {checksum:08x}, its header says {crc:08x}")
    code = attributes & _COMPRESSION_MASK
    if code > max(Compression):
        raise InvalidRecordsError(
            f"compression {code} is not known", fault=RecordsFault.UNSUPPORTED_COMPRESSION
        )
    header = BatchHeader(
        base_offset,
        Compression(code),
        bool(attributes & _IS_APPEND_TIME),
        bool(attributes & _IS_TRANSACTIONAL),
        bool(attributes & _IS_CONTROL),
        *fields,
    )
    return header, data[HEADER_BYTES:end], data[end:]


def claimed_record_count(data: bytes) -> int:
    """Return the record count in an unchecked header; 0 without a header."""
    if len(data) < HEADER_BYTES:
        return 0
    return max(0, int.from_bytes(data[HEADER_BYTES - 4 : HEADER_BYTES], "big", signed=True))


def claims_compression(data: bytes) -> bool:
    """Return whether an unchecked header announces compressed records."""
    return len(data) > _CRC_FROM + 1 and bool(data[_CRC_FROM + 1] & _COMPRESSION_MASK)


def _corrupt(message: str) -> InvalidRecordsError:
    return InvalidRecordsError(message, fault=RecordsFault.CORRUPT)


def header_bytes(
    header: BatchHeader, records: list[bytes | memoryview], *, leader_epoch: int = 0
) -> bytes:
    """Return the encoded header for `records`."""
    attributes = (
        header.compression
        | header.is_append_time * _IS_APPEND_TIME
        | header.is_transactional * _IS_TRANSACTIONAL
        | header.is_control * _IS_CONTROL
    )
    batch_bytes = HEADER_BYTES - _PREFIX.size + sum(len(piece) for piece in records)
    packed = bytearray(
        _HEADER.pack(
            header.base_offset, batch_bytes, leader_epoch, _MAGIC, 0, attributes, *header[5:]
        )
    )
    crc = crc32c.crc32c(packed[_CRC_FROM:])
    for piece in records:
        crc = crc32c.crc32c(piece, crc)
    packed[_CRC_AT:_CRC_FROM] = crc.to_bytes(4, "big")
    return bytes(packed)
