"""Arrow's arrays of numpy's, and back, over the same memory.

`pa.array`, `pa.scalar` and `to_numpy` import pandas where it is installed: a quarter of a second in
every new process.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

__all__ = ["boolean_array", "integer_array", "integer_values"]


def integer_array(
    values: npt.NDArray[np.int32] | npt.NDArray[np.int64], data_type: pa.DataType
) -> pa.Array:
    """Return `values` as an array of an integer or timestamp type of the same width."""
    assert values.dtype.itemsize * 8 == data_type.bit_width, (values.dtype, data_type)
    contiguous = np.ascontiguousarray(values)
    return pa.Array.from_buffers(data_type, len(values), [None, pa.py_buffer(contiguous)])


def boolean_array(values: npt.NDArray[np.bool_]) -> pa.BooleanArray:
    """Return `values` as a boolean array."""
    bits = np.packbits(values, bitorder="little")
    return pa.Array.from_buffers(pa.bool_(), len(values), [None, pa.py_buffer(bits)])


def integer_values(
    array: pa.Array | pa.ChunkedArray, *, null: int | None = None
) -> npt.NDArray[np.int64]:
    """Return the values of an integer or timestamp array, as wide as they are.

    `null` stands for a null; without it the array must have none.
    """
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    validity, buffer = array.buffers()
    if buffer is None:
        return np.empty(0, dtype=np.int64)
    rows = slice(array.offset, array.offset + len(array))
    values: npt.NDArray[np.int64] = np.frombuffer(buffer, dtype=f"i{array.type.bit_width // 8}")
    if not array.null_count:
        return values[rows]
    assert null is not None, "a column that must not be null"
    is_valid = np.unpackbits(np.frombuffer(validity, dtype=np.uint8), bitorder="little")
    return np.where(is_valid[rows], values[rows], null)
