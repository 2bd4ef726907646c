"""Short texts as two words each, which two texts have in common only if they are equal.

The words are the text's own bytes and its length, so nothing is hashed: that takes as long as all
else that is done to find a text.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from streamhouse.core.model.hashing.byte_runs import (
    binary_parts,
    gather_at,
    longest_of,
)

__all__ = ["are_short_texts", "text_words"]

SHORT_BYTES: Final = 15
_WORD: Final = np.dtype("<u8")
_WORD_BYTES: Final = 8
_UNREAD: Final = np.zeros(2 * _WORD_BYTES, dtype=np.uint8)
_LENGTH_BITS: Final = np.uint64(8)
_LENGTH_MAX: Final = 255
# By count, a mask of the lowest bytes of a word.
_LOW_BYTES: Final = np.array([(1 << (8 * count)) - 1 for count in range(9)], dtype=np.uint64)

Words = npt.NDArray[np.uint64]


def are_short_texts(array: pa.Array) -> bool:
    """Return whether all values of an array without nulls are texts, or bytes, of 15 at most."""
    return _is_text(array.type) and longest_of(array) <= SHORT_BYTES


def _is_text(data_type: pa.DataType) -> bool:
    return bool(pa.types.is_string(data_type) or pa.types.is_binary(data_type))


def text_words(array: pa.Array) -> tuple[Words, Words]:
    """Return two words of each text of an array without nulls.

    A longer text than 15 bytes has other words than any that is not.
    """
    data, offsets = binary_parts(array)
    first, last = int(offsets[0]), int(offsets[-1])
    # The words of the last text must be readable in full.
    data = np.concatenate((data[first:last], _UNREAD))
    starts = offsets[:-1].astype(np.int64)
    starts -= first
    lengths = np.diff(offsets)
    head: Words = gather_at(data, starts, _WORD)
    head &= _LOW_BYTES.take(lengths, mode="clip")
    if lengths.max(initial=0) > _WORD_BYTES:
        starts += _WORD_BYTES
        tail: Words = gather_at(data, starts, _WORD)
        # Of a text that ends before, nothing is kept.
        tail &= _LOW_BYTES.take(lengths - _WORD_BYTES, mode="clip")
        tail <<= _LENGTH_BITS
    else:
        tail = np.zeros(len(head), dtype=np.uint64)
    tail |= np.minimum(lengths, _LENGTH_MAX).astype(np.uint64)
    return head, tail
