"""Compares a local data directory with the journal, and lists the necessary changes.

One decision per file and per bucket, from the tree and the local disk; nothing is changed here.

- The directory's own process was the last writer (`is_own`): bytes of a log beyond the journal's
  end were written afterwards, and stay to be journalled. A durable mark newer than the
  journal's stays, too.
- Another process was the last writer: logs are kept up to the first byte different from the
  journal. The rows by key of a bucket with other bytes are deleted and rebuilt.
- With `is_trusted` (own process last, no interrupted restore) a bucket's earlier logs are trusted
  by length, if everything else equals the journal. Otherwise the directory may be an older copy,
  such as a snapshot of its disk: then all bytes are compared by checksum. A bucket's newest log
  always is compared, because opening the log reads all of it anyway.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from streamhouse.storage_service.log.durable_mark import (
    LOSS_ACCEPTED_NAME,
    MARK_NAME,
    DurableMark,
)
from streamhouse.storage_service.log.filesystem import LocalFilesystem
from streamhouse.storage_service.log.segments.segment_format import LogIdentity, offsets_of
from streamhouse.storage_service.ownership.journal._file_checksum import check_next
from streamhouse.storage_service.ownership.journal.operations import (
    is_journalled,
    is_journalled_directory,
)
from streamhouse.storage_service.ownership.journal.tree import Held, JournalTree, Local, TreeFile

__all__ = ["Cut", "LocalCopy", "bucket_identity", "compare", "local_files"]

_LOG: Final = ".log"
_BUCKET: Final = re.compile(r"tables/([0-9]+)/bucket-([0-9]+)")


@dataclass(frozen=True, slots=True)
class Cut:
    """The local log `path` had other bytes than the journal from `position` on."""

    path: str
    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalCopy:
    """The changes in order: rows by key to rebuild, removed directories and files, longer files."""

    cuts: tuple[Cut, ...] = ()
    keys_given_up: frozenset[str] = frozenset()
    """Buckets whose rows by key may have rows missing from the journal."""
    trees_removed: tuple[str, ...] = ()
    files_removed: tuple[str, ...] = ()
    kept_lengths: dict[str, int] = field(default_factory=dict)
    """The number of correct first bytes of each incomplete or wrong file."""
    longer: frozenset[str] = frozenset()
    """The files keeping their bytes beyond the journal."""


def local_files(directory: Path) -> Iterator[str]:
    """Yield the paths of a data directory's files eligible for the journal."""
    if (directory / "service.json").is_file():
        yield "service.json"
    for folder, _, names in os.walk(directory / "tables"):
        place = Path(folder).relative_to(directory).as_posix()
        if is_journalled_directory(place):
            yield from (f"{place}/{name}" for name in names if is_journalled(f"{place}/{name}"))


def compare(directory: Path, tree: JournalTree, *, is_own: bool, is_trusted: bool) -> LocalCopy:
    """Return the changes needed to make the directory equal to the tree."""
    local_paths = set(local_files(directory))
    logs = [file for file in tree if file.path.endswith(_LOG)]
    oldest: dict[str, TreeFile] = {}
    for file in logs:
        oldest.setdefault(_bucket(file.path), file)
    is_trusted = is_trusted and not any(_is_short(directory, file) for file in logs)
    kept_lengths = dict.fromkeys((file.path for file in tree if file.path not in local_paths), 0)
    for file in tree:
        if file.path in kept_lengths or file.path.endswith(_LOG):
            continue
        is_kept_mark = (
            is_own
            and is_trusted
            and file.path.endswith(f"/{MARK_NAME}")
            and _is_mark_of(directory, oldest.get(_bucket(file.path)))
        )
        if not is_kept_mark and not _is_whole(directory / file.path, file):
            kept_lengths[file.path] = 0
    has_expired = any(path.endswith(_LOG) and tree.get(path) is None for path in local_paths)
    is_trusted = is_trusted and not kept_lengths and not has_expired
    newest = {_bucket(file.path): file for file in logs}
    cuts: list[Cut] = []
    longer: set[str] = set()
    given_up: set[str] = set()
    for file in logs:
        if file.path in kept_lengths:
            continue
        path, bucket = directory / file.path, _bucket(file.path)
        length = path.stat().st_size
        is_believed = is_trusted and newest[bucket] is not file
        right = min(length, file.length) if is_believed else _right_bytes(path, file)
        if right == file.length and (is_own or length == right):
            continue
        kept_lengths[file.path] = right
        if is_own and length > file.length:
            longer.add(file.path)
        elif length > right:
            given_up.add(bucket)
            if not is_own:
                cuts.append(Cut(file.path, right))
    removed = sorted(
        path
        for path in local_paths
        # An operator's file is meant for the service opening the log.
        if tree.get(path) is None and not (is_own and path.endswith(f"/{LOSS_ACCEPTED_NAME}"))
    )
    if not is_own:
        # Whether a log that is gone had only rows of the journal cannot be told any more.
        given_up.update(_bucket(path) for path in removed if path.endswith(_LOG))
        given_up.update(_buckets_without_logs(directory, local_paths))
    return LocalCopy(
        cuts=tuple(cuts),
        keys_given_up=frozenset(given_up),
        trees_removed=tuple(_trees_removed(directory, tree)),
        files_removed=tuple(removed),
        kept_lengths=kept_lengths,
        longer=frozenset(longer),
    )


