"""How far a long command is: a bar on stderr, on a terminal and unless `--quiet` says otherwise."""

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

_COUNTED: Final[dict[str, tuple[ProgressColumn, ...]]] = {
    "bytes": (DownloadColumn(binary_units=True),),
    "rows": (MofNCompleteColumn(), TextColumn("rows")),
}


class ProgressBar:
    """One bar for a whole command; leaving removes the bar, so that printed lines stand alone."""

    def __init__(self, what: str, *, is_quiet: bool, unit: str = "bytes") -> None:
        """Say `what` is done, counted in bytes or rows."""
        console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            *_COUNTED[unit],
            TimeRemainingColumn(),
            console=console,
            transient=True,
            # Else rich would write to stderr what others print to a file or a pipe meanwhile.
            redirect_stdout=sys.stdout.isatty(),
            disable=is_quiet or not console.is_terminal,
        )
        self._task = self._bar.add_task(what, total=None)
        self._total = 0

    def __enter__(self) -> ProgressBar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def expect(self, total: int) -> None:
        """So much more has to be done."""
        self._total += total
        self._bar.update(self._task, total=self._total)

    def done(self, count: int) -> None:
        """So much more of it is done."""
        self._bar.advance(self._task, count)
