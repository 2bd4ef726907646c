"""Rows of a bucket in memory, within a budget: what RocksDB has not got yet, and what fits beside.

Of every key it knows one of three things: the newest row; that there is no row (it was deleted, or
the cache is `complete` and does not have it); or nothing, and then RocksDB does.

One thread at a time changes it; readers hold the same `lock` that changes they could stumble over
happen under. It is held briefly, for some thousand keys at a time where each takes work; copying
rows and growing the index happen outside it. Rows that RocksDB may not have yet, those of a run on
its way to it included, are never evicted.
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
"""Up to so many keys are put one by one."""
# To copy an index of so many entries takes half a millisecond.
_SMALL_INDEX: Final = 20_000
_SPARE_ROWS: Final = 4_096
# So many keys are looked for or added at once: others wait for it.
_AT_ONCE: Final = 4_096
_HASH_BYTES: Final = 8
_NO_SLOTS: Final = np.zeros(0, dtype=np.int64)
# A segment below this share of live rows is worth emptying, which moves those: the less of them the
# cheaper, where there is memory.
_SPARSE: Final = 0.25
_SPARSE_IF_SHORT: Final = 0.5


class CachedRows(NamedTuple):
    """What is known of some keys.

    `values` is null where there is no row or nothing is known; `unknown` marks the latter, and is
    None when everything is known.
    """

    values: pa.Array
    unknown: npt.NDArray[np.bool_] | None


class FewRows(NamedTuple):
    """What is known of few keys: None where there is no row or nothing is known.

    `unknown` has the positions of the latter.
    """

    values: list[bytes | None]
    unknown: list[int]


class _Located(NamedTuple):
    """Where the rows of some keys were at one moment: location 0 where none is.

    `unknown` is that of `CachedRows`. Rows are never changed in place, and what is dropped lives as
    long as `segments` has it: so they can be read at any time after.
    """

    locations: Hashes
    unknown: npt.NDArray[np.bool_] | None
    segments: Segments


class _Read(NamedTuple):
    """Where the keys of the last `get_to_write` were."""

    hashed: HashedKeys
    slots: npt.NDArray[np.int64]
    changes: int


class _Place(NamedTuple):
    """Where one key is; its slot is -1 if it is not there."""

    first: int
    second: int
    slot: int


class _FewRead(NamedTuple):
    """Where the keys of the last `get_few_to_write` were."""

    places: dict[bytes, _Place]
    changes: int


class RowCache:
    """Newest rows by key. A new cache is complete: of no rows at all."""

    def __init__(
        self,
        *,
        budget_bytes: int,
        segment_bytes: int | None = None,
        hasher: KeyHasher | None = None,
        few_keys: int = FEW_KEYS,
    ) -> None:
        """Make an empty cache; segments are what is evicted at once, 1/32 of the budget if None."""
        self._few_keys: Final = few_keys
        if segment_bytes is None:
            segment_bytes = max(budget_bytes // 32, _SEGMENT_BYTES_MIN)
        self.budget_bytes = budget_bytes
        """May be changed by who changes the rows; `tidy` keeps to it."""
        self._hasher: Final = hasher or PROCESS_HASHER
        self._lock: Final = threading.Lock()
        self._index = HashIndex()
        self._arena: Final = RowArena(segment_bytes=min(segment_bytes, SEGMENT_BYTES_MAX))
        self._complete = True
        self._loading = False
        # Segments with rows, and keys of deletes, that RocksDB may not have yet.
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
    def complete(self) -> bool:
        """Whether a key that is not here has no row."""
        return self._complete

    @property
    def memory_bytes(self) -> int:
        """The bytes that rows, index and what is known of deletes take."""
        deletes = len(self._deleted) + len(self._deleted_by_run)
        return self._arena.memory_bytes + self._index.memory_bytes + _HASH_BYTES * deletes

    def get(self, keys: pa.Array) -> CachedRows:
        """Return what is known of distinct or repeated binary keys.

        Each is known as it was at some moment of the call, not all as they were at the same.
        """
        return _rows_of(self._locate(keys))

    def get_within(self, keys: pa.Array, bytes_max: int) -> CachedRows | None:
        """As `get`; None, and no row is copied, if the rows have more than `bytes_max`."""
        located = self._locate(keys)
        if sum(RowArena.bytes_at(part.locations) for part in located) > bytes_max:
            return None
        return _rows_of(located)

    def _locate(self, keys: pa.Array) -> list[_Located]:
        """Return where the rows are, part by part."""
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
        unknown = None if self._complete or not missing.any() else missing
        return _Located(locations, unknown, self._arena.segments)

    def get_to_write(self, hashed: HashedKeys, bytes_max: int) -> CachedRows | None:
        """As `get_within`, for the writing thread; to `put` the same keys then costs less."""
        slots = self._index.find(hashed.first, hashed.second)
        self._read_last = _Read(hashed, slots, self._changes)
        located = self._at(slots)
        return None if RowArena.bytes_at(located.locations) > bytes_max else _rows_of([located])

    def get_few_to_write(self, keys: Sequence[bytes]) -> list[bytes | None] | None:
        """As `get_to_write`, for few keys; None if of any of them nothing is known."""
        self._few_read = _FewRead({}, -1)
        places = {key: self._place_of(key) for key in keys}
        self._few_read = _FewRead(places, self._changes)
        if not self._complete and any(place.slot < 0 for place in places.values()):
            return None
        at = (0 if slot < 0 else self._index.number_at(slot) for _, _, slot in places.values())
        return [self._arena.row_at(location) if location else None for location in at]

    def get_few(self, hashes: Sequence[tuple[int, int]], *, bytes_max: int) -> FewRows | None:
        """As `get_within` for few keys, given by their hashes, in a fraction of the time."""
        values: list[bytes | None] = []
        unknown: list[int] = []
        with self._lock:
            for first, second in hashes:
                slot = self._index.find_one(first, second)
                if slot < 0 and not self._complete:
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
        locations = iter(self._arena.append_few([row for row in values if row is not None]))
        if not self._index.room_for(len(keys)):
            self._resize_index(len(keys))
        places = [self._place_of(key) for key in keys]
        replaced = []
        with self._lock:
            for (first, second, slot), value in zip(places, values, strict=True):
                location = 0 if value is None else next(locations)
                if slot < 0:
                    self._index.insert_one(first, second, location)
                    self._changes += 1
                else:
                    replaced.append(self._index.number_at(slot))
                    self._index.set_number_at(slot, location)
                if location:
                    self._pinned.add(self._arena.segment_of(location))
                else:
                    self._deleted.extend((first, second))
        self._arena.release_few(filter(None, replaced))

    def _place_of(self, key: bytes) -> _Place:
        if self._few_read.changes == self._changes:
            place = self._few_read.places.get(key)
            if place is not None:
                return place
        first, second = self._hasher.one(key)
        return _Place(first, second, self._index.find_one(first, second))

    def run_begun(self) -> None:
        """What was put so far is on its way to RocksDB."""
        self._pinned_by_run, self._pinned = self._pinned, set()
        self._deleted_by_run, self._deleted = self._deleted, array("Q")

    def run_ended(self, *, is_written: bool) -> None:
        """RocksDB has what was put before the run began, or has not taken it."""
        deleted, self._deleted_by_run = self._deleted_by_run, array("Q")
        pinned, self._pinned_by_run = self._pinned_by_run, set()
        if not is_written:
            self._pinned |= pinned
        if self._loading or not is_written:
            self._deleted = deleted + self._deleted
            return
        if not deleted:
            return
        # RocksDB may have a row that was put and deleted again meanwhile.
        slots = np.setdiff1d(self._slots_of_deleted(deleted), self._slots_of_deleted(self._deleted))
        self._changes += 1
        with self._lock:
            self._index.remove(slots[self._index.numbers[slots] == _DELETED])

    def _slots_of_deleted(self, deleted: array[int]) -> npt.NDArray[np.int64]:
        hashes = np.array(deleted, dtype=np.uint64)
        slots = self._index.find(hashes[::2], hashes[1::2])
        return slots[slots >= 0]

    @property
    def _kept(self) -> set[int]:
        """Segments with rows that RocksDB may not have."""
        return self._pinned | self._pinned_by_run

    def start_loading(self, row_count: int) -> None:
        """Say that RocksDB has rows that are not here; `load` them all, then `finish_loading`."""
        self._complete = False
        self._loading = True
        if self._index.memory_of(row_count) < self.budget_bytes // 2:
            self._resize_index(row_count)

    def load(self, keys: pa.Array, values: pa.Array) -> bool:
        """Add rows that RocksDB had when loading started, unless something newer is known.

        Returns False when they do not fit: then loading has ended, and the cache stays incomplete.
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
        """Return how many rows are here; None if not all were kept that were loaded."""
        return self._index.count_numbered() if self._loading else None

    def stop_loading(self) -> None:
        """Not everything can be loaded: of what is not here nothing is known."""
        self._loading = False

    def finish_loading(self) -> None:
        """Everything has been loaded: what is not here does not exist."""
        if self._loading:
            self._loading = False
            self._complete = True

    def has_room(self, count: int) -> bool:
        """Whether `put` of so many rows is quick: the index needs no copy, or a small one."""
        return len(self._index) <= _SMALL_INDEX or self._index.room_for(count)

    @property
    def is_untidy(self) -> bool:
        """Whether `tidy` has something to do."""
        return (
            (
                self.memory_bytes > self.budget_bytes
                and self._arena.oldest(except_=self._kept) is not None
            )
            or self._index.is_sparse
            or not self.has_room(_SPARE_ROWS)
            or self._sparsest() is not None
        )

    def tidy(self) -> None:
        """Win back memory of superseded rows; evict the oldest rows if there are too many.

        Moves at most one segment, so that calling it once a write is cheap and enough. The index
        grows here before it is full, so that a write of few rows need not copy it.
        """
        while self.memory_bytes > self.budget_bytes:
            oldest = self._arena.oldest(except_=self._kept)
            if oldest is None:
                break
            self._evict(oldest)
            if self._index.is_loose:
                self._resize_index(0)
        if self._index.is_sparse or not self.has_room(_SPARE_ROWS):
            self._resize_index(0)
        sparsest = self._sparsest()
        if sparsest is not None:
            self._empty(sparsest)

    def _sparsest(self) -> int | None:
        """Return the segment that is emptied next."""
        is_short = self.memory_bytes > self.budget_bytes // 2
        return self._arena.sparsest(below=_SPARSE_IF_SHORT if is_short else _SPARSE)

    def _append(self, values: pa.Array) -> Hashes:
        """Append rows that RocksDB does not have yet."""
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
            self._complete = False
            self._index.remove(slots)
            self._arena.drop(segment)

    def _empty(self, segment: int) -> None:
        """Move the live rows of a segment to the end, and drop it."""
        slots = self._arena.in_segment(self._index.numbers, segment)
        rows = self._arena.rows_at(self._index.numbers[slots])
        locations = self._append(rows) if segment in self._kept else self._arena.append(rows)
        with self._lock:
            self._index.numbers[slots] = locations
            self._arena.drop(segment)
        self._pinned.discard(segment)
        self._pinned_by_run.discard(segment)


def _rows_of(located: Sequence[_Located]) -> CachedRows:
    """Return copies of the rows; any thread, at any time after."""
    values = RowArena.rows_in([(part.segments, part.locations) for part in located])
    unknown = None
    if any(part.unknown is not None for part in located):
        unknown = np.concatenate([_flags(part) for part in located])
    return CachedRows(values, unknown)


def _flags(part: _Located) -> npt.NDArray[np.bool_]:
    return np.zeros(len(part.locations), np.bool_) if part.unknown is None else part.unknown
