"""Telling rows by the offsets they were written at, which are the stamps of their values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import pyarrow as pa

from streamhouse.storage_service.kv.rocksdb_store import RocksdbStore
from streamhouse.storage_service.kv.rows.row_codec import versions_of

__all__ = ["only_written_in", "values_before"]


_CHUNK_ROWS_MAX: Final = 2_000
# Where few rows are old, whoever looks for them lets others do their work in between.
_CHUNKS_AT_ONCE_MAX: Final = 10


def values_before(
    store: RocksdbStore, offset: int, row_count: int, *, bytes_max: int
) -> Iterator[pa.Array]:
    """Yield the values of the store written below `offset`, about `bytes_max` of them at a time.

    Or fewer, or none, when many rows were looked at for them. The store has about `row_count` rows,
    whose average size bounds a chunk of large ones.
    """
    held = store.approximate_bytes()
    row_bytes = (held["files"] + held["memtables"]) // max(row_count, 1)
    chunk_rows = min(max(bytes_max // max(row_bytes, 1), 1), _CHUNK_ROWS_MAX)
    waiting: list[pa.Array] = []
    size = chunks = 0
    for _, values in store.scan(chunk_rows=chunk_rows):
        older = values.filter(pa.array(versions_of(values) < offset))
        if chunks == _CHUNKS_AT_ONCE_MAX or (waiting and size + older.nbytes > bytes_max):
            yield _all_of(waiting)
            waiting, size, chunks = [], 0, 0
        chunks += 1
        if len(older):
            waiting.append(older)
            size += older.nbytes
    yield _all_of(waiting)


def _all_of(arrays: list[pa.Array]) -> pa.Array:
    return pa.concat_arrays(arrays) if arrays else pa.array([], pa.binary())


def only_written_in(values: pa.Array, versions: range) -> pa.Array:
    """Return `values` with null for those not written at the offsets `versions`; nulls stay."""
    found = values.is_valid().to_numpy(zero_copy_only=False)
    kept = np.flatnonzero(found)
    stamps = versions_of(values.drop_null())
    kept = kept[(stamps >= versions.start) & (stamps < versions.stop)]
    if len(kept) == int(found.sum()):
        return values
    mask = np.ones(len(values), dtype=np.bool_)
    mask[kept] = False
    return values.take(pa.array(np.arange(len(values)), mask=mask))
