"""The file of one staged part: durable, invisible rows of a transaction.

Part file, little endian: a 64-byte header, the Arrow schema message, record batch messages (each
padded with zeros to a multiple of 8 bytes), the index.

    0 magic 'SHTP' | 4 version u16 | 6 header bytes u16 | 8 table id u64 | 16 batch count u32
    20 zero u32 | 24 index position u64 | 32 file bytes u64 | 40 row count u64
    48 schema message bytes u32 | 52 zero u32 | 56 crc u32 of the index | 60 crc u32 of the header

The index has one entry a batch: bucket u32 | row count u32 | position u64 | bytes u32 | crc u32.

A truncated file fails these checks, and was never acknowledged. Batches of primary key tables may
have a last column `__operation`: the operation of each row.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import pyarrow as pa
from crc32c import crc32c

from streamhouse.core.errors import CorruptDataError
from streamhouse.storage_service.log.append_queue import RoutedBatch
from streamhouse.storage_service.log.filesystem import Buffer, Filesystem
from streamhouse.storage_service.log.segments.segment_format import (
    FILE_HEADER_BYTES,
    MalformedError,
    seal_header,
    unseal_header,
)

__all__ = ["OPERATION_COLUMN", "StagedPart", "encode_part"]

OPERATION_COLUMN: Final = "__operation"
_MAGIC: Final = b"SHTP"
_HEADER: Final = struct.Struct("<4sHHQIIQQQIII")
_ENTRY: Final = struct.Struct("<IIQII")
_PADDING: Final = tuple(bytes(count) for count in range(8))


def encode_part(
    schema: pa.Schema, batches: Sequence[RoutedBatch], *, table_id: int
) -> list[Buffer]:
    """Return the contents of a part file; payloads are not copied."""
    schema_message = memoryview(schema.serialize()).cast("B")
    buffers: list[Buffer] = [schema_message, _padding(len(schema_message))]
    position = FILE_HEADER_BYTES + sum(map(len, buffers))
    entries = []
    for batch in batches:
        payload = batch.payload
        entry = (batch.bucket, batch.row_count, position, len(payload), crc32c(payload))
        entries.append(_ENTRY.pack(*entry))
        padding = _padding(len(payload))
        buffers += [payload, padding]
        position += len(payload) + len(padding)
    index = b"".join(entries)
    header = _HEADER.pack(
        _MAGIC,
        1,
        FILE_HEADER_BYTES,
        table_id,
        len(batches),
        0,
        position,
        position + len(index),
        sum(batch.row_count for batch in batches),
        len(schema_message),
        0,
        crc32c(index),
    )
    return [seal_header(header), *(b for b in buffers if len(b)), *([index] if index else [])]


class StagedPart:
    """A checked part file; its rows are checked when read."""

    def __init__(
        self,
        path: Path,
        data: memoryview,
        entries: Sequence[tuple[int, int, int, int, int]],
        schema: pa.Schema,
        row_count: int,
    ) -> None:
        self._path = path
        self._data = data
        self._entries = entries
        self.schema = schema
        self.row_count = row_count
        self.size_bytes = len(data)

    @classmethod
    def open(cls, path: Path, *, filesystem: Filesystem, table_id: int) -> StagedPart:
        """Map the file at `path`; raises CorruptDataError."""
        try:
            return cls._open(path, filesystem, table_id)
        except (MalformedError, struct.error, pa.ArrowException, OSError) as error:
            raise CorruptDataError(f"staged part {path}: {error}") from error

    @classmethod
    def _open(cls, path: Path, filesystem: Filesystem, table_id: int) -> StagedPart:
        size_bytes = filesystem.size_bytes(path)
        if size_bytes < FILE_HEADER_BYTES:
            raise MalformedError(f"it has {size_bytes} bytes")
        data = filesystem.map(path, size_bytes)[:size_bytes]
        body = unseal_header(data[:FILE_HEADER_BYTES], magic=_MAGIC, what="staged part")
        fields = _HEADER.unpack(body)
        owner, count, _, index_at, file_bytes, row_count, schema_bytes, _, crc = fields[3:]
        index = data[index_at:]
        if (owner, file_bytes) != (table_id, size_bytes):
            raise MalformedError(f"its header is not of {size_bytes} bytes of table {table_id}")
        if len(index) != count * _ENTRY.size or crc32c(index) != crc:
            raise MalformedError("index checksum mismatch")
        message = data[FILE_HEADER_BYTES : FILE_HEADER_BYTES + schema_bytes]
        schema = pa.ipc.read_schema(pa.py_buffer(message))
        return cls(path, data, list(_ENTRY.iter_unpack(index)), schema, row_count)

    def rows_by_bucket(self) -> dict[int, int]:
        """Return the number of rows of each bucket with rows."""
        counts: dict[int, int] = {}
        for bucket, row_count, *_ in self._entries:
            counts[bucket] = counts.get(bucket, 0) + row_count
        return counts

    def batches(self) -> Iterator[RoutedBatch]:
        """Yield all batches in order, each checked; raises CorruptDataError."""
        for bucket, row_count, position, size, crc in self._entries:
            payload = self._data[position : position + size]
            if len(payload) != size or crc32c(payload) != crc:
                raise CorruptDataError(
                    f"staged part {self._path}: the batch at byte {position} is damaged"
                )
            yield RoutedBatch(bucket, row_count, payload)


def _padding(size: int) -> bytes:
    return _PADDING[-size & 7]
