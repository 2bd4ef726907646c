"""The Iceberg library's file IO over our own access to lake files.

The library's stock file IO imports `pyarrow.dataset` and with it pandas: a third of what a process
needs to start.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Final
from urllib.parse import urlsplit

from pyiceberg.io import (
    PY_IO_IMPL,
    FileIO,
    InputFile,
    InputStream,
    OutputFile,
    OutputStream,
)

from streamhouse.core.errors import StreamhouseError
from streamhouse.lake.files.lake_filesystem import LakeFilesystem

__all__ = ["LakeIO", "ReadOnlyLakeIO", "with_file_io"]

_SCHEMES: Final = ("file", "s3", "s3a", "s3n")

_Errors = Callable[[], AbstractContextManager[None]]


def with_file_io(properties: dict[str, str], kind: type[FileIO]) -> dict[str, str]:
    """Return the properties of a catalog whose tables are read and written by `kind`.

    A catalog keeps its own file IO, and the library's where the warehouse is in another store.
    """
    scheme = urlsplit(properties.get("warehouse", "")).scheme
    if scheme not in _SCHEMES or PY_IO_IMPL in properties:
        return properties
    return {**properties, PY_IO_IMPL: f"{kind.__module__}.{kind.__name__}"}


@contextlib.contextmanager
def _stock_errors() -> Iterator[None]:
    """Raise what the disk or the store said, as the library's stock file IO does.

    After a commit was sent, an error of ours would read as a refusal of the commit.
    """
    try:
        yield
    except StreamhouseError as error:
        if isinstance(error.__cause__, OSError):
            raise error.__cause__ from None
        raise


class _LakeFile(InputFile, OutputFile):
    """One file; `errors` makes of ours what its IO raises."""

    def __init__(self, filesystem: LakeFilesystem, location: str, errors: _Errors) -> None:
        super().__init__(location)
        self._filesystem = filesystem
        self._errors = errors

    def __len__(self) -> int:
        with self._errors():
            return self._filesystem.size(self.location)

    def exists(self) -> bool:
        """Whether the file is there."""
        with self._errors():
            try:
                self._filesystem.size(self.location)
            except StreamhouseError as error:
                if isinstance(error.__cause__, FileNotFoundError):
                    return False
                raise
        return True

    def open(self, seekable: bool = True) -> InputStream:  # noqa: ARG002 - its signature
        """Open the file."""
        with self._errors():
            stream: InputStream = self._filesystem.open_input(self.location)
        return stream

    def create(self, overwrite: bool = False) -> OutputStream:
        """Create the file; raises `FileExistsError` unless it may be overwritten."""
        if not overwrite and self.exists():
            raise FileExistsError(f"lake file '{self.location}' is there already")
        with self._errors():
            stream: OutputStream = self._filesystem.open_output(self.location)
        return stream

    def to_input_file(self) -> InputFile:
        """Return the file for reading."""
        return self


class LakeIO(FileIO):
    """Reads, writes and deletes lake files; the catalog loads it by its name."""

    _errors: _Errors = staticmethod(_stock_errors)

    def __init__(self, properties: Any) -> None:
        super().__init__(properties)
        self._filesystem = LakeFilesystem(properties)

    def new_input(self, location: str) -> InputFile:
        """Return the file at `location`."""
        return _LakeFile(self._filesystem, location, self._errors)

    def new_output(self, location: str) -> OutputFile:
        """Return the file at `location`, which may not be there yet."""
        return _LakeFile(self._filesystem, location, self._errors)

    def delete(self, location: str | InputFile | OutputFile) -> None:
        """Delete a file; one that is not there is fine."""
        with self._errors():
            self._filesystem.delete(location if isinstance(location, str) else location.location)


class ReadOnlyLakeIO(LakeIO):
    """Reads lake metadata for planning; its errors are ours, and name the file."""

    _errors = contextlib.nullcontext

    def new_output(self, location: str) -> OutputFile:
        """Refuse: this IO is for planning."""
        raise NotImplementedError(f"planning a read writes nothing, but wanted to: {location}")

    def delete(self, location: str | InputFile | OutputFile) -> None:
        """Refuse: this IO is for planning."""
        raise NotImplementedError(f"planning a read deletes nothing, but wanted to: {location}")
