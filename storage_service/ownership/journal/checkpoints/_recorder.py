"""An owner's recorded operations, applied to a tree as well.

The tree follows every operation in the order of the journal: a checkpoint copies the tree instead
of reading the journal again. Safe to call from any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from streamhouse.storage_service.ownership.journal._writer import JournalWriter
from streamhouse.storage_service.ownership.journal.names import Place
from streamhouse.storage_service.ownership.journal.operations import Operation
from streamhouse.storage_service.ownership.journal.tree import FileAtPlace, JournalTree, Packed

__all__ = ["TreeAtPlace", "TreeRecorder"]


class TreeAtPlace(NamedTuple):
    """The files and directories recorded before `position`."""

    position: int
    files: Sequence[FileAtPlace]
    directories: frozenset[str]


class TreeRecorder:
    """A journal keeping `tree` equal to all recorded operations."""

    def __init__(self, journal: JournalWriter, tree: JournalTree) -> None:
        self._journal = journal
        self._tree = tree
        self._lock = threading.Lock()

    def record(self, operation: Operation) -> int:
        """See `JournalWriter.record`."""
        with self._lock:
            position = self._journal.record(operation)
            self._tree.apply(operation)
            return position

    @property
    def recorded_position(self) -> int:
        """See `Replica.recorded_position`."""
        return self._journal.recorded_position

    @property
    def stored_position(self) -> int:
        """See `Replica.stored_position`."""
        return self._journal.stored_position

    def when_stored(self, position: int, callback: Callable[[], None]) -> None:
        """See `Replica.when_stored`."""
        self._journal.when_stored(position, callback)

    def wait_stored(self, position: int) -> None:
        """See `Replica.wait_stored`."""
        self._journal.wait_stored(position)

    def gather(self) -> None:
        """See `Replica.gather`."""
        self._journal.gather()

    def place_of(self, position: int) -> tuple[Place, int]:
        """See `JournalWriter.place_of`."""
        return self._journal.place_of(position)

    def at_place(self) -> TreeAtPlace:
        """Return the current tree."""
        with self._lock:
            files = [FileAtPlace.of(file) for file in self._tree]
            return TreeAtPlace(self._journal.recorded_position, files, self._tree.directories)

    def packed(self, files: Iterable[tuple[FileAtPlace, Sequence[Packed]]]) -> None:
        """Note the packs of the files' bytes at their place."""
        with self._lock:
            for at, pieces in files:
                if at.is_there:
                    at.file.pack(pieces, at.crc32c)

    def log_bytes(self) -> dict[str, int]:
        """Return the length of each journalled log, by path."""
        with self._lock:
            return {file.path: file.length for file in self._tree if file.path.endswith(".log")}
