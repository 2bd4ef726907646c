"""A note beside the log of how far it was durable, and of what retention has deleted.

Recovery tells loss from a torn tail by it, and segments that are missing from those that expired.
The mark is overwritten in place after each sync and not synced itself: it costs one small write and
may lag behind, never run ahead. It is written to one of two slots in turn: a process that is killed
in the middle of the write, which the kernel then leaves half done, leaves the other slot as it was.
So after a killed process the mark is exact, or one commit behind; after a power cut its end is as
old as the last write-back of the page cache. What retention is about to delete is synced before.
A log that was open once has a mark: one that is missing, or damaged in both slots, is damage.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

from streamhouse.core.errors import CorruptDataError
from streamhouse.storage_service.log.filesystem import Filesystem, WritableFile, replace_durably
from streamhouse.storage_service.log.segments.segment_format import (
    FILE_HEADER_BYTES,
    LogIdentity,
    MalformedError,
    MarkFacts,
    OtherFormatError,
    decode_durable_mark,
    encode_durable_mark,
)

__all__ = ["LOSS_ACCEPTED_NAME", "MARK_NAME", "DurableMark"]

MARK_NAME: Final = "durable.mark"
LOSS_ACCEPTED_NAME: Final = "loss.accepted"
"""An empty file that an operator makes: the log is what is there, whatever the mark says."""

_SLOTS: Final = 2

_logger = logging.getLogger(__name__)


class DurableMark:
    """The open mark of one log. Belongs to whoever holds the log's lock."""

    def __init__(
        self,
        directory: Path,
        facts: MarkFacts,
        *,
        identity: LogIdentity,
        filesystem: Filesystem,
    ) -> None:
        """Write a fresh mark and keep it open; its name is durable after `sync_directory`."""
        self._path = directory / MARK_NAME
        self._identity = identity
        self._filesystem = filesystem
        self.facts = facts
        self._slot = 0
        self._file: WritableFile | None = self._fresh()

    def _fresh(self) -> WritableFile:
        self._slot = 0
        contents = encode_durable_mark(self.facts, identity=self._identity)
        replace_durably(self._filesystem, self._path, [contents])
        return self._filesystem.open(self._path)

    @staticmethod
    def read(directory: Path, *, identity: LogIdentity, filesystem: Filesystem) -> MarkFacts | None:
        """Return what the mark says; None without a readable one.

        Raises `CorruptDataError` for one of another release.
        """
        path = directory / MARK_NAME
        try:
            data = filesystem.read(path, bytes_max=_SLOTS * FILE_HEADER_BYTES)
        except FileNotFoundError:
            return None
        slots: list[MarkFacts] = []
        # A mark that never was overwritten has one slot.
        for start in range(0, max(len(data), 1), FILE_HEADER_BYTES):
            try:
                slot = data[start : start + FILE_HEADER_BYTES]
                slots.append(decode_durable_mark(slot, identity=identity))
            except OtherFormatError as error:
                # No damage: what it says is there for the release that wrote it.
                raise CorruptDataError(f"{path}: {error}") from error
            except MalformedError as error:
                _logger.warning("event=durable_mark_unreadable path=%s why=%r", path, str(error))
        # Both are true; the log only grows between two of them.
        return max(slots, default=None)

    def advance(self, durable_offset: int) -> None:
        """Note that everything below `durable_offset` is durable; call after the sync only."""
        _, start_offset, forgotten_offset = self.facts
        self.facts = MarkFacts(durable_offset, start_offset, forgotten_offset)
        if self._file is None:
            return
        try:
            contents = encode_durable_mark(self.facts, identity=self._identity)
            self._slot = (self._slot + 1) % _SLOTS
            self._file.write([contents], position=self._slot * FILE_HEADER_BYTES)
        except OSError as error:
            # The rows are durable and must be acknowledged; only the extra check is lost.
            _logger.warning("event=durable_mark_given_up path=%s why=%r", self._path, str(error))
            self._file.close()
            self._file = None

    def begin_at(self, start_offset: int, *, forgotten_offset: int) -> None:
        """Make it durable that rows below `start_offset` go; raises OSError, and then none may."""
        if start_offset <= self.facts.start_offset:
            return
        previous = self.facts
        self.facts = self.facts._replace(
            start_offset=start_offset,
            forgotten_offset=max(self.facts.forgotten_offset, forgotten_offset),
        )
        file, self._file = self._file, None
        if file is not None:
            file.close()
        # A new file: one that is overwritten may be torn by the disk that refuses it.
        try:
            self._file = self._fresh()
            self._filesystem.sync_directory(self._path.parent)
        except OSError:
            self.facts = previous
            raise

    def close(self) -> None:
        """Make the mark durable as it is and release it; closing twice is harmless."""
        if self._file is None:
            return
        file, self._file = self._file, None
        try:
            file.sync()
        except OSError as error:
            _logger.warning("event=durable_mark_not_synced path=%s why=%r", self._path, str(error))
        finally:
            file.close()
