"""Journalled operations on the files of a data directory, and the valid paths.

Operations applied in order to an earlier tree give the later tree; applying some operations twice
changes nothing. Paths are relative to the data directory, with `/` between names.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Final, TypeAlias

from streamhouse.core.errors import CorruptDataError
from streamhouse.storage_service.log.filesystem import Buffer

__all__ = [
    "Append",
    "MakeDirectory",
    "Move",
    "Operation",
    "Remove",
    "RemoveTree",
    "Replace",
    "check_path",
    "is_journalled",
    "is_journalled_directory",
    "is_movable",
]

_NUMBER: Final = r"(?:0|[1-9][0-9]{0,18})"
_TABLE: Final = rf"tables/{_NUMBER}"
_TREE: Final = rf"{_TABLE}(?:\.dropped|\.given-up)?"
_BUCKET: Final = rf"{_TREE}/bucket-{_NUMBER}"
# Names of transactions are checked at their begin: no separator, no leading dot.
_TRANSACTION_FILE: Final = rf"{_TREE}/transactions/[A-Za-z0-9_-][A-Za-z0-9_.-]{{0,250}}"
_DIRECTORY: Final = re.compile(rf"{_TREE}|{_BUCKET}|{_TREE}/transactions|tables")
_MOVED: Final = re.compile(_TREE)
_FILE: Final = re.compile(
    rf"service\.json|{_TREE}/[a-z_]{{1,32}}\.json|{_TRANSACTION_FILE}"
    rf"|{_BUCKET}/(?:[0-9]{{20}}\.(?:log|index|writers)|[a-z_]{{1,32}}\.[a-z_]{{1,32}})"
)


@dataclass(frozen=True, slots=True)
class Append:
    """`data` is appended to a `.log` file with the length `position`."""

    path: str
    position: int
    data: Buffer


@dataclass(frozen=True, slots=True)
class Replace:
    """The file gets this content, whether new or existing."""

    path: str
    data: Buffer


@dataclass(frozen=True, slots=True)
class Remove:
    """The file is removed, if existing."""

    path: str


@dataclass(frozen=True, slots=True)
class MakeDirectory:
    """The directory is created, with its parents."""

    path: str


@dataclass(frozen=True, slots=True)
class Move:
    """The directory `source` is renamed to `target`, replacing an existing `target`.

    Both are names of tables' directories. Without `source` nothing happens: the move was done
    before.
    """

    source: str
    target: str


@dataclass(frozen=True, slots=True)
class RemoveTree:
    """The directory is removed, with its contents."""

    path: str


Operation: TypeAlias = Append | Replace | Remove | MakeDirectory | Move | RemoveTree


# The same few files are written to again and again, and each operation is checked several times.
@functools.lru_cache(maxsize=4_096)
def is_journalled(path: str) -> bool:
    """Whether the journal has the file at this path, relative to the data directory."""
    return not path.endswith(".tmp") and _FILE.fullmatch(path) is not None


def is_journalled_directory(path: str) -> bool:
    """Whether the journal has the directory at this path, relative to the data directory."""
    return _DIRECTORY.fullmatch(path) is not None


def is_movable(source: str, target: str) -> bool:
    """Whether the journal can follow this rename of a directory.

    Only a table's directory is moved: neither name lies within the other, and all its contents keep
    journalled names.
    """
    return source != target and all(map(_MOVED.fullmatch, (source, target)))


def check_path(operation: Operation) -> None:
    """Raise `CorruptDataError` for a path or a move foreign to data directories."""
    match operation:
        case Append(path) | Replace(path) | Remove(path):
            is_known = is_journalled(path)
        case Move(source, target):
            is_known = is_movable(source, target)
        case MakeDirectory(path) | RemoveTree(path):
            is_known = is_journalled_directory(path)
    if not is_known:
        raise CorruptDataError(f"the journal names a path that cannot be: {operation!r:.200}")
