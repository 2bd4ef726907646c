"""Columns as the records of a batch, without a step of Python for each (the bytes: record_reading).

A record is made of pieces: its numbers, its key, the size of its value, its value. The pieces of
all records are laid side by side, numbers in one column, keys in the next, and Arrow takes them
from there in the order of the records.
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
"""What one batch can hold, whose size is a number of 32 bits, beside its header."""
RECORD_BYTES_MIN: Final = 7
"""What a record has beside its key, its value and its headers."""
_ZERO: Final = b"\0"


class _Laid(NamedTuple):
    """The pieces of records but keys and values; `size` is of each one what its first number says.

    Without headers the zero of each record's count of them is its last piece, in no column.
    """

    numbers: list[Varints]
    value_size: Varints
    headers: list[pa.BinaryArray]
    size: Numbers


def written_records(
    columns: RecordColumns, *, timestamp_deltas_ms: Numbers, offset_deltas: Numbers
) -> list[bytes | memoryview]:
    """Return the bytes of the records, in pieces; ValueError beyond RECORDS_BYTES_MAX."""
    count = len(columns)
    if count == 0:
        return []
    numbers, value_size, behind, size = _laid(columns, timestamp_deltas_ms, offset_deltas)
    # The count of a record's headers is its last number. Where all have none, it is written with
    # the first numbers of the next record.
    before = [] if behind else [_zeros(count)]
    if int(size.sum()) > RECORDS_BYTES_MAX:
        raise ValueError(f"records of {int(size.sum())} bytes are more than one batch can hold")
    numbers = [*before, Varints.of(size), *numbers]
    if columns.keys.null_count == count:
        pieces = [_written([*numbers, value_size]), columns.values]
    else:
        pieces = [_written(numbers), columns.keys, _written([value_size]), columns.values]
    records = _interleaved([*pieces, *behind])
    return [records] if behind else [records[len(_ZERO) :], _ZERO]


def record_sizes(
    columns: RecordColumns, *, timestamp_deltas_ms: Numbers, offset_deltas: Numbers
) -> Numbers:
    """Return how many bytes each record takes as `written_records` writes it."""
    if not len(columns):
        return np.empty(0, dtype=np.int64)
    size = _laid(columns, timestamp_deltas_ms, offset_deltas).size
    return size + Varints.of(size).size


def _laid(columns: RecordColumns, timestamp_deltas_ms: Numbers, offset_deltas: Numbers) -> _Laid:
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
    return _Laid(numbers, value_size, headers, size)


def _zeros(count: int) -> Varints:
    return Varints.of(np.zeros(count, dtype=np.int64))


def _sizes(column: pa.BinaryArray) -> Numbers:
    """Return the bytes of each value, -1 of a null."""
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
    """Return `data` as values that lie side by side, and end at `ends`."""
    bounds = np.zeros(len(ends) + 1, dtype=np.int32)
    bounds[1:] = ends
    buffers = [None, pa.py_buffer(bounds), data]
    return pa.BinaryArray.from_buffers(pa.binary(), len(ends), buffers)


def _interleaved(columns: Sequence[pa.BinaryArray]) -> memoryview:
    """Return the first value of each column, then the second of each, and so on."""
    count = len(columns[0])
    order = np.arange(len(columns) * count, dtype=np.int32).reshape(len(columns), count)
    taken = pa.concat_arrays(columns).take(pa.array(order.T.ravel()))
    bounds = np.frombuffer(taken.buffers()[1], dtype=np.int32)
    return memoryview(taken.buffers()[2])[: int(bounds[len(taken)])]


def _header_pieces(headers: pa.ListArray) -> list[pa.BinaryArray]:
    """Return how many headers each record has, and the bytes of all of them."""
    counts = pc.list_value_length(headers).fill_null(0).to_numpy().astype(np.int64)
    keys, values = headers.flatten().flatten()
    # A table's column may lack a key, which Kafka's headers always have.
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
