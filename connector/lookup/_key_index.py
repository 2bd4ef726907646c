"""A hash table of keys that only grows, probed for many keys at once.

A place of the table holds the words of a key and its number; number 0 means that the place is free.
Keys have one word or two, and are numbered from 1 on in the order of their addition. Replacing a
key changes the number in the key's place. A forgotten key keeps its place until the table grows: a
free place would end the search for keys of deeper levels.

If another key occupies a key's place in the first level, the key goes to its place in the second
level, which is a quarter as large, and further down if needed. So a free place ends a search. Three
of four keys are found at the first look, and nearly all at the second. Two places a key keep this
ratio. Random factors keep an attacker from choosing colliding keys.

The cost of a large table is its random reads. Therefore words and number lie together and are read
as one item. Mostly for this reason the table takes a third of the time of
`model/hashing/hash_index.py`, which takes less memory for two words and a number.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from random import Random
from typing import Any, Final

import numpy as np
import numpy.typing as npt

__all__ = ["KeyIndex", "Words"]

Words = npt.NDArray[np.uint64]
_Places = npt.NDArray[np.int64]

_PLACES_MIN: Final = 1_024
_PLACES_PER_KEY: Final = 2
_FULL: Final = 9 / 8
"""A table grows when it holds this many times the keys of its size: a few more cost little."""
_SHRINKING: Final = 2
"""Each level is smaller than the level above by this many bits."""
_FORGOTTEN: Final = 1 << 62
_HALF: Final = np.uint64(32)
_FOUND_AT_ONCE: Final = 1 << 16
_PLACED_AT_ONCE: Final = 1 << 14
"""The working set of a pass over this many keys stays in the processor's cache."""


