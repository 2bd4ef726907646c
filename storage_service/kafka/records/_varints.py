"""Zigzag varints of one or many records (the encoding of Protocol Buffers, used by KIP-98).

A number n is encoded as z = 2n, or -2n - 1 if n < 0: seven bits of z in each byte, the lowest bits
first. The highest bit of a byte announces a further byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamhouse.storage_service.kafka.protocol_errors import InvalidRecordsError

__all__ = [
    "VARINT_BYTES_MAX",
    "VARLONG_BYTES_MAX",
    "Varints",
    "read_varint",
    "read_varints",
    "varint_rows",
]

VARINT_BYTES_MAX: Final = 5
"""The limit for a number of 32 bits."""
VARLONG_BYTES_MAX: Final = 10
"""The limit for a number of 64 bits."""

Bytes = NDArray[np.uint8]
Numbers = NDArray[np.int64]

_UNSIGNED_MAX: Final = (1 << 64) - 1


_OF_ONE_BYTE: Final[Numbers] = np.array([(z >> 1) ^ -(z & 1) for z in range(128)])


def read_varints(data: Bytes, at: Numbers, *, bytes_max: int) -> tuple[Numbers, Numbers]:
    """Return the numbers at the positions `at` of `data`, and the positions behind the numbers.

    A position outside `data` reads the nearest byte: the caller compares the positions behind all
    numbers of a record with the record's end. Raises InvalidRecordsError if a number is longer than
    `bytes_max`.
    """
    byte = data.take(at, mode="clip")
    at = at + 1
    if byte.tobytes().isascii():
        return _OF_ONE_BYTE.take(byte), at
    raw = byte.astype(np.int64)
    shift = 0
    # The fastest check for a byte above 0x7F, for few and for many numbers.
    while not byte.tobytes().isascii():
        shift += 7
        if shift == 7 * bytes_max:
            raise _too_long(bytes_max)
        # Numbers that have ended continue with a byte of 0, without moving on.
        continues = byte >> 7
        byte = data.take(at, mode="clip") * continues
        at += continues
        # `continues` subtracts the continuation bit of the previous byte.
        raw += (byte.astype(np.int64) - continues) << shift
    if shift < 7 * (VARINT_BYTES_MAX + 1):
        return (raw >> 1) ^ -(raw & 1), at
    unsigned = raw.view(np.uint64) >> np.uint64(1)
    return unsigned.view(np.int64) ^ -(raw & 1), at


def read_varint(data: bytes, at: int, *, bytes_max: int = VARINT_BYTES_MAX) -> tuple[int, int]:
    """Return the number at `at`, and the position behind.

    Raises IndexError at the end of `data`, and InvalidRecordsError if the number is too long.
    """
    byte = data[at]
    at += 1
    raw, shift = byte & 0x7F, 0
    while byte > 0x7F:
        shift += 7
        if shift == 7 * bytes_max:
            raise _too_long(bytes_max)
        byte = data[at]
        at += 1
        raw |= (byte & 0x7F) << shift
    # The tenth byte has bits beyond the 64th.
    raw &= _UNSIGNED_MAX
    return (raw >> 1) ^ -(raw & 1), at


def _too_long(bytes_max: int) -> InvalidRecordsError:
    return InvalidRecordsError(f"a number in a record has more than {bytes_max} bytes")


class Varints(NamedTuple):
    """A column of encoded numbers."""

    zigzag: NDArray[np.uint64]
    """The z of each number."""
    size: Numbers
    """The bytes of each number."""
    size_max: int

    @classmethod
    def of(cls, numbers: Numbers) -> Varints:
        """Return the varints of a column."""
        zigzag = ((numbers << 1) ^ (numbers >> 63)).view(np.uint64)
        size = np.ones(len(numbers), dtype=np.int64)
        bits = int(zigzag.max(initial=0)).bit_length()
        for shift in range(7, bits, 7):
            size += zigzag >= np.uint64(1 << shift)
        return cls(zigzag, size, max(1, -(-bits // 7)))


def varint_rows(columns: Sequence[Varints]) -> tuple[Bytes, Numbers]:
    """Return the encoded rows of equally long columns, and the bytes of each row."""
    row_count = len(columns[0].size)
    row_bytes = np.zeros(row_count, dtype=np.int64)
    width = sum(column.size_max for column in columns)
    table = np.empty((row_count, width), dtype=np.uint8)
    is_used = np.ones((row_count, width), dtype=np.bool_)
    at = 0
    for column in columns:
        row_bytes += column.size
        for index in range(column.size_max):
            is_last = index + 1 == column.size_max
            byte = (column.zigzag >> np.uint64(7 * index) if index else column.zigzag).astype(
                np.uint8
            )
            if not is_last:
                byte &= 0x7F
                byte |= (column.size > index + 1).view(np.uint8) << 7
            table[:, at] = byte
            if index:
                is_used[:, at] = column.size > index
            at += 1
    if row_bytes.sum() == table.size:
        return table.ravel(), row_bytes
    return table[is_used], row_bytes
