"""A bucket's rows in memory, within a budget: rows missing from RocksDB, and further rows.

A key's state is one of three: the newest row is cached; the key is known as absent (deleted, or
missing from a `complete` cache); or the key is unknown, and RocksDB must be read.

One thread at a time changes the cache; readers hold the same `lock` as changes unsafe for readers.
The lock is held briefly, for some thousand keys at a time; copying rows and growing the index
happen outside. Rows possibly missing from RocksDB, including a run on its way, are never evicted.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from streamhouse.core.model.hashing.hash_index import HashIndex
from streamhouse.core.model.hashing.key_hash import (
    PROCESS_HASHER,
    HashedKeys,
    Hashes,
    KeyHasher,
)
from streamhouse.storage_service.kv.cache._row_arena import (
    SEGMENT_BYTES_MAX,
    RowArena,
    Segments,
)

__all__ = ["FEW_KEYS", "CachedRows", "FewRows", "RowCache"]

_DELETED: Final = np.uint64(0)
_SEGMENT_BYTES_MIN: Final = 256 << 10
FEW_KEYS: Final = 64
"""The most keys put one by one."""
# Copying an index of this size takes half a millisecond.
_SMALL_INDEX: Final = 20_000
_SPARE_ROWS: Final = 4_096
# The keys searched or added under one hold of the lock.
_AT_ONCE: Final = 4_096
_HASH_BYTES: Final = 8
_NO_SLOTS: Final = np.zeros(0, dtype=np.int64)
# A segment below this share of live rows is emptied by moving its live rows: fewer rows are
# cheaper to move, if memory is available.
_SPARSE: Final = 0.25
_SPARSE_IF_SHORT: Final = 0.5


class CachedRows(NamedTuple):
    """The cache's knowledge of some keys.

    `values` is null for an absent or unknown key; `unknown` marks unknown keys, and is None if all
    keys are known.
    """

    values: pa.Array
    unknown: npt.NDArray[np.bool_] | None


class FewRows(NamedTuple):
    """The cache's knowledge of few keys: None for an absent or unknown key.

    `unknown` has the positions of unknown keys.
    """

    values: list[bytes | None]
    unknown: list[int]


class _Located(NamedTuple):
    """The locations of some keys' rows at one moment: 0 without a row.

    `unknown` is as in `CachedRows`. Rows are immutable, and dropped rows live as long as `segments`
    references them, so the rows can be read at any later time.
    """

    locations: Hashes
    unknown: npt.NDArray[np.bool_] | None
    segments: Segments


class _Read(NamedTuple):
    """The slots of the keys of the last `get_to_write`."""

    hashed: HashedKeys
    slots: npt.NDArray[np.int64]
    changes: int


class _Place(NamedTuple):
    """The slot of one key; -1 for a missing key."""

    first: int
    second: int
    slot: int


class _FewRead(NamedTuple):
    """The places of the keys of the last `get_few_to_write`."""

    places: dict[bytes, _Place]
    changes: int


class RowCache:
    """Newest rows by key. A new cache is complete, without rows."""

    def __init__(
        self,
        *,
        budget_bytes: int,
        segment_bytes: int | None = None,
        hasher: KeyHasher | None = None,
        few_keys: int = FEW_KEYS,
    ) -> None:
        """Make an empty cache evicting one segment at a time (None: 1/32 of the budget)."""
        self._few_keys: Final = few_keys
        if segment_bytes is None:
            segment_bytes = max(budget_bytes // 32, _SEGMENT_BYTES_MIN)
        self.budget_bytes = budget_bytes
        """Set by the changing thread; `tidy` enforces the budget."""
        self._hasher: Final = hasher or PROCESS_HASHER
        self._lock: Final = threading.Lock()
        self._index = HashIndex()
        self._arena: Final = RowArena(segment_bytes=min(segment_bytes, SEGMENT_BYTES_MAX))
        self.complete = True
        """Whether keys missing from the cache have no row."""
        self._loading = False
        # Segments with rows, and keys of deletes, possibly missing from RocksDB.
        self._pinned: set[int] = set()
        self._pinned_by_run: set[int] = set()
        # Slots stay valid while no key is added or removed.
        self._changes = 0
        self._read_last: _Read | None = None
        self._few_read = _FewRead({}, -1)
        # Both hashes of one key after those of another.
        self._deleted = array("Q")
        self._deleted_by_run = array("Q")

    @property
    def memory_bytes(self) -> int:
        """The bytes of rows, index and remembered deletes."""
        deletes = len(self._deleted) + len(self._deleted_by_run)
        return self._arena.memory_bytes + self._index.memory_bytes + _HASH_BYTES * deletes

    def get(self, keys: pa.Array) -> CachedRows:
        """Return the state of distinct or repeated binary keys.

        Each key's state is from some moment of the call, not all from the same moment.
        """
        return _rows_of(self._locate(keys))

    def get_within(self, keys: pa.Array, bytes_max: int) -> CachedRows | None:
        """As `get`; None, without copying rows, if the rows exceed `bytes_max`."""
        located = self._locate(keys)
        if sum(RowArena.bytes_at(part.locations) for part in located) > bytes_max:
            return None
        return _rows_of(located)

    def _locate(self, keys: pa.Array) -> list[_Located]:
        """Return the rows' locations, part by part."""
        first, second = self._hasher.many(keys)
        located = []
        for start in range(0, max(len(keys), 1), _AT_ONCE):
            part = slice(start, start + _AT_ONCE)
            with self._lock:
                located.append(self._at(self._index.find(first[part], second[part])))
        return located

    def _at(self, slots: npt.NDArray[np.int64]) -> _Located:
        missing = slots < 0
        locations = self._index.numbers[slots]
        locations[missing] = _DELETED
        unknown = None if self.complete or not missing.any() else missing
        return _Located(locations, unknown, self._arena.segments)

    def get_to_write(self, hashed: HashedKeys, bytes_max: int) -> CachedRows | None:
        """As `get_within`, for the writing thread; makes a later `put` of the same keys cheaper."""
        slots = self._index.find(hashed.first, hashed.second)
        self._read_last = _Read(hashed, slots, self._changes)
        located = self._at(slots)
        return None if RowArena.bytes_at(located.locations) > bytes_max else _rows_of([located])

    def get_few_to_write(self, keys: Sequence[bytes]) -> list[bytes | None] | None:
        """As `get_to_write`, for few keys; None if a key is unknown."""
        self._few_read = _FewRead({}, -1)
        index, hash_of = self._index, self._hasher.one
        places: dict[bytes, _Place] = {}
        locations: list[int] = []
        for key in keys:
            first, second = hash_of(key)
            slot = index.find_one(first, second)
            if slot < 0 and not self.complete:
                return None
            places[key] = _Place(first, second, slot)
            locations.append(0 if slot < 0 else index.number_at(slot))
        self._few_read = _FewRead(places, self._changes)
        return self._arena.few_rows_at(locations)

    def get_few(self, hashes: Sequence[tuple[int, int]], *, bytes_max: int) -> FewRows | None:
        """As `get_within` for the hashes of few keys, in a fraction of the time."""
        values: list[bytes | None] = []
        unknown: list[int] = []
        with self._lock:
            for first, second in hashes:
                slot = self._index.find_one(first, second)
                if slot < 0 and not self.complete:
                    unknown.append(len(values))
                location = self._index.number_at(slot) if slot >= 0 else 0
                bytes_max -= self._arena.bytes_of(location)
                if bytes_max < 0:
                    return None
                values.append(self._arena.row_at(location) if location else None)
        return FewRows(values, unknown)

    def put(self, keys: pa.Array, values: pa.Array) -> None:
        """Make `values` the newest rows of distinct `keys`; a null deletes."""
        if len(keys) <= self._few_keys:
            self._put_few(keys.to_pylist(), values.to_pylist())
            return
        first, second, slots = self._slots_of(keys)
        if values.null_count:
            present = values.is_valid().to_numpy(zero_copy_only=False)
            locations = np.full(len(keys), _DELETED, dtype=np.uint64)
            locations[present] = self._append(values.drop_null())
            gone = np.stack((first[~present], second[~present]), axis=1)
            self._deleted.frombytes(gone.tobytes())
        else:
            locations = self._append(values)
        is_cached = slots >= 0
        previous_numbers = self._index.numbers[slots[is_cached]]
        new = ~is_cached
        with self._lock:
            self._index.numbers[slots[is_cached]] = locations[is_cached]
        self._insert(first[new], second[new], locations[new])
        self._arena.release(previous_numbers[previous_numbers != _DELETED])

    def _put_few(self, keys: Sequence[bytes], values: Sequence[bytes | None]) -> None:
        appended, segments = self._arena.append_few([row for row in values if row is not None])
        self._pinned |= segments
        locations = iter(appended)
        if not self._index.room_for(len(keys)):
            self._resize_index(len(keys))
        index, read = self._index, self._few_read
        places = read.places if read.changes == self._changes else {}
        at = []
        for key in keys:
            at.append(places.get(key) or self._place_of(key))
        replaced = []
        with self._lock:
            for (first, second, slot), value in zip(at, values, strict=True):
                location = 0 if value is None else next(locations)
                if slot < 0:
                    index.insert_one(first, second, location)
                    self._changes += 1
                else:
                    replaced.append(index.replace_number(slot, location))
                if not location:
                    self._deleted.extend((first, second))
        self._arena.release_few(filter(None, replaced))

    def _place_of(self, key: bytes) -> _Place:
        first, second = self._hasher.one(key)
        return _Place(first, second, self._index.find_one(first, second))

    def run_begun(self) -> None:
        """Note a run with all rows put so far on its way to RocksDB."""
        self._pinned_by_run, self._pinned = self._pinned, set()
        self._deleted_by_run, self._deleted = self._deleted, array("Q")

    def run_ended(self, *, is_written: bool) -> None:
        """Note the end of a run: RocksDB has its rows, or has refused them."""
        deleted, self._deleted_by_run = self._deleted_by_run, array("Q")
        pinned, self._pinned_by_run = self._pinned_by_run, set()
        if not is_written:
            self._pinned |= pinned
        if self._loading or not is_written:
            self._deleted = deleted + self._deleted
            return
        if not deleted:
            return
        # RocksDB may have a row put and deleted again meanwhile.
        slots = np.setdiff1d(self._slots_of_deleted(deleted), self._slots_of_deleted(self._deleted))
        self._changes += 1
        with self._lock:
            self._index.remove(slots[self._index.numbers[slots] == _DELETED])

    def _slots_of_deleted(self, deleted: array[int]) -> npt.NDArray[np.int64]:
        hashes = np.array(deleted, dtype=np.uint64)
        slots = self._index.find(hashes[::2], hashes[1::2])
        return slots[slots >= 0]

    @property
    def _pinned_segments(self) -> set[int]:
        """Segments with rows possibly missing from RocksDB."""
        return self._pinned | self._pinned_by_run

    def start_loading(self, row_count: int) -> None:
        """Declare `row_count` rows in RocksDB; `load` all of them, then `finish_loading`."""
        self.complete = False
        self._loading = True
        if self._index.memory_of(row_count) < self.budget_bytes // 2:
            self._resize_index(row_count)

    def load(self, keys: pa.Array, values: pa.Array) -> bool:
        """Add rows present in RocksDB when loading started, unless a newer row is cached.

        Returns False if the rows do not fit: loading has ended, and the cache stays incomplete.
        """
        if not self._loading or self.memory_bytes + values.nbytes > self.budget_bytes:
            self._loading = False
            return False
        first, second = self._hasher.many(keys)
        new = self._index.find(first, second) < 0
        fresh = values if new.all() else values.filter(pa.array(new))
        self._insert(first[new], second[new], self._arena.append(fresh))
        return True

    def loaded_row_count(self) -> int | None:
        """Return the number of cached rows; None if some loaded rows were dropped."""
        return self._index.count_numbered() if self._loading else None

    def stop_loading(self) -> None:
        """End loading without completeness: missing keys stay unknown."""
        self._loading = False

    def finish_loading(self) -> None:
        """End loading with completeness: missing keys are absent."""
        if self._loading:
            self._loading = False
            self.complete = True

    def has_room(self, count: int) -> bool:
        """Whether `put` of `count` rows is quick: no copy of the index, or a small one."""
        return len(self._index) <= _SMALL_INDEX or self._index.room_for(count)

    @property
    def is_untidy(self) -> bool:
        """Whether `tidy` has work."""
        below = self._sparse_below
        evicts = self.memory_bytes > self.budget_bytes
        return (
            not self.has_room(_SPARE_ROWS)
            or self._index.is_sparse
            or self._arena.sparsest(below=below) is not None
            or (evicts and self._arena.oldest(except_=self._pinned_segments) is not None)
        )

    def tidy(self) -> None:
        """Reclaim memory of superseded rows; evict the oldest rows above the budget.

        Moves at most one segment, so a call after every write is cheap and sufficient. The index
        grows here before it is full, because a write of few rows should not copy the index.
        """
        while self.memory_bytes > self.budget_bytes:
            oldest = self._arena.oldest(except_=self._pinned_segments)
            if oldest is None:
                break
            self._evict(oldest)
            if self._index.is_loose:
                self._resize_index(0)
        if self._index.is_sparse or not self.has_room(_SPARE_ROWS):
            self._resize_index(0)
        sparsest = self._arena.sparsest(below=self._sparse_below)
        if sparsest is not None:
            self._empty(sparsest)

    @property
    def _sparse_below(self) -> float:
        """The share of live rows below which a segment is emptied."""
        is_short = self.memory_bytes > self.budget_bytes // 2
        return _SPARSE_IF_SHORT if is_short else _SPARSE

    def _append(self, values: pa.Array) -> Hashes:
        """Append rows missing from RocksDB."""
        locations = self._arena.append(values)
        self._pinned.update(self._arena.segments_of(locations))
        return locations

    def _slots_of(self, keys: pa.Array) -> tuple[Hashes, Hashes, npt.NDArray[np.int64]]:
        read = self._read_last
        if read is None or not (read.hashed.keys is keys or read.hashed.keys.equals(keys)):
            read = _Read(self._hasher.hashed(keys), _NO_SLOTS, -1)
        _, first, second = read.hashed
        is_known = read.changes == self._changes
        return first, second, read.slots if is_known else self._index.find(first, second)

    def _resize_index(self, count: int) -> None:
        self._changes += 1
        index = self._index.resized(count)
        with self._lock:
            self._index = index

    def _insert(self, first: Hashes, second: Hashes, locations: Hashes) -> None:
        if len(first) == 0:
            return
        self._changes += 1
        if not self._index.room_for(len(first)):
            self._resize_index(len(first))
        for start in range(0, len(first), _AT_ONCE):
            part = slice(start, start + _AT_ONCE)
            with self._lock:
                self._index.insert(first[part], second[part], locations[part])

    def _evict(self, segment: int) -> None:
        self._loading = False
        slots = self._arena.in_segment(self._index.numbers, segment)
        self._changes += 1
        with self._lock:
            self.complete = False
            self._index.remove(slots)
            self._arena.drop(segment)

    def _empty(self, segment: int) -> None:
        """Move the live rows of a segment to the end, and drop the segment."""
        slots = self._arena.in_segment(self._index.numbers, segment)
        rows = self._arena.rows_at(self._index.numbers[slots])
        locations = (
            self._append(rows) if segment in self._pinned_segments else self._arena.append(rows)
        )
        with self._lock:
            self._index.numbers[slots] = locations
            self._arena.drop(segment)
        self._pinned.discard(segment)
        self._pinned_by_run.discard(segment)


def _rows_of(located: Sequence[_Located]) -> CachedRows:
    """Return copies of the rows; on any thread, at any later time."""
    values = RowArena.rows_in([(part.segments, part.locations) for part in located])
    unknown = None
    if any(part.unknown is not None for part in located):
        unknown = np.concatenate([_flags(part) for part in located])
    return CachedRows(values, unknown)


def _flags(part: _Located) -> npt.NDArray[np.bool_]:
    return np.zeros(len(part.locations), np.bool_) if part.unknown is None else part.unknown