class KeyIndex:
    """Maps keys, each of `word_count` words, to numbers.

    An index made from the seed, levels and count of another index, also of another process, equals
    that index.
    """

    def __init__(
        self,
        word_count: int,
        *,
        seed: int | None = None,
        levels: Sequence[Words] = (),
        count: int = 0,
        has_forgotten: bool = False,
    ) -> None:
        self.seed: Final = secrets.randbits(128) if seed is None else seed
        self._random: Final = Random(self.seed)
        self._factors: Final[list[tuple[np.uint64, ...]]] = []
        self._width: Final = word_count + 1
        self._levels: list[Words] = list(levels) or [self._empty(_PLACES_MIN)]
        self.count = count
        self.has_forgotten = has_forgotten

    @property
    def levels(self) -> tuple[Words, ...]:
        """The whole memory of the index: a row per place, of the words of a key and the number."""
        return tuple(self._levels)

    @property
    def memory_bytes(self) -> int:
        """The bytes of memory of the index."""
        return sum(level.nbytes for level in self._levels)

    def _empty(self, places: int) -> Words:
        return np.zeros((places, self._width), dtype=np.uint64)

    def add(self, *words: Words, numbers: Words | None = None) -> None:
        """Add distinct keys that are absent, with `numbers` or else with the next numbers."""
        count = len(words[0])
        if (self.count + count) * _PLACES_PER_KEY > len(self._levels[0]) * _FULL:
            self._grow(self.count + count)
        for start in range(0, count, _PLACED_AT_ONCE):
            part = slice(start, start + _PLACED_AT_ONCE)
            first = self.count + 1
            records = np.empty((len(words[0][part]), self._width), dtype=np.uint64)
            for column, each in enumerate(words):
                records[:, column] = each[part]
            if numbers is None:
                records[:, -1] = np.arange(first, first + len(records))
            else:
                records[:, -1] = numbers[part]
            self._place(records)
            self.count += len(records)

    def _grow(self, count: int) -> None:
        records_of_levels = [level[level[:, -1] != 0] for level in self._levels]
        if self.has_forgotten:
            records_of_levels = [
                records[records[:, -1] != _FORGOTTEN] for records in records_of_levels
            ]
            self.count = sum(map(len, records_of_levels))
            self.has_forgotten = False
        # At least doubling keeps the moves few when keys arrive little by little.
        places = max(count * _PLACES_PER_KEY, len(self._levels[0]) * 2)
        self._levels = [self._empty(places)]
        for records in records_of_levels:
            for start in range(0, len(records), _PLACED_AT_ONCE):
                self._place(records[start : start + _PLACED_AT_ONCE])

    def _place(self, records: Words) -> None:
        number = 0
        while len(records):
            if number == len(self._levels):
                places = len(self._levels[0]) >> (_SHRINKING * number)
                self._levels.append(self._empty(max(places, _PLACES_MIN)))
            level = self._levels[number]
            places_of = self._places_of([*records.T[:-1]], number)
            is_free = level[:, -1][places_of] == 0
            # If several keys have the same place, the last key gets the place.
            if is_free.all():
                _whole(level)[places_of] = _whole(records)
            else:
                _whole(level)[places_of[is_free]] = _whole(records)[is_free]
            records = records[level[:, -1][places_of] != records[:, -1]]
            number += 1

    def find(self, *words: Words) -> npt.NDArray[np.int64]:
        """Return the number of each key, 0 if the key is absent."""
        numbers = np.empty(len(words[0]), dtype=np.int64)
        for start in range(0, len(numbers), _FOUND_AT_ONCE):
            part = slice(start, start + _FOUND_AT_ONCE)
            self._find([each[part] for each in words], numbers[part])
        if self.has_forgotten:
            numbers[numbers == _FORGOTTEN] = 0
        return numbers

    def renumber(self, *words: Words, numbers: Words) -> npt.NDArray[np.bool_]:
        """Give distinct keys these numbers, and return which of the keys are absent.

        A forgotten key is present.
        """
        is_absent = np.zeros(len(numbers), dtype=np.bool_)
        remaining = np.arange(len(numbers))
        for number, level in enumerate(self._levels):
            some = [each[remaining] for each in words]
            old_numbers, is_different = self._compared(some, number)
            is_absent[remaining] = old_numbers == 0
            is_present = (old_numbers != 0) & ~is_different
            places = self._places_of(some, number)[is_present]
            level[places, -1] = numbers[remaining[is_present]]
            remaining = remaining[is_different]
        is_absent[remaining] = True
        return is_absent

    def forget(self, *words: Words) -> None:
        """Make keys, some of which may be absent, count as absent."""
        numbers = np.full(len(words[0]), _FORGOTTEN, dtype=np.uint64)
        is_absent = self.renumber(*words, numbers=numbers)
        self.has_forgotten = self.has_forgotten or not is_absent.all()

    def _find(self, words: list[Words], numbers: npt.NDArray[np.int64]) -> None:
        """Write the number of each key."""
        numbers[:], is_different = self._compared(words, 0)
        remaining = np.flatnonzero(is_different)
        for number in range(1, len(self._levels)):
            if not len(remaining):
                return
            numbers[remaining], is_different = self._compared(
                [each[remaining] for each in words], number
            )
            remaining = remaining[is_different]
        numbers[remaining] = 0

    def _compared(self, words: list[Words], number: int) -> tuple[Words, npt.NDArray[np.bool_]]:
        """Return a level's numbers in the keys' places, and flags for places of different keys."""
        places = self._places_of(words, number)
        records = _whole(self._levels[number]).take(places).view(np.uint64)
        records = records.reshape(-1, self._width)
        is_different: npt.NDArray[np.bool_] = records[:, 0] != words[0]
        for column in range(1, len(words)):
            is_different |= records[:, column] != words[column]
        numbers = records[:, -1]
        is_different &= numbers != 0
        return numbers, is_different

    def _places_of(self, words: Sequence[Words], number: int) -> _Places:
        while number >= len(self._factors):
            odd = [np.uint64(self._random.getrandbits(64) | 1) for _ in range(self._width)]
            self._factors.append(tuple(odd))
        *factors, last = self._factors[number]
        mixed = words[0] * factors[0]
        for each, factor in zip(words[1:], factors[1:], strict=True):
            mixed += each * factor
        mixed ^= mixed >> _HALF
        mixed *= last
        mixed >>= _HALF
        mixed *= np.uint64(len(self._levels[number]))
        mixed >>= _HALF
        return mixed.view(np.int64)


def _whole(records: Words) -> npt.NDArray[Any]:
    """Return the records as one item each, in the same memory."""
    items: npt.NDArray[Any] = records.view(np.dtype(f"V{8 * records.shape[1]}"))[:, 0]
    return items
