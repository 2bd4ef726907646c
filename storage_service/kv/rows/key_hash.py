"""Two independent 64-bit hashes of encoded keys, for many keys at once and for one.

Together they stand for the key: two keys of a bucket with the same 128 bits do not happen by chance
(for 10 billion keys the odds are below 1 in 10**18), and the seed, which is new in every process,
keeps anybody from making them on purpose.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from streamhouse.storage_service.kv.rows.byte_runs import binary_parts, gather_at

__all__ = ["PROCESS_HASHER", "KeyHasher"]

_WORD: Final = np.dtype("<u8")
_MASK: Final = (1 << 64) - 1
# The finalizers of SplitMix64 and MurmurHash3: shift, factor, shift, factor, shift.
_MIXES: Final = (
    (30, 0xBF58476D1CE4E5B9, 27, 0x94D049BB133111EB, 31),
    (33, 0xFF51AFD7ED558CCD, 33, 0xC4CEB9FE1A85EC53, 33),
)
# Every key starts with the byte of a part that is not null.
_SKIPPED_BYTES: Final = 1
# From here on arrays are quicker than numbers one by one.
_MANY_KEYS: Final = 16


def _seeds() -> tuple[int, int]:
    return secrets.randbits(64), secrets.randbits(64)


@dataclass(frozen=True, slots=True)
class KeyHasher:
    """Hashes keys; the same seeds give the same hashes."""

    seeds: tuple[int, int] = field(default_factory=_seeds)

    def many(self, keys: pa.Array) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        """Return both hashes of every key of a binary array without nulls."""
        data, offsets = binary_parts(keys)
        starts = offsets[:-1].astype(np.int64) + _SKIPPED_BYTES
        lengths = np.diff(offsets).astype(np.int64) - _SKIPPED_BYTES
        hashes = [np.full(len(keys), seed, dtype=np.uint64) for seed in self.seeds]
        if len(keys) == 0:
            return hashes[0], hashes[1]
        # The last word of the last key must be readable in full.
        padded = np.empty(int(offsets[-1]) + 16, dtype=np.uint8)
        padded[: offsets[-1]] = data[: offsets[-1]]
        everything: Any = slice(None)
        shortest, longest = int(lengths.min()), int(lengths.max())
        for position in range(0, max(longest, 1), 8):
            chosen = everything if position < shortest else np.flatnonzero(lengths > position)
            words = gather_at(padded, starts[chosen] + position, _WORD)
            if position + 8 > shortest:
                rest = np.minimum(lengths[chosen] - position, 8).astype(np.uint64)
                words &= _low_bytes(rest)
            for hash_, mix in zip(hashes, _MIXES, strict=True):
                hash_[chosen] = _mixed(hash_[chosen] ^ words, mix)
        sizes = lengths.astype(np.uint64)
        first, second = (_mixed(h ^ sizes, mix) for h, mix in zip(hashes, _MIXES, strict=True))
        return first, second

    def few(self, keys: Sequence[bytes]) -> list[tuple[int, int]]:
        """Return both hashes of each of few keys as plain numbers."""
        if len(keys) < _MANY_KEYS:
            return [self.one(key) for key in keys]
        first, second = self.many(pa.array(keys, pa.binary()))
        return list(zip(first.tolist(), second.tolist(), strict=True))

    def one(self, key: bytes) -> tuple[int, int]:
        """Return both hashes of one key: what `many` gives for it."""
        (a, f, b, g, c), (k, m, n, o, p) = _MIXES
        first, second = self.seeds
        size = len(key) - _SKIPPED_BYTES
        # The length comes last: what words could cancel out would not depend on the seed.
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
"""What all buckets of this process hash by, so that keys of many are hashed at once."""


def _low_bytes(count: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return masks of the lowest `count` bytes, 0 to 8."""
    masks = np.array([(1 << (8 * n)) - 1 for n in range(9)], dtype=np.uint64)
    return masks[count.astype(np.int64)]


def _mixed(
    x: npt.NDArray[np.uint64], mix: tuple[int, int, int, int, int]
) -> npt.NDArray[np.uint64]:
    a, f, b, g, c = (np.uint64(number) for number in mix)
    x ^= x >> a
    x *= f
    x ^= x >> b
    x *= g
    x ^= x >> c
    return x
