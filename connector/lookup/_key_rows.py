"""A cache of keys: the rows of each key, found for many keys at once.

Integers are compared by value; integers that lie close together are found in an array by value. If
all texts of a whole table are short, texts are compared by value too (`_text_words.py`). All
remaining keys are compared by the service's 128-bit hashes (`model/hashing/key_hash.py`): different
keys do not have the same hash by chance or on purpose.

A number stands for a key's rows: 0 for a key without rows, -1 for a key outside the cache. A whole
primary key has one row, at position number - 1. A prefix of a primary key has a run of rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from streamhouse.connector.lookup._key_index import KeyIndex, Words
from streamhouse.connector.lookup._row_values import RowValues
from streamhouse.connector.lookup._text_words import are_short_texts, text_words
from streamhouse.core.model.bucketing import encode_key
from streamhouse.core.model.hashing.key_hash import PROCESS_HASHER, Hashes, KeyHasher
from streamhouse.core.model.schema import empty_batch
from streamhouse.core.types.logical_type import raw_values
from streamhouse.core.types.registry import type_of

__all__ = ["KeyRows", "KeyRowsParts", "Keys", "Numbers", "key_runs"]

UNKNOWN: Final = -1
_DENSE_SHARE: Final = 4
"""A table by value may be this many times as long as it has values."""
_DENSE_MIN: Final = 1_024
_UNUSED_SHARE: Final = 8
"""At most one of this many rows of a full read may have been replaced."""
_AT_ONCE: Final = 1 << 16
"""The working set of a pass over this many keys stays in the processor's cache."""

Numbers = npt.NDArray[np.int64]


class Keys:
    """Keys without nulls, one array a column, of exactly the types of the table."""

    def __init__(self, arrays: Sequence[pa.Array]) -> None:
        self.arrays: Final = tuple(arrays)

    def __len__(self) -> int:
        return len(self.arrays[0])

    @functools.cached_property
    def hashed(self) -> tuple[Hashes, Hashes]:
        """Two hashes of each key."""
        return self.hashed_by(PROCESS_HASHER)

    def hashed_by(self, hasher: KeyHasher) -> tuple[Hashes, Hashes]:
        """Return the keys' hashes by the seeds of a hasher."""

        def hashes(start: int) -> tuple[Hashes, Hashes]:
            return _hashes([array.slice(start, _AT_ONCE) for array in self.arrays], hasher)

        return self._in_parts(hashes)

    @property
    def are_short_texts(self) -> bool:
        """Whether the keys are a single column of short texts."""
        return len(self.arrays) == 1 and are_short_texts(self.arrays[0])

    def text_words(self) -> tuple[Words, Words]:
        """Return two words of each key, a text; different short texts have different words."""
        return self._in_parts(lambda start: text_words(self.arrays[0].slice(start, _AT_ONCE)))

    def _in_parts(self, words_from: Callable[[int], tuple[Words, Words]]) -> tuple[Words, Words]:
        parts = [words_from(start) for start in range(0, max(len(self), 1), _AT_ONCE)]
        if len(parts) == 1:
            return parts[0]
        first, second = zip(*parts, strict=True)
        return np.concatenate(first), np.concatenate(second)

    @functools.cached_property
    def words(self) -> Numbers | None:
        """The keys as integers, if the key is a single column of integers."""
        stored = type_of(self.arrays[0].type).stored_dtype
        if len(self.arrays) > 1 or stored is None or stored.kind != "i":
            return None
        return np.asarray(raw_values(self.arrays[0], stored), dtype=np.int64)

    def at(self, positions: Numbers) -> Keys:
        """Return the keys at these positions."""
        indices = pa.array(positions)
        return Keys([array.take(indices) for array in self.arrays])

    def distinct(self) -> Keys:
        """Return each key once."""
        if self.words is not None:
            _, firsts = np.unique(self.words, return_index=True)
            return self if len(firsts) == len(self) else self.at(np.sort(firsts))
        first, second = self.hashed
        order = np.lexsort((second, first))
        is_new = np.ones(len(order), dtype=np.bool_)
        a, b = first[order], second[order]
        is_new[1:] = (a[1:] != a[:-1]) | (b[1:] != b[:-1])
        return self if is_new.all() else self.at(np.sort(order[is_new]))


def _hashes(arrays: Sequence[pa.Array], hasher: KeyHasher) -> tuple[Hashes, Hashes]:
    data_type = arrays[0].type
    if len(arrays) == 1 and (pa.types.is_string(data_type) or pa.types.is_binary(data_type)):
        # The bytes of a single text are enough; the prefix that orders keys is skipped.
        return hasher.many(arrays[0], skipped=0)
    return hasher.many(encode_key(arrays))


