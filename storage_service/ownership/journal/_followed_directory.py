"""An unserved data directory to which a journal's operations are applied in order.

Invariants:
- after every operation the directory has the same files as a tree of the same operations
- an inconsistent operation raises `CorruptDataError` and changes nothing: the directory must be
  restored
- nothing is durable before `sync` returns; after an earlier crash the directory must be restored

Other files (`kv`, `LOCK`) are moved and removed only with their directory. One thread at a time.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from streamhouse.core.errors import CorruptDataError
from streamhouse.storage_service.log.filesystem import (
    Buffer,
    LocalFilesystem,
    WritableFile,
    replace_durably,
)
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
from streamhouse.storage_service.ownership.journal.tree import JournalTree

__all__ = ["FollowedDirectory"]

# Logs are written in turn; opening a log costs more than writing a frame.
_OPEN_LOGS_MAX: Final = 256


class FollowedDirectory:
    """See the module. `leave` is called before a directory is moved or removed."""

    def __init__(self, root: Path, *, leave: Callable[[str], None] = lambda _: None) -> None:
        self._root = root
        self._leave = leave
        self._filesystem = LocalFilesystem()
        self._logs: OrderedDict[str, tuple[WritableFile, int]] = OrderedDict()
        """Open logs and their lengths, the last written log at the end."""
        self._unsynced: set[str] = set()
        self._unsynced_directories: set[Path] = set()

    def apply(self, operations: Sequence[Operation]) -> set[str]:
        """Apply operations; return the paths of changed, existing files.

        Raises `OSError` if the disk refuses, and `CorruptDataError`.
        """
        changed: set[str] = set()
        for operation in operations:
            check_path(operation)
            match operation:
                case Append(path, position, data):
                    self._append(path, position, data)
                    changed.add(path)
                case Replace(path, data):
                    self._replace(path, data)
                    changed.add(path)
                case Remove(path):
                    self._remove(path)
                    changed.discard(path)
                case MakeDirectory(path):
                    self._filesystem.make_directory(self._root / path)
                case Move(source, target):
                    if (self._root / source).is_dir():
                        self._remove_tree(target)
                        self._move(source, target)
                        changed = {path for path in changed if not _is_below(path, source, target)}
                case RemoveTree(path):
                    self._remove_tree(path)
                    changed = {name for name in changed if not _is_below(name, path)}
        return changed

    def sync(self) -> None:
        """Return once all applied operations are durable; raises `OSError`."""
        for path in sorted(self._unsynced):
            self._sync_file(path)
        for directory in sorted(self._unsynced_directories):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                self._filesystem.sync_directory(directory)
        self._unsynced.clear()
        self._unsynced_directories.clear()

    def check(self, tree: JournalTree) -> None:
        """Raise `CorruptDataError` unless all files of a tree exist with the right lengths.

        A file removed by a stranger was still written through its open descriptor.
        """
        for file in tree:
            try:
                size_bytes = self._filesystem.size_bytes(self._root / file.path)
            except FileNotFoundError:
                size_bytes = -1
            if size_bytes != file.length:
                raise CorruptDataError(
                    f"{file.path} differs from the journal: another process has changed the file"
                )

    def close(self) -> None:
        """Close the files; unsynced bytes may be lost in a crash."""
        for path in list(self._logs):
            self._close_log(path)

    def _append(self, path: str, position: int, data: Buffer) -> None:
        log = self._logs.pop(path, None) or self._open_log(path)
        file, size_bytes = log
        if position != size_bytes:
            file.close()
            raise CorruptDataError(
                f"the journal appends to {path} at byte {position}, but it has {size_bytes} bytes"
            )
        try:
            file.write([data], position=position)
        except OSError:
            file.close()
            raise
        self._logs[path] = (file, position + len(data))
        self._unsynced.add(path)
        if len(self._logs) > _OPEN_LOGS_MAX:
            self._close_log(next(iter(self._logs)))

    def _open_log(self, path: str) -> tuple[WritableFile, int]:
        try:
            size_bytes = self._filesystem.size_bytes(self._root / path)
            return self._filesystem.open(self._root / path), size_bytes
        except FileNotFoundError as error:
            raise CorruptDataError(f"the journal appends to {path}, which it never made") from error

    def _replace(self, path: str, data: Buffer) -> None:
        self._close_log(path)
        whole = self._root / path
        whole.parent.mkdir(parents=True, exist_ok=True)
        replace_durably(self._filesystem, whole, [data], is_synced=False)
        self._unsynced.add(path)
        self._unsynced_directories.add(whole.parent)

    def _remove(self, path: str) -> None:
        self._close_log(path)
        with contextlib.suppress(FileNotFoundError):
            self._filesystem.remove(self._root / path)
        self._unsynced.discard(path)
        self._unsynced_directories.add((self._root / path).parent)

    def _move(self, source: str, target: str) -> None:
        self._forget_below(source)
        self._leave(source)
        self._filesystem.move_directory(self._root / source, self._root / target)
        self._unsynced_directories.add((self._root / target).parent)

    def _remove_tree(self, path: str) -> None:
        self._forget_below(path)
        self._leave(path)
        self._filesystem.remove_tree(self._root / path)
        self._unsynced_directories.add((self._root / path).parent)

    def _forget_below(self, directory: str) -> None:
        """Close and sync the files in a directory before the directory loses its name."""
        for path in [path for path in self._logs if _is_below(path, directory)]:
            self._close_log(path)
        below = [path for path in self._unsynced if _is_below(path, directory)]
        for path in below:
            self._sync_file(path)
        self._unsynced.difference_update(below)

    def _sync_file(self, path: str) -> None:
        try:
            file = self._filesystem.open(self._root / path)
        except FileNotFoundError:
            return
        try:
            file.sync()
        finally:
            file.close()

    def _close_log(self, path: str) -> None:
        log = self._logs.pop(path, None)
        if log is not None:
            log[0].close()


def _is_below(path: str, *directories: str) -> bool:
    return any(path.startswith(directory + "/") for directory in directories)
