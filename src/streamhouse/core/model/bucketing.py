"""The bucket of a row: Iceberg's `bucket[N]`, so that log and lake agree.

One bucketable key column is hashed by Iceberg's rule for its type (spec, appendix B: 32-bit
murmur3, `(hash & int32.max) % N`). Several columns, or one column which Iceberg cannot bucket, are
hashed as the bytes of `encode_key`. A null single key hashes to bucket 0.

For one key of Python values, `bytes_to_hash` gives the bytes to hash without Arrow: building an
Arrow row and computing its bucket takes longer than the whole lookup.
"""

from __future__ import annotations

import array
import itertools
import struct
from collections.abc import Callable, Sequence
from decimal import Context, Decimal
from typing import Any, Final

import mmh3
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from streamhouse.core.model.hashing._murmur import iceberg_hashes
from streamhouse.core.model.partitioning import is_bucketable
from streamhouse.core.model.values.calendar import as_days, as_microseconds

__all__ = [
    "FEW_ROWS",
    "buckets_for_rows",
    "buckets_of_few",
    "bytes_to_hash",
    "encode_few",
    "encode_key",
    "least_bytes",
    "rows_of_buckets",
    "split_by_bucket",
    "split_evenly",
]

_NULL: Final = b"\x00"
_PRESENT: Final = b"\x01"
_LONG: Final = struct.Struct("<q")
_EXACT: Final = Context(prec=80)
FEW_ROWS: Final = 64
"""The most rows for which Python values, one by one, are faster than kernels."""
_INTEGERS: Final = frozenset(t.id for t in (pa.int8(), pa.int16(), pa.int32(), pa.int64()))
_BYTES: Final = frozenset((pa.string().id, pa.binary().id))
_TIMES: Final = {pa.date32().id: pa.int32(), pa.timestamp("us").id: pa.int64()}
"""The storage type of dates and times."""
_SIGN_BITS: Final = {size: np.array(1 << (size * 8 - 1), f"u{size}") for size in (1, 2, 4, 8)}


def buckets_for_rows(
    batch: pa.RecordBatch | pa.Table, bucket_key: Sequence[str], bucket_count: int
) -> npt.NDArray[np.int32]:
    """Return the bucket of every row, shape (rows,), values in [0, bucket_count)."""
    if bucket_count == 1:
        return np.zeros(batch.num_rows, dtype=np.int32)
    columns = [_one_array(batch.column(name)) for name in bucket_key]
    few = buckets_of_few(columns, bucket_count)
    if few is not None:
        return np.array(few, dtype=np.int32)
    is_hashed_itself = len(columns) == 1 and is_bucketable(columns[0].type)
    key = columns[0] if is_hashed_itself else encode_key(columns)
    buckets = (iceberg_hashes(key) & np.uint32(0x7FFFFFFF)) % np.uint32(bucket_count)
    if key.null_count:
        buckets[np.asarray(key.is_null().to_numpy(zero_copy_only=False))] = 0
    return buckets.astype(np.int32)


def buckets_of_few(columns: Sequence[pa.Array], bucket_count: int) -> list[int] | None:
    """Return the result of `buckets_for_rows` for few rows of key columns of common types.

    None for many rows, or another type.
    """
    if len(columns[0]) > FEW_ROWS:
        return None
    kind = columns[0].type.id
    hashed: Sequence[bytes | None] | None
    if len(columns) > 1:
        hashed = encode_few(columns)
    elif kind in _INTEGERS:
        hashed = [None if v is None else _LONG.pack(v) for v in columns[0].to_pylist()]
    else:
        hashed = _bytes_of(columns[0]) if kind in _BYTES else None
    if hashed is None:
        return None
    return [0 if h is None else (mmh3.hash(h) & 0x7FFFFFFF) % bucket_count for h in hashed]


def _bytes_of(column: pa.Array) -> list[bytes | None]:
    # Strings are not decoded, because a string may be malformed UTF-8.
    return column.view(pa.binary()).to_pylist()  # type: ignore[no-any-return]