class _ByValue:
    """Numbers of integers, in an array read at value - least."""

    def __init__(self, least: int, numbers: npt.NDArray[np.int32]) -> None:
        self.least: Final = np.int64(least)
        # The last place stands for all values outside the span.
        self.numbers: Final = numbers
        self._outside: Final = np.uint64(len(numbers) - 1)

    @classmethod
    def of(cls, words: Numbers, numbers: Numbers) -> _ByValue:
        least = int(words.min())
        by_value = np.zeros(int(words.max()) - least + 2, dtype=np.int32)
        by_value[words - least] = numbers
        return cls(least, by_value)

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes

    @staticmethod
    def fits(words: Numbers | None) -> bool:
        """Whether an array by value would not be much longer than the count of the values."""
        if words is None or len(words) == 0:
            return False
        span = int(words.max()) - int(words.min())
        return span < _DENSE_SHARE * len(words) + _DENSE_MIN

    def spanning(self, words: Numbers) -> _ByValue | None:
        """Return an array that also covers these values; None if it would be much too long."""
        if not len(words):
            return self
        least = min(int(words.min()), int(self.least))
        end = max(int(words.max()) + 1, int(self.least) + len(self.numbers) - 1)
        length = end - least + 1
        if length == len(self.numbers):
            return self
        value_count = int(np.count_nonzero(self.numbers)) + len(words)
        if length > _DENSE_SHARE * value_count + _DENSE_MIN:
            return None
        numbers = np.zeros(length, dtype=np.int32)
        first = int(self.least) - least
        numbers[first : first + len(self.numbers)] = self.numbers
        return _ByValue(least, numbers)

    def put(self, words: Numbers, numbers: Numbers) -> None:
        """Give values within the span these numbers."""
        self.numbers[words - self.least] = numbers

    def forget(self, words: Numbers) -> None:
        """Make values, some of which may be absent, count as absent."""
        # Values outside the span change only the last place, which has 0 already.
        self.numbers[self._places(words)] = 0

    def _places(self, words: Numbers) -> Numbers:
        # A value below the least wraps around to a place far above the last.
        with np.errstate(over="ignore"):
            places = (words - self.least).view(np.uint64)
        np.minimum(places, self._outside, out=places)
        return places.view(np.int64)

    def find(self, words: Numbers) -> Numbers:
        numbers: Numbers = self.numbers[self._places(words)].astype(np.int64)
        return numbers


class KeyRowsParts(NamedTuple):
    """The parts of a complete table in forms that a file can store; `facts` are JSON values."""

    facts: dict[str, Any]
    arrays: list[npt.NDArray[Any]]
    rows: pa.RecordBatch


