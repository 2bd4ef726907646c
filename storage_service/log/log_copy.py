"""Copying a log's files up to an offset, during appends.

Sealed segments and writer states are immutable: they are linked at no cost. The segment with the
end is copied up to the end, and a new durable mark declares the copy complete. Retention must not
run meanwhile; appends and rolls may.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO, NamedTuple

from streamhouse.core.errors import CorruptDataError
from streamhouse.storage_service.log.durable_mark import MARK_NAME, DurableMark
from streamhouse.storage_service.log.filesystem import LocalFilesystem
from streamhouse.storage_service.log.segments.segment_format import (
    FILE_HEADER_BYTES,
    FRAME,
    FRAME_HEADER_BYTES,
    FRAME_MAGIC,
    LogIdentity,
    encode_durable_mark,
    frame_bytes,
    index_path,
    offsets_of,
    segment_path,
)

__all__ = ["CopiedLog", "copy_log", "link_or_copy"]

_COPY_BYTES = 8 << 20


class CopiedLog(NamedTuple):
    """The offsets of a copy."""

    log_start_offset: int
    log_end_offset: int


def copy_log(source: Path, target: Path, *, identity: LogIdentity, end_offset: int) -> CopiedLog:
    """Copy the log in `source` into `target`, up to `end_offset`, the end of a frame.

    Raises CorruptDataError if the log does not have the offset, OSError if the disk refuses.
    """
    target.mkdir(parents=True, exist_ok=True)
    names = [path.name for path in source.iterdir()]
    bases = [base for base in offsets_of(names, ".log") if base <= end_offset]
    if not bases:
        raise CorruptDataError(f"{source} has no segment with offset {end_offset}")
    for base, next_base in pairwise(bases):
        assert next_base <= end_offset
        for path in (segment_path(source, base), index_path(source, base)):
            with contextlib.suppress(FileNotFoundError):
                link_or_copy(path, target / path.name)
        if not segment_path(target, base).exists():
            raise CorruptDataError(f"{segment_path(source, base)} vanished while it was copied")
    _copy_until(
        segment_path(source, bases[-1]), segment_path(target, bases[-1]), bases[-1], end_offset
    )
    for offset in offsets_of(names, ".writers"):
        if offset <= end_offset:
            # Old snapshots may vanish at any time; without one, more segments are scanned.
            with contextlib.suppress(FileNotFoundError):
                name = f"{offset:020d}.writers"
                link_or_copy(source / name, target / name)
    facts = DurableMark.read(source, identity=identity, filesystem=LocalFilesystem())
    if facts is None:
        raise CorruptDataError(f"{source / MARK_NAME} is missing or damaged")
    facts = facts._replace(durable_offset=end_offset)
    (target / MARK_NAME).write_bytes(encode_durable_mark(facts, identity=identity))
    return CopiedLog(bases[0], end_offset)


def link_or_copy(source: Path, target: Path) -> None:
    """Link an immutable file under a second name; on another file system, copy the file."""
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        # Another file system, or one without links.
        shutil.copy2(source, target)


def _copy_until(source: Path, target: Path, base_offset: int, end_offset: int) -> None:
    with source.open("rb") as reading, target.open("wb") as writing:
        remaining_bytes = _position_of(reading, base_offset, end_offset, source)
        reading.seek(0)
        while remaining_bytes:
            piece = reading.read(min(remaining_bytes, _COPY_BYTES))
            writing.write(piece)
            remaining_bytes -= len(piece)


def _position_of(file: BinaryIO, base_offset: int, end_offset: int, path: Path) -> int:
    """Return the end position of the frame ending at `end_offset`; only headers are read."""
    position, offset = FILE_HEADER_BYTES, base_offset
    while offset < end_offset:
        file.seek(position)
        header = file.read(FRAME_HEADER_BYTES)
        if len(header) < FRAME_HEADER_BYTES:
            break
        magic, _, payload_bytes, _, _, _, base, rows, *_ = FRAME.unpack(header)
        if magic != FRAME_MAGIC or base != offset or not rows:
            break
        offset += rows
        position += frame_bytes(payload_bytes)
    if offset != end_offset:
        raise CorruptDataError(f"{path}: no frame ends at offset {end_offset}, but at {offset}")
    return position
