"""The tree of a directory without a journal, read from the disk.

A log ends with its last whole frame: later bytes were never acknowledged, and the service truncates
them when opening the log. If the log proves more durable rows, the log is damaged, and copied
unchanged: no service opens such a log.
"""

from __future__ import annotations

from pathlib import Path

from crc32c import crc32c

from streamhouse.storage_service.log.durable_mark import MARK_NAME, DurableMark
from streamhouse.storage_service.log.filesystem import LocalFilesystem
from streamhouse.storage_service.log.segments.segment_format import (
    FILE_HEADER_BYTES,
    MalformedError,
    decode_segment_header,
    offsets_of,
    segment_path,
)
from streamhouse.storage_service.log.segments.segment_scan import durable_offset_after, scan_frames
from streamhouse.storage_service.ownership.journal._file_checksum import check_next
from streamhouse.storage_service.ownership.journal.operations import is_journalled_directory
from streamhouse.storage_service.ownership.journal.restore._local_copy import (
    bucket_identity,
    local_files,
)
from streamhouse.storage_service.ownership.journal.tree import Held, JournalTree, Local, TreeFile

__all__ = ["read_local_tree"]


def read_local_tree(directory: Path) -> JournalTree:
    """Return the tree of a directory without concurrent changes; raises `OSError`."""
    tree = JournalTree()
    paths = sorted(local_files(directory))
    for path in (directory / "tables").rglob("*"):
        name = path.relative_to(directory).as_posix()
        if is_journalled_directory(name) and path.is_dir():
            tree.add_directory(name)
    names: dict[str, list[str]] = {}
    for name in paths:
        folder, _, last = name.rpartition("/")
        names.setdefault(folder, []).append(last)
    ends = {
        folder: _whole_end(directory, folder, file_names) for folder, file_names in names.items()
    }
    for name in paths:
        tree.add_file(_read(directory, name, ends[name.rpartition("/")[0]].get(name)))
    return tree


def _read(directory: Path, name: str, length: int | None) -> TreeFile:
    path = directory / name
    if path.name == MARK_NAME:
        data = path.read_bytes()
        return TreeFile(name, len(data), crc32c(data), [Held(data)])
    length = path.stat().st_size if length is None else length
    with path.open("rb", buffering=0) as file:
        crc, length = check_next(file, length)
    return TreeFile(name, length, crc, [Local(length)] if length else [])


def _whole_end(directory: Path, folder: str, names: list[str]) -> dict[str, int]:
    """Return the end of a bucket's newest log, by its path; nothing for a damaged log."""
    identity = bucket_identity(folder)
    bases = offsets_of(names, ".log")
    if identity is None or not bases:
        return {}
    path = segment_path(directory / folder, bases[-1])
    filesystem = LocalFilesystem()
    view = filesystem.map(path, path.stat().st_size)
    try:
        header = decode_segment_header(view[:FILE_HEADER_BYTES], identity=identity)
    except MalformedError:
        return {}
    scan = scan_frames(
        view,
        base_offset=header.base_offset,
        timestamp_us=header.created_timestamp_us,
        index=None,
        writers=None,
    )
    mark = DurableMark.read(directory / folder, identity=identity, filesystem=filesystem)
    proven = mark.durable_offset if mark else 0
    if scan.problem:
        durable_offset = durable_offset_after(view, scan.end_position, offset_min=scan.end_offset)
        proven = max(proven, durable_offset)
    if proven > scan.end_offset:
        return {}
    return {f"{folder}/{path.name}": scan.end_position}
