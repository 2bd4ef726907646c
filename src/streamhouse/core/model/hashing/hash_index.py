"""An open-addressing hash table from 128-bit hashes to numbers, with lookups of many keys at once.

Slots come in groups of eight. A group has one tag byte per slot, read as one number, so a few
operations try eight slots; an entry (both hashes and the number) is read only after a tag match.
Groups fill from the front and are never emptied, so a group with an unused last slot ends a search.
Removed slots stay dead until the table is rebuilt.

One thread changes the table. `resized` makes a separate copy, so readers are blocked only during
the swap.
"""

from __future__ import annotations

import sys
from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["HashIndex"]

_GROUP: Final = 8
_EMPTY: Final = 0
_DEAD: Final = 1
# A tag has its highest bit set, and seven bits of the first hash.
_TAG_BIT: Final = np.uint64(0x80)
_TAG_HASH: Final = np.uint64(0x7F)
_ONES: Final = np.uint64(0x0101010101010101)
_HIGH_BITS: Final = np.uint64(0x8080808080808080)
_ONE: Final = np.uint64(1)
_LAST: Final = np.uint64(56)
_HALF: Final = np.uint64(32)
_LOAD_MAX: Final = 0.75
_GROWTH: Final = 1.6
_GROUPS_MIN: Final = 64
# Fewer keys are searched one by one.
_FEW: Final = 16
_INSERTED_AT_ONCE: Final = 1 << 15
# An entry as one item: numpy moves it at once, where three columns are moved one by one.
_ENTRY: Final = np.dtype("V24")

Hashes = npt.NDArray[np.uint64]
Slots = npt.NDArray[np.int64]

# Tags are addressed as bytes and as numbers.
assert sys.byteorder == "little"


