"""Checks of RocksDB's own lists before RocksDB opens them.

RocksDB verifies each record of its manifest, but some bytes behind the last record cause an endless
search for the next, and the whole service hangs. Without a `CURRENT` file RocksDB creates an empty
database and deletes the existing rows.
"""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Final

from crc32c import crc32c

__all__ = ["has_lists", "problem_of"]

_CURRENT: Final = "CURRENT"
_MANIFEST_NAME: Final = re.compile(rb"(MANIFEST-[0-9]{1,20})\n")
_BLOCK_BYTES: Final = 32 << 10
# masked checksum of type and payload, payload bytes, type            (little endian)
_HEADER: Final = struct.Struct("<IHB")
_FIRST_TYPE: Final = 1
_LAST_TYPE: Final = 4
_MASK_DELTA: Final = 0xA282EAD8


def has_lists(directory: Path) -> bool:
    """Whether RocksDB has ever been opened at `directory`; the lists are there ever after."""
    return (directory / _CURRENT).exists()


def problem_of(directory: Path) -> str:
    """Return the problem of the RocksDB lists at `directory`; empty if they are whole."""
    current = directory / _CURRENT
    if not current.exists():
        is_lost = any(directory.glob("*.sst"))
        return "there are files of rows, but no file CURRENT" if is_lost else ""
    for path in directory.glob("*.log"):
        if path.stat().st_size:
            return f"{path.name} has a log of changes, which is never written"
    named = _MANIFEST_NAME.fullmatch(current.read_bytes())
    if named is None:
        return "CURRENT names no manifest"
    manifest = directory / named[1].decode("ascii")
    if not manifest.is_file():
        return f"CURRENT names {manifest.name}, which is not there"
    position = _damaged_at(manifest.read_bytes())
    return "" if position is None else f"{manifest.name} is damaged at byte {position}"


def _damaged_at(data: bytes) -> int | None:
    """Return the position of the first invalid record not caused by a crash."""
    position = 0
    while position + _HEADER.size <= len(data):
        block_rest = _BLOCK_BYTES - position % _BLOCK_BYTES
        if block_rest < _HEADER.size:
            position += block_rest
            continue
        masked, size, kind = _HEADER.unpack_from(data, position)
        start = position + _HEADER.size
        if kind == 0:
            # Only zeros follow if a file was allocated longer than written.
            return position if any(data[position:]) else None
        if not _FIRST_TYPE <= kind <= _LAST_TYPE or _HEADER.size + size > block_rest:
            return position
        if start + size > len(data):
            return None
        if _masked(crc32c(data[start - 1 : start + size])) != masked:
            return position
        position = start + size
    return None


def _masked(checksum: int) -> int:
    rotated = (checksum >> 15) | (checksum << 17)
    return (rotated + _MASK_DELTA) & 0xFFFFFFFF
