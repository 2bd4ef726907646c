"""Arrow streams as a big-endian machine writes them."""

from __future__ import annotations

import struct

import numpy as np
import pyarrow as pa

__all__ = ["big_endian_stream"]


def big_endian_stream(batch: pa.RecordBatch) -> bytes:
    """Return `batch`, whose columns are 64-bit integers without nulls, as such a stream."""
    swapped = pa.RecordBatch.from_arrays(
        [pa.array(column.to_numpy().byteswap()) for column in batch.columns], schema=batch.schema
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(swapped)
    stream = bytearray(sink.getvalue())
    _mark(stream)
    assert pa.ipc.open_stream(bytes(stream)).read_next_batch() == batch
    return bytes(stream)


def _mark(stream: bytearray) -> None:
    """Give the schema that the stream begins with an endianness that is not 0, which is little."""
    message = 8 + _u32(stream, 8)
    vtable = message - _i32(stream, message)
    header = message + _u16(stream, vtable + 8)
    schema = header + _u32(stream, header)
    slots = schema - _i32(stream, schema)
    assert _u16(stream, slots + 4) == 0
    # There is no room for a field: it shares that of the columns, which is not 0.
    struct.pack_into("<H", stream, slots + 4, _u16(stream, slots + 6))


def _u16(data: bytearray, at: int) -> int:
    return int(np.frombuffer(data, "<u2", 1, at)[0])


def _u32(data: bytearray, at: int) -> int:
    return int(np.frombuffer(data, "<u4", 1, at)[0])


def _i32(data: bytearray, at: int) -> int:
    return int(np.frombuffer(data, "<i4", 1, at)[0])
