"""Few rows as plain values: the stored numbers and bytes, without arrays.

A plain value is the form stored by `row_layout`: days of a date, microseconds of a timestamp, bits
of a float, 16 bytes of a decimal, bytes of a string, True or False, and None for a null. A plain
row is a tuple of plain values. All values are exact, beyond the limits of Python's own types. The
bytes equal `RowCodec` and `model.bucketing.encode_key`; tests compare them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, repeat
from operator import itemgetter
from typing import Any, Final

import numpy as np
import pyarrow as pa

from streamhouse.core.types.registry import type_of

__all__ = [
    "VERSION_BYTES",
    "PlainRow",
    "PlainRows",
    "plain_array",
    "stamped",
    "version_of",
]

PlainRow = tuple[Any, ...]

_VERSION: Final = struct.Struct("<q")
VERSION_BYTES: Final = _VERSION.size
"""The bytes of the version at the start of a stored value, before `PlainRows.encode`."""

_CODES: Final = {
    "|u1": "?",
    "|i1": "b",
    "<i2": "h",
    "<i4": "i",
    "<i8": "q",
    "<f4": "i",
    "<f8": "q",
    "|V16": "16s",
}
# Sign bit aside, the bits of infinity: whatever is above is a NaN, and this one stands for all.
_FLOATS: Final = {
    "<f4": (0x7FFF_FFFF, 0x7F80_0000, int(np.array(np.nan, "<f4").view("<i4"))),
    "<f8": ((1 << 63) - 1, 0x7FF << 52, int(np.array(np.nan, "<f8").view("<i8"))),
}


def stamped(version: int, encoded: bytes) -> bytes:
    """Return the stored value of an encoded row written at the offset `version`."""
    return _VERSION.pack(version) + encoded


def version_of(value: bytes) -> int:
    """Return the write offset of a stored value."""
    version: int = _VERSION.unpack_from(value)[0]
    return version


class PlainRows:
    """Rows with columns of `types`, none of them nested, as values of schema `schema_id`."""

    def __init__(
        self, types: Sequence[pa.DataType], *, schema_id: int, value_bytes_min: int
    ) -> None:
        self._types: Final = tuple(types)
        logical_types = [type_of(t) for t in types]
        self._plain_types: Final = [t.stored_view for t in logical_types]
        dtypes = [t.stored_dtype for t in logical_types]
        self._fixed: Final = [i for i, dtype in enumerate(dtypes) if dtype is not None]
        self._varying: Final = [i for i, dtype in enumerate(dtypes) if dtype is None]
        self._floats: Final = [_FLOATS.get(dtype.str) if dtype else None for dtype in dtypes]
        self._zeros: Final = [_zero(dtype) for dtype in dtypes]
        self._no_nulls: Final = bytes((len(types) + 7) // 8)
        self._codes: Final = ["" if dtype is None else _CODES[dtype.str] for dtype in dtypes]
        codes = "".join(self._codes)
        codes = f"{len(self._no_nulls)}s{codes}{'I' * len(self._varying)}"
        spare = value_bytes_min - VERSION_BYTES - struct.calcsize(f"<B{codes}")
        self._header: Final = struct.Struct(f"<B{spare}x{codes}")
        self._schema_id: Final = schema_id
        self._value_bytes_min: Final = value_bytes_min
        stored = [*self._fixed, *self._varying]
        order = [stored.index(i) for i in range(len(types))]
        self._in_order: Final = None if order == sorted(order) else itemgetter(*order)

    def read(
        self,
        batch: pa.RecordBatch,
        positions: Sequence[int],
        key_encoders: Mapping[int, Callable[[Any], bytes]],
        *,
        is_whole: bool,
    ) -> tuple[list[list[Any]], list[bytes], list[bytes]]:
        """Return plain values, keys and row bytes of a batch with the columns at `positions`.

        The values are by column. `key_encoders` is by the position of a key column, in the order
        of the key; a null in a key is encoded as zero. Only whole rows are encoded.
        """
        columns: dict[int, list[Any]] = {}
        for position, column in zip(positions, batch.columns, strict=True):
            plain = self._plain_types[position]
            columns[position] = (column if plain is None else column.view(plain)).to_pylist()
        cells = list(columns.values())
        encoded = self.encode(cells) if is_whole else []
        parts = []
        for position, encode in key_encoders.items():
            values = columns[position]
            if None in values:
                values = [self._zeros[position] if value is None else value for value in values]
            parts.append(list(map(encode, values)))
        keys = parts[0] if len(parts) == 1 else list(map(b"".join, zip(*parts, strict=True)))
        return cells, keys, encoded

    def encode(self, columns: Sequence[Sequence[Any]]) -> list[bytes]:
        """Return the bytes of each row of `columns`, without a version."""
        nulls: Sequence[bytes] = [self._no_nulls] * len(columns[0])
        cells = list(columns)
        if any(None in column for column in columns):
            nulls = self._null_bits(columns)
            cells = [
                [zero if value is None else value for value in column]
                for column, zero in zip(columns, self._zeros, strict=True)
            ]
        for i, bits in enumerate(self._floats):
            if bits is not None:
                mask, infinity, nan = bits
                cells[i] = [b if b & mask <= infinity else nan for b in cells[i]]
        fixed = [cells[i] for i in self._fixed]
        varying = [cells[i] for i in self._varying]
        lengths = [map(len, column) for column in varying]
        heads = map(self._header.pack, repeat(self._schema_id), nulls, *fixed, *lengths)
        return list(map(b"".join, zip(heads, *varying, strict=True)) if varying else heads)

    def is_own(self, value: bytes) -> bool:
        """Whether a stored value may be of this schema."""
        return len(value) >= self._value_bytes_min and value[VERSION_BYTES] == self._schema_id

    def decode(self, value: bytes) -> PlainRow:
        """Return the row of a stored value that `is_own`."""
        _, nulls, *cells = self._header.unpack_from(value, VERSION_BYTES)
        position = VERSION_BYTES + self._header.size
        for i in range(len(self._fixed), len(cells)):
            end = position + cells[i]
            cells[i] = value[position:end]
            position = end
        row: PlainRow = tuple(cells) if self._in_order is None else self._in_order(cells)
        if nulls == self._no_nulls:
            return row
        bits = int.from_bytes(nulls, "little")
        return tuple(None if bits >> i & 1 else item for i, item in enumerate(row))

    def arrays(self, rows: Sequence[PlainRow]) -> Iterator[pa.Array]:
        """Yield the columns of `rows`."""
        columns = zip(*rows, strict=True) if rows else repeat(())
        for t, code, zero, column in zip(
            self._types, self._codes, self._zeros, columns, strict=False
        ):
            yield plain_array(t, code, column, below_null=zero)

    def _null_bits(self, columns: Sequence[Sequence[Any]]) -> list[bytes]:
        bits = [0] * len(columns[0])
        for i, column in enumerate(columns):
            for place, value in enumerate(column):
                if value is None:
                    bits[place] |= 1 << i
        return [number.to_bytes(len(self._no_nulls), "little") for number in bits]


def plain_array(t: pa.DataType, code: str, column: Sequence[Any], *, below_null: Any) -> pa.Array:
    """Return plain values as an array of type `t`.

    `code` is the `struct` format of a value, or empty for strings and binaries. `below_null` is the
    value stored under a null.
    """
    count = len(column)
    valid = None
    if None in column:
        valid = _bitmap([value is not None for value in column])
        column = [below_null if value is None else value for value in column]
    if code == "?":
        buffers = [_bitmap(column)]
    elif code == "16s":
        buffers = [pa.py_buffer(b"".join(column))]
    elif code:
        buffers = [pa.py_buffer(struct.pack(f"<{count}{code}", *column))]
    else:
        ends = accumulate(map(len, column), initial=0)
        buffers = [
            pa.py_buffer(struct.pack(f"<{count + 1}i", *ends)),
            pa.py_buffer(b"".join(column)),
        ]
    return pa.Array.from_buffers(t, count, [valid, *buffers])


def _bitmap(marks: Sequence[bool]) -> pa.Buffer:
    bits = sum(1 << i for i, mark in enumerate(marks) if mark)
    return pa.py_buffer(bits.to_bytes((len(marks) + 7) // 8, "little"))


def _zero(dtype: np.dtype[Any] | None) -> Any:
    """Return what is stored under a null."""
    if dtype is None:
        return b""
    return bytes(16) if dtype.kind == "V" else 0
