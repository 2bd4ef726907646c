"""Runs of bytes in one buffer as Arrow binary arrays, and numbers at arbitrary positions.

These primitives under the row codec are independent of rows, types and keys. Positions are in bytes
from the start of a buffer. No function runs Python per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

__all__ = [
    "binary_array",
    "binary_parts",
    "bytes_of",
    "fixed_rows",
    "gather_at",
    "in_turn",
    "joined",
    "longest_of",
    "slice_runs",
    "validity_buffer",
    "write_at",
]

# Only small arrays of indices are cached; large arrays would waste megabytes.
_KEPT_NUMBERS_MAX: Final = 32_768
_KEPT_MAX: Final = 4
# Types whose values are 1, 2, 4 or 8 bytes.
_NUMBERS: Final = frozenset(
    t.id
    for t in (
        *(pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64()),
        *(pa.date32(), pa.timestamp("us")),
    )
)


def binary_parts(array: pa.Array) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]]:
    """Return data and the n + 1 offsets of a binary array, both without a copy."""
    _, offsets, data = array.buffers()
    if offsets is None or len(array) == 0:
        return np.zeros(0, dtype=np.uint8), np.zeros(1, dtype=np.int32)
    starts = np.frombuffer(offsets, dtype=np.int32, count=array.offset + len(array) + 1)
    bytes_ = np.frombuffer(data, dtype=np.uint8) if data is not None else np.zeros(0, np.uint8)
    return bytes_, starts[array.offset :]


def bytes_of(array: pa.Array) -> int:
    """Return the size in bytes of the values of a binary array and their offsets."""
    offsets = array.buffers()[1]
    if offsets is None or len(array) == 0:
        return 0
    ends = memoryview(offsets).cast("i")
    return int(ends[array.offset + len(array)] - ends[array.offset]) + 4 * len(array)


def longest_of(array: pa.Array) -> int:
    """Return the size in bytes of the longest value of a binary array, 0 for an empty array."""
    # Kernels would release the interpreter lock and wait for the lock again.
    _, offsets = binary_parts(array)
    return int((offsets[1:] - offsets[:-1]).max(initial=0))


def binary_array(data: Any, offsets: npt.NDArray[np.int32], *, valid: Any = None) -> pa.Array:
    """Return the binary array over `data` with n + 1 `offsets`, without a copy."""
    return pa.Array.from_buffers(
        pa.binary(), len(offsets) - 1, [valid, pa.py_buffer(offsets), pa.py_buffer(data)]
    )


def fixed_rows(rows: npt.NDArray[np.uint8]) -> pa.Array:
    """Return the rows of a C-contiguous (n, width) byte matrix as binary values, uncopied."""
    count, width = rows.shape
    offsets = np.arange(0, (count + 1) * width, width, dtype=np.int32)
    return binary_array(rows, offsets)


def validity_buffer(valid: npt.NDArray[np.bool_]) -> pa.Buffer | None:
    """Return Arrow's validity bitmap, or None when all values are valid."""
    if valid.all():
        return None
    return pa.py_buffer(np.packbits(valid, bitorder="little"))


def gather_at(
    data: npt.NDArray[np.uint8], positions: npt.NDArray[np.int64], dtype: np.dtype[Any]
) -> npt.NDArray[Any]:
    """Return the values of `dtype` that start at `positions`, aligned or not."""
    if len(positions) == 0:
        return np.empty(0, dtype=dtype)
    if dtype.fields is None:
        return _overlapping(data, dtype)[positions]
    # numpy copies a record field by field, but plain bytes in one step.
    return _overlapping(data, np.dtype(f"V{dtype.itemsize}"))[positions].view(dtype)


def write_at(
    data: npt.NDArray[np.uint8], positions: npt.NDArray[np.int64], values: npt.NDArray[Any]
) -> None:
    """Write each of `values` in place at its position."""
    if len(positions):
        _overlapping(data, values.dtype)[positions] = values


def _overlapping(data: npt.NDArray[np.uint8], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return a view with one value starting at every byte of `data`."""
    count = max(len(data) - dtype.itemsize + 1, 0)
    return np.ndarray(shape=(count,), dtype=dtype, buffer=data, strides=(1,))


def joined(parts: Sequence[pa.Array]) -> pa.Array:
    """Return binary arrays of one length, without nulls, joined value by value."""
    if len(parts) == 1 or len(parts[0]) == 0:
        return parts[0]
    # Interleaved, the bytes of the parts are already in order; only the inner offsets are dropped.
    data, offsets = binary_parts(in_turn(parts))
    return binary_array(data, offsets[:: len(parts)].copy())


def in_turn(parts: Sequence[pa.Array]) -> pa.Array:
    """Return the first values of all parts, then the second values, ...; parts have one length."""
    if len(parts) == 1:
        return parts[0]
    count, t = len(parts[0]), parts[0].type
    if count and t.id in _NUMBERS and not any(part.null_count for part in parts):
        both = np.empty((count, len(parts)), dtype=f"u{t.bit_width // 8}")
        for i, part in enumerate(parts):
            values = np.frombuffer(part.buffers()[1], both.dtype, count=part.offset + count)
            both[:, i] = values[part.offset :]
        return pa.Array.from_buffers(t, both.size, [None, pa.py_buffer(both)])
    return pa.concat_arrays(parts).take(_in_turn(len(parts), count))


def _in_turn(part_count: int, count: int) -> pa.Array:
    """Return the positions of the interleaved values in the concatenated parts."""
    make = _kept_in_turn if part_count * count <= _KEPT_NUMBERS_MAX else _make_in_turn
    return make(part_count, count)


def _make_in_turn(part_count: int, count: int) -> pa.Array:
    positions = np.arange(part_count * count, dtype=_positions_type(part_count * count))
    return pa.array(positions.reshape(part_count, count).T.ravel())


_kept_in_turn = lru_cache(maxsize=_KEPT_MAX)(_make_in_turn)


def slice_runs(
    data: npt.NDArray[np.uint8],
    starts: npt.NDArray[np.int64],
    ends: npt.NDArray[np.int64],
    *,
    data_type: pa.DataType,
) -> pa.Array:
    """Return the runs [start, end) of `data` as a string or binary array. Starts must ascend."""
    count = len(starts)
    if count == 0:
        return pa.array([], data_type)
    # In an array over the same data, every other value is a run; the values between are the gaps.
    offsets = np.empty(2 * count + 1, dtype=np.int32)
    offsets[0:-1:2] = starts
    offsets[1::2] = ends
    offsets[-1] = ends[-1]
    both = pa.Array.from_buffers(
        data_type, 2 * count, [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    )
    return both.take(_even_numbers(count))


def _even_numbers(count: int) -> pa.Array:
    return (_kept_even_numbers if count <= _KEPT_NUMBERS_MAX else _make_even_numbers)(count)


def _make_even_numbers(count: int) -> pa.Array:
    return pa.array(np.arange(0, 2 * count, 2, dtype=_positions_type(2 * count)))


def _positions_type(count: int) -> type[np.int32 | np.int64]:
    """Return the type of positions below `count`; cached positions are small."""
    return np.int32 if count < 1 << 31 else np.int64


_kept_even_numbers = lru_cache(maxsize=_KEPT_MAX)(_make_even_numbers)
