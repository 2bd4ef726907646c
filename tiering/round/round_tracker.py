"""How far a round is, for the heartbeats that tell the service."""

from __future__ import annotations

import threading
from typing import Final

from streamhouse.tiering.ports import RoundObserver

__all__ = ["RoundTracker"]

WRITING: Final = "writing"
COMMITTING: Final = "committing"
MAINTAINING: Final = "maintaining"


class RoundTracker:
    """A `RoundObserver` that counts, and passes on what it is told; from any thread."""

    def __init__(self, observer: RoundObserver) -> None:
        self._observer = observer
        self._lock = threading.Lock()
        self.step = ""
        self.rows_done = 0
        self.rows_planned = 0

    def started(self, table: str, *, rows: int, splits: int) -> None:
        """Files are being written."""
        with self._lock:
            self.step, self.rows_done, self.rows_planned = WRITING, 0, rows
        self._observer.started(table, rows=rows, splits=splits)

    def wrote(self, table: str, *, rows: int) -> None:
        """That many more rows are in files."""
        with self._lock:
            self.rows_done += rows
        self._observer.wrote(table, rows=rows)

    def ended(self, table: str) -> None:
        """Everything is written, or the round failed."""
        self.step = COMMITTING
        self._observer.ended(table)

    def maintaining(self) -> None:
        """The rows are in the lake, and it is being tidied."""
        self.step = MAINTAINING
