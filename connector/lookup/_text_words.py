"""Short texts as two words each; equal words mean equal texts.

The words contain the text's own bytes and its length. No hash is computed: hashing takes as long as
all other steps of finding a text.
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
    """Return whether all values of an array without nulls are texts of 15 bytes at most."""
    return _is_text(array.type) and longest_of(array) <= SHORT_BYTES


def _is_text(data_type: pa.DataType) -> bool:
    return bool(pa.types.is_string(data_type) or pa.types.is_binary(data_type))


def text_words(array: pa.Array) -> tuple[Words, Words]:
    """Return two words of each text of an array without nulls.

    Texts of more than 15 bytes never have the words of a shorter text.
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
        # A shorter text has an empty tail.
        tail &= _LOW_BYTES.take(lengths - _WORD_BYTES, mode="clip")
        tail <<= _LENGTH_BITS
    else:
        tail = np.zeros(len(head), dtype=np.uint64)
    tail |= np.minimum(lengths, _LENGTH_MAX).astype(np.uint64)
    return head, tail
