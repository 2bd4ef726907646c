"""Arrow arrays over numpy's memory and back, without copying and without pandas.

`pyarrow.array`, `scalar` and `to_numpy` import pandas wherever it is installed: 0.2 s and 40 MB
for every new executor process, which needs nothing of it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

__all__ = ["boolean_array", "filtered", "integer_array", "integer_values"]


def integer_array(
    values: npt.NDArray[np.int32] | npt.NDArray[np.int64], data_type: pa.DataType
) -> pa.Array:
    """Return `values` as an array of an integer or timestamp type of the same width."""
    assert values.dtype.itemsize * 8 == data_type.bit_width, (values.dtype, data_type)
    return pa.Array.from_buffers(data_type, len(values), [None, pa.py_buffer(values)])


def boolean_array(values: npt.NDArray[np.bool_]) -> pa.BooleanArray:
    """Return `values` as a boolean array."""
    bits = np.packbits(values, bitorder="little")
    return pa.Array.from_buffers(pa.bool_(), len(values), [None, pa.py_buffer(bits)])


def integer_values(array: pa.Array) -> npt.NDArray[np.int64]:
    """Return the values of an integer or timestamp array without nulls, as 32 or 64 bits wide."""
    assert array.null_count == 0, "a column that must not be null"
    width = array.type.bit_width
    buffer = array.buffers()[1]
    if buffer is None:
        return np.empty(0, dtype=np.int64)
    values: npt.NDArray[np.int64] = np.frombuffer(buffer, dtype=f"i{width // 8}")
    return values[array.offset : array.offset + len(array)]


def filtered(batch: pa.RecordBatch, mask: pa.BooleanArray) -> pa.RecordBatch:
    """Return the rows of `batch` for which `mask` is true.

    `RecordBatch.filter` makes row numbers of the mask and takes them one by one: of most rows, in
    five columns with strings, that is twice the price of copying each column's runs.
    """
    if not batch.num_columns:
        return batch.filter(mask)
    arrays = [column.filter(mask) for column in batch.columns]
    return pa.RecordBatch.from_arrays(arrays, schema=batch.schema)
