"""The files of a data directory as the operations of its journal made them.

A tree has each file's length, checksum and the location of its bytes, not the bytes. The owner of a
data directory keeps a tree of the recorded operations; a checkpoint is a copy of the tree at one
place of the journal; a restore builds a tree from a checkpoint and the later operations.

Invariants:
- the same operations in the same order give the same tree
- bytes are appended exactly at the end of a file, or `CorruptDataError` is raised
- a checkpoint may leave out files replaced, moved over or removed after its place, because a later
  operation decides about each. `check_whole` raises if such an operation is missing

Not safe to call from several threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

from crc32c import crc32c

from streamhouse.core.errors import CorruptDataError
from streamhouse.storage_service.log.durable_mark import MARK_NAME
from streamhouse.storage_service.log.filesystem import Buffer
from streamhouse.storage_service.ownership.journal.operations import (
    Append,
    MakeDirectory,
    Move,
    Operation,
    Remove,
    RemoveTree,
    Replace,
    check_path,
    is_journalled,
)

__all__ = [
    "FileAtPlace",
    "Held",
    "JournalTree",
    "Journalled",
    "Local",
    "Packed",
    "Piece",
    "TreeFile",
]


@dataclass(frozen=True, slots=True)
class Packed:
    """`length` bytes of a pack, from `offset` on."""

    pack: str
    offset: int
    length: int
    crc32c: int

    def __post_init__(self) -> None:
        if self.offset < 0 or self.length < 0 or not 0 <= self.crc32c < 1 << 32:
            raise CorruptDataError(f"not a part of a pack: {self!r}")


@dataclass(frozen=True, slots=True)
class Journalled:
    """The data of one operation: number `index` of the journal's object (`epoch`, `seq`)."""

    epoch: int
    seq: int
    index: int
    length: int
    crc32c: int


@dataclass(frozen=True, slots=True)
class Local:
    """`length` bytes on the local disk of the tree's process."""

    length: int


@dataclass(frozen=True, slots=True)
class Held:
    """A few bytes in memory, of a file overwritten in place later."""

    data: bytes

    @property
    def length(self) -> int:
        """The number of bytes."""
        return len(self.data)


Piece: TypeAlias = Packed | Journalled | Local | Held

# A tree holds the bytes of files with this suffix: overwrites in place are not journalled.
_HELD: Final = f"/{MARK_NAME}"


@dataclass(slots=True, eq=False)
class TreeFile:
    """One file. Appends, replacements and moves keep the same object.

    `version` counts replacements. `path` is empty once the file is gone. A file with `is_left_out`
    has a name, but no contents.
    """

    path: str
    length: int = 0
    crc32c: int = 0
    pieces: list[Piece] = field(default_factory=list)
    version: int = 0
    is_left_out: bool = False
    packed_length: int = 0
    """The number of first bytes in packs, and their checksum."""
    packed_crc32c: int = 0

    def copy(self) -> TreeFile:
        """Return a copy of the file's current state."""
        return replace(self, pieces=list(self.pieces))

    def add(self, piece: Piece, crc: int) -> None:
        """Append `piece`; `crc` is the checksum of the whole file afterwards."""
        if piece.length:
            last = self.pieces[-1] if self.pieces else None
            if isinstance(last, Local) and isinstance(piece, Local):
                self.pieces[-1] = Local(last.length + piece.length)
            else:
                self.pieces.append(piece)
        self.length += piece.length
        self.crc32c = crc

    def pack(self, pieces: Sequence[Packed], crc: int) -> None:
        """Replace the first bytes by `pieces` of packs; `crc` is the checksum of these bytes."""
        length = remaining_bytes = sum(piece.length for piece in pieces)
        later_pieces = list(self.pieces)
        while remaining_bytes:
            first = later_pieces.pop(0)
            remaining_bytes -= first.length
            if remaining_bytes < 0:
                assert isinstance(first, Local), "others are packed as a whole"
                later_pieces.insert(0, Local(-remaining_bytes))
                break
        self.pieces = [*pieces, *later_pieces]
        self.packed_length, self.packed_crc32c = length, crc


