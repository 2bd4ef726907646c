"""A lake table in a round: tasks write files, and a commit adds the files."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from streamhouse.core.errors import (
    CorruptDataError,
    StreamhouseError,
)
from streamhouse.core.model.lake.facts import LakeRole
from streamhouse.core.model.table import TableInfo
from streamhouse.lake.commits.committer import IcebergLakeTable, LakeCommit
from streamhouse.lake.files.lake_filesystem import LakeFilesystem
from streamhouse.reading.tail.lake_task import SplitResult
from streamhouse.reading.tail.round_planner import RoundPlan
from streamhouse.reading.tail.round_splits import check_results, round_splits
from streamhouse.tiering._ports import RoundObserver, TaskRunner
from streamhouse.tiering.round._copy_tasks import copy_tasks
from streamhouse.tiering.round._lease import Lease
from streamhouse.tiering.tasks._rewrite_task import RewriteResult

__all__ = ["LandedFiles", "RoundWriter"]

_Result = TypeVar("_Result", SplitResult, RewriteResult)


@dataclass(frozen=True, slots=True, kw_only=True)
class LandedFiles:
    """A committed snapshot, and the results of the tasks that wrote its files into `folder`.

    With an empty `folder` no file was written, and the snapshot is older than the round.
    """

    snapshot_id: int
    folder: str
    results: tuple[SplitResult | RewriteResult, ...]


@dataclass(frozen=True, kw_only=True)
class RoundWriter:
    """Advances the lake tables of one round; `checkpoint` is called after each step.

    `fingerprints` returns the log's fingerprints at the end offsets of a snapshot.
    """

    endpoint: str
    token: str | None = field(repr=False)
    table: TableInfo
    epoch: int
    files: LakeFilesystem
    runner: TaskRunner
    observer: RoundObserver
    lease: Lease
    fingerprints: Callable[[Mapping[int, int]], Mapping[int, str]]
    checkpoint: Callable[[str], None]
    is_stopping: Callable[[], bool]

    def advance(
        self, lake_table: IcebergLakeTable, plan: RoundPlan, *, step_prefix: str = ""
    ) -> LandedFiles:
        """Write the rows of `plan` and commit them; on failure the files are deleted.

        Files stay when the commit may have landed (`UnknownOutcomeError`).
        """

        def write(folder: str) -> list[SplitResult]:
            return self._write(lake_table, plan, folder)

        return self._land(lake_table, plan, write, step_prefix=step_prefix)

    def copy(
        self,
        source: IcebergLakeTable,
        target: IcebergLakeTable,
        plan: RoundPlan,
        *,
        step_prefix: str,
        is_anew: bool,
    ) -> LandedFiles:
        """Copy the rows of `plan` from `source` into `target`, and commit as `advance` does.

        With `is_anew` the rows replace all rows of `target`.
        """

        def write(folder: str) -> list[RewriteResult]:
            return self._copy(source, target, plan, folder)

        return self._land(target, plan, write, step_prefix=step_prefix, is_anew=is_anew)

    def _land(
        self,
        lake_table: IcebergLakeTable,
        plan: RoundPlan,
        write: Callable[[str], Sequence[SplitResult | RewriteResult]],
        *,
        step_prefix: str,
        is_anew: bool = False,
    ) -> LandedFiles:
        def checkpoint(step: str) -> None:
            self.checkpoint(step_prefix + step)

        folder = f"{lake_table.data_location}/round-{self.epoch:06d}-{uuid.uuid4().hex[:12]}"
        with self.files.attempt_in(folder):
            results = write(folder)
            checkpoint("files-written")
            self.lease.check()
            commit = LakeCommit(
                files=[file for result in results for file in result.files],
                deletes=[
                    deletes
                    for result in results
                    if isinstance(result, SplitResult)
                    for deletes in result.deletes
                ],
                deleted_rows=[
                    rows
                    for result in results
                    if isinstance(result, SplitResult)
                    for rows in result.deleted_rows
                ],
                base_offsets=plan.base_offsets,
                tiered_offsets=plan.target_offsets,
                truncated_offsets=plan.truncated_offsets,
                epoch=self.epoch,
                is_anew=is_anew,
                fingerprints=self.fingerprints(plan.target_offsets),
            )
            snapshot_id = lake_table.commit(commit, checkpoint=checkpoint)
        checkpoint("committed")
        return LandedFiles(snapshot_id=snapshot_id, folder=folder, results=tuple(results))

    def drop_leftovers(self, landed: LandedFiles) -> None:
        """Delete files of superseded task attempts (retries, speculation)."""
        if landed.folder:
            committed = {path for result in landed.results for path in result.paths}
            self.files.delete_leftovers(landed.folder, kept=committed)

    def _write(
        self, lake_table: IcebergLakeTable, plan: RoundPlan, folder: str
    ) -> list[SplitResult]:
        splits = round_splits(
            plan,
            self.table,
            lake_table,
            folder=folder,
            files=self.files,
            endpoint=self.endpoint,
            token=self.token,
        )
        results = self._run(
            self.runner.run,
            splits,
            row_count=plan.row_count,
        )
        is_folded = self.table.is_primary_key_table and lake_table.role is not LakeRole.CHANGES
        check_results(plan, results, table=str(self.table.path), is_folded=is_folded)
        return results

    def _copy(
        self, source: IcebergLakeTable, target: IcebergLakeTable, plan: RoundPlan, folder: str
    ) -> list[RewriteResult]:
        tasks = copy_tasks(
            source, target, plan.splits, table=self.table, folder=folder, files=self.files
        )
        results = self._run(self.runner.rewrite, tasks, row_count=plan.row_count)
        if sorted(result.number for result in results) != list(range(len(tasks))):
            raise CorruptDataError(
                f"table '{self.table.path}': {len(results)} tasks of a copy answered, {len(tasks)}"
                " were given out"
            )
        return results

    def _run(
        self,
        run: Callable[..., list[_Result]],
        tasks: Sequence[object],
        *,
        row_count: int,
    ) -> list[_Result]:
        path = str(self.table.path)
        self.observer.started(path, rows=row_count, splits=len(tasks))
        try:
            return run(
                tasks,
                on_rows=lambda rows: self.observer.wrote(path, rows=rows),
                is_cancelled=lambda: self.lease.is_lost or self.is_stopping(),
            )
        except StreamhouseError:
            # A cancelled task only reports the cancellation: a lost lease is the better error.
            self.lease.check()
            raise
        finally:
            self.observer.ended(path)
