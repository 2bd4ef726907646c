"""What is known of keys: which rows each has, found for many keys at once.

Keys are compared by the 128-bit hashes that the service's own rows in memory go by
(`model/hashing/key_hash.py`): two different keys with the same hash do not happen by chance, nor on
purpose. Integers that lie close together are found by their value alone.

A number stands for a key's rows. 0 is a key that has none, and -1 one that was never asked for. Of
a whole primary key there is one row, which is at position number - 1. By the first columns of a key
there is a run of rows.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from streamhouse.storage_service.model.bucketing import encode_key
from streamhouse.storage_service.model.hashing.hash_index import HashIndex
from streamhouse.storage_service.model.hashing.key_hash import PROCESS_HASHER, Hashes
from streamhouse.storage_service.model.schema import empty_batch

__all__ = ["KeyRows", "Keys", "Numbers", "key_runs"]

UNKNOWN: Final = -1
_INTEGERS: Final = {
    pa.int8(): pa.int8(),
    pa.int16(): pa.int16(),
    pa.int32(): pa.int32(),
    pa.int64(): pa.int64(),
    pa.date32(): pa.int32(),
    pa.timestamp("us"): pa.int64(),
    pa.timestamp("us", tz="UTC"): pa.int64(),
}
_DENSE_SHARE: Final = 4
"""A table by value may be so many times as long as there are values."""
_DENSE_MIN: Final = 1_024
_HASHED_AT_ONCE: Final = 1 << 16
"""What a pass over so many keys works on stays in the processor's cache."""

Numbers = npt.NDArray[np.int64]


class Keys:
    """Keys without nulls, one array a column, of exactly the types of the table."""

    def __init__(self, arrays: Sequence[pa.Array]) -> None:
        self.arrays: Final = tuple(arrays)

    def __len__(self) -> int:
        return len(self.arrays[0])

    @functools.cached_property
    def hashed(self) -> tuple[Hashes, Hashes]:
        """The keys' hashes: two of each."""
        parts = [
            _hashes([array.slice(start, _HASHED_AT_ONCE) for array in self.arrays])
            for start in range(0, max(len(self), 1), _HASHED_AT_ONCE)
        ]
        if len(parts) == 1:
            return parts[0]
        first, second = zip(*parts, strict=True)
        return np.concatenate(first), np.concatenate(second)

    @functools.cached_property
    def words(self) -> Numbers | None:
        """The keys as integers, if they are of one column that is stored as integers."""
        stored = _INTEGERS.get(self.arrays[0].type)
        if len(self.arrays) > 1 or stored is None:
            return None
        values = self.arrays[0].view(stored).to_numpy(zero_copy_only=False)
        return np.asarray(values, dtype=np.int64)

    def at(self, positions: Numbers) -> Keys:
        """Return those at some positions."""
        taken = pa.array(positions)
        return Keys([array.take(taken) for array in self.arrays])

    def distinct(self) -> Keys:
        """Return each key once."""
        first, second = self.hashed
        order = np.lexsort((second, first))
        is_new = np.ones(len(order), dtype=np.bool_)
        a, b = first[order], second[order]
        is_new[1:] = (a[1:] != a[:-1]) | (b[1:] != b[:-1])
        return self if is_new.all() else self.at(np.sort(order[is_new]))


def _hashes(arrays: Sequence[pa.Array]) -> tuple[Hashes, Hashes]:
    data_type = arrays[0].type
    if len(arrays) == 1 and (pa.types.is_string(data_type) or pa.types.is_binary(data_type)):
        # One text is told from another by its own bytes, without those that order keys.
        return PROCESS_HASHER.many(arrays[0], skipped=0)
    return PROCESS_HASHER.many(encode_key(arrays))


class _ByValue:
    """Numbers of integers, in a table that is read at value - least."""

    def __init__(self, words: Numbers, numbers: Numbers) -> None:
        self._least = words.min()
        self._span = np.uint64(int(words.max()) - int(self._least))
        # After the last value comes one for all others.
        self._numbers = np.zeros(int(self._span) + 2, dtype=np.int64)
        self._numbers[words - self._least] = numbers

    @property
    def nbytes(self) -> int:
        return self._numbers.nbytes

    @staticmethod
    def fits(words: Numbers | None) -> bool:
        """Whether the table would not be much longer than the values are many."""
        if words is None or len(words) == 0:
            return False
        span = int(words.max()) - int(words.min())
        return span < _DENSE_SHARE * len(words) + _DENSE_MIN

    def find(self, words: Numbers) -> Numbers:
        # What is below the least wraps around, to far above the last.
        with np.errstate(over="ignore"):
            places = (words - self._least).view(np.uint64)
        found: Numbers = self._numbers[np.minimum(places, self._span + np.uint64(1))]
        return found


