"""Columns of any supported type as one byte string a row, and back; vectorised both ways.

    null bits, one a column (1 = null), padded to bytes
    | the fixed-width columns, packed, little endian (boolean 1 byte, decimal 16 bytes)
    | byte length u32 of each other column
    | the bytes of each other column, in order

Strings and binaries are their bytes. A struct is a row of its fields. An array is
`count u32 | length u32 of each element row | the element rows`, where an element row is a row
of one column; a map is an array of rows of key and value.

The bytes are canonical: two rows are identical (any NaN is the same, 0.0 and -0.0 are not) exactly
when their bytes are, because NaN has one form and values under a null are zeroed or empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from streamhouse.core.model.casts.nested import fields_of
from streamhouse.core.model.hashing.byte_runs import (
    binary_array,
    binary_parts,
    fixed_rows,
    gather_at,
    joined,
    slice_runs,
    validity_buffer,
)
from streamhouse.core.types.registry import type_of

__all__ = ["RowLayout"]

_U32: Final = np.dtype("<u4")
_EMPTY: Final = pa.scalar(b"", pa.binary())


class RowLayout:
    """The byte layout of rows with columns of `types`, after `prefix_bytes` of zeros."""

    def __init__(self, types: Sequence[pa.DataType], *, prefix_bytes: int = 0) -> None:
        self.types: Final = tuple(types)
        self.prefix_bytes: Final = prefix_bytes
        self.null_bytes: Final = (len(self.types) + 7) // 8
        dtypes = [type_of(t).stored_dtype for t in self.types]
        self._fixed = [(i, d) for i, d in enumerate(dtypes) if d is not None]
        self._varying = [i for i, d in enumerate(dtypes) if d is None]
        fields: list[Any] = [("nulls", "u1", (self.null_bytes,))]
        fields += [(f"c{i}", dtype) for i, dtype in self._fixed]
        fields += [(f"l{i}", _U32) for i in self._varying]
        if prefix_bytes:
            fields.insert(0, ("prefix", f"V{prefix_bytes}"))
        self.header: Final = np.dtype(fields)
        self._children = {i: _children(self.types[i]) for i in self._varying}

    def encode(self, columns: Sequence[pa.Array]) -> pa.Array:
        """Return one binary value a row, never null."""
        count = len(columns[0])
        header = np.zeros(count, dtype=self.header)
        for i, dtype in self._fixed:
            header[f"c{i}"] = _fixed_values(columns[i], dtype)
        bodies = []
        for i in self._varying:
            body = self._encode_varying(columns[i], self._children[i])
            _, offsets = binary_parts(body)
            header[f"l{i}"] = np.diff(offsets)
            bodies.append(body)
        for i, column in enumerate(columns):
            if column.null_count:
                header["nulls"][:, i // 8] |= _null_bytes(column) << np.uint8(i % 8)
        rows = fixed_rows(header.view(np.uint8).reshape(count, self.header.itemsize))
        return joined([rows, *bodies])

    def decode(self, rows: pa.Array) -> list[pa.Array]:
        """Return the columns of rows encoded with the same types; no row may be null."""
        data, offsets = binary_parts(rows)
        return self.decode_at(data, offsets[:-1].astype(np.int64))

    def decode_at(
        self, data: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64]
    ) -> list[pa.Array]:
        """As `decode`, for rows starting at ascending places of `data`."""
        header = gather_at(data, starts, self.header)
        nulls = header["nulls"]
        columns: dict[int, pa.Array] = {}
        valid: dict[int, npt.NDArray[np.bool_]] = {}
        if nulls.any():
            any_null = np.bitwise_or.reduce(nulls, axis=0)
            for i in range(len(self.types)):
                if any_null[i // 8] >> (i % 8) & 1:
                    valid[i] = (nulls[:, i // 8] >> (i % 8) & 1) == 0
        for i, _ in self._fixed:
            columns[i] = _fixed_array(self.types[i], header[f"c{i}"], valid.get(i))
        position = starts + self.header.itemsize
        for i in self._varying:
            end = position + header[f"l{i}"]
            columns[i] = self._decode_varying(i, data, position, end, valid.get(i))
            position = end
        return [columns[i] for i in range(len(self.types))]

    @staticmethod
    def _encode_varying(column: pa.Array, children: RowLayout | None) -> pa.Array:
        """Return the bytes of each value as a binary array without nulls."""
        if children is None:
            body = column.view(pa.binary())
        elif pa.types.is_struct(column.type):
            body = children.encode(column.flatten())
            if column.null_count:
                body = pc.if_else(column.is_valid(), body, _EMPTY)
        else:
            body = _encode_list(column, children)
        return body.fill_null(_EMPTY) if body.null_count else body

    def _decode_varying(
        self,
        i: int,
        data: npt.NDArray[np.uint8],
        starts: npt.NDArray[np.int64],
        ends: npt.NDArray[np.int64],
        valid: npt.NDArray[np.bool_] | None,
    ) -> pa.Array:
        t = self.types[i]
        children = self._children[i]
        if children is None:
            return _with_validity(slice_runs(data, starts, ends, data_type=t), valid)
        present = slice(None) if valid is None else np.flatnonzero(valid)
        runs = slice_runs(data, starts[present], ends[present], data_type=pa.binary())
        if pa.types.is_struct(t):
            values = pa.StructArray.from_arrays(children.decode(runs), fields=list(t))
        else:
            values = _decode_list(runs, t, children)
        return values if valid is None else values.take(_places(valid))


def _children(t: pa.DataType) -> RowLayout | None:
    """Return the layout of what is inside a nested type, or None for strings and binaries."""
    fields = fields_of(t)
    return RowLayout([field.type for field in fields]) if fields else None


def _fixed_values(column: pa.Array, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return the values with zeros where the column is null."""
    if pa.types.is_boolean(column.type):
        values = column.cast(pa.uint8()).fill_null(0)
        return np.frombuffer(values.buffers()[1], "u1", len(values), values.offset)
    buffer = column.buffers()[1]
    if buffer is None:
        return np.zeros(len(column), dtype=dtype)
    values = np.frombuffer(buffer, dtype=dtype, count=column.offset + len(column))
    values = values[column.offset :]
    if column.null_count:
        values = values.copy()
        values[_null_bytes(column).view(np.bool_)] = np.zeros((), dtype=dtype)
    if dtype.kind == "f" and np.isnan(values).any():
        values = np.where(np.isnan(values), np.array(np.nan, dtype=dtype), values)
    return values


