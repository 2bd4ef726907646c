"""Objects as files of a directory: for tests, one machine, and file systems that are shared.

An object appears whole and at once: it is written and synced under another name, then linked
(`create`) or renamed (`replace`), and its directory synced. So the directory must be of a file
system whose hard links are atomic for all who mount it, as NFS version 4 promises.

What is made is its owner's alone, as a data directory is: it has the same rows.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from streamhouse.storage_service.journal.object_store import (
    LIST_COUNT_MAX,
    ObjectEntry,
    ObjectExistsError,
    ObjectNotFoundError,
    ObjectTooLargeError,
    StoreRefusedError,
    StoreUnavailableError,
)
from streamhouse.storage_service.log.filesystem import Buffer

__all__ = ["FileObjectStore"]

# No key has it: names that are being written.
_STAGED: Final = "#"
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


class FileObjectStore:
    """`ObjectStore` of a directory, which is made with the first object."""

    def __init__(self, root: Path) -> None:
        self._root = root

    @property
    def url(self) -> str:
        """See `ObjectStore.url`."""
        return f"file://{self._root}"

    def create(self, key: str, buffers: Sequence[Buffer]) -> None:
        """See `ObjectStore.create`."""
        path = self._path(key)
        with self._errors(key), self._staged(path, buffers) as staged:
            try:
                os.link(staged, path)
            except FileExistsError as error:
                # Whoever finds it depends on it: it may have been linked a moment ago.
                _sync_directory(path.parent)
                raise ObjectExistsError(f"{key} exists") from error
            _sync_directory(path.parent)

    def replace(self, key: str, data: Buffer) -> None:
        """See `ObjectStore.replace`."""
        path = self._path(key)
        with self._errors(key), self._staged(path, [data]) as staged:
            staged.replace(path)
            _sync_directory(path.parent)

    def get(self, key: str, *, bytes_max: int) -> memoryview:
        """See `ObjectStore.get`."""
        with self._errors(key), self._path(key).open("rb") as file:
            if (size := os.fstat(file.fileno()).st_size) > bytes_max:
                raise ObjectTooLargeError(f"{key} has {size} bytes, more than {bytes_max}")
            return memoryview(file.read(bytes_max))

    def get_range(self, key: str, *, start: int, length: int) -> memoryview:
        """See `ObjectStore.get_range`."""
        with self._errors(key), self._path(key).open("rb") as file:
            found = os.pread(file.fileno(), length, start)
        if len(found) != length:
            raise ObjectNotFoundError(f"{key} has no bytes {start} to {start + length}")
        return memoryview(found)

    def list_objects(
        self, folder: str, *, start_after: str = "", count_max: int = LIST_COUNT_MAX
    ) -> list[ObjectEntry]:
        """See `ObjectStore.list_objects`."""
        found: list[ObjectEntry] = []
        with self._errors(folder):
            for key, path in self._walk(self._path(folder.rstrip("/")), folder, start_after):
                try:
                    size_bytes = path.stat().st_size
                except FileNotFoundError:
                    continue
                found.append(ObjectEntry(key, size_bytes))
                if len(found) == count_max:
                    break
        return found

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
        """Yield the keys after `start_after`, in order; subtrees before it are not opened."""
        try:
            with os.scandir(directory) as entries:
                # A directory stands where its keys do: with the `/` that follows its name.
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

    @contextmanager
    def _staged(self, path: Path, buffers: Sequence[Buffer]) -> Iterator[Path]:
        staged = path.with_name(f"{path.name}{_STAGED}{secrets.token_hex(8)}")
        self._make_directory(path.parent)
        try:
            with os.fdopen(os.open(staged, _NEW, 0o600), "wb") as file:
                file.writelines(buffers)
                file.flush()
                os.fsync(file.fileno())
            yield staged
        finally:
            staged.unlink(missing_ok=True)

    def _make_directory(self, directory: Path) -> None:
        if directory.is_dir():
            return
        if directory != directory.parent:
            self._make_directory(directory.parent)
        directory.mkdir(mode=0o700, exist_ok=True)
        _sync_directory(directory.parent)

    @contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        """Translate what the operating system says."""
        try:
            yield
        except FileNotFoundError as error:
            raise ObjectNotFoundError(f"{key} is not there") from error
        except PermissionError as error:
            raise StoreRefusedError(f"{self.url}: {key}: {error.strerror}") from error
        except OSError as error:
            raise StoreUnavailableError(f"{self.url}: {key}: {error.strerror}") from error


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
