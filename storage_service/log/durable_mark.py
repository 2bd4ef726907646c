"""A mark of the log's durable end and of the rows deleted by retention.

With the mark recovery distinguishes loss from a torn tail, and missing segments from expired ones.
The mark is overwritten in place after each sync and not synced itself: the cost is one small write,
and the mark may lag behind, but never runs ahead. Two slots are written in turn: a process killed
in the middle of the write leaves one slot half written and the other slot intact.

So after a killed process the mark is exact, or one commit behind; after a power cut its end is as
old as the last write-back of the page cache. Planned deletions by retention are synced before.

Every log opened once has a mark: a missing mark, or damage in both slots, is damage of the log.
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
"""An operator's empty file: accept the existing log, and ignore the mark."""

_SLOTS: Final = 2

_logger = logging.getLogger(__name__)


class DurableMark:
    """The open mark of one log, guarded by the log's lock."""

    def __init__(
        self,
        directory: Path,
        facts: MarkFacts,
        *,
        identity: LogIdentity,
        filesystem: Filesystem,
    ) -> None:
        """Write a fresh mark and keep its file open; the name is durable after `sync_directory`."""
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
        """Return the mark's facts; None without a readable mark.

        Raises `CorruptDataError` for another release's mark.
        """
        path = directory / MARK_NAME
        try:
            data = filesystem.read(path, bytes_max=_SLOTS * FILE_HEADER_BYTES)
        except FileNotFoundError:
            return None
        slots: list[MarkFacts] = []
        # A mark without overwrites has one slot.
        for start in range(0, max(len(data), 1), FILE_HEADER_BYTES):
            try:
                slot = data[start : start + FILE_HEADER_BYTES]
                slots.append(decode_durable_mark(slot, identity=identity))
            except OtherFormatError as error:
                # No damage: the release of the mark can read its facts.
                raise CorruptDataError(f"{path}: {error}") from error
            except MalformedError as error:
                _logger.warning("event=durable_mark_unreadable path=%s why=%r", path, str(error))
        # Both slots are true; the log only grew in between.
        return max(slots, default=None)

    def advance(self, durable_offset: int) -> None:
        """Note everything below `durable_offset` as durable; call after the sync only."""
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
        """Make a new start durable before rows below are deleted.

        After OSError no row may be deleted.
        """
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
        # A new file, because a refused overwrite may leave a torn mark.
        try:
            self._file = self._fresh()
            self._filesystem.sync_directory(self._path.parent)
        except OSError:
            self.facts = previous
            raise

    def close(self) -> None:
        """Make the mark durable and close its file; closing twice is harmless."""
        if self._file is None:
            return
        file, self._file = self._file, None
        try:
            file.sync()
        except OSError as error:
            _logger.warning("event=durable_mark_not_synced path=%s why=%r", self._path, str(error))
        finally:
            file.close()
