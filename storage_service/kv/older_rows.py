"""Telling rows that were written below an offset from later ones, by the stamps of their values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import pyarrow as pa

from streamhouse.storage_service.kv.rocksdb_store import RocksdbStore
from streamhouse.storage_service.kv.row_codec import versions_of

__all__ = ["only_written_since", "values_before"]


_CHUNK_ROWS_MAX: Final = 2_000


def values_before(
    store: RocksdbStore, offset: int, row_count: int, *, bytes_max: int
) -> Iterator[pa.Array]:
    """Yield the values of the store written below `offset`, about `bytes_max` of them at a time.

    The store has about `row_count` rows, whose average size bounds a chunk of large ones.
    """
    held = store.approximate_bytes()
    row_bytes = (held["files"] + held["memtables"]) // max(row_count, 1)
    chunk_rows = min(max(bytes_max // max(row_bytes, 1), 1), _CHUNK_ROWS_MAX)
    waiting: list[pa.Array] = []
    size = 0
    for _, values in store.scan(chunk_rows=chunk_rows):
        older = values.filter(pa.array(versions_of(values) < offset))
        if waiting and size + older.nbytes > bytes_max:
            yield pa.concat_arrays(waiting)
            waiting, size = [], 0
        if len(older):
            waiting.append(older)
            size += older.nbytes
    if waiting:
        yield pa.concat_arrays(waiting)


def only_written_since(values: pa.Array, offset: int) -> pa.Array:
    """Return `values` with null for those written below `offset`; nulls stay."""
    found = values.is_valid().to_numpy(zero_copy_only=False)
    kept = np.flatnonzero(found)
    kept = kept[versions_of(values.drop_null()) >= offset]
    if len(kept) == int(found.sum()):
        return values
    mask = np.ones(len(values), dtype=np.bool_)
    mask[kept] = False
    return values.take(pa.array(np.arange(len(values)), mask=mask))
