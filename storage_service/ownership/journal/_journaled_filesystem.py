"""A `Filesystem` recording every durable change of a data directory in its journal.

Order of the local disk and the journal (decision 0020 has the reasons):
- bytes of a `.log` file: synced here, then recorded. Truncated bytes were never recorded
- any other file, as a whole: written as `X.tmp` and synced, recorded, stored, and only then `X`
- a file or a directory removed, a directory made: recorded, then done
- a directory moved: stored, then done

So a file here is never ahead of the journal, except the ends of `.log` files and the slots of
`durable.mark`, overwritten in place. A local failure after the journal stored a change ends the
process: the next start applies the journal.

Files outside of the journal (`operations.is_journalled`) are changed without a record.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol
from weakref import WeakValueDictionary

from streamhouse.core.errors import (
    CorruptDataError,
    InternalError,
    NotOwnerError,
    UnknownOutcomeError,
)
from streamhouse.storage_service.log.durable_mark import MARK_NAME
from streamhouse.storage_service.log.filesystem import (
    Buffer,
    Filesystem,
    WritableFile,
    rename_in_order,
)
from streamhouse.storage_service.log.replica import Replica
from streamhouse.storage_service.ownership.journal.operations import (
    Append,
    MakeDirectory,
    Move,
    Operation,
    Remove,
    RemoveTree,
    Replace,
    is_journalled,
    is_journalled_directory,
    is_movable,
)

__all__ = ["Journal", "JournaledFilesystem"]

_TEMPORARY: Final = ".tmp"
_LOG: Final = ".log"


class Journal(Replica, Protocol):
    """Records operations, stored in the same order. Safe to call from any thread."""

    def record(self, operation: Operation) -> int:
        """Record an operation; return the position after. Does not wait for the store.

        The data must not change any more. Raises `NotOwnerError` after a takeover.
        """


class JournaledFilesystem:
    """See the module. `log_bytes` are the journalled lengths of `.log` files.

    `on_failure` gets the reason to end the process, and does not return.
    """

    def __init__(
        self,
        inner: Filesystem,
        root: Path,
        journal: Journal,
        *,
        log_bytes: Mapping[str, int],
        on_failure: Callable[[str], None],
    ) -> None:
        self._inner = inner
        self._root = root
        self._journal = journal
        self._on_failure = on_failure
        self._log_bytes = dict(log_bytes)
        self._written: dict[str, list[Buffer]] = {}
        """The contents of temporary files, by their final path."""
        self._open_logs = WeakValueDictionary[str, JournaledLogFile]()
        # Held while recording, so that a file's name does not change meanwhile.
        self._lock = threading.Lock()

    # -- reads ------------------------------------------------------------------------------------

    def list_names(self, directory: Path) -> list[str]:
        """See `Filesystem.list_names`."""
        return self._inner.list_names(directory)

    def has_directory(self, directory: Path) -> bool:
        """See `Filesystem.has_directory`."""
        return self._inner.has_directory(directory)

    def size_bytes(self, path: Path) -> int:
        """See `Filesystem.size_bytes`."""
        return self._inner.size_bytes(path)

    def read(self, path: Path, *, bytes_max: int, position: int = 0) -> bytes:
        """See `Filesystem.read`."""
        return self._inner.read(path, bytes_max=bytes_max, position=position)

    def map(self, path: Path, size_bytes: int) -> memoryview:
        """See `Filesystem.map`."""
        return self._inner.map(path, size_bytes)

    def forget(self, directory: Path) -> None:
        """See `Filesystem.forget`."""
        self._inner.forget(directory)

    def sync_directory(self, directory: Path) -> None:
        """See `Filesystem.sync_directory`."""
        self._inner.sync_directory(directory)

    # -- files -----------------------------------------------------------------------------------

    def create(self, path: Path) -> WritableFile:
        """See `Filesystem.create`; a file of the journal gets its name by `rename`."""
        name = self._name(path)
        if is_journalled(name):
            raise InternalError(f"{name} is written in place, which the journal cannot follow")
        file = self._inner.create(path)
        target = name.removesuffix(_TEMPORARY)
        if target == name or not is_journalled(target):
            return file
        written: list[Buffer] = []
        with self._lock:
            self._written[target] = written
        return _TemporaryFile(file, written)

    def open(self, path: Path) -> WritableFile:
        """See `Filesystem.open`; only logs and marks are written afterwards."""
        name = self._name(path)
        if not is_journalled(name) or path.name == MARK_NAME:
            return self._inner.open(path)
        if path.suffix != _LOG:
            return _WholeFile(self._inner.open(path), name)
        size_bytes = self._inner.size_bytes(path)
        with self._lock:
            journalled_bytes = self._log_bytes.get(name)
            if journalled_bytes is None:
                raise InternalError(f"{name} is to be written, but the journal does not have it")
            if size_bytes < journalled_bytes:
                raise _cut_off(name, size_bytes, journalled_bytes)
            log = JournaledLogFile(
                self._inner.open(path),
                name,
                journalled_bytes=journalled_bytes,
                size_bytes=size_bytes,
                read=lambda: self._inner.map(path, self._inner.size_bytes(path)),
                record=self._record_append,
            )
            self._open_logs[name] = log
        return log

    def _record_append(self, file: JournaledLogFile, data: Buffer) -> None:
        with self._lock:
            # A file removed while open has no name.
            if file.name:
                self._journal.record(Append(file.name, file.journalled_bytes, data))
                self._log_bytes[file.name] = file.journalled_bytes + len(data)

    def rename(self, source: Path, target: Path) -> None:
        """See `Filesystem.rename`: the contents of a temporary file are stored first."""
        name, former = self._name(target), self._name(source)
        if not is_journalled(name):
            if is_journalled(former):
                self._record(Remove(former))
            self._inner.rename(source, target)
            return
        position = self._record_replaced(former, name)
        self._wait_stored(name, position)
        self._do_stored(name, self._inner.rename, source, target)

    def rename_in_order(self, renames: Sequence[tuple[Path, Path]]) -> None:
        """See `Filesystem.rename_in_order`: all contents are stored first, in this order.

        Waits for the store once.
        """
        names = [self._name(target) for _, target in renames]
        if not all(map(is_journalled, names)):
            return rename_in_order(self, renames)
        for (source, _), name in zip(renames, names, strict=True):
            position = self._record_replaced(self._name(source), name)
        self._wait_stored(names[-1], position)
        self._do_stored(names[-1], self._inner.rename_in_order, renames)

    def _record_replaced(self, former: str, name: str) -> int:
        """Record the contents written to `former` as `name`; return the position after."""
        with self._lock:
            written = self._written.pop(name, None)
            if written is None or former != name + _TEMPORARY:
                raise InternalError(f"{name} is renamed without a write to {name}{_TEMPORARY}")
            contents = written[0] if len(written) == 1 else b"".join(written)
            position = self._journal.record(Replace(name, contents))
            if name.endswith(_LOG):
                self._log_bytes[name] = len(contents)
        return position

    def remove(self, path: Path) -> None:
        """See `Filesystem.remove`."""
        name = self._name(path)
        if is_journalled(name):
            # A missing file raises before anything is recorded.
            self._inner.size_bytes(path)
            self._record(Remove(name))
        elif name.endswith(_TEMPORARY):
            with self._lock:
                self._written.pop(name.removesuffix(_TEMPORARY), None)
        self._inner.remove(path)

    # -- directories -----------------------------------------------------------------------------

    def make_directory(self, directory: Path) -> None:
        """See `Filesystem.make_directory`."""
        name = self._name(directory)
        if is_journalled_directory(name) and not self._inner.has_directory(directory):
            self._record(MakeDirectory(name))
        self._inner.make_directory(directory)

    def move_directory(self, source: Path, target: Path) -> None:
        """See `Filesystem.move_directory`."""
        old, new = self._name(source), self._name(target)
        if not is_movable(old, new):
            raise InternalError(f"{source} is moved to {target}, which the journal cannot follow")
        for path, is_there, code in ((source, True, errno.ENOENT), (target, False, errno.EEXIST)):
            if self._inner.has_directory(path) != is_there:
                raise OSError(code, os.strerror(code), str(path))
        position = self._record(Move(old, new))
        self._wait_stored(new, position)
        self._do_stored(new, self._inner.move_directory, source, target)

    def remove_tree(self, directory: Path) -> None:
        """See `Filesystem.remove_tree`."""
        name = self._name(directory)
        if is_journalled_directory(name) and self._inner.has_directory(directory):
            self._record(RemoveTree(name))
        self._inner.remove_tree(directory)

    # -- inside ----------------------------------------------------------------------------------

    def _name(self, path: Path) -> str:
        """Return a path relative to the data directory; empty for a path outside."""
        return path.relative_to(self._root).as_posix() if path.is_relative_to(self._root) else ""

    def _record(self, operation: Operation) -> int:
        with self._lock:
            position = self._journal.record(operation)
            match operation:
                case Remove(path):
                    self._follow(path, None)
                case RemoveTree(path):
                    for name in self._logs_below(path):
                        self._follow(name, None)
                case Move(source, target):
                    for name in self._logs_below(source):
                        self._follow(name, target + name[len(source) :])
                case _:
                    pass
        return position

    def _logs_below(self, directory: str) -> list[str]:
        return [name for name in self._log_bytes if name.startswith(directory + "/")]

    def _follow(self, log: str, target: str | None) -> None:
        """Rename a log in the bookkeeping, or forget the log if `target` is None."""
        length, file = self._log_bytes.pop(log, None), self._open_logs.pop(log, None)
        if length is not None and target is not None:
            self._log_bytes[target] = length
        if file is not None:
            file.name = target or ""
            if target is not None:
                self._open_logs[target] = file

    def _wait_stored(self, name: str, position: int) -> None:
        try:
            self._journal.wait_stored(position)
        except NotOwnerError as error:
            # The operation was in flight: the next owner may have the operation or not.
            raise UnknownOutcomeError(
                f"{name}: another process took over before the journal answered: {error.message}"
            ) from error

    def _do_stored(self, name: str, do: Callable[..., None], *args: object) -> None:
        try:
            do(*args)
        except OSError as error:
            self._on_failure(
                f"{name} is in the journal, but the disk refused it: {error}; the next start makes"
                " it as the journal says"
            )
            raise


class JournaledLogFile:
    """`WritableFile` of a log: bytes made durable by a sync are recorded, in order and once."""

    def __init__(
        self,
        inner: WritableFile,
        name: str,
        *,
        journalled_bytes: int,
        size_bytes: int,
        read: Callable[[], memoryview],
        record: Callable[[JournaledLogFile, Buffer], None],
    ) -> None:
        self._inner = inner
        self.name = name
        """The file's name in the journal; empty after its removal."""
        self.journalled_bytes = journalled_bytes
        self._read = read
        self._record = record
        self._end = size_bytes
        # Bytes written since the last sync; None if other bytes are unrecorded, too.
        self._unsynced: list[bytes] | None = None if size_bytes > journalled_bytes else []

    def write(self, buffers: Sequence[Buffer], *, position: int) -> None:
        """See `WritableFile.write`."""
        if position != self._end:
            raise InternalError(f"{self.name} is written at byte {position}, not at its end")
        # Joined once, for the disk and for the journal.
        data = b"".join(buffers)
        self._inner.write([data], position=position)
        # After a refused write the end stays: bytes behind the end have no meaning.
        self._end = position + len(data)
        if self._unsynced is not None:
            self._unsynced.append(data)

    def sync(self) -> None:
        """See `WritableFile.sync`."""
        self._inner.sync()
        if self._end == self.journalled_bytes:
            return
        if self._unsynced is None:
            data = bytes(self._read()[self.journalled_bytes : self._end])
        else:
            data = b"".join(self._unsynced)
        assert len(data) == self._end - self.journalled_bytes
        self._record(self, data)
        self.journalled_bytes = self._end
        self._unsynced = []

    def truncate(self, size_bytes: int) -> None:
        """See `WritableFile.truncate`; journalled bytes cannot be truncated."""
        if size_bytes < self.journalled_bytes:
            raise _cut_off(self.name, size_bytes, self.journalled_bytes)
        # Also if the local truncation fails: the bytes must not reach the journal.
        self._end = size_bytes
        self._unsynced = None if size_bytes > self.journalled_bytes else []
        self._inner.truncate(size_bytes)

    def close(self) -> None:
        """See `WritableFile.close`."""
        self._inner.close()


