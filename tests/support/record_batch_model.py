"""Record batches as KIP-98 describes them, one record and one byte at a time, for tests."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Final

import crc32c
import numpy as np
import pyarrow as pa

from streamhouse.storage_service.kafka.records.columns import HEADERS_TYPE, RecordColumns

_HEADER: Final = struct.Struct(">qiibIhiqqqhii")


@dataclass(frozen=True)
class Record:
    """One record, with its offset from that of its batch."""

    key: bytes | None
    value: bytes | None
    timestamp_ms: int = 0
    headers: tuple[tuple[str, bytes | None], ...] = ()
    offset_delta: int = 0


@dataclass(frozen=True)
class Batch:
    """A batch and all that its header says."""

    records: tuple[Record, ...]
    base_offset: int = 0
    attributes: int = 0
    producer_id: int = -1
    producer_epoch: int = -1
    base_sequence: int = -1
    last_offset_delta: int | None = None
    base_timestamp_ms: int | None = None
    record_count: int | None = None
    body: bytes | None = field(default=None, repr=False)
    """In place of the records' own bytes."""

    def encoded(self) -> bytes:
        """Return the bytes of the batch."""
        times = [record.timestamp_ms for record in self.records] or [-1]
        base = times[0] if self.base_timestamp_ms is None else self.base_timestamp_ms
        body = self.body
        if body is None:
            body = b"".join(encoded_record(record, base) for record in self.records)
        last = self.last_offset_delta
        if last is None:
            last = self.records[-1].offset_delta
        count = len(self.records) if self.record_count is None else self.record_count
        fields = [
            self.attributes, last, base, max(times), self.producer_id, self.producer_epoch,
            self.base_sequence, count,
        ]  # fmt: skip
        packed = _HEADER.pack(self.base_offset, 49 + len(body), 0, 2, 0, *fields)
        return with_crc(packed + body)


def with_crc(batch: bytes) -> bytes:
    """Return a batch with the checksum of what it is now."""
    return batch[:17] + crc32c.crc32c(batch[21:]).to_bytes(4, "big") + batch[21:]


def encoded_varint(number: int) -> bytes:
    """Return a number as zigzag varint."""
    rest = number * 2 if number >= 0 else -number * 2 - 1
    encoded = bytearray()
    while rest > 0x7F:
        encoded.append(rest & 0x7F | 0x80)
        rest >>= 7
    return bytes([*encoded, rest])


def encoded_record(record: Record, base_timestamp_ms: int) -> bytes:
    """Return the bytes of a record, its length included."""
    body = b"\0" + encoded_varint(record.timestamp_ms - base_timestamp_ms)
    body += encoded_varint(record.offset_delta) + _field(record.key) + _field(record.value)
    body += encoded_varint(len(record.headers))
    for key, value in record.headers:
        body += _field(key.encode()) + _field(value)
    return encoded_varint(len(body)) + body


def _field(value: bytes | None) -> bytes:
    return encoded_varint(-1) if value is None else encoded_varint(len(value)) + value


def columns_of(records: tuple[Record, ...]) -> RecordColumns:
    """Return records as columns, without a column of headers if none has one."""
    headers = [[{"key": k, "value": v} for k, v in record.headers] for record in records]
    return RecordColumns(
        keys=pa.array([record.key for record in records], pa.binary()),
        values=pa.array([record.value for record in records], pa.binary()),
        timestamps_ms=np.array([record.timestamp_ms for record in records], np.int64),
        headers=pa.array(headers, HEADERS_TYPE) if any(headers) else None,
    )


def records_of(columns: RecordColumns, offset_deltas: list[int]) -> tuple[Record, ...]:
    """Return columns as records."""
    lists = [None] * len(columns) if columns.headers is None else columns.headers.to_pylist()
    return tuple(
        Record(key, value, time, tuple((h["key"], h["value"]) for h in headers or ()), delta)
        for key, value, time, headers, delta in zip(
            columns.keys.to_pylist(),
            columns.values.to_pylist(),
            columns.timestamps_ms.tolist(),
            lists,
            offset_deltas,
            strict=True,
        )
    )
