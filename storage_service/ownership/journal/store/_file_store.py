"""Objects as files of a directory: for tests, one machine, and shared file systems.

An object appears whole and at once: written and synced without a name or, if the file system lacks
unnamed files, under another name; then linked (`create`) or renamed (`replace`), and its directory
synced. So the file system needs atomic hard links for all its mounts, as NFS version 4 promises.
Files are readable by their owner only, like a data directory with the same rows.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from streamhouse.storage_service.log.filesystem import Buffer, write_buffers
from streamhouse.storage_service.ownership.journal.store.object_store import (
    LIST_COUNT_MAX,
    ObjectEntry,
    ObjectExistsError,
    ObjectNotFoundError,
    ObjectTooLargeError,
    StoreRefusedError,
    StoreUnavailableError,
)

__all__ = ["FileObjectStore"]

# Marks names being written; no key contains this character.
_STAGED: Final = "#"
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# Unnamed files exist on Linux only; NFS, for example, lacks unnamed files.
_UNNAMED: Final = getattr(os, "O_TMPFILE", 0)
_HAS_NO_UNNAMED: Final = {
    errno.EINVAL,
    errno.EISDIR,
    errno.ENOENT,
    errno.ENOTSUP,
    errno.EPERM,
    errno.EXDEV,
}


class FileObjectStore:
    """`ObjectStore` of a directory, created with the first object."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._has_unnamed = bool(_UNNAMED)

    @property
    def url(self) -> str:
        """See `ObjectStore.url`."""
        return f"file://{self._root}"

    def create(self, key: str, buffers: Sequence[Buffer]) -> None:
        """See `ObjectStore.create`."""
        path = self._path(key)
        with self._errors(key), self._opened(path.parent) as directory:
            try:
                if not (self._has_unnamed and self._create_unnamed(directory, path.name, buffers)):
                    with self._staged(path, buffers) as staged:
                        os.link(staged, path)
            except FileExistsError as error:
                # The caller depends on the existing object, perhaps linked only a moment ago.
                os.fsync(directory)
                raise ObjectExistsError(f"{key} exists") from error
            os.fsync(directory)

    def replace(self, key: str, data: Buffer) -> None:
        """See `ObjectStore.replace`."""
        path = self._path(key)
        with (
            self._errors(key),
            self._opened(path.parent) as directory,
            self._staged(path, [data]) as staged,
        ):
            staged.replace(path)
            os.fsync(directory)

    def get(self, key: str, *, bytes_max: int) -> memoryview:
        """See `ObjectStore.get`."""
        with self._errors(key), self._path(key).open("rb") as file:
            if (size := os.fstat(file.fileno()).st_size) > bytes_max:
                raise ObjectTooLargeError(f"{key} has {size} bytes, more than {bytes_max}")
            return memoryview(file.read(bytes_max))

    def get_range(self, key: str, *, start: int, length: int) -> memoryview:
        """See `ObjectStore.get_range`."""
        with self._errors(key), self._path(key).open("rb") as file:
            data = os.pread(file.fileno(), length, start)
        if len(data) != length:
            raise ObjectNotFoundError(f"{key} has no bytes {start} to {start + length}")
        return memoryview(data)

    def list_objects(
        self, folder: str, *, start_after: str = "", count_max: int = LIST_COUNT_MAX
    ) -> list[ObjectEntry]:
        """See `ObjectStore.list_objects`."""
        entries: list[ObjectEntry] = []
        with self._errors(folder):
            for key, path in self._walk(self._path(folder.rstrip("/")), folder, start_after):
                try:
                    size_bytes = path.stat().st_size
                except FileNotFoundError:
                    continue
                entries.append(ObjectEntry(key, size_bytes))
                if len(entries) == count_max:
                    break
        return entries

    def delete(self, keys: Sequence[str]) -> None:
        """See `ObjectStore.delete`."""
        for key in keys:
            with self._errors(key):
                self._path(key).unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        parts = key.split("/")
        assert all(part and part[0] != "." and _STAGED not in part for part in parts), key
        return self._root.joinpath(*parts)

    def _walk(self, directory: Path, folder: str, start_after: str) -> Iterator[tuple[str, Path]]:
        """Yield the keys after `start_after`, in order; earlier subtrees are not opened."""
        try:
            with os.scandir(directory) as entries:
                # A directory sorts like its keys: by its name with a trailing `/`.
                names = sorted(
                    entry.name + "/" if entry.is_dir() else entry.name
                    for entry in entries
                    if not entry.name.startswith(".") and _STAGED not in entry.name
                )
        except (FileNotFoundError, NotADirectoryError):
            return
        for name in names:
            key = folder + name
            if not name.endswith("/"):
                if key > start_after:
                    yield key, directory / name
            elif key > start_after or start_after.startswith(key):
                yield from self._walk(directory / name[:-1], key, start_after)

    def _create_unnamed(self, directory: int, name: str, buffers: Sequence[Buffer]) -> bool:
        """Write an object and link the file; False if the file system lacks unnamed files."""
        try:
            file = os.open(".", _UNNAMED | os.O_WRONLY | os.O_CLOEXEC, 0o600, dir_fd=directory)
        except OSError as error:
            return self._without_unnamed(error)
        try:
            write_buffers(file, buffers, position=0)
            os.fsync(file)
            source = f"/proc/self/fd/{file}"
            try:
                # The link in /proc is followed only with directory descriptors.
                os.link(source, name, src_dir_fd=directory, dst_dir_fd=directory)
            except FileExistsError:
                raise
            except OSError as error:
                return self._without_unnamed(error)
        finally:
            os.close(file)
        return True

    def _without_unnamed(self, error: OSError) -> bool:
        if error.errno not in _HAS_NO_UNNAMED:
            raise error
        self._has_unnamed = False
        return False

    @contextmanager
    def _staged(self, path: Path, buffers: Sequence[Buffer]) -> Iterator[Path]:
        staged = path.with_name(f"{path.name}{_STAGED}{secrets.token_hex(8)}")
        try:
            file = os.open(staged, _NEW, 0o600)
            try:
                write_buffers(file, buffers, position=0)
                os.fsync(file)
            finally:
                os.close(file)
            yield staged
        finally:
            staged.unlink(missing_ok=True)

    @contextmanager
    def _opened(self, directory: Path) -> Iterator[int]:
        """Yield a directory's descriptor, after creating a missing directory."""
        try:
            descriptor = os.open(directory, _DIRECTORY)
        except FileNotFoundError:
            self._make_directory(directory)
            descriptor = os.open(directory, _DIRECTORY)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _make_directory(self, directory: Path) -> None:
        if directory.is_dir():
            return
        if directory != directory.parent:
            self._make_directory(directory.parent)
        directory.mkdir(mode=0o700, exist_ok=True)
        _sync_directory(directory.parent)

    @contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        """Translate the errors of the operating system."""
        try:
            yield
        except FileNotFoundError as error:
            raise ObjectNotFoundError(f"{key} is not there") from error
        except PermissionError as error:
            raise StoreRefusedError(f"{self.url}: {key}: {error.strerror}") from error
        except OSError as error:
            raise StoreUnavailableError(f"{self.url}: {key}: {error.strerror}") from error


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, _DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
