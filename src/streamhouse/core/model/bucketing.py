"""The bucket of a row: Iceberg's `bucket[N]`, so that log and lake agree.

One bucketable key column is hashed by Iceberg's rule for its type (spec, appendix B: 32-bit
murmur3, `(hash & int32.max) % N`). Several columns, or one column which Iceberg cannot bucket, are
hashed as the bytes of `encode_key`. A null single key hashes to bucket 0.
"""

from __future__ import annotations

import array
import itertools
from collections.abc import Sequence
from typing import Final

import mmh3
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from streamhouse.core.model.hashing._murmur import hashes_of_bytes
from streamhouse.core.types.logical_type import NULL_KEY
from streamhouse.core.types.registry import type_of

__all__ = [
    "FEW_ROWS",
    "buckets_for_rows",
    "buckets_of_few",
    "encode_few",
    "encode_key",
    "rows_of_buckets",
    "split_by_bucket",
    "split_evenly",
]

FEW_ROWS: Final = 64
"""The most rows for which Python values, one by one, are faster than kernels."""


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
    key = columns[0]
    hashes = type_of(key.type).hashes if len(columns) == 1 else None
    if hashes is None:
        key, hashes = encode_key(columns), hashes_of_bytes
    buckets = (hashes(key) & np.uint32(0x7FFFFFFF)) % np.uint32(bucket_count)
    if key.null_count:
        buckets[np.asarray(key.is_null().to_numpy(zero_copy_only=False))] = 0
    return buckets.astype(np.int32)


def buckets_of_few(columns: Sequence[pa.Array], bucket_count: int) -> list[int] | None:
    """Return the result of `buckets_for_rows` for few rows of key columns of common types.

    None for many rows, or another type.
    """
    if len(columns[0]) > FEW_ROWS:
        return None
    hashed: Sequence[bytes | None] | None
    if len(columns) > 1:
        hashed = encode_few(columns)
    else:
        few_hashed = type_of(columns[0].type).few_hashed
        hashed = None if few_hashed is None else few_hashed(columns[0])
    if hashed is None:
        return None
    return [0 if h is None else (mmh3.hash(h) & 0x7FFFFFFF) % bucket_count for h in hashed]


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
    if parts == 1:
        # The same object: its rows are in the log's form already.
        return {first_bucket % bucket_count: batch} if batch.num_rows else {}
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
    parts = []
    for column in columns:
        part = type_of(column.type).keys(column)
        parts.append(pc.fill_null(part, NULL_KEY) if part.null_count else part)
    if len(parts) == 1:
        return parts[0]
    return pc.binary_join_element_wise(*parts, b"", null_handling="replace", null_replacement=b"")


def encode_few(columns: Sequence[pa.Array]) -> list[bytes] | None:
    """Return the encoded keys of few rows; None if a column is of a rare type."""
    parts: list[list[bytes]] = []
    for column in columns:
        few_keys = type_of(column.type).few_keys
        if few_keys is None:
            return None
        parts.append(few_keys(column))
    return parts[0] if len(parts) == 1 else [b"".join(row) for row in zip(*parts, strict=True)]


def _one_array(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
