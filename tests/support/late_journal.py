"""A journal in memory that stores late: in order, and only what a test lets it store."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable

from streamhouse.core.errors import NotOwnerError
from streamhouse.storage_service.ownership.journal.operations import (
    Append,
    MakeDirectory,
    Move,
    Operation,
    Remove,
    RemoveTree,
    Replace,
    check_path,
)

__all__ = ["LateJournal", "files_after"]


class LateJournal:
    """`Journal`; positions count operations.

    Who waits is served once another thread calls `store`, or at once by `on_wait`, which is told
    the position and stores.
    """

    def __init__(self, on_wait: Callable[[int], None] | None = None) -> None:
        self.operations: list[Operation] = []
        self.stored_position = 0
        self.is_lost = False
        """Whether another process has it now."""
        self._is_prompt = False
        self.on_wait = on_wait
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()
        self._changed = threading.Condition()

    @property
    def recorded_position(self) -> int:
        return len(self.operations)

    def record(self, operation: Operation) -> int:
        check_path(operation)
        self._check_ours()
        with self._changed:
            self.operations.append(operation)
            position = len(self.operations)
            self._changed.notify_all()
        if self._is_prompt:
            self.store()
        return position

    def store_at_once(self) -> None:
        """Store what there is, and from now on everything as it is recorded."""
        self._is_prompt = True
        self.store()

    def store_late(self) -> None:
        """Store only what a test stores from now on."""
        self._is_prompt = False

    def store(self, count: int | None = None) -> None:
        """Store that many more operations, or all, and call who waited for them."""
        with self._changed:
            most = len(self.operations)
            end = most if count is None else min(self.stored_position + max(count, 0), most)
            self.stored_position = end
            self._changed.notify_all()
            due = []
            while self._waiting and self._waiting[0][0] <= end:
                due.append(self._waiting.popleft()[1])
        for then in due:
            then()

    def when_stored(self, position: int, callback: Callable[[], None]) -> None:
        with self._changed:
            if position > self.stored_position:
                assert not self._waiting or self._waiting[-1][0] <= position
                self._waiting.append((position, callback))
                return
        callback()

    def wait_stored(self, position: int) -> None:
        if self.on_wait is not None:
            self.on_wait(position)
        with self._changed:
            self._changed.wait_for(lambda: self.is_lost or self.stored_position >= position)
        if self.stored_position < position:
            self._check_ours()

    def gather(self) -> None:
        """Nothing is on its way before a test stores it."""

    def _check_ours(self) -> None:
        if self.is_lost:
            raise NotOwnerError("another process has the journal")

    def wait_recorded(self, position: int) -> None:
        """Return once somebody has recorded so much."""
        with self._changed:
            self._changed.wait_for(lambda: len(self.operations) >= position)


def files_after(operations: Iterable[Operation]) -> dict[str, bytes]:
    """Return the files that operations make of an empty directory, the obvious way."""
    files: dict[str, bytes] = {}
    for operation in operations:
        match operation:
            case Append(path, position, data):
                assert len(files[path]) == position, operation
                files[path] += bytes(data)
            case Replace(path, data):
                files[path] = bytes(data)
            case Remove(path):
                files.pop(path, None)
            case MakeDirectory(_):
                pass
            case Move(source, target):
                files = {_moved(path, source, target): data for path, data in files.items()}
            case RemoveTree(directory):
                files = {p: d for p, d in files.items() if not p.startswith(directory + "/")}
    return files


def _moved(path: str, source: str, target: str) -> str:
    return target + path[len(source) :] if path.startswith(source + "/") else path
