"""The header of a record batch of magic 2 (KIP-98; Kafka's DefaultRecordBatch), all big endian.

byte  0  base offset            i64 | offset of the first record; the broker's to say
byte  8  batch bytes            i32 | of everything that follows
byte 12  partition leader epoch i32 | the broker's to say
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

from streamhouse.storage_service.kafka.errors import InvalidRecordsError, RecordsFault
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
    """What stands before the records of a batch."""

    base_offset: int
    """What a producer writes here means nothing: most write 0."""
    compression: Compression
    is_append_time: bool
    """Whether every record has the batch's max timestamp, in place of its own."""
    is_transactional: bool
    is_control: bool
    """Whether the records are marks of a transaction's end, which only brokers write."""
    last_offset_delta: int
    """Of the last record that the batch ever had, from the base offset."""
    base_timestamp_ms: int
    max_timestamp_ms: int
    producer_id: int
    """`NO_PRODUCER`: the batch is not idempotent."""
    producer_epoch: int
    base_sequence: int
    record_count: int

    @property
    def is_dense(self) -> bool:
        """Return whether no offset of the batch is without a record, as in one just produced."""
        return self.last_offset_delta == self.record_count - 1


def open_batch(
    data: memoryview, *, is_damaged: bool = False
) -> tuple[BatchHeader, memoryview, memoryview]:
    """Return the header of the batch that `data` begins with, its records, what follows the batch.

    All bytes of the batch are there and are those that were sent, or InvalidRecordsError is raised;
    of one that `is_damaged` the header may be right all the same. What it says of its records is
    not checked.
    """
    # Of every magic at the same place, and the first thing to be known of a batch.
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
    (base_offset, _, _, _, crc, attributes, *rest) = _HEADER.unpack_from(data)
    found = crc32c.crc32c(data[_CRC_FROM:end])
    if found != crc and not is_damaged:
        raise _corrupt(f"the record batch has checksum {found:08x}, its header says {crc:08x}")
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
        *rest,
    )
    return header, data[HEADER_BYTES:end], data[end:]


def claimed_record_count(data: bytes) -> int:
    """Return how many records a batch says that it has, 0 for what is none; nothing is checked."""
    if len(data) < HEADER_BYTES:
        return 0
    return max(0, int.from_bytes(data[HEADER_BYTES - 4 : HEADER_BYTES], "big", signed=True))


def claims_compression(data: bytes) -> bool:
    """Return whether a batch says that its records are compressed; nothing is checked."""
    return len(data) > _CRC_FROM + 1 and bool(data[_CRC_FROM + 1] & _COMPRESSION_MASK)


def _corrupt(message: str) -> InvalidRecordsError:
    return InvalidRecordsError(message, fault=RecordsFault.CORRUPT)


def header_bytes(
    header: BatchHeader, records: list[bytes | memoryview], *, leader_epoch: int = 0
) -> bytes:
    """Return the header of `records` as it stands before them."""
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
