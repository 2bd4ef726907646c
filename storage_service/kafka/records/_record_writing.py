"""Columns as the records of a batch, without Python code for each record (format: record_reading).

A record consists of pieces: numbers, key, size of the value, and value. Each kind of piece is a
column over all records. Arrow then interleaves the columns in the order of the records.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from streamhouse.storage_service.kafka.records._varints import Varints, varint_rows
from streamhouse.storage_service.kafka.records.columns import RecordColumns

__all__ = ["RECORDS_BYTES_MAX", "RECORD_BYTES_MIN", "record_sizes", "written_records"]

Numbers = NDArray[np.int64]

RECORDS_BYTES_MAX: Final = (1 << 31) - 1024
"""The limit for one batch without its header; the size is a number of 32 bits."""
RECORD_BYTES_MIN: Final = 7
"""The minimal bytes of a record without key, value and headers."""
_ZERO: Final = b"\0"


class _Pieces(NamedTuple):
    """The pieces of records except keys and values; `size` is the size field of each record.

    Without headers the last piece of a record is the zero count of its headers, which is in no
    column.
    """

    numbers: list[Varints]
    value_size: Varints
    headers: list[pa.BinaryArray]
    size: Numbers


def written_records(
    columns: RecordColumns, *, timestamp_deltas_ms: Numbers, offset_deltas: Numbers
) -> list[bytes | memoryview]:
    """Return the encoded records, in pieces; ValueError beyond RECORDS_BYTES_MAX."""
    count = len(columns)
    if count == 0:
        return []
    numbers, value_size, header_pieces, size = _pieces_of(
        columns, timestamp_deltas_ms, offset_deltas
    )
    # The count of headers is a record's last number. If no record has headers, this zero is written
    # with the first numbers of the next record.
    leading_zeros = [] if header_pieces else [_zeros(count)]
    if int(size.sum()) > RECORDS_BYTES_MAX:
        raise ValueError(f"records of {int(size.sum())} bytes are more than one batch can hold")
    numbers = [*leading_zeros, Varints.of(size), *numbers]
    if columns.keys.null_count == count:
        pieces = [_written([*numbers, value_size]), columns.values]
    else:
        pieces = [_written(numbers), columns.keys, _written([value_size]), columns.values]
    records = _interleaved([*pieces, *header_pieces])
    return [records] if header_pieces else [records[len(_ZERO) :], _ZERO]


def record_sizes(
    columns: RecordColumns, *, timestamp_deltas_ms: Numbers, offset_deltas: Numbers
) -> Numbers:
    """Return the bytes of each record in `written_records`."""
    if not len(columns):
        return np.empty(0, dtype=np.int64)
    size = _pieces_of(columns, timestamp_deltas_ms, offset_deltas).size
    return size + Varints.of(size).size


def _pieces_of(
    columns: RecordColumns, timestamp_deltas_ms: Numbers, offset_deltas: Numbers
) -> _Pieces:
    keys, values = _sizes(columns.keys), _sizes(columns.values)
    key_size, value_size = Varints.of(keys), Varints.of(values)
    attributes = _zeros(len(columns))
    numbers = [attributes, Varints.of(timestamp_deltas_ms), Varints.of(offset_deltas), key_size]
    size = value_size.size + np.maximum(keys, 0) + np.maximum(values, 0)
    for column in numbers:
        size += column.size
    headers: list[pa.BinaryArray] = []
    if columns.headers is None:
        size += len(_ZERO)
    else:
        headers = _header_pieces(columns.headers)
        for piece in headers:
            size += _sizes(piece)
    return _Pieces(numbers, value_size, headers, size)


def _zeros(count: int) -> Varints:
    return Varints.of(np.zeros(count, dtype=np.int64))


def _sizes(column: pa.BinaryArray) -> Numbers:
    """Return the bytes of each value, -1 for a null."""
    bounds = np.frombuffer(column.buffers()[1], dtype=np.int32)
    bounds = bounds[column.offset : column.offset + len(column) + 1]
    sizes = np.subtract(bounds[1:], bounds[:-1], dtype=np.int64)
    if column.null_count:
        sizes[column.is_null().to_numpy(zero_copy_only=False)] = -1
    return sizes


def _written(columns: Sequence[Varints]) -> pa.BinaryArray:
    data, row_bytes = varint_rows(columns)
    return _cut(pa.py_buffer(data), np.cumsum(row_bytes))


def _cut(data: pa.Buffer, ends: Numbers) -> pa.BinaryArray:
    """Return `data` as adjacent values that end at `ends`."""
    bounds = np.zeros(len(ends) + 1, dtype=np.int32)
    bounds[1:] = ends
    buffers = [None, pa.py_buffer(bounds), data]
    return pa.BinaryArray.from_buffers(pa.binary(), len(ends), buffers)


def _interleaved(columns: Sequence[pa.BinaryArray]) -> memoryview:
    """Return the first value of each column, then the second of each, and so on."""
    count = len(columns[0])
    order = np.arange(len(columns) * count, dtype=np.int32).reshape(len(columns), count)
    interleaved = pa.concat_arrays(columns).take(pa.array(order.T.ravel()))
    bounds = np.frombuffer(interleaved.buffers()[1], dtype=np.int32)
    return memoryview(interleaved.buffers()[2])[: int(bounds[len(interleaved)])]


def _header_pieces(headers: pa.ListArray) -> list[pa.BinaryArray]:
    """Return the number of headers and the encoded headers of each record."""
    counts = pc.list_value_length(headers).fill_null(0).to_numpy().astype(np.int64)
    keys, values = headers.flatten().flatten()
    # A table's column may have a null key; in Kafka a header always has a key.
    keys = keys.cast(pa.binary()).fill_null(b"")
    key_sizes, value_sizes = _sizes(keys), _sizes(values)
    key_size, value_size = Varints.of(key_sizes), Varints.of(value_sizes)
    data: memoryview | bytes = b""
    if len(keys):
        data = _interleaved([_written([key_size]), keys, _written([value_size]), values])
    size = key_size.size + key_sizes + value_size.size + np.maximum(value_sizes, 0)
    ends = np.zeros(len(size) + 1, dtype=np.int64)
    np.cumsum(size, out=ends[1:])
    return [_written([Varints.of(counts)]), _cut(pa.py_buffer(data), ends[np.cumsum(counts)])]
