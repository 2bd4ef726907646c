"""What a round reports to, and what runs its tasks: each has several implementations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from streamhouse.reading.tail.lake_task import SplitResult, TieringSplit
from streamhouse.tiering.tasks._rewrite_task import RewriteResult, RewriteTask

__all__ = [
    "RoundObserver",
    "TaskRunner",
]


class RoundObserver(Protocol):
    """Receives the progress of a round, in the worker's threads: calls must be quick."""

    def started(self, table: str, *, rows: int, splits: int) -> None:
        """A round begins to write."""

    def wrote(self, table: str, *, rows: int) -> None:
        """`rows` more rows are in files."""

    def ended(self, table: str) -> None:
        """The round wrote all rows, or failed."""


class TaskRunner(Protocol):
    """Runs the tasks of a round somewhere."""

    @property
    def parallelism(self) -> int:
        """How many tasks can run at once."""

    def run(
        self,
        splits: Sequence[TieringSplit],
        *,
        on_rows: Callable[[int], None],
        is_cancelled: Callable[[], bool],
    ) -> list[SplitResult]:
        """Run all splits and return their results in any order; one result a split.

        After an error some splits may be written, and an unstoppable task may still be writing:
        the caller deletes the round's folder.
        """

    def rewrite(
        self,
        tasks: Sequence[RewriteTask],
        *,
        on_rows: Callable[[int], None],
        is_cancelled: Callable[[], bool],
    ) -> list[RewriteResult]:
        """Run all tasks of a rewrite, as `run` does the splits of a round."""


class SilentObserver:
    """A `RoundObserver` without an effect."""

    def started(self, table: str, *, rows: int, splits: int) -> None:
        """Do nothing."""

    def wrote(self, table: str, *, rows: int) -> None:
        """Do nothing."""

    def ended(self, table: str) -> None:
        """Do nothing."""
