"""RocksDB's files in packs: known files are reused, new files are uploaded.

A file of rows is immutable, and a copy of RocksDB shares the file with the original: the same file
on the disk is neither read nor uploaded twice. After a restart the file is read once, and matches a
packed file only if name, length and checksum agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from streamhouse.core.errors import StorageFailedError
from streamhouse.storage_service.ownership.journal._file_checksum import check_next
from streamhouse.storage_service.ownership.journal.checkpoints.manifest import KeyFile, KeyRows
from streamhouse.storage_service.ownership.journal.checkpoints.packs import PackWriter
from streamhouse.storage_service.ownership.journal.tree import Packed

__all__ = ["KeyCopy", "KeyPacker", "SeenCopy"]


class KeyCopy(NamedTuple):
    """A copy of one bucket's RocksDB, in a directory of its own.

    Without a directory the rows are unchanged since the previous copy.
    """

    bucket: str
    applied_offset: int
    directory: Path | None


class _Sight(NamedTuple):
    """The identity of an unchanged file on the disk."""

    bucket: str
    name: str
    inode: int
    length: int
    changed_ns: int


@dataclass(frozen=True, slots=True)
class SeenCopy:
    """A copy, and for each of its files the packed file, if known."""

    copy: KeyCopy
    files: tuple[tuple[_Sight, KeyFile | None], ...] = ()
    unchanged: KeyRows | None = None

    @property
    def packed_pieces(self) -> Iterator[Packed]:
        """Every packed piece possibly needed again."""
        for file in self.unchanged.files if self.unchanged else ():
            yield from file.pieces
        for _, packed in self.files:
            yield from packed.pieces if packed else ()


class KeyPacker:
    """The packed files of RocksDB. One thread at a time."""

    def __init__(self, packed_rows: Iterable[KeyRows] = ()) -> None:
        """`packed_rows` has the rows of the owner's first manifest."""
        self._rows = {rows.bucket: rows for rows in packed_rows}
        self._packed_files = {
            (rows.bucket, file.name, file.length): file
            for rows in self._rows.values()
            for file in rows.files
        }
        self._seen: dict[_Sight, KeyFile] = {}

    @property
    def applied_offsets(self) -> dict[str, int]:
        """The applied offset of each bucket's packed rows."""
        return {bucket: rows.applied_offset for bucket, rows in self._rows.items()}

    def packed(self, key_rows: Sequence[KeyRows]) -> None:
        """Note the rows of a stored manifest."""
        self._rows = {rows.bucket: rows for rows in key_rows}

    def look(self, copies: Sequence[KeyCopy]) -> list[SeenCopy]:
        """Find the packed file of every file of `copies`; other sights are forgotten."""
        seen, self._seen = self._seen, {}
        seen_copies: list[SeenCopy] = []
        for copy in copies:
            if copy.directory is None:
                unchanged = self._rows[copy.bucket]
                names = {file.name for file in unchanged.files}
                self._seen.update(
                    (sight, file)
                    for sight, file in seen.items()
                    if sight.bucket == copy.bucket and sight.name in names
                )
                seen_copies.append(SeenCopy(copy, unchanged=unchanged))
                continue
            files: list[tuple[_Sight, KeyFile | None]] = []
            for path in sorted(copy.directory.iterdir()):
                sight = _sight(copy.bucket, path)
                packed = seen.get(sight)
                if packed is not None:
                    self._seen[sight] = packed
                files.append((sight, packed or self._packed_file(path, sight)))
            seen_copies.append(SeenCopy(copy, tuple(files)))
        return seen_copies

    def pack(self, seen: SeenCopy, writer: PackWriter, sound: frozenset[str]) -> KeyRows:
        """Return a copy's files for a manifest; add the files missing from sound packs."""
        if seen.unchanged is not None:
            return seen.unchanged
        assert seen.copy.directory is not None
        files: list[KeyFile] = []
        for sight, packed in seen.files:
            if packed is None or not all(piece.pack in sound for piece in packed.pieces):
                packed = _add(seen.copy.directory / sight.name, sight, writer)
            files.append(packed)
            self._seen[sight] = packed
        return KeyRows(seen.copy.bucket, seen.copy.applied_offset, tuple(files))

    def _packed_file(self, path: Path, sight: _Sight) -> KeyFile | None:
        packed_file = self._packed_files.get((sight.bucket, sight.name, sight.length))
        if packed_file is None:
            return None
        with path.open("rb", buffering=0) as file:
            if check_next(file, packed_file.length) != (packed_file.crc32c, packed_file.length):
                return None
        self._seen[sight] = packed_file
        return packed_file


def _sight(bucket: str, path: Path) -> _Sight:
    stat = path.stat()
    return _Sight(bucket, path.name, stat.st_ino, stat.st_size, stat.st_mtime_ns)


def _add(path: Path, sight: _Sight, writer: PackWriter) -> KeyFile:
    with path.open("rb", buffering=0) as file:
        added = writer.add_from(file, sight.length)
    if added.length != sight.length:
        raise StorageFailedError(f"{path} has {added.length} bytes, not {sight.length}")
    return KeyFile(sight.name, added.length, added.crc32c, tuple(added.pieces))
