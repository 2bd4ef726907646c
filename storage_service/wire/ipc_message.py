"""Walk the messages of an Arrow IPC stream without decoding them.

An encapsulated message is (Arrow columnar format, "Serialization and Interprocess Communication"):

    continuation u32 = 0xFFFFFFFF | metadata bytes i32 | metadata (flatbuffer Message) | body

and a metadata size of 0 ends the stream. Only the three facts needed before decoding are read
from the flatbuffer: the kind, the body length, and whether buffers are compressed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from streamhouse.storage_service.errors import InvalidRequestError

__all__ = ["END_OF_STREAM", "IpcMessage", "messages"]

END_OF_STREAM: Final = b"\xff\xff\xff\xff\x00\x00\x00\x00"
SCHEMA: Final = 1
RECORD_BATCH: Final = 3
_CONTINUATION: Final = 0xFFFF_FFFF
_PREFIX: Final = struct.Struct("<Ii")
_U16: Final = struct.Struct("<H")
_U32: Final = struct.Struct("<I")
_I32: Final = struct.Struct("<i")
_I64: Final = struct.Struct("<q")
# The first slots of flatbuffer tables (Message.fbs): Message{version, header_type, header,
# bodyLength} and RecordBatch{length, nodes, buffers, compression}.
_SLOTS: Final = struct.Struct("<4H")
_NO_SLOT: Final = bytes(_SLOTS.size)


class IpcMessage(NamedTuple):
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
        yield IpcMessage(kind, is_compressed, row_count, stream[position:end])
        position = end


def _read_message(metadata: memoryview) -> tuple[int, bool, int, int]:
    (root,) = _U32.unpack_from(metadata)
    _, kind_at, header_at, body_bytes_at = _slots(metadata, root)
    kind = metadata[root + kind_at] if kind_at else 0
    body_bytes = _I64.unpack_from(metadata, root + body_bytes_at)[0] if body_bytes_at else 0
    if kind != RECORD_BATCH:
        return kind, False, 0, body_bytes
    if not header_at:
        raise ValueError
    header = root + header_at
    batch = header + _U32.unpack_from(metadata, header)[0]
    row_count_at, _, _, compression_at = _slots(metadata, batch)
    row_count = _I64.unpack_from(metadata, batch + row_count_at)[0] if row_count_at else 0
    return kind, compression_at != 0, row_count, body_bytes


def _slots(metadata: memoryview, table: int) -> tuple[int, int, int, int]:
    """Return how far into a table its first four fields lie; 0 for one that is not there."""
    vtable = table - _I32.unpack_from(metadata, table)[0]
    if vtable < 0:
        raise ValueError
    vtable_bytes = _U16.unpack_from(metadata, vtable)[0]
    if vtable_bytes >= _U32.size + _SLOTS.size:
        return _SLOTS.unpack_from(metadata, vtable + _U32.size)
    given = bytes(metadata[vtable + _U32.size : vtable + vtable_bytes])
    return _SLOTS.unpack(given + _NO_SLOT[len(given) :])
