"""Walk the messages of an Arrow IPC stream without decoding them.

An encapsulated message is (Arrow columnar format, "Serialization and Interprocess Communication"):

    continuation u32 = 0xFFFFFFFF | metadata bytes i32 | metadata (flatbuffer Message) | body

and a metadata size of 0 ends the stream. Only the three facts needed before decoding are read
from the flatbuffer: the kind, the body length, and whether buffers are compressed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from streamhouse.storage_service.errors import InvalidRequestError

__all__ = ["END_OF_STREAM", "IpcMessage", "messages"]

END_OF_STREAM: Final = b"\xff\xff\xff\xff\x00\x00\x00\x00"
SCHEMA: Final = 1
RECORD_BATCH: Final = 3
_CONTINUATION: Final = 0xFFFF_FFFF
_PREFIX: Final = struct.Struct("<Ii")
# Slots of flatbuffer tables (Message.fbs): Message{version, header_type, header, bodyLength}
# and RecordBatch{length, nodes, buffers, compression}.
_HEADER_TYPE, _HEADER, _BODY_LENGTH = 1, 2, 3
_ROW_COUNT, _COMPRESSION = 0, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class IpcMessage:
    """One message: `data` is all of its bytes, prefix included."""

    kind: int
    is_compressed: bool
    row_count: int
    data: memoryview


def messages(stream: memoryview) -> Iterator[IpcMessage]:
    """Yield the messages of a stream; raises `InvalidRequestError` at the first malformed byte."""
    position = 0
    while position < len(stream):
        try:
            continuation, metadata_bytes = _PREFIX.unpack_from(stream, position)
            if continuation != _CONTINUATION or metadata_bytes < 0:
                raise ValueError
            if metadata_bytes == 0:
                return
            start = position + _PREFIX.size
            metadata = stream[start : start + metadata_bytes]
            kind, is_compressed, row_count, body_bytes = _read_message(metadata)
            end = start + metadata_bytes + body_bytes
            if body_bytes < 0 or row_count < 0 or end > len(stream):
                raise ValueError
        except (struct.error, ValueError, IndexError) as error:
            raise InvalidRequestError(
                f"the body is not an Arrow IPC stream: bad message at byte {position}"
            ) from error
        yield IpcMessage(
            kind=kind,
            is_compressed=is_compressed,
            row_count=row_count,
            data=stream[position:end],
        )
        position = end


def _read_message(metadata: memoryview) -> tuple[int, bool, int, int]:
    root = struct.unpack_from("<I", metadata, 0)[0]
    kind = _scalar(metadata, root, _HEADER_TYPE, "<B")
    body_bytes = _scalar(metadata, root, _BODY_LENGTH, "<q")
    if kind != RECORD_BATCH:
        return kind, False, 0, body_bytes
    slot = _slot(metadata, root, _HEADER)
    if slot is None:
        raise ValueError
    batch = slot + struct.unpack_from("<I", metadata, slot)[0]
    is_compressed = _slot(metadata, batch, _COMPRESSION) is not None
    return kind, is_compressed, _scalar(metadata, batch, _ROW_COUNT, "<q"), body_bytes


def _slot(metadata: memoryview, table: int, slot: int) -> int | None:
    vtable = table - struct.unpack_from("<i", metadata, table)[0]
    if vtable < 0:
        raise ValueError
    vtable_bytes = struct.unpack_from("<H", metadata, vtable)[0]
    entry = 4 + 2 * slot
    if entry + 2 > vtable_bytes:
        return None
    offset = struct.unpack_from("<H", metadata, vtable + entry)[0]
    return table + offset if offset else None


def _scalar(metadata: memoryview, table: int, slot: int, form: str) -> int:
    position = _slot(metadata, table, slot)
    return 0 if position is None else int(struct.unpack_from(form, metadata, position)[0])
