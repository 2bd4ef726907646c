"""The files of a data directory as the operations of its journal made them.

A tree knows of each file how long it is, its checksum and where its bytes are, but has none of
them. The owner of a data directory keeps one beside what it records; a checkpoint is a copy of it
at one place of the journal; a restore makes one of a checkpoint and the operations after it.

Invariants:
- the same operations in the same order give the same tree, whoever applies them
- bytes are appended exactly at the end of a file, or `CorruptDataError` is raised
- a checkpoint may leave out files that were replaced, moved over or removed after its place: a
  later operation says what became of each. `check_whole` raises unless one did

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
    """`length` bytes from `offset` on of the pack with this name."""

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
    """`length` bytes that are on the local disk of whoever keeps the tree."""

    length: int


@dataclass(frozen=True, slots=True)
class Held:
    """A few bytes that are in memory: those of a file that is later overwritten in its place."""

    data: bytes

    @property
    def length(self) -> int:
        """How many bytes there are."""
        return len(self.data)


Piece: TypeAlias = Packed | Journalled | Local | Held

# So end the paths of files whose bytes a tree has: what is written into them is not journalled.
_HELD: Final = f"/{MARK_NAME}"


@dataclass(slots=True, eq=False)
class TreeFile:
    """One file. It stays the same object while it is appended to, replaced or moved.

    `version` counts how often it was replaced. `path` is empty once the file is gone. A file that
    `is_left_out` is known by name only.
    """

    path: str
    length: int = 0
    crc32c: int = 0
    pieces: list[Piece] = field(default_factory=list)
    version: int = 0
    is_left_out: bool = False
    packed_length: int = 0
    """How many of the first bytes are in packs, and their checksum."""
    packed_crc32c: int = 0

    def copy(self) -> TreeFile:
        """Return the file as it is now."""
        return replace(self, pieces=list(self.pieces))

    def add(self, piece: Piece, crc: int) -> None:
        """Let `piece` follow what the file has; its checksum with that is `crc` then."""
        if piece.length:
            last = self.pieces[-1] if self.pieces else None
            if isinstance(last, Local) and isinstance(piece, Local):
                self.pieces[-1] = Local(last.length + piece.length)
            else:
                self.pieces.append(piece)
        self.length += piece.length
        self.crc32c = crc

    def pack(self, pieces: Sequence[Packed], crc: int) -> None:
        """Let the first bytes be in packs; `crc` is their checksum."""
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
    """A file of a tree that goes on changing, as it was at one place of the journal."""

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
        """Return the file as it is now."""
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
        """Whether the first `length` bytes of the file are still those of then.

        They lie at `file.path` now. Where this is False a later operation replaced or removed it.
        """
        return bool(self.file.path) and self.file.version == self.version

    def left_out(self) -> TreeFile:
        """Return the file as a checkpoint names it whose contents it does not have."""
        return TreeFile(self.path, is_left_out=True)


class JournalTree:
    """Files and directories by their paths."""

    def __init__(self) -> None:
        self._files: dict[str, TreeFile] = {}
        self._directories: set[str] = set()
        self._by_table: dict[str, set[str]] = {}
        """Files and directories of each table: to drop one of many looks at no other."""

    @property
    def directories(self) -> frozenset[str]:
        """Every directory but the data directory itself."""
        return frozenset(self._directories)

    def __len__(self) -> int:
        return len(self._files)

    def __iter__(self) -> Iterator[TreeFile]:
        """Go through the files in the order of their paths."""
        return iter([self._files[path] for path in sorted(self._files)])

    def get(self, path: str) -> TreeFile | None:
        """Return the file at `path`."""
        return self._files.get(path)

    def copy(self) -> JournalTree:
        """Return the tree as it is now; the files in it are others, with the same contents."""
        tree = JournalTree()
        tree._files = {path: file.copy() for path, file in self._files.items()}
        tree._directories = set(self._directories)
        tree._by_table = {table: set(paths) for table, paths in self._by_table.items()}
        return tree

    def add_directory(self, path: str) -> None:
        """Let there be a directory, and those it lies in."""
        while path and path not in self._directories:
            self._directories.add(path)
            self._note(path)
            path = path.rpartition("/")[0]

    def check_and_add_directory(self, path: str) -> None:
        """As `add_directory`; raises `CorruptDataError` for one that no data directory has."""
        self.apply(MakeDirectory(path))

    def add_file(self, file: TreeFile) -> None:
        """Let there be a file, as a checkpoint or the local disk has it.

        Raises `CorruptDataError` for a path that cannot be or is there, or lengths that differ.
        """
        if not is_journalled(file.path) or file.path in self._files:
            raise CorruptDataError(f"a file that cannot be, or is there twice: {file.path!r:.200}")
        if not file.is_left_out and file.length != sum(piece.length for piece in file.pieces):
            raise CorruptDataError(f"{file.path}: {file.length} bytes, but its pieces have others")
        if all(isinstance(piece, Packed) for piece in file.pieces):
            file.packed_length, file.packed_crc32c = file.length, file.crc32c
        self._files[file.path] = file
        self._note(file.path)
        self.add_directory(_parent(file.path))

    def apply(
        self, operation: Operation, *, place: tuple[int, int, int] | None = None
    ) -> TreeFile | None:
        """Apply one operation; return the file that it appended to or replaced.

        `place` is its epoch, object and number in it; without, its data is on the local disk.
        Raises `CorruptDataError` for one that does not follow the operations before it.
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
        """Return path, length and checksum of every file: two trees with the same are the same."""
        return [(file.path, file.length, file.crc32c) for file in self]

    def check_whole(self) -> None:
        """Raise `CorruptDataError` if the contents of a file are not known."""
        for file in self._files.values():
            if file.is_left_out:
                raise CorruptDataError(
                    f"{file.path} was left out of the checkpoint, but no operation after it says"
                    " what became of it: the journal is damaged"
                )

    def _append(
        self, path: str, position: int, data: Buffer, place: tuple[int, int, int] | None
    ) -> TreeFile:
        file = self._files.get(path)
        if file is None:
            raise CorruptDataError(f"the journal appends to {path}, which it never made")
        if file.is_left_out:
            # It is replaced or removed by a later operation.
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
        """Let there be no file and no directory of these paths."""
        for path in paths:
            self._files.pop(path, None)
            self._directories.discard(path)
            table = _table_of(path)
            of_table = self._by_table[table]
            of_table.discard(path)
            if not of_table:
                del self._by_table[table]

    def _of_table(self, directory: str) -> list[str]:
        """Return the paths that may lie in a directory."""
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
    """Return the directory of a table that a path is or lies in; empty for others."""
    table = "/".join(path.split("/", 2)[:2])
    return table if table.startswith("tables/") else ""


def _is_below(path: str, directory: str) -> bool:
    return path.startswith(directory + "/")


def _is_in(path: str, directory: str) -> bool:
    return path == directory or _is_below(path, directory)
