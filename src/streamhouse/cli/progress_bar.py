"""The progress bar of a long command, on stderr: only on a terminal, and not with `--quiet`."""

from __future__ import annotations

import sys
from typing import Final

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

__all__ = ["ProgressBar", "quiet_option"]

quiet_option = click.option("-q", "--quiet", "is_quiet", is_flag=True, help="Show no progress.")

_COUNTER_COLUMNS: Final[dict[str, tuple[ProgressColumn, ...]]] = {
    "bytes": (DownloadColumn(binary_units=True),),
    "rows": (MofNCompleteColumn(), TextColumn("rows")),
}


class ProgressBar:
    """One bar for a whole command; leaving the context removes the bar from the terminal."""

    def __init__(self, title: str, *, is_quiet: bool, unit: str = "bytes") -> None:
        """Show a bar with this title, counted in bytes or rows."""
        console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            *_COUNTER_COLUMNS[unit],
            TimeRemainingColumn(),
            console=console,
            transient=True,
            # Otherwise rich writes to stderr the lines that the command prints to a file or a pipe.
            redirect_stdout=sys.stdout.isatty(),
            disable=is_quiet or not console.is_terminal,
        )
        self._task = self._bar.add_task(title, total=None)
        self._total = 0

    def __enter__(self) -> ProgressBar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def expect(self, total: int) -> None:
        """Add to the bytes or rows that the command has to process."""
        self._total += total
        self._bar.update(self._task, total=self._total)

    def done(self, count: int) -> None:
        """Add to the bytes or rows that the command has processed."""
        self._bar.advance(self._task, count)
