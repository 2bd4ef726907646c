"""A note beside the log of how far it was durable, so that recovery can tell loss from a torn tail.

The mark is overwritten in place after each sync and not synced itself: it costs one small write and
may lag behind, never run ahead. After a killed process it is exact; after a power cut it is as old
as the last write-back of the page cache. It only ever adds a check: a missing, torn or stale mark
means less detection, not less data.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

from streamhouse.storage_service.log.filesystem import Filesystem, WritableFile, replace_durably
from streamhouse.storage_service.log.segment_format import (
    FILE_HEADER_BYTES,
    LogIdentity,
    MalformedError,
    decode_durable_mark,
    encode_durable_mark,
)

__all__ = ["MARK_NAME", "DurableMark"]

MARK_NAME: Final = "durable.mark"

_logger = logging.getLogger(__name__)


class DurableMark:
    """The open mark of one log. Belongs to whoever syncs the log."""

    def __init__(self, *, file: WritableFile, identity: LogIdentity, path: Path) -> None:
        self._file: WritableFile | None = file
        self._identity = identity
        self._path = path

    @staticmethod
    def read(directory: Path, *, identity: LogIdentity, filesystem: Filesystem) -> int:
        """Return the offset the mark vouches for; 0 without a readable mark."""
        path = directory / MARK_NAME
        try:
            data = filesystem.read(path, bytes_max=FILE_HEADER_BYTES)
            return decode_durable_mark(data, identity=identity)
        except FileNotFoundError:
            return 0
        except MalformedError as error:
            _logger.warning("durable mark ignored path=%s %s", path, error)
            return 0

    @classmethod
    def open(
        cls, directory: Path, durable_offset: int, *, identity: LogIdentity, filesystem: Filesystem
    ) -> DurableMark:
        """Write a fresh mark and keep it open; its name is durable after `sync_directory`."""
        path = directory / MARK_NAME
        contents = encode_durable_mark(durable_offset, identity=identity)
        replace_durably(filesystem, path, [contents])
        return cls(file=filesystem.open(path), identity=identity, path=path)

    def advance(self, durable_offset: int) -> None:
        """Note that everything below `durable_offset` is durable; call after the sync only."""
        if self._file is None:
            return
        try:
            contents = encode_durable_mark(durable_offset, identity=self._identity)
            self._file.write([contents], position=0)
        except OSError as error:
            # The rows are durable and must be acknowledged; only the extra check is lost.
            _logger.warning("durable mark given up path=%s %s", self._path, error)
            self._file.close()
            self._file = None

    def close(self) -> None:
        """Make the mark durable as it is and release it; closing twice is harmless."""
        if self._file is None:
            return
        file, self._file = self._file, None
        try:
            file.sync()
        except OSError as error:
            _logger.warning("durable mark not synced path=%s %s", self._path, error)
        finally:
            file.close()