@dataclass(frozen=True, slots=True)
class FileAtPlace:
    """A file at one place of the journal, while its tree goes on changing."""

    file: TreeFile
    path: str
    length: int
    crc32c: int
    version: int
    pieces: tuple[Piece, ...]
    packed_length: int
    packed_crc32c: int

    @classmethod
    def of(cls, file: TreeFile) -> FileAtPlace:
        """Return the file's current state."""
        return cls(
            file,
            file.path,
            file.length,
            file.crc32c,
            file.version,
            tuple(file.pieces),
            file.packed_length,
            file.packed_crc32c,
        )

    @property
    def is_there(self) -> bool:
        """Whether the first `length` bytes of `file.path` are unchanged since then.

        False means: a later operation replaced or removed the file.
        """
        return bool(self.file.path) and self.file.version == self.version

    def left_out(self) -> TreeFile:
        """Return the entry for a checkpoint without the file's contents."""
        return TreeFile(self.path, is_left_out=True)


class JournalTree:
    """Files and directories by their paths."""

    def __init__(self) -> None:
        self._files: dict[str, TreeFile] = {}
        self._directories: set[str] = set()
        self._by_table: dict[str, set[str]] = {}
        """The paths of each table, so that dropping a table visits no other table's paths."""

    @property
    def directories(self) -> frozenset[str]:
        """Every directory below the data directory."""
        return frozenset(self._directories)

    def __len__(self) -> int:
        return len(self._files)

    def __iter__(self) -> Iterator[TreeFile]:
        """Iterate over the files in the order of their paths."""
        return iter([self._files[path] for path in sorted(self._files)])

    def get(self, path: str) -> TreeFile | None:
        """Return the file at `path`."""
        return self._files.get(path)

    def copy(self) -> JournalTree:
        """Return an independent copy of the tree."""
        tree = JournalTree()
        tree._files = {path: file.copy() for path, file in self._files.items()}
        tree._directories = set(self._directories)
        tree._by_table = {table: set(paths) for table, paths in self._by_table.items()}
        return tree

    def add_directory(self, path: str) -> None:
        """Add a directory and its parents."""
        while path and path not in self._directories:
            self._directories.add(path)
            self._note(path)
            path = path.rpartition("/")[0]

    def check_and_add_directory(self, path: str) -> None:
        """As `add_directory`; raises `CorruptDataError` for a path foreign to data directories."""
        self.apply(MakeDirectory(path))

    def add_file(self, file: TreeFile) -> None:
        """Add a file from a checkpoint or the local disk.

        Raises `CorruptDataError` for an invalid or duplicate path, and for inconsistent lengths.
        """
        if not is_journalled(file.path) or file.path in self._files:
            raise CorruptDataError(f"an invalid or duplicate file: {file.path!r:.200}")
        if not file.is_left_out and file.length != sum(piece.length for piece in file.pieces):
            raise CorruptDataError(
                f"{file.path}: {file.length} bytes, but the sum of its pieces differs"
            )
        if all(isinstance(piece, Packed) for piece in file.pieces):
            file.packed_length, file.packed_crc32c = file.length, file.crc32c
        self._files[file.path] = file
        self._note(file.path)
        self.add_directory(_parent(file.path))

    def apply(
        self, operation: Operation, *, place: tuple[int, int, int] | None = None
    ) -> TreeFile | None:
        """Apply one operation; return the file appended to or replaced.

        `place` is the operation's epoch, object and number; without `place` the data is on the
        local disk. Raises `CorruptDataError` for an operation inconsistent with the operations
        before.
        """
        check_path(operation)
        match operation:
            case Append(path, position, data):
                return self._append(path, position, data, place)
            case Replace(path, data):
                return self._replace(path, data, place)
            case Remove(path):
                self._forget([path])
            case MakeDirectory(path):
                self.add_directory(path)
            case Move(source, target):
                self._move(source, target)
            case RemoveTree(path):
                self._remove_tree(path)
        return None

    def facts(self) -> list[tuple[str, int, int]]:
        """Return path, length and checksum of every file; equal facts mean equal trees."""
        return [(file.path, file.length, file.crc32c) for file in self]

    def check_whole(self) -> None:
        """Raise `CorruptDataError` if the contents of a file are missing."""
        for file in self._files.values():
            if file.is_left_out:
                raise CorruptDataError(
                    f"{file.path} was left out of the checkpoint, but no later operation"
                    " replaces or removes the file: the journal is damaged"
                )

    def _append(
        self, path: str, position: int, data: Buffer, place: tuple[int, int, int] | None
    ) -> TreeFile:
        file = self._files.get(path)
        if file is None:
            raise CorruptDataError(f"the journal appends to {path}, which it never made")
        if file.is_left_out:
            # A later operation replaces or removes the file.
            return file
        if position != file.length:
            raise CorruptDataError(
                f"the journal appends to {path} at byte {position}, but it has {file.length} bytes"
            )
        file.add(_piece(data, place), crc32c(data, file.crc32c))
        return file

    def _replace(self, path: str, data: Buffer, place: tuple[int, int, int] | None) -> TreeFile:
        file = self._files.get(path)
        if file is None:
            file = self._files[path] = TreeFile(path)
            self._note(path)
            self.add_directory(_parent(path))
        file.version += 1
        file.is_left_out = False
        file.pieces.clear()
        file.length = file.packed_length = file.packed_crc32c = 0
        piece = Held(bytes(data)) if path.endswith(_HELD) else _piece(data, place)
        file.add(piece, crc32c(data))
        return file

    def _move(self, source: str, target: str) -> None:
        if source not in self._directories:
            return
        self._remove_tree(target)
        moved = [path for path in self._of_table(source) if _is_in(path, source)]
        directories = [path for path in moved if path in self._directories]
        files = [file for path in moved if (file := self._files.get(path)) is not None]
        self._leave(moved)
        for path in directories:
            self.add_directory(target + path[len(source) :])
        for file in files:
            file.path = target + file.path[len(source) :]
            self._files[file.path] = file
            self._note(file.path)

    def _remove_tree(self, directory: str) -> None:
        gone = [path for path in self._of_table(directory) if _is_in(path, directory)]
        files = [path for path in gone if _is_below(path, directory) and path in self._files]
        self._forget(files)
        self._leave(path for path in gone if path in self._directories)

    def _note(self, path: str) -> None:
        self._by_table.setdefault(_table_of(path), set()).add(path)

    def _leave(self, paths: Iterable[str]) -> None:
        """Remove files and directories by their paths."""
        for path in paths:
            self._files.pop(path, None)
            self._directories.discard(path)
            table = _table_of(path)
            of_table = self._by_table[table]
            of_table.discard(path)
            if not of_table:
                del self._by_table[table]

    def _of_table(self, directory: str) -> list[str]:
        """Return the candidate paths below a directory."""
        table = _table_of(directory)
        if table:
            return list(self._by_table.get(table, ()))
        return [*self._directories, *self._files]

    def _forget(self, paths: Iterable[str]) -> None:
        for path in paths:
            file = self._files.get(path)
            if file is not None:
                self._leave([path])
                file.path = ""


def _piece(data: Buffer, place: tuple[int, int, int] | None) -> Piece:
    if place is None:
        return Local(len(data))
    return Journalled(*place, len(data), crc32c(data))


def _parent(path: str) -> str:
    return path.rpartition("/")[0]


def _table_of(path: str) -> str:
    """Return the table's directory of a path; empty for a path outside of tables."""
    table = "/".join(path.split("/", 2)[:2])
    return table if table.startswith("tables/") else ""


def _is_below(path: str, directory: str) -> bool:
    return path.startswith(directory + "/")


def _is_in(path: str, directory: str) -> bool:
    return path == directory or _is_below(path, directory)
