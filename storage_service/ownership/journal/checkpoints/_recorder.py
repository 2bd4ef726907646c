"""An owner's recorded operations, applied to a tree as well.

The tree follows every operation in the order of the journal: a checkpoint copies the tree instead
of reading the journal again. Safe to call from any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from streamhouse.storage_service.log.replica import Replica
from streamhouse.storage_service.ownership.journal.checkpoints._checkpoint import TreeAtPlace
from streamhouse.storage_service.ownership.journal.names import Place
from streamhouse.storage_service.ownership.journal.operations import Operation
from streamhouse.storage_service.ownership.journal.tree import FileAtPlace, JournalTree, Packed

__all__ = ["PlacedJournal", "TreeRecorder"]


class PlacedJournal(Replica, Protocol):
    """A journal with the place of each operation, such as `writer.JournalWriter`."""

    def record(self, operation: Operation) -> int:
        """Record an operation; return the position after."""

    def place_of(self, position: int) -> tuple[Place, int]:
        """Return the object of the operation at a stored position, and the operation's number."""


class TreeRecorder:
    """A journal keeping `tree` equal to all recorded operations."""

    def __init__(self, journal: PlacedJournal, tree: JournalTree) -> None:
        self._journal = journal
        self._tree = tree
        self._lock = threading.Lock()

    def record(self, operation: Operation) -> int:
        """See `PlacedJournal.record`."""
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
        """See `PlacedJournal.place_of`."""
        return self._journal.place_of(position)

    def at_place(self) -> TreeAtPlace:
        """See `RecordedFiles.at_place`."""
        with self._lock:
            files = [FileAtPlace.of(file) for file in self._tree]
            return TreeAtPlace(self._journal.recorded_position, files, self._tree.directories)

    def packed(self, files: Iterable[tuple[FileAtPlace, Sequence[Packed]]]) -> None:
        """See `RecordedFiles.packed`."""
        with self._lock:
            for at, pieces in files:
                if at.is_there:
                    at.file.pack(pieces, at.crc32c)

    def log_bytes(self) -> dict[str, int]:
        """Return the length of each journalled log, by path."""
        with self._lock:
            return {file.path: file.length for file in self._tree if file.path.endswith(".log")}
