"""32-bit Murmur3 hashes of many values at once, of the bytes hashed by Iceberg's `bucket[N]`.

Iceberg's own library takes three times as long for numbers, and adds 40 MB to a client's install.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import mmh3
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from streamhouse.core.model.hashing.byte_runs import binary_parts, gather_at

__all__ = ["hashes_of_bytes", "hashes_of_decimals", "hashes_of_longs"]

Hashes = npt.NDArray[np.uint32]

_WORD: Final = np.dtype("<u4")
_C1: Final = np.uint32(0xCC9E2D51)
_C2: Final = np.uint32(0x1B873593)
_ADDED: Final = np.uint32(0xE6546B64)
_FIVE: Final = np.uint32(5)
# By count, a mask of the lowest bytes of a word.
_LOW_BYTES: Final = np.array([(1 << (8 * count)) - 1 for count in range(4)], dtype=np.uint32)
# Longer values are hashed one by one: their bytes cost more than a call.
_LONG_BYTES: Final = 128
# Fewer rows of text or bytes are hashed one by one: the setup costs more.
_FEW_RUNS: Final = 512
# Rows at a time, so that the rows of a step are still in the processor's cache for the next step.
_CHUNK_ROWS: Final = 16_384
_NO_WORD: Final = np.zeros(4, dtype=np.uint8)


def hashes_of_bytes(column: pa.Array) -> Hashes:
    """Return the hashes of the values of a binary array."""
    data, offsets = binary_parts(column)
    starts = offsets[:-1].astype(np.int64) - offsets[0]
    return _of_runs(data[offsets[0] : offsets[-1]], starts, np.diff(offsets).astype(np.int64))


def hashes_of_longs(values: npt.NDArray[Any]) -> Hashes:
    """Return the hashes of numbers, each as eight little-endian bytes."""
    words = np.ascontiguousarray(values, dtype="<i8").view(_WORD).reshape(-1, 2)
    hashes = np.zeros(len(words), dtype=np.uint32)
    for start in range(0, len(words), _CHUNK_ROWS):
        some = hashes[start : start + _CHUNK_ROWS]
        for place in (0, 1):
            _take_word(some, words[start : start + _CHUNK_ROWS, place].copy())
        some ^= np.uint32(8)
        _finish(some)
    return hashes


def hashes_of_decimals(stored: npt.NDArray[Any]) -> Hashes:
    """Return the hashes of the shortest big-endian two's complements of stored decimals."""
    rows = np.ascontiguousarray(stored.view(np.uint8).reshape(-1, 16)[:, ::-1])
    sign = np.where(rows[:, :1] & 0x80, np.uint8(0xFF), np.uint8(0))
    # A byte is left out if it only repeats the sign of the next byte.
    is_needed = (rows[:, :-1] != sign) | ((rows[:, 1:] ^ sign) & 0x80 != 0)
    left_out = np.where(is_needed.any(axis=1), is_needed.argmax(axis=1), 15)
    starts = np.arange(len(rows), dtype=np.int64) * 16 + left_out
    return _of_runs(rows.reshape(-1), starts, 16 - left_out)


def _of_runs(
    data: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
) -> Hashes:
    """Return the hashes of the runs of `data` at `starts`."""
    hashes = np.zeros(len(starts), dtype=np.uint32)
    one_by_one: Iterable[int] = range(len(starts))
    if len(starts) > _FEW_RUNS:
        # The last word of the last run must be readable in full.
        readable = np.concatenate((data, _NO_WORD))
        for first in range(0, len(starts), _CHUNK_ROWS):
            some = slice(first, first + _CHUNK_ROWS)
            _hash_runs(hashes[some], readable, starts[some], lengths[some])
        one_by_one = np.flatnonzero(lengths > _LONG_BYTES).tolist()
    view = np.ascontiguousarray(data).data
    for row in one_by_one:
        start = int(starts[row])
        hashes[row] = mmh3.mmh3_32_uintdigest(view[start : start + int(lengths[row])])
    return hashes


def _hash_runs(
    hashes: Hashes,
    data: npt.NDArray[np.uint8],
    starts: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
) -> None:
    """Hash the runs of at most `_LONG_BYTES` bytes in place."""
    short = lengths <= _LONG_BYTES
    longest = int(lengths.max(where=short, initial=0))
    shortest = int(lengths.min())
    for position in range(0, longest, 4):
        if position + 4 <= shortest:
            # Hashes of runs above the limit are computed, too, and overwritten later.
            _take_word(hashes, gather_at(data, starts + position, _WORD))
            continue
        remaining = lengths - position
        whole = np.flatnonzero((remaining >= 4) & short)
        if len(whole):
            part = hashes[whole]
            _take_word(part, gather_at(data, starts[whole] + position, _WORD))
            hashes[whole] = part
        last = np.flatnonzero((remaining > 0) & (remaining < 4))
        if len(last):
            words = gather_at(data, starts[last] + position, _WORD)
            words &= _LOW_BYTES[remaining[last]]
            _mix_word(words)
            hashes[last] ^= words
    hashes ^= lengths.astype(np.uint32)
    _finish(hashes)


def _take_word(hashes: Hashes, words: Hashes) -> None:
    _mix_word(words)
    hashes ^= words
    _rotate(hashes, 13)
    hashes *= _FIVE
    hashes += _ADDED


def _mix_word(words: Hashes) -> None:
    words *= _C1
    _rotate(words, 15)
    words *= _C2


def _rotate(numbers: Hashes, bits: int) -> None:
    high = numbers >> np.uint32(32 - bits)
    numbers <<= np.uint32(bits)
    numbers |= high


def _finish(hashes: Hashes) -> None:
    hashes ^= hashes >> np.uint32(16)
    hashes *= np.uint32(0x85EBCA6B)
    hashes ^= hashes >> np.uint32(13)
    hashes *= np.uint32(0xC2B2AE35)
    hashes ^= hashes >> np.uint32(16)