class _TemporaryFile:
    """`WritableFile` remembering its contents from the beginning on."""

    def __init__(self, inner: WritableFile, written: list[Buffer]) -> None:
        self._inner = inner
        self._written = written
        self._end = 0

    def write(self, buffers: Sequence[Buffer], *, position: int) -> None:
        if position != self._end:
            raise InternalError(f"a temporary file is written at byte {position}, not at its end")
        self._inner.write(buffers, position=position)
        self._end += sum(map(len, buffers))
        self._written += buffers

    def sync(self) -> None:
        self._inner.sync()

    def truncate(self, size_bytes: int) -> None:
        raise InternalError(f"a temporary file is cut to {size_bytes} bytes")

    def close(self) -> None:
        self._inner.close()


class _WholeFile:
    """`WritableFile` of a file replaced only as a whole; opened to be synced."""

    def __init__(self, inner: WritableFile, name: str) -> None:
        self._inner = inner
        self._name = name

    def write(self, buffers: Sequence[Buffer], *, position: int) -> None:
        raise InternalError(
            f"{self._name} is written at byte {position} ({len(buffers)} buffers), which the"
            " journal cannot follow"
        )

    def sync(self) -> None:
        self._inner.sync()

    def truncate(self, size_bytes: int) -> None:
        raise InternalError(
            f"{self._name} is cut to {size_bytes} bytes, which the journal cannot follow"
        )

    def close(self) -> None:
        self._inner.close()


def _cut_off(name: str, size_bytes: int, journalled_bytes: int) -> CorruptDataError:
    return CorruptDataError(
        f"{name} is whole up to byte {size_bytes} only, but the journal has {journalled_bytes}"
        " bytes of it: the file is damaged; move it away and start again, and it is made of the"
        " journal"
    )