class KeyRows:
    """Keys with their rows; in a table that `is_complete` an absent key has no rows."""

    def __init__(self, row_schema: pa.Schema, *, has_runs: bool) -> None:
        self._has_runs: Final = has_runs
        self._index: KeyIndex | None = None
        self._has_short_texts = False
        self._hasher = PROCESS_HASHER
        self._by_value: _ByValue | None = None
        # By the index's number of a key; 0 is an absent key.
        self._numbers: Numbers = np.full(1, UNKNOWN)
        self.values = RowValues(empty_batch(row_schema))
        # By number: the first row of the run and the length of the run.
        self._starts = np.zeros(1, dtype=np.int64)
        self._counts = np.zeros(1, dtype=np.int64)
        self.is_complete = False
        # The rows of a complete table at its full read.
        self._read_rows = 0

    @property
    def nbytes(self) -> int:
        """The bytes of memory of all parts."""
        index = 0 if self._index is None else self._index.memory_bytes
        by_value = 0 if self._by_value is None else self._by_value.nbytes
        runs = self._starts.nbytes + self._counts.nbytes + self._numbers.nbytes
        return self.values.nbytes + index + by_value + runs

    def find(self, keys: Keys) -> Numbers:
        """Return the number of each key."""
        if self._by_value is not None:
            words = keys.words
            assert words is not None, "keys have one type"
            return self._by_value.find(words)
        if self._index is None:
            return np.full(len(keys), 0 if self.is_complete else UNKNOWN)
        numbers = self._index.find(*self._indexed(keys))
        # A complete table has keys and rows in the same order.
        return numbers if self.is_complete else self._numbers[numbers]

    def runs(self, numbers: Numbers) -> tuple[Numbers, Numbers]:
        """Return the first row and the count of rows of each number."""
        if not self._has_runs:
            return np.maximum(numbers - 1, 0), (numbers > 0).astype(np.int64)
        return self._starts[numbers], self._counts[numbers]

    def add(self, keys: Keys, counts: Numbers, rows: pa.RecordBatch) -> None:
        """Add distinct absent keys and their rows, key after key."""
        cached_rows = self.values.rows
        base = cached_rows.num_rows
        self._numbers = np.concatenate([self._numbers, self._numbered(counts, base)])
        self._put_in(keys)
        self.values = RowValues(pa.concat_batches([cached_rows, rows]) if base else rows)

    def take_in(self, deleted: Keys, keys: Keys, rows: pa.RecordBatch) -> bool:
        """Delete keys of a complete table, and put distinct keys with these rows.

        Return False if the table cannot take the change; the table is unchanged in that case.
        """
        assert self.is_complete, "only a complete table knows that an absent key has no rows"
        assert not self._has_runs, "a key has one row"
        cached_rows = self.values.rows
        if (cached_rows.num_rows + len(keys) - self._read_rows) * _UNUSED_SHARE > self._read_rows:
            return False
        numbers = cached_rows.num_rows + 1 + np.arange(len(keys))
        if self._by_value is not None:
            deleted_words, words = deleted.words, keys.words
            assert deleted_words is not None, "keys have one type"
            assert words is not None, "keys have one type"
            by_value = self._by_value.spanning(words)
            if by_value is None:
                return False
            by_value.forget(deleted_words)
            by_value.put(words, numbers)
            self._by_value = by_value
        elif self._has_short_texts and not keys.are_short_texts:
            return False
        else:
            self._renumber(deleted, keys, numbers.view(np.uint64))
        if len(keys):
            self.values = RowValues(pa.concat_batches([cached_rows, rows]), is_long_lived=True)
        return True

    def _renumber(self, deleted: Keys, keys: Keys, numbers: Words) -> None:
        assert self._index is not None, "it has all keys"
        if len(deleted):
            self._index.forget(*self._indexed(deleted))
        if len(keys):
            words = self._indexed(keys)
            is_new = self._index.renumber(*words, numbers=numbers)
            if is_new.any():
                self._index.add(*(each[is_new] for each in words), numbers=numbers[is_new])

    def _put_in(self, keys: Keys) -> None:
        words = self._indexed(keys)
        if self._index is None:
            self._index = KeyIndex(len(words))
        self._index.add(*words)

    def _indexed(self, keys: Keys) -> tuple[Words, ...]:
        """Return the words of each key for the index."""
        if keys.words is not None:
            return (keys.words.view(np.uint64),)
        if self._has_short_texts:
            return keys.text_words()
        return keys.hashed if self._hasher is PROCESS_HASHER else keys.hashed_by(self._hasher)

    @classmethod
    def complete(
        cls, row_schema: pa.Schema, keys: Keys, rows: pa.RecordBatch, *, has_runs: bool
    ) -> KeyRows:
        """Return a complete table of these rows and their keys."""
        table = cls(row_schema, has_runs=has_runs)
        table.is_complete = True
        if has_runs and len(keys):
            keys, counts, order = key_runs(keys)
            rows = rows.take(pa.array(order))
        else:
            counts = np.ones(len(keys), dtype=np.int64)
        table.values = RowValues(rows, is_long_lived=True)
        table._read_rows = rows.num_rows
        numbers = table._numbered(counts, 0)
        words = keys.words
        if words is not None and _ByValue.fits(words):
            table._by_value = _ByValue.of(words, numbers)
        else:
            table._has_short_texts = keys.are_short_texts
            table._put_in(keys)
        return table

    # -- in another process ------------------------------------------------------------------------

    def parts(self) -> KeyRowsParts:
        """Return the parts of a complete table."""
        facts: dict[str, Any] = {
            "has_runs": self._has_runs,
            "has_short_texts": self._has_short_texts,
            "hasher": self._hasher.seeds,
            "read_rows": self._read_rows,
        }
        arrays: list[npt.NDArray[Any]] = [self._starts, self._counts]
        if self._by_value is not None:
            facts["least"] = int(self._by_value.least)
            arrays.append(self._by_value.numbers)
        elif self._index is not None:
            facts |= {
                "seed": self._index.seed,
                "count": self._index.count,
                "has_forgotten": self._index.has_forgotten,
            }
            arrays += self._index.levels
        return KeyRowsParts(facts, arrays, self.values.rows)

    @classmethod
    def of_parts(cls, parts: KeyRowsParts) -> KeyRows:
        """Return the complete table of these parts."""
        facts = parts.facts
        table = cls(parts.rows.schema, has_runs=facts["has_runs"])
        table.is_complete = True
        table.values = RowValues(parts.rows, is_long_lived=True)
        table._has_short_texts = facts["has_short_texts"]
        table._hasher = KeyHasher(tuple(facts["hasher"]))
        table._read_rows = facts["read_rows"]
        table._starts, table._counts, *index_arrays = parts.arrays
        if "least" in facts:
            table._by_value = _ByValue(facts["least"], *index_arrays)
        elif "seed" in facts:
            table._index = KeyIndex(
                index_arrays[0].shape[1] - 1,
                seed=facts["seed"],
                levels=index_arrays,
                count=facts["count"],
                has_forgotten=facts["has_forgotten"],
            )
        return table

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
    """Return the distinct keys, the count of each, and an order that puts equal keys together.

    The keys come in that order.
    """
    first, second = keys.hashed
    order = np.lexsort((second, first))
    a, b = first[order], second[order]
    heads = np.flatnonzero(np.r_[True, (a[1:] != a[:-1]) | (b[1:] != b[:-1])])
    counts = np.diff(np.append(heads, len(order)))
    return keys.at(order[heads]), counts, order