class HashIndex:
    """`numbers[slot]` is the number for the hashes at `slot`; the caller may change it."""

    def __init__(self, *, groups: int = _GROUPS_MIN) -> None:
        self._groups: Final = groups
        self._lines: Final = np.zeros(groups, dtype=np.uint64)
        self._tags: Final = self._lines.view(np.uint8)
        # The number of slots of a group ever used.
        self._used: Final = np.zeros(groups, dtype=np.uint8)
        # By slot: first hash, second hash, number.
        self._entries: Final = np.zeros((groups * _GROUP, 3), dtype=np.uint64)
        self._rows: Final = _as_rows(self._entries)
        self.numbers: Final = self._entries[:, 2]
        # Reading and writing one number is faster without an array.
        self._tag_bytes: Final = self._tags.data
        self._numbers_of_entries: Final = self._entries.reshape(-1).data
        self._filled = 0
        self._dead = 0
        self.memory_bytes: Final = self._lines.nbytes + self._used.nbytes + self._entries.nbytes
        """The memory of the table in bytes."""

    def __len__(self) -> int:
        return self._filled - self._dead

    def find(self, first: Hashes, second: Hashes) -> Slots:
        """Return the slot of each pair of hashes, or -1."""
        groups = self._group_of(first)
        tags = ((first & _TAG_HASH) | _TAG_BIT) * _ONES
        lines = self._lines[groups]
        candidates = _equal_bytes(lines, tags)
        # The first candidate is nearly always right, so all first candidates are tried at once.
        slots = groups * _GROUP + _lowest_byte(candidates)
        wrong = np.flatnonzero((candidates == 0) | ~self._are_at(slots, first, second))
        slots[wrong] = -1
        candidates &= candidates - _ONE
        unresolved = wrong[(candidates[wrong] != 0) | (lines[wrong] >> _LAST != _EMPTY)]
        slots[unresolved] = self._find_on(
            first[unresolved],
            second[unresolved],
            tags[unresolved],
            groups[unresolved],
            candidates[unresolved],
        )
        return slots

    def _are_at(self, slots: Slots, first: Hashes, second: Hashes) -> npt.NDArray[np.bool_]:
        """Return whether each pair of hashes is at its slot."""
        entries = self._entries.take(slots, axis=0)
        same: npt.NDArray[np.bool_] = (entries[:, 0] == first) & (entries[:, 1] == second)
        return same

    def _find_on(
        self, first: Hashes, second: Hashes, tags: Hashes, groups: Slots, candidates: Hashes
    ) -> Slots:
        """Return the slot of each pair of hashes, or -1, from the next candidates on."""
        slots = np.full(len(first), -1, dtype=np.int64)
        remaining = np.arange(len(first))
        while len(remaining) > _FEW:
            onward = np.flatnonzero(candidates == 0)
            groups[onward] += 1
            groups[groups == self._groups] = 0
            candidates[onward] = _equal_bytes(self._lines[groups[onward]], tags[remaining[onward]])
            tried = np.flatnonzero(candidates)
            guesses = groups[tried] * _GROUP + _lowest_byte(candidates[tried])
            at = remaining[tried]
            right = self._are_at(guesses, first[at], second[at])
            slots[at[right]] = guesses[right]
            candidates[tried] &= candidates[tried] - _ONE
            # Continue with the keys that have another candidate, or another group to search.
            full = self._lines[groups] >> _LAST != _EMPTY
            unresolved = np.flatnonzero((slots[remaining] < 0) & ((candidates != 0) | full))
            remaining, groups, candidates = (
                remaining[unresolved],
                groups[unresolved],
                candidates[unresolved],
            )
        for position in remaining.tolist():
            slots[position] = self.find_one(int(first[position]), int(second[position]))
        return slots

    def find_one(self, first: int, second: int) -> int:
        """Return the slot of one pair of hashes, or -1."""
        group = ((first >> 32) * self._groups) >> 32
        tag = (first & 0x7F) | 0x80
        entries = self._numbers_of_entries
        while True:
            start = group * _GROUP
            line = self._tag_bytes[start : start + _GROUP].tobytes()
            within = line.find(tag)
            while within >= 0:
                at = 3 * (start + within)
                if entries[at] == first and entries[at + 1] == second:
                    return start + within
                within = line.find(tag, within + 1)
            if line[-1] == _EMPTY:
                return -1
            group = (group + 1) % self._groups

    def number_at(self, slot: int) -> int:
        """Return the number at one slot."""
        number: int = self._numbers_of_entries[3 * slot + 2]
        return number

    def replace_number(self, slot: int, number: int) -> int:
        """Store another number at one slot; return the number stored before."""
        at = 3 * slot + 2
        previous: int = self._numbers_of_entries[at]
        self._numbers_of_entries[at] = number
        return previous

    def insert_one(self, first: int, second: int, number: int) -> None:
        """Add one new pair of hashes; there must be `room_for` the pair."""
        assert self.room_for(1)
        group = ((first >> 32) * self._groups) >> 32
        while self._used[group] == _GROUP:
            group = (group + 1) % self._groups
        slot = group * _GROUP + int(self._used[group])
        entries = self._numbers_of_entries
        entries[3 * slot], entries[3 * slot + 1], entries[3 * slot + 2] = first, second, number
        self._tag_bytes[slot] = (first & 0x7F) | 0x80
        self._used[group] += 1
        self._filled += 1

    def insert(self, first: Hashes, second: Hashes, numbers: npt.NDArray[np.uint64]) -> None:
        """Add distinct new pairs of hashes; there must be `room_for` the pairs."""
        assert self.room_for(len(first))
        for start in range(0, len(first), _INSERTED_AT_ONCE):
            part = slice(start, start + _INSERTED_AT_ONCE)
            entries = np.empty((len(first[part]), 3), dtype=np.uint64)
            for column, values in enumerate((first, second, numbers)):
                entries[:, column] = values[part]
            self._insert(first[part], _as_rows(entries))

    def _insert(self, first: Hashes, rows: npt.NDArray[np.void]) -> None:
        assert self.room_for(len(first))
        groups = self._group_of(first)
        tags = ((first & _TAG_HASH) | _TAG_BIT).astype(np.uint8)
        remaining = np.arange(len(first))
        while len(remaining):
            if not (groups[1:] >= groups[:-1]).all():
                order = np.argsort(groups)
                groups, remaining = groups[order], remaining[order]
            bounds = np.flatnonzero(groups[1:] != groups[:-1]) + 1
            heads = np.concatenate([[0], bounds])
            sizes = np.concatenate([bounds, [len(groups)]]) - heads
            used = self._used[groups[heads]].astype(np.int64)
            # The position of each new entry in its group: after the present and earlier entries.
            within = np.arange(len(groups)) - np.repeat(heads - used, sizes)
            self._used[groups[heads]] = np.minimum(used + sizes, _GROUP)
            fits = within < _GROUP
            slots = (groups * _GROUP + within)[fits]
            placed = remaining[fits]
            self._rows[slots] = rows[placed]
            self._tags[slots] = tags[placed]
            groups, remaining = groups[~fits] + 1, remaining[~fits]
            groups[groups == self._groups] = 0
        self._filled += len(first)

    def remove(self, slots: Slots) -> None:
        """Remove the entries at distinct `slots`."""
        self._tags[slots] = _DEAD
        self.numbers[slots] = 0
        self._dead += len(slots)

    def count_numbered(self) -> int:
        """Return the number of entries with a number other than 0."""
        return int(np.count_nonzero(self.numbers))

    def room_for(self, count: int) -> bool:
        """Whether `count` more entries fit without growth."""
        return self._filled + count <= int(self._groups * _GROUP * _LOAD_MAX)

    @property
    def is_sparse(self) -> bool:
        """Whether a copy would be much smaller."""
        return self._groups > max(4 * _groups_for(len(self)), _GROUPS_MIN)

    @property
    def is_loose(self) -> bool:
        """Whether a copy would be smaller by half: worthwhile if memory is short."""
        return self._groups > max(2 * _groups_for(len(self)), _GROUPS_MIN)

    @staticmethod
    def memory_of(count: int) -> int:
        """Return the bytes of a copy with `count` entries."""
        return _groups_for(count) * (_GROUP * 25 + 1)

    def resized(self, count: int) -> HashIndex:
        """Return a copy with room for `count` more entries and growth; its slots differ."""
        copy = HashIndex(groups=_groups_for(len(self) + count))
        live = np.flatnonzero(self._tags >= _TAG_BIT)
        # Slots are nearly in the order of groups: each part lands in one stretch of memory.
        for start in range(0, len(live), _INSERTED_AT_ONCE):
            rows = self._rows[live[start : start + _INSERTED_AT_ONCE]]
            first = np.ascontiguousarray(rows.view(np.uint64).reshape(-1, 3)[:, 0])
            copy._insert(first, rows)
        return copy

    def _group_of(self, first: Hashes) -> Slots:
        # Rising hashes have rising groups: a copy is filled nearly in order.
        return (((first >> _HALF) * np.uint64(self._groups)) >> _HALF).astype(np.int64)


def _groups_for(count: int) -> int:
    return max(int(count / (_LOAD_MAX * _GROUP) * _GROWTH), _GROUPS_MIN)


def _as_rows(entries: npt.NDArray[np.uint64]) -> npt.NDArray[np.void]:
    """Return each entry as one item, in the same memory."""
    rows: npt.NDArray[np.void] = entries.view(_ENTRY)[:, 0]
    return rows


def _equal_bytes(lines: Hashes, tags: Hashes) -> Hashes:
    """Return a number with the high bit of each byte set where both are equal.

    Bytes above the lowest equal byte may be marked by mistake; the entries decide.
    """
    differences = lines ^ tags
    return (differences - _ONES) & ~differences & _HIGH_BITS


def _lowest_byte(marks: Hashes) -> Slots:
    """Return the position of the lowest marked byte; 0 if none is."""
    below: npt.NDArray[np.uint8] = np.bitwise_count(~marks & (marks - _ONE))
    return (below >> 3 & 7).astype(np.int64)