def bucket_identity(bucket: str) -> LogIdentity | None:
    """Return the log identity of a table's bucket directory; None for another directory."""
    match = _BUCKET.fullmatch(bucket)
    return match and LogIdentity(int(match[1]), int(match[2]))


def _is_mark_of(directory: Path, oldest: TreeFile | None) -> bool:
    """Whether a bucket's mark is readable and explains why its log begins with `oldest`.

    The mark of an older copy does not, if retention has removed segments since.
    """
    if oldest is None:
        return False
    bucket, _, name = oldest.path.rpartition("/")
    identity = bucket_identity(bucket)
    if identity is None:
        return False
    facts = DurableMark.read(directory / bucket, identity=identity, filesystem=LocalFilesystem())
    return facts is not None and facts.start_offset >= offsets_of([name], _LOG)[0]


def _is_short(directory: Path, file: TreeFile) -> bool:
    """Whether a log lacks bytes synced by its own process before they were journalled."""
    try:
        return (directory / file.path).stat().st_size < file.length
    except FileNotFoundError:
        return True


def _bucket(path: str) -> str:
    return path.rpartition("/")[0]


def _buckets_without_logs(directory: Path, local_paths: Iterable[str]) -> Iterator[str]:
    with_logs = {_bucket(path) for path in local_paths if path.endswith(_LOG)}
    for rows in sorted((directory / "tables").glob("*/bucket-*/kv")):
        bucket = rows.parent.relative_to(directory).as_posix()
        if bucket not in with_logs:
            yield bucket


def _trees_removed(directory: Path, tree: JournalTree) -> Iterator[str]:
    """Yield the outermost directories missing from the journal."""
    gone: list[str] = []
    for path in sorted((directory / "tables").rglob("*")):
        name = path.relative_to(directory).as_posix()
        is_gone = is_journalled_directory(name) and name not in tree.directories and path.is_dir()
        if is_gone and not any(name.startswith(f"{outer}/") for outer in gone):
            gone.append(name)
    yield from gone


def _is_whole(path: Path, file: TreeFile) -> bool:
    if path.stat().st_size != file.length:
        return False
    if all(isinstance(piece, Held) for piece in file.pieces):
        # Bytes ending with their own checksum, such as a mark, always have the same checksum.
        return path.read_bytes() == b"".join(
            piece.data for piece in file.pieces if isinstance(piece, Held)
        )
    if path.name == MARK_NAME:
        # Its bytes are in a pack: fetching is as quick as comparing.
        return False
    with path.open("rb", buffering=0) as opened:
        return check_next(opened, file.length) == (file.crc32c, file.length)


def _right_bytes(path: Path, file: TreeFile) -> int:
    """Return the number of first bytes equal to the file's first pieces."""
    right = 0
    with path.open("rb", buffering=0) as opened:
        for piece in file.pieces:
            checked = check_next(opened, piece.length)
            if isinstance(piece, Local | Held) or checked != (piece.crc32c, piece.length):
                break
            right += piece.length
    return right
