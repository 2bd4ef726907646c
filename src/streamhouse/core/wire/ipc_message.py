"""Iterate over the messages of an Arrow IPC stream without decoding them.

An encapsulated message is (Arrow columnar format, "Serialization and Interprocess Communication"):

    continuation u32 = 0xFFFFFFFF | metadata bytes i32 | metadata (flatbuffer Message) | body

and a metadata size of 0 ends the stream. From the flatbuffer only a few fields are read: the kind,
the body length, the row count, whether buffers are compressed, and the custom metadata of a record
batch.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from streamhouse.core.errors import InvalidRequestError

__all__ = ["END_OF_STREAM", "IpcMessage", "is_little_endian", "messages"]

END_OF_STREAM: Final = b"\xff\xff\xff\xff\x00\x00\x00\x00"
SCHEMA: Final = 1
DICTIONARY_BATCH: Final = 2
RECORD_BATCH: Final = 3
_CONTINUATION: Final = 0xFFFF_FFFF
_PREFIX: Final = struct.Struct("<Ii")
_U16: Final = struct.Struct("<H")
_U32: Final = struct.Struct("<I")
_I32: Final = struct.Struct("<i")
_I64: Final = struct.Struct("<q")
# The first slots of flatbuffer tables (Message.fbs): Message{version, header_type, header,
# bodyLength, custom_metadata}, RecordBatch{length, nodes, buffers, compression}, KeyValue{key,
# value}, Schema{endianness}, DictionaryBatch{id, data, is_delta}. By the count of slots in a table.
_SLOTS_MAX: Final = 5
_SLOTS: Final = tuple(struct.Struct(f"<{count}H") for count in range(_SLOTS_MAX + 1))
_NO_SLOTS: Final = tuple((0,) * (_SLOTS_MAX - count) for count in range(_SLOTS_MAX + 1))
# A vtable of KeyValue: the sizes of the vtable and of the table, and both slots.
_KEY_VALUE: Final = struct.Struct("<4H")
_CUSTOM_ENTRIES_MAX: Final = 100
_NOTHING: Final[Mapping[bytes, bytes]] = {}


class IpcMessage(NamedTuple):
    """One message; `data` has all of its bytes with the prefix, `custom` the custom metadata."""

    kind: int
    is_compressed: bool
    row_count: int
    custom: Mapping[bytes, bytes]
    data: memoryview
    is_delta: bool = False
    """Whether a dictionary is added to the dictionary before."""


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
            kind, is_compressed, row_count, custom, body_bytes, is_delta = _read_message(metadata)
            end = start + metadata_bytes + body_bytes
            if body_bytes < 0 or row_count < 0 or end > len(stream):
                raise ValueError
        except (struct.error, ValueError, IndexError) as error:
            raise InvalidRequestError(
                f"the body is not an Arrow IPC stream: bad message at byte {position}"
            ) from error
        yield IpcMessage(kind, is_compressed, row_count, custom, stream[position:end], is_delta)
        position = end


def is_little_endian(schema_message: bytes) -> bool:
    """Return whether the batches after a schema message, valid for Arrow, are little-endian."""
    metadata = memoryview(schema_message)[_PREFIX.size :]
    (root,) = _U32.unpack_from(metadata)
    schema = _target(metadata, root + _slots(metadata, root)[2])
    endianness_at = _slots(metadata, schema)[0]
    return not (endianness_at and _U16.unpack_from(metadata, schema + endianness_at)[0])


def _read_message(
    metadata: memoryview,
) -> tuple[int, bool, int, Mapping[bytes, bytes], int, bool]:
    (root,) = _U32.unpack_from(metadata)
    _, kind_at, header_at, body_bytes_at, custom_at = _slots(metadata, root)
    kind = metadata[root + kind_at] if kind_at else 0
    body_bytes = _I64.unpack_from(metadata, root + body_bytes_at)[0] if body_bytes_at else 0
    if kind not in (RECORD_BATCH, DICTIONARY_BATCH):
        return kind, False, 0, _NOTHING, body_bytes, False
    if not header_at:
        raise ValueError
    if kind == DICTIONARY_BATCH:
        dictionary = _target(metadata, root + header_at)
        _, data_at, is_delta_at, _, _ = _slots(metadata, dictionary)
        if not data_at:
            raise ValueError
        values = _target(metadata, dictionary + data_at)
        is_compressed = _slots(metadata, values)[3] != 0
        is_delta = bool(is_delta_at and metadata[dictionary + is_delta_at])
        return kind, is_compressed, 0, _NOTHING, body_bytes, is_delta
    batch = _target(metadata, root + header_at)
    row_count_at, _, _, compression_at, _ = _slots(metadata, batch)
    row_count = _I64.unpack_from(metadata, batch + row_count_at)[0] if row_count_at else 0
    custom = _custom(metadata, _target(metadata, root + custom_at)) if custom_at else _NOTHING
    return kind, compression_at != 0, row_count, custom, body_bytes, False


def _custom(metadata: memoryview, vector: int) -> Mapping[bytes, bytes]:
    (count,) = _U32.unpack_from(metadata, vector)
    if count > _CUSTOM_ENTRIES_MAX:
        raise ValueError
    entries = {}
    for place in range(vector + 4, vector + 4 + 4 * count, 4):
        entry = _target(metadata, place)
        vtable = entry - _I32.unpack_from(metadata, entry)[0]
        vtable_bytes, _, key_at, value_at = _KEY_VALUE.unpack_from(metadata, vtable)
        if vtable < 0 or vtable_bytes < _KEY_VALUE.size or not (key_at and value_at):
            raise ValueError
        entries[_text(metadata, entry + key_at)] = _text(metadata, entry + value_at)
    return entries


def _text(metadata: memoryview, place: int) -> bytes:
    start = _target(metadata, place) + 4
    end = start + _U32.unpack_from(metadata, start - 4)[0]
    if end > len(metadata):
        raise ValueError
    return bytes(metadata[start:end])


def _target(metadata: memoryview, place: int) -> int:
    """Return the position to which the offset at `place` refers."""
    return place + int(_U32.unpack_from(metadata, place)[0])


def _slots(metadata: memoryview, table: int) -> tuple[int, ...]:
    """Return the positions of a table's first fields in the table; 0 for a missing field."""
    vtable = table - _I32.unpack_from(metadata, table)[0]
    if vtable < 0:
        raise ValueError
    count = (_U16.unpack_from(metadata, vtable)[0] - 4) // 2
    if count < 0:
        raise ValueError
    read_count = min(count, _SLOTS_MAX)
    slots: tuple[int, ...] = _SLOTS[read_count].unpack_from(metadata, vtable + 4)
    return slots + _NO_SLOTS[read_count]
