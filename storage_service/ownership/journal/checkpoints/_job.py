"""When an owner takes a checkpoint, and the work afterwards.

A restart reads the journal since the last checkpoint, so a checkpoint is taken after a number of
bytes. Old objects stay until two checkpoints later, so a checkpoint is also taken after some time
with changes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from streamhouse.storage_service.ownership.journal._writer import JournalWriter
from streamhouse.storage_service.ownership.journal.checkpoints._checkpoint import CheckpointTaker
from streamhouse.storage_service.ownership.journal.checkpoints._trim import Trimmer, TrimPoint
from streamhouse.storage_service.ownership.journal.checkpoints.manifest import Manifest

__all__ = [
    "CheckpointJob",
]

_logger = logging.getLogger(__name__)

_EVERY_S: Final = 300.0
_EVERY_BYTES: Final = 512 << 20


@dataclass
class CheckpointJob:
    """Takes checkpoints one at a time, for any caller. `first_manifest` is the start's."""

    taker: CheckpointTaker
    trimmer: Trimmer
    journal: JournalWriter
    first_manifest: Manifest | None = None
    every_s: float = _EVERY_S
    every_bytes: int = _EVERY_BYTES
    monotonic_s: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._taking = threading.Lock()
        self._last = TrimPoint.of(self.first_manifest) if self.first_manifest else None
        self.first_manifest = None
        self._at_s = self.monotonic_s()
        self._at_bytes = self.journal.bytes_stored
        self._at_position = self.journal.recorded_position

    @property
    def age_s(self) -> float:
        """The time since the last checkpoint began, or since the start."""
        return self.monotonic_s() - self._at_s

    def look(self) -> bool:
        """Take a due checkpoint; return whether a checkpoint was taken. Blocking."""
        grown = self.journal.bytes_stored - self._at_bytes
        waited_s = self.monotonic_s() - self._at_s
        is_old = waited_s >= self.every_s and self.journal.recorded_position > self._at_position
        return self.take() if is_old or grown >= self.every_bytes else False

    def take(self) -> bool:
        """Take a checkpoint, and trim objects needed by neither of the last two. Blocking.

        Raises the errors of `CheckpointTaker.take` and of the store.
        """
        with self._taking:
            at_s, at_bytes = self.monotonic_s(), self.journal.bytes_stored
            at_position = self.journal.recorded_position
            manifest = self.taker.take()
            self._at_s, self._at_bytes, self._at_position = at_s, at_bytes, at_position
            if manifest is None:
                return False
            took_s = self.monotonic_s() - at_s
            _logger.info("event=checkpoint place=%s seconds=%.1f", manifest.place, took_s)
            older, self._last = self._last, TrimPoint.of(manifest)
            if older is not None and older.place < self._last.place:
                self.trimmer.trim(older, self._last, epoch=self.journal.epoch)
            # Only epochs before the newest may be trimmed the next time.
            self.journal.roll()
            return True
