"""A round's progress on the terminal: a bar per table while it is written."""

from __future__ import annotations

import threading

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

__all__ = ["TerminalProgress"]


class TerminalProgress:
    """A `RoundObserver` that draws bars on stderr; silent unless stderr is a terminal."""

    def __init__(self, *, is_quiet: bool = False) -> None:
        """Draw nothing at all if `is_quiet`."""
        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("tiering {task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("rows"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=is_quiet or not console.is_terminal,
        )
        self._bars: dict[str, TaskID] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> TerminalProgress:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def started(self, table: str, *, rows: int, splits: int) -> None:
        """Draw a bar."""
        with self._lock:
            self._bars[table] = self._progress.add_task(
                f"{table} ({splits} task{'s' if splits != 1 else ''})", total=rows
            )

    def wrote(self, table: str, *, rows: int) -> None:
        """Advance the bar."""
        with self._lock:
            if (bar := self._bars.get(table)) is not None:
                self._progress.advance(bar, rows)

    def ended(self, table: str) -> None:
        """Remove the bar."""
        with self._lock:
            if (bar := self._bars.pop(table, None)) is not None:
                self._progress.remove_task(bar)
