"""Nearly sorting encoded keys: the order that eight bytes give, for the price of sorting numbers.

RocksDB sorts what it gets; given in order, that costs it half. Exact order is not needed, but two
changes of one key must stay in the order they came in.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from streamhouse.storage_service.kv.rows.byte_runs import binary_parts, gather_at

__all__ = ["nearly_sorted"]

_WORD: Final = np.dtype(">u8")


def nearly_sorted(keys: pa.Array) -> npt.NDArray[np.int64]:
    """Return positions that put `keys` nearly in order; equal keys keep their order."""
    count = len(keys)
    if count < 2:
        return np.arange(count)
    words = _words_after(_common_prefix_bytes(keys), keys)
    # Spread over all 64 bits, the lowest can be given up to carry the position.
    words -= words.min()
    words <<= np.uint64(64 - int(words.max()).bit_length() & 63)
    bits = np.uint64((count - 1).bit_length())
    words = (words >> bits << bits) | np.arange(count, dtype=np.uint64)
    words.sort()
    return (words & ((np.uint64(1) << bits) - np.uint64(1))).astype(np.int64)


def _common_prefix_bytes(keys: pa.Array) -> int:
    """Return how many bytes all keys have in common at the start."""
    extremes = pc.min_max(keys)
    least, greatest = extremes["min"].as_py(), extremes["max"].as_py()
    length = min(len(least), len(greatest))
    for position in range(length):
        if least[position] != greatest[position]:
            return position
    return length


def _words_after(position: int, keys: pa.Array) -> npt.NDArray[np.uint64]:
    """Return the eight bytes from `position` of each key as numbers that compare like them."""
    data, offsets = binary_parts(keys)
    starts = offsets[:-1].astype(np.int64) + position
    padded = np.zeros(int(offsets[-1]) + _WORD.itemsize, dtype=np.uint8)
    padded[: offsets[-1]] = data[: offsets[-1]]
    words = gather_at(padded, starts, _WORD).astype(np.uint64)
    missing = np.maximum(8 - (offsets[1:] - starts), 0)
    if missing.any():
        # The bytes of the next key count as zeros.
        masks = np.array([(1 << 64) - (1 << (8 * n)) for n in range(8)] + [0], dtype=np.uint64)
        words &= masks[missing]
    return words