def bytes_to_hash(t: pa.DataType) -> Callable[[Any], bytes] | None:
    """Return a function for the bytes which Iceberg hashes of a value of `t`; None for other types.

    The bucket is `(murmur3(bytes) & 0x7FFFFFFF) % N`.
    """
    if not is_bucketable(t):
        return None
    if pa.types.is_string(t):
        return str.encode
    if pa.types.is_binary(t):
        return bytes
    if pa.types.is_decimal(t):
        return lambda value: least_bytes(int(_EXACT.scaleb(Decimal(value), t.scale)))
    if pa.types.is_date(t):
        return lambda value: _LONG.pack(as_days(value))
    if pa.types.is_timestamp(t):
        is_utc = t.tz is not None
        return lambda value: _LONG.pack(as_microseconds(value, is_utc=is_utc))
    return _LONG.pack


def least_bytes(number: int) -> bytes:
    """Return the shortest big-endian two's complement of a number."""
    bits = (number if number >= 0 else ~number).bit_length() + 1
    return number.to_bytes((bits + 7) // 8, "big", signed=True)


def split_by_bucket(
    batch: pa.RecordBatch, bucket_key: Sequence[str], bucket_count: int
) -> dict[int, pa.RecordBatch]:
    """Return the rows of each non-empty bucket, in the order of `batch`."""
    if bucket_count == 1 or batch.num_rows == 0:
        return {0: batch} if batch.num_rows else {}
    return rows_of_buckets(batch, buckets_for_rows(batch, bucket_key, bucket_count))


def rows_of_buckets(
    batch: pa.RecordBatch, buckets: list[int] | npt.NDArray[np.int32]
) -> dict[int, pa.RecordBatch]:
    """Return the rows of each non-empty bucket, in the order of `batch`, which must have rows.

    `buckets` has the bucket of every row.
    """
    if len(buckets) <= FEW_ROWS:
        places: dict[int, list[int]] = {}
        for place, bucket in enumerate(buckets if isinstance(buckets, list) else buckets.tolist()):
            places.setdefault(bucket, []).append(place)
        present = sorted(places)
        ends = list(itertools.accumulate(len(places[bucket]) for bucket in present))
        in_order = [place for bucket in present for place in places[bucket]]
        order = pa.py_buffer(array.array("q", in_order))
    else:
        by_bucket = np.argsort(buckets, kind="stable")
        numbers, starts = np.unique(np.asarray(buckets)[by_bucket], return_index=True)
        present = numbers.tolist()
        ends = [*starts[1:].tolist(), batch.num_rows]
        order = pa.py_buffer(by_bucket.astype(np.int64, copy=False))
    if len(present) == 1:
        return {present[0]: batch}
    # Made from bytes: a conversion of values would take half as long as the take.
    indices = pa.Array.from_buffers(pa.int64(), batch.num_rows, [None, order])
    grouped = batch.take(indices)
    return {
        bucket: grouped.slice(start, end - start)
        for bucket, start, end in zip(present, [0, *ends], ends, strict=False)
    }


def split_evenly(
    batch: pa.RecordBatch, bucket_count: int, *, first_bucket: int, rows_min: int
) -> dict[int, pa.RecordBatch]:
    """Cut `batch` into runs of at least `rows_min` rows for buckets from `first_bucket` on.

    A batch below `2 * rows_min` rows goes to one bucket: small frames cost more than they balance.
    """
    parts = max(1, min(bucket_count, batch.num_rows // max(rows_min, 1)))
    bounds = [batch.num_rows * part // parts for part in range(parts + 1)]
    return {
        (first_bucket + i) % bucket_count: batch.slice(bounds[i], bounds[i + 1] - bounds[i])
        for i in range(parts)
        if bounds[i + 1] > bounds[i]
    }


def encode_key(columns: Sequence[pa.Array]) -> pa.Array:
    """Encode key columns as one order-preserving byte string per row (a `pa.BinaryArray`).

    Each part is `00` for null, else `01` and the value: integers, dates, timestamps and decimals
    big-endian with the sign bit flipped; booleans one byte; floats as IEEE 754 total order; strings
    and bytes with `00` escaped as `00 FF` and closed by `00 00`. Comparing the bytes compares the
    columns in order, and a prefix of the columns is a prefix of the bytes.
    """
    few = encode_few(columns) if len(columns[0]) <= FEW_ROWS else None
    if few is not None:
        return pa.array(few, pa.binary())
    parts = [_encode_column(column) for column in columns]
    if len(parts) == 1:
        return parts[0]
    return pc.binary_join_element_wise(*parts, b"", null_handling="replace", null_replacement=b"")


def encode_few(columns: Sequence[pa.Array]) -> list[bytes] | None:
    """Return the encoded keys of few rows; None if a column is of a rare type."""
    parts: list[list[bytes]] = []
    for column in columns:
        kind = column.type.id
        if kind in _BYTES:
            parts.append(
                [
                    _NULL if v is None else b"\x01%b\x00\x00" % v.replace(b"\x00", b"\x00\xff")
                    for v in _bytes_of(column)
                ]
            )
        elif kind in _INTEGERS or kind in _TIMES:
            size = column.type.bit_width // 8
            sign = 1 << (size * 8 - 1)
            numbers = column.view(_TIMES.get(kind, column.type)).to_pylist()
            parts.append(
                [
                    _NULL if v is None else _PRESENT + (v + sign).to_bytes(size, "big")
                    for v in numbers
                ]
            )
        else:
            return None
    return parts[0] if len(parts) == 1 else [b"".join(row) for row in zip(*parts, strict=True)]


def _encode_column(column: pa.Array) -> pa.Array:
    t = column.type
    if pa.types.is_string(t) or pa.types.is_binary(t):
        # Arrow replaces bytes only in strings typed as binary.
        body = pc.replace_substring(
            column.cast(pa.binary()), pattern=b"\x00", replacement=b"\x00\xff"
        )
        encoded = pc.binary_join_element_wise(_PRESENT, body, b"\x00\x00", b"")
    else:
        encoded = _fixed_width(column)
    return pc.fill_null(encoded, _NULL) if column.null_count else encoded


def _fixed_width(column: pa.Array) -> pa.Array:
    t = column.type
    if pa.types.is_boolean(t):
        values = np.asarray(column.cast(pa.uint8()).fill_null(0).to_numpy()).reshape(-1, 1)
    elif pa.types.is_decimal(t):
        values = _raw_values(column, np.dtype("V16")).view(np.uint8).reshape(-1, 16)[:, ::-1].copy()
        values[:, 0] ^= 0x80
    else:
        values = _big_endian(column)
    rows = np.empty((len(column), values.shape[1] + 1), dtype=np.uint8)
    rows[:, 0] = _PRESENT[0]
    rows[:, 1:] = values
    offsets = np.arange(0, rows.size + 1, rows.shape[1], dtype=np.int32)
    encoded = pa.Array.from_buffers(
        pa.binary(), len(column), [None, pa.py_buffer(offsets), pa.py_buffer(rows)]
    )
    if column.null_count == 0:
        return encoded
    return pc.if_else(column.is_valid(), encoded, pa.scalar(None, pa.binary()))


def _raw_values(column: pa.Array, dtype: np.dtype[Any]) -> npt.NDArray[np.generic]:
    """Return the stored values, including the bytes under nulls."""
    data = column.buffers()[1]
    if data is None:
        return np.zeros(len(column), dtype=dtype)
    return np.frombuffer(data, dtype=dtype, count=column.offset + len(column))[column.offset :]


def _big_endian(column: pa.Array) -> npt.NDArray[np.uint8]:
    size = column.type.bit_width // 8
    sign = _SIGN_BITS[size]
    if pa.types.is_floating(column.type):
        floats = _raw_values(column, np.dtype(f"f{size}"))
        # -0.0 and 0.0 are the same key, and all NaNs are the same key.
        floats = np.where(floats == 0, np.zeros_like(floats), floats)
        bits = np.where(np.isnan(floats), np.full_like(floats, np.nan), floats).view(sign.dtype)
        bits = np.where(bits & sign, ~bits, bits ^ sign)
    else:
        bits = _raw_values(column, sign.dtype) ^ sign
    return bits.astype(sign.dtype.newbyteorder(">")).view(np.uint8).reshape(-1, size)


def _one_array(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
