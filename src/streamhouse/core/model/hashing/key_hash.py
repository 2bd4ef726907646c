"""Two independent 64-bit hashes of encoded keys, for many keys at once and for one.

Together the hashes stand for the key. Two keys of a bucket do not share all 128 bits by chance: for
10 billion keys the odds are below 1 in 10**18. The seed is new in every process, so that nobody can
construct such keys.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from streamhouse.core.model.hashing.byte_runs import binary_parts, gather_at

__all__ = ["PROCESS_HASHER", "HashedKeys", "Hashes", "KeyHasher"]

_WORD: Final = np.dtype("<u8")
_MASK: Final = (1 << 64) - 1
# The finalizers of SplitMix64 and MurmurHash3: shift, factor, shift, factor, shift.
_MIXES: Final = (
    (30, 0xBF58476D1CE4E5B9, 27, 0x94D049BB133111EB, 31),
    (33, 0xFF51AFD7ED558CCD, 33, 0xC4CEB9FE1A85EC53, 33),
)
_MIX_COLUMNS: Final = tuple(
    np.array(pair, np.uint64)[:, None] for pair in zip(*_MIXES, strict=True)
)
# By count, a mask of the lowest bytes of a word.
_LOW_BYTES: Final = np.array([(1 << (8 * count)) - 1 for count in range(9)], dtype=np.uint64)
_NO_WORDS: Final = np.zeros(16, dtype=np.uint8)
# The first byte of every key is the same: the byte of a part that is not null.
_SKIPPED_BYTES: Final = 1
# From this number of keys on, arrays are faster than single numbers.
_MANY_KEYS: Final = 16


Hashes = npt.NDArray[np.uint64]


class HashedKeys(NamedTuple):
    """Encoded keys with both hashes of each key, computed once."""

    keys: pa.Array
    first: Hashes
    second: Hashes

    def between(self, start: int, end: int) -> HashedKeys:
        """Return the keys at the positions from `start` to before `end`."""
        keys = self.keys.slice(start, end - start)
        return HashedKeys(keys, self.first[start:end], self.second[start:end])


def _seeds() -> tuple[int, int]:
    return secrets.randbits(64), secrets.randbits(64)


@dataclass(frozen=True, slots=True)
class KeyHasher:
    """Hashes keys; the same seeds give the same hashes."""

    seeds: tuple[int, int] = field(default_factory=_seeds)

    def hashed(self, keys: pa.Array) -> HashedKeys:
        """Return `keys`, a binary array without nulls, with their hashes."""
        return HashedKeys(keys, *self.many(keys))

    def many(self, keys: pa.Array, *, skipped: int = _SKIPPED_BYTES) -> tuple[Hashes, Hashes]:
        """Return both hashes of every key of a binary array without nulls.

        The first `skipped` bytes of each key are left out; 0 for texts which are not encoded keys.
        """
        data, offsets = binary_parts(keys)
        starts = offsets[:-1] + np.int64(skipped)
        lengths = offsets[1:] - starts
        hashes = np.empty((2, len(keys)), dtype=np.uint64)
        hashes[0], hashes[1] = self.seeds
        if len(keys) == 0:
            return hashes[0], hashes[1]
        shortest, longest = int(lengths.min()), int(lengths.max())
        if shortest < longest or longest % 8 or longest == 0:
            # The last word of the last key must be readable in full.
            data = np.concatenate((data[offsets[0] : offsets[-1]], _NO_WORDS))
            starts -= offsets[0]
        for position in range(0, max(longest, 1), 8):
            if position + 8 <= shortest:
                hashes ^= gather_at(data, starts + position, _WORD)
                _mix(hashes)
                continue
            chosen = np.flatnonzero(lengths > position) if position else np.arange(len(keys))
            words = gather_at(data, starts[chosen] + position, _WORD)
            words &= _LOW_BYTES[np.minimum(lengths[chosen] - position, 8)]
            part = hashes.take(chosen, axis=1) ^ words
            _mix(part)
            hashes[0][chosen], hashes[1][chosen] = part
        hashes ^= lengths.view(np.uint64)
        _mix(hashes)
        return hashes[0], hashes[1]

    def few(self, keys: Sequence[bytes]) -> list[tuple[int, int]]:
        """Return both hashes of each of few keys as plain numbers."""
        if len(keys) < _MANY_KEYS:
            return [self.one(key) for key in keys]
        first, second = self.many(pa.array(keys, pa.binary()))
        return list(zip(first.tolist(), second.tolist(), strict=True))

    def one(self, key: bytes) -> tuple[int, int]:
        """Return both hashes of one key, the same as from `many`."""
        (a, f, b, g, c), (k, m, n, o, p) = _MIXES
        first, second = self.seeds
        size = len(key) - _SKIPPED_BYTES
        # The length comes last: otherwise words could cancel the length for every seed.
        if size <= 8:
            words: Sequence[int] = (int.from_bytes(key[_SKIPPED_BYTES:], "little"), size)
        else:
            starts = range(_SKIPPED_BYTES, len(key), 8)
            words = [int.from_bytes(key[i : i + 8], "little") for i in starts] + [size]
        for word in words:
            first ^= word
            first = (first ^ first >> a) * f & _MASK
            first = (first ^ first >> b) * g & _MASK
            first ^= first >> c
            second ^= word
            second = (second ^ second >> k) * m & _MASK
            second = (second ^ second >> n) * o & _MASK
            second ^= second >> p
        return first, second


PROCESS_HASHER: Final = KeyHasher()
"""The hasher of all buckets of this process, so that keys of many buckets are hashed at once."""


def _mix(hashes: Hashes) -> None:
    """Mix the first hashes in row 0 and the second hashes in row 1, each with its own constants."""
    a, f, b, g, c = _MIX_COLUMNS
    hashes ^= hashes >> a
    hashes *= f
    hashes ^= hashes >> b
    hashes *= g
    hashes ^= hashes >> c