class KeyRows:
    """Keys with their rows; of a table that `is_complete` a key that is not there has no rows."""

    def __init__(self, row_schema: pa.Schema, *, has_runs: bool) -> None:
        self._has_runs: Final = has_runs
        self._index = HashIndex()
        self._by_value: _ByValue | None = None
        self.rows: pa.RecordBatch = empty_batch(row_schema)
        # By number: where the run begins and how long it is.
        self._starts = np.zeros(1, dtype=np.int64)
        self._counts = np.zeros(1, dtype=np.int64)
        self.is_complete = False

    @property
    def nbytes(self) -> int:
        """What all of it takes in memory."""
        by_value = 0 if self._by_value is None else self._by_value.nbytes
        runs = self._starts.nbytes + self._counts.nbytes
        return int(self.rows.nbytes) + self._index.memory_bytes + by_value + runs

    def find(self, keys: Keys) -> Numbers:
        """Return the number of each key."""
        if self._by_value is not None:
            words = keys.words
            assert words is not None, "keys have one type"
            return self._by_value.find(words)
        slots = self._index.find(*keys.hashed)
        numbers = self._index.numbers[slots].view(np.int64)
        return np.where(slots < 0, 0 if self.is_complete else UNKNOWN, numbers)

    def runs(self, numbers: Numbers) -> tuple[Numbers, Numbers]:
        """Return where the rows of each number begin, and how many they are."""
        if not self._has_runs:
            return np.maximum(numbers - 1, 0), (numbers > 0).astype(np.int64)
        return self._starts[numbers], self._counts[numbers]

    def add(self, keys: Keys, counts: Numbers, rows: pa.RecordBatch) -> None:
        """Add keys that are not there, each once, and their rows, key after key."""
        base = self.rows.num_rows
        numbers = self._numbered(counts, base)
        if not self._index.room_for(len(keys)):
            self._index = self._index.resized(len(keys))
        self._index.insert(*keys.hashed, numbers.view(np.uint64))
        self.rows = pa.concat_batches([self.rows, rows]) if base else rows

    @classmethod
    def complete(
        cls, row_schema: pa.Schema, keys: Keys, rows: pa.RecordBatch, *, has_runs: bool
    ) -> KeyRows:
        """Return all rows of a table, which have these keys."""
        made = cls(row_schema, has_runs=has_runs)
        made.is_complete = True
        if has_runs and len(keys):
            keys, counts, order = key_runs(keys)
            rows = rows.take(pa.array(order))
        else:
            counts = np.ones(len(keys), dtype=np.int64)
        words = keys.words
        if words is not None and _ByValue.fits(words):
            made._by_value = _ByValue(words, made._numbered(counts, 0))
            made.rows = rows
        else:
            made.add(keys, counts, rows)
        return made

    def _numbered(self, counts: Numbers, base: int) -> Numbers:
        """Return the numbers of new keys, whose rows begin at `base`."""
        starts = base + np.cumsum(counts) - counts
        if not self._has_runs:
            return np.where(counts > 0, starts + 1, 0)
        numbers = len(self._starts) + np.arange(len(counts))
        self._starts = np.concatenate([self._starts, starts])
        self._counts = np.concatenate([self._counts, counts])
        return numbers


def key_runs(keys: Keys) -> tuple[Keys, Numbers, Numbers]:
    """Return each key once, how often it is there, and an order in which equal keys are together.

    The keys come in that order.
    """
    first, second = keys.hashed
    order = np.lexsort((second, first))
    a, b = first[order], second[order]
    heads = np.flatnonzero(np.r_[True, (a[1:] != a[:-1]) | (b[1:] != b[:-1])])
    counts = np.diff(np.append(heads, len(order)))
    return keys.at(order[heads]), counts, order
