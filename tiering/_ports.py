"""The outside of a tiering worker as small protocols; tests replace each protocol."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from streamhouse.client import TieringIdle
from streamhouse.core.model.lake.coverage import CoveredOffsets
from streamhouse.core.model.lake.facts import LakeCatalog, LakeState
from streamhouse.core.model.table import TableInfo
from streamhouse.core.model.table_state import (
    TableState,
    TieringAssignment,
    TieringReport,
)
from streamhouse.tiering.tasks._lake_task import SplitResult, TieringSplit
from streamhouse.tiering.tasks._rewrite_task import RewriteResult, RewriteTask

__all__ = ["RoundObserver", "TaskRunner", "TieringClient"]


class TieringClient(Protocol):
    """The part of `StorageClient` that tiering uses."""

    @property
    def endpoint(self) -> str:
        """The service's URL, for tasks that open their own client."""

    def claim_tiering(
        self, worker_id: str, *, tables: Sequence[str] | None = None, force: bool = False
    ) -> TieringAssignment | TieringIdle:
        """See `StorageClient.claim_tiering`."""

    def heartbeat_tiering(
        self,
        path: str,
        *,
        table_id: int,
        epoch: int,
        step: str = "",
        rows_done: int = 0,
        rows_planned: int = 0,
    ) -> None:
        """See `StorageClient.heartbeat_tiering`."""

    def complete_tiering(self, path: str, report: TieringReport) -> LakeState:
        """See `StorageClient.complete_tiering`."""

    def compare_history(
        self,
        path: str,
        *,
        table_id: int,
        covered: CoveredOffsets | None = None,
        offsets: Mapping[int, int] | None = None,
    ) -> dict[int, str]:
        """See `StorageClient.compare_history`."""

    def pinned_snapshots(self, path: str) -> dict[str, int]:
        """See `StorageClient.pinned_snapshots`."""

    def fail_tiering(self, path: str, *, table_id: int, epoch: int, error: str) -> None:
        """See `StorageClient.fail_tiering`."""

    def table_state(self, path: str) -> TableState:
        """See `StorageClient.table_state`."""

    def list_tables(self, database: str | None = None) -> list[str]:
        """See `StorageClient.list_tables`."""

    def describe_table(self, path: str) -> TableInfo:
        """See `StorageClient.describe_table`."""

    def lake_catalog(self) -> LakeCatalog:
        """See `StorageClient.lake_catalog`."""


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
