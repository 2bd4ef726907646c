"""How the Iceberg library reads metadata while planning: through our own door to lake files.

Its stock file IO imports `pyarrow.dataset` and with it pandas, half a second that every new
planning process would pay before the first read. Read-only; the catalog loads it by its name.
"""

from __future__ import annotations

from typing import Any, Final

from pyiceberg.io import FileIO, InputFile, InputStream, OutputFile

from streamhouse.storage_service.errors import StorageFailedError
from streamhouse.storage_service.lake.files.lake_filesystem import LakeFilesystem

__all__ = ["READ_ONLY_IO", "SCHEMES", "ReadOnlyLakeIO"]

READ_ONLY_IO: Final = f"{__name__}.ReadOnlyLakeIO"
SCHEMES: Final = ("file", "s3", "s3a", "s3n")


class _LakeInput(InputFile):
    """One metadata file."""

    def __init__(self, filesystem: LakeFilesystem, location: str) -> None:
        super().__init__(location)
        self._filesystem = filesystem

    def __len__(self) -> int:
        return self._filesystem.size(self.location)

    def exists(self) -> bool:
        """Whether the file is there."""
        try:
            self._filesystem.size(self.location)
        except StorageFailedError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return False
            raise
        return True

    def open(self, seekable: bool = True) -> InputStream:  # noqa: ARG002 - its signature
        """Open the file."""
        stream: InputStream = self._filesystem.open_input(self.location)
        return stream


class ReadOnlyLakeIO(FileIO):
    """Reads lake metadata; planning writes nothing."""

    def __init__(self, properties: Any) -> None:
        super().__init__(properties)
        self._filesystem = LakeFilesystem(properties)

    def new_input(self, location: str) -> InputFile:
        """Return the file at `location`."""
        return _LakeInput(self._filesystem, location)

    def new_output(self, location: str) -> OutputFile:
        """Refuse: this IO is for planning."""
        raise NotImplementedError(f"planning a read writes nothing, but wanted to: {location}")

    def delete(self, location: str | InputFile | OutputFile) -> None:
        """Refuse: this IO is for planning."""
        raise NotImplementedError(f"planning a read deletes nothing, but wanted to: {location}")
