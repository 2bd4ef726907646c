"""The file operations of a data directory, and the local disk behind them.

Every durable change of a data directory passes through one `Filesystem`, and so does every byte
read by the log. Tests replace the filesystem by one losing unsynced bytes, a service with a journal
by a recording one. A failing operation raises `OSError`; translating the error is the caller's job,
because only the caller knows the operations in flight.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol, TypeAlias

__all__ = [
    "Buffer",
    "Filesystem",
    "LocalFilesystem",
    "WritableFile",
    "rename_in_order",
    "replace_durably",
    "replace_in_order",
    "write_buffers",
]

Buffer: TypeAlias = bytes | memoryview

# The most buffers of one writev on Linux, as in sysconf.
_IOV_MAX: Final = 1024
# Below this size a copy into one buffer is cheaper than a long list of small buffers.
_COALESCE_BYTES_MAX: Final = 256 * 1024
# A mapped file costs a file descriptor (mmap duplicates it), and descriptors are scarce.
_MAPPED_FILES_MAX: Final = 256

_EMPTY: Final = memoryview(b"")
_TEMPORARY: Final = ".tmp"


class WritableFile(Protocol):
    """An open file. One thread at a time; nothing is durable before `sync` returns."""

    def write(self, buffers: Sequence[Buffer], *, position: int) -> None:
        """Write all of `buffers`, in order, from byte `position` on.

        After an `OSError` any part of the buffers may have been written.
        """

    def sync(self) -> None:
        """Return only when every byte and the length of this file are durable.

        After an `OSError` bytes written since the last successful sync are in an unknown state, and
        a later successful sync proves nothing about them.
        """

    def truncate(self, size_bytes: int) -> None:
        """Cut the file to `size_bytes`; durable after the next `sync`."""

    def close(self) -> None:
        """Release the file without syncing it; closing twice is harmless."""


class Filesystem(Protocol):
    """Files and directories. Safe to call from any thread; a path has one writer at a time."""

    def make_directory(self, directory: Path) -> None:
        """Create `directory` and its missing parents; the new entries are durable."""

    def list_names(self, directory: Path) -> list[str]:
        """Return the names of the files in `directory`, sorted; empty for a missing directory."""

    def has_directory(self, directory: Path) -> bool:
        """Whether the directory exists."""

    def size_bytes(self, path: Path) -> int:
        """Return the current length of a file."""

    def create(self, path: Path) -> WritableFile:
        """Open `path` for writing, empty; its name is durable after `sync_directory`."""

    def open(self, path: Path) -> WritableFile:
        """Open an existing file for writing, keeping its contents."""

    def read(self, path: Path, *, bytes_max: int, position: int = 0) -> bytes:
        """Return the bytes of a file from `position` on, at most `bytes_max`."""

    def map(self, path: Path, size_bytes: int) -> memoryview:
        """Return a read-only view of at least the first `size_bytes` bytes of a file.

        The view of a file that was cut is shorter. The view stays valid when the file grows or is
        removed. Reads past the last written end of the file are forbidden: truncated bytes vanish
        from the view, and a read of them ends the process.
        """

    def rename(self, source: Path, target: Path) -> None:
        """Move `source` over `target`; durable after `sync_directory`."""

    def rename_in_order(self, renames: Sequence[tuple[Path, Path]]) -> None:
        """Do each `rename` in turn, all in one directory; durable after `sync_directory`.

        The last rename happens only when the earlier ones are durable.
        """

    def remove(self, path: Path) -> None:
        """Remove a file; durable after `sync_directory`. Views of it stay valid."""

    def move_directory(self, source: Path, target: Path) -> None:
        """Rename a directory with its contents; durable after `sync_directory`."""

    def remove_tree(self, directory: Path) -> None:
        """Remove a directory with its contents; files refused by the disk stay."""

    def forget(self, directory: Path) -> None:
        """Close cached files in `directory`; existing views stay valid."""

    def sync_directory(self, directory: Path) -> None:
        """Return only when the current names in `directory` are durable."""


def replace_durably(
    filesystem: Filesystem, path: Path, buffers: Sequence[Buffer], *, is_synced: bool = True
) -> None:
    """Replace the contents of `path` as a whole: a crash leaves the old or the new contents.

    The contents are durable on return; the name is after the caller's `sync_directory`. Without
    `is_synced` a power cut may leave the name with a part of the contents, until a later sync.
    """
    temporary = path.with_name(path.name + _TEMPORARY)
    file = filesystem.create(temporary)
    try:
        file.write(buffers, position=0)
        if is_synced:
            file.sync()
    except OSError:
        # A full disk gets its space back.
        with contextlib.suppress(OSError):
            filesystem.remove(temporary)
        raise
    finally:
        file.close()
    filesystem.rename(temporary, path)


def replace_in_order(
    filesystem: Filesystem, files: Sequence[tuple[Path, Sequence[Buffer]]]
) -> None:
    """Replace files of one directory in order: after a crash only the first ones may be new.

    Each as `replace_durably`; the last file is new only if all are, also after a power cut.
    """
    renames: list[tuple[Path, Path]] = []
    try:
        for path, buffers in files:
            temporary = path.with_name(path.name + _TEMPORARY)
            renames.append((temporary, path))
            file = filesystem.create(temporary)
            try:
                file.write(buffers, position=0)
                file.sync()
            finally:
                file.close()
    except OSError:
        for temporary, _ in renames:
            with contextlib.suppress(OSError):
                filesystem.remove(temporary)
        raise
    filesystem.rename_in_order(renames)


def rename_in_order(filesystem: Filesystem, renames: Sequence[tuple[Path, Path]]) -> None:
    """Implement `Filesystem.rename_in_order` by the other methods of a filesystem."""
    *earlier_renames, (source, target) = renames
    for each in earlier_renames:
        filesystem.rename(*each)
    if earlier_renames:
        filesystem.sync_directory(target.parent)
    filesystem.rename(source, target)


class LocalWritableFile:
    """`WritableFile` over a file descriptor."""

    def __init__(self, path: Path, flags: int) -> None:
        self._descriptor = os.open(path, flags | os.O_RDWR | os.O_CLOEXEC, 0o644)

    def write(self, buffers: Sequence[Buffer], *, position: int) -> None:
        """See `WritableFile.write`: one system call unless the list is long."""
        if sum(map(len, buffers)) <= _COALESCE_BYTES_MAX:
            buffers = [b"".join(buffers)]
        write_buffers(self._descriptor, buffers, position=position)

    def sync(self) -> None:
        """See `WritableFile.sync`: fdatasync, including the length."""
        os.fdatasync(self._descriptor)

    def truncate(self, size_bytes: int) -> None:
        """See `WritableFile.truncate`."""
        os.ftruncate(self._descriptor, size_bytes)

    def close(self) -> None:
        """See `WritableFile.close`."""
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)


def write_buffers(descriptor: int, buffers: Sequence[Buffer], *, position: int) -> None:
    """Write all of `buffers`, in order, to an open file from byte `position` on."""
    for start in range(0, len(buffers), _IOV_MAX):
        some = list(buffers[start : start + _IOV_MAX])
        remaining_bytes = sum(map(len, some))
        while remaining_bytes:
            written = os.pwritev(descriptor, some, position)
            position += written
            remaining_bytes -= written
            if remaining_bytes:
                some = _without_first(some, written)


def _without_first(buffers: list[Buffer], count: int) -> list[Buffer]:
    """Return `buffers` without their first `count` bytes."""
    for index, buffer in enumerate(buffers):
        if count < len(buffer):
            return [memoryview(buffer)[count:], *buffers[index + 1 :]]
        count -= len(buffer)
    return []


class LocalFilesystem:
    """`Filesystem` on the local disk, with a bounded set of mapped files."""

    def __init__(self, *, mapped_files_max: int = _MAPPED_FILES_MAX) -> None:
        self._mapped_files_max = mapped_files_max
        self._maps: OrderedDict[Path, memoryview] = OrderedDict()
        self._maps_lock = threading.Lock()

    def make_directory(self, directory: Path) -> None:
        """See `Filesystem.make_directory`."""
        missing = [p for p in (directory, *directory.parents) if not p.exists()]
        directory.mkdir(parents=True, exist_ok=True)
        for created in reversed(missing):
            self.sync_directory(created.parent)

    def list_names(self, directory: Path) -> list[str]:
        """See `Filesystem.list_names`."""
        if not directory.exists():
            return []
        with os.scandir(directory) as entries:
            return sorted(entry.name for entry in entries if entry.is_file())

    def has_directory(self, directory: Path) -> bool:
        """See `Filesystem.has_directory`."""
        return directory.is_dir()

    def size_bytes(self, path: Path) -> int:
        """See `Filesystem.size_bytes`."""
        return path.stat().st_size

    def create(self, path: Path) -> WritableFile:
        """See `Filesystem.create`."""
        return LocalWritableFile(path, os.O_CREAT | os.O_TRUNC)

    def open(self, path: Path) -> WritableFile:
        """See `Filesystem.open`."""
        return LocalWritableFile(path, 0)

    def read(self, path: Path, *, bytes_max: int, position: int = 0) -> bytes:
        """See `Filesystem.read`."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.pread(descriptor, bytes_max, position)
        finally:
            os.close(descriptor)

    def map(self, path: Path, size_bytes: int) -> memoryview:
        """See `Filesystem.map`: maps are shared; the least recently used map is dropped."""
        with self._maps_lock:
            view = self._maps.get(path)
            if view is not None and size_bytes <= min(len(view), _file_bytes(view)):
                self._maps.move_to_end(path)
                return view
        view = self._map_now(path)
        with self._maps_lock:
            self._maps[path] = view
            self._maps.move_to_end(path)
            # A map is dropped, never closed: readers may still hold views of it.
            while len(self._maps) > self._mapped_files_max:
                self._maps.popitem(last=False)
        return view

    @staticmethod
    def _map_now(path: Path) -> memoryview:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                return _EMPTY
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))

    def rename(self, source: Path, target: Path) -> None:
        """See `Filesystem.rename`."""
        source.rename(target)
        self._forget(source, target)

    def rename_in_order(self, renames: Sequence[tuple[Path, Path]]) -> None:
        """See `Filesystem.rename_in_order`."""
        rename_in_order(self, renames)

    def remove(self, path: Path) -> None:
        """See `Filesystem.remove`."""
        path.unlink()
        self._forget(path)

    def move_directory(self, source: Path, target: Path) -> None:
        """See `Filesystem.move_directory`."""
        source.rename(target)

    def remove_tree(self, directory: Path) -> None:
        """See `Filesystem.remove_tree`."""
        shutil.rmtree(directory, ignore_errors=True)

    def forget(self, directory: Path) -> None:
        """See `Filesystem.forget`."""
        with self._maps_lock:
            for path in [path for path in self._maps if path.parent == directory]:
                del self._maps[path]

    def _forget(self, *paths: Path) -> None:
        with self._maps_lock:
            for path in paths:
                self._maps.pop(path, None)

    def sync_directory(self, directory: Path) -> None:
        """See `Filesystem.sync_directory`."""
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            with contextlib.suppress(OSError):
                os.close(descriptor)


def _file_bytes(view: memoryview) -> int:
    """Return the present length of a mapped file."""
    return view.obj.size() if isinstance(view.obj, mmap.mmap) else len(view)