def _null_bytes(column: pa.Array) -> npt.NDArray[np.uint8]:
    """Return 1 where the column is null, else 0."""
    bits = column.is_null().cast(pa.uint8())
    return np.frombuffer(bits.buffers()[1], "u1", len(column), bits.offset)


def _fixed_array(
    t: pa.DataType, values: npt.NDArray[Any], valid: npt.NDArray[np.bool_] | None
) -> pa.Array:
    bitmap = None if valid is None else validity_buffer(valid)
    if pa.types.is_boolean(t):
        data = pa.py_buffer(np.packbits(values.astype(np.bool_), bitorder="little"))
    else:
        data = pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(t, len(values), [bitmap, data])


def _with_validity(array: pa.Array, valid: npt.NDArray[np.bool_] | None) -> pa.Array:
    if valid is None:
        return array
    _, *buffers = array.buffers()
    return pa.Array.from_buffers(
        array.type, len(array), [validity_buffer(valid), *buffers], offset=array.offset
    )


def _places(valid: npt.NDArray[np.bool_]) -> pa.Array:
    """Return take indices that put values without gaps where they belong, null elsewhere."""
    return pa.array(np.cumsum(valid) - 1, mask=~valid)


def _encode_list(column: pa.Array, children: RowLayout) -> pa.Array:
    lengths = np.asarray(pc.list_value_length(column.cast(_as_list(column.type))).fill_null(0))
    elements = column.cast(_as_list(column.type)).flatten()
    parts = elements.flatten() if pa.types.is_map(column.type) else [elements]
    ends = np.concatenate([[0], np.cumsum(lengths)])
    if len(elements) == 0:
        body_data, body_offsets = np.zeros(0, np.uint8), np.zeros(1, np.int32)
    else:
        body_data, body_offsets = binary_parts(children.encode(parts))
    # A row's elements are neighbours, so their joined bytes are one run between list boundaries.
    counts = fixed_rows(lengths.astype(_U32).view(np.uint8).reshape(-1, 4))
    lengths_of_elements = np.diff(body_offsets).astype(_U32)
    sizes = binary_array(lengths_of_elements, (ends * 4).astype(np.int32))
    bodies = binary_array(body_data, body_offsets[ends])
    rows = joined([counts, sizes, bodies])
    return pc.if_else(column.is_valid(), rows, _EMPTY) if column.null_count else rows


def _as_list(t: pa.DataType) -> pa.DataType:
    """Return the list type with the same layout as a map; Arrow's kernels know few maps."""
    if not pa.types.is_map(t):
        return t
    return pa.list_(pa.field("entries", pa.struct([t.key_field, t.item_field]), nullable=False))


def _decode_list(rows: pa.Array, t: pa.DataType, children: RowLayout) -> pa.Array:
    data, offsets = binary_parts(rows)
    starts = offsets[:-1].astype(np.int64)
    counts = gather_at(data, starts, _U32).astype(np.int64)
    ends = np.concatenate([[0], np.cumsum(counts)])
    total = int(ends[-1])
    row_of = np.repeat(np.arange(len(counts)), counts)
    # Element j of row r has its length at 4 + 4j in the row, and its bytes after all lengths.
    in_row = np.arange(total) - ends[row_of]
    lengths = gather_at(data, starts[row_of] + 4 + 4 * in_row, _U32).astype(np.int64)
    sums = np.concatenate([[0], np.cumsum(lengths)])
    first = starts + 4 + 4 * counts - sums[ends[:-1]]
    element_starts = sums[:-1] + first[row_of]
    elements = slice_runs(data, element_starts, element_starts + lengths, data_type=pa.binary())
    values = children.decode(elements)
    if pa.types.is_map(t):
        inside = pa.StructArray.from_arrays(values, fields=[t.key_field, t.item_field])
    else:
        inside = values[0]
    list_offsets = pa.py_buffer(ends.astype(np.int32))
    return pa.Array.from_buffers(t, len(rows), [None, list_offsets], children=[inside])
