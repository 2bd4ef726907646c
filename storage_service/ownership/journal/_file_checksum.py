"""The checksum of a part of a file on the local disk, read a few MiB at a time."""

from __future__ import annotations

from typing import BinaryIO, Final, NamedTuple

from crc32c import crc32c

__all__ = ["READ_BYTES", "Checked", "check_next"]

READ_BYTES: Final = 4 << 20
"""The most bytes of a file in memory at once."""


class Checked(NamedTuple):
    """The checksum and the number of the bytes read."""

    crc32c: int
    length: int


def check_next(file: BinaryIO, length: int) -> Checked:
    """Return the checksum of the next `length` bytes of a file, or of fewer at its end."""
    crc, remaining_bytes = 0, length
    while remaining_bytes and (data := file.read(min(remaining_bytes, READ_BYTES))):
        crc, remaining_bytes = crc32c(data, crc), remaining_bytes - len(data)
    return Checked(crc, length - remaining_bytes)
