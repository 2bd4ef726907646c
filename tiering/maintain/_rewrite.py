"""One rewrite of a lake table: planned on its current snapshot, written by tasks, committed.

The steps; a worker may die after any of them:

    rewrite-planned   which files become which
    files-rewritten   new files lie in the rewrite's folder; no snapshot refers to them
    rewrite-staged    the snapshot's metadata is written, not committed
    rewrite-committed the table consists of the new files; older snapshots still have the old ones

A worker that dies before the last step leaves unreferenced files, which orphan removal deletes.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass

from streamhouse.core.errors import (
    CorruptDataError,
)
from streamhouse.lake.commits.committer import IcebergLakeTable
from streamhouse.lake.commits.replacement import LakeReplacement, commit_replacement
from streamhouse.lake.files.deletes.deleted_positions import Deletes, read_deleted_positions
from streamhouse.lake.files.lake_filesystem import LakeFilesystem
from streamhouse.lake.files.parquet_writer import WrittenFile, clustered_format
from streamhouse.lake.files.position_deletes import (
    LakeFile,
    WrittenDeletes,
    write_position_deletes,
)
from streamhouse.lake.snapshots.inventory import Inventory
from streamhouse.tiering._ports import TaskRunner
from streamhouse.tiering.maintain._maintenance_plan import RewritePlan
from streamhouse.tiering.tasks._rewrite_task import RewriteResult, RewriteTask

__all__ = ["Rewrite", "Rewritten"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewritten:
    """The files before and after a rewrite; its commit made the snapshot `snapshot_id`."""

    snapshot_id: int
    files_before: int
    files_after: int
    deletes_before: int
    deletes_after: int
    rows: int
    rows_dropped: int
    bytes_read: int
    bytes_written: int


@dataclass(frozen=True, kw_only=True)
class Rewrite:
    """The inputs of one rewrite; `run` carries it out."""

    table: str
    lake_table: IcebergLakeTable
    inventory: Inventory
    plan: RewritePlan
    runner: TaskRunner
    filesystem: LakeFilesystem
    epoch: int
    check_lease: Callable[[], None] = lambda: None
    is_cancelled: Callable[[], bool] = lambda: False
    checkpoint: Callable[[str], None] = lambda _: None

    def run(self) -> Rewritten:
        """Rewrite the plan's files in one snapshot.

        Raises:
            FencedError: another worker has the table now; nothing was replaced.
            StreamhouseError: nothing was replaced; a later maintenance plans anew.
        """
        folder = f"{self.lake_table.data_location}/rewrite-{self.epoch:06d}-{uuid.uuid4().hex[:12]}"
        with self.filesystem.attempt_in(folder):
            results = self._write(folder)
            merged = self._merge_deletes(folder)
            self.checkpoint("files-rewritten")
            removed = self._removed()
            snapshot_id = commit_replacement(
                self.lake_table,
                LakeReplacement(
                    base=self.inventory,
                    removed=removed,
                    files=[
                        (group.spec_id, result.files)
                        for group, result in zip(self.plan.groups, results, strict=True)
                    ],
                    deletes=merged,
                    epoch=self.epoch,
                ),
                check_lease=self.check_lease,
                checkpoint=self.checkpoint,
            )
        self.checkpoint("rewrite-committed")
        written: list[WrittenFile | WrittenDeletes] = [*merged]
        written += [file for result in results for file in result.files]
        self.filesystem.delete_leftovers(folder, kept={file.path for file in written})
        plan = self.plan
        return Rewritten(
            snapshot_id=snapshot_id,
            files_before=sum(len(group.files) for group in plan.groups),
            files_after=sum(len(result.files) for result in results),
            deletes_before=len(removed) - sum(len(group.files) for group in plan.groups),
            deletes_after=len(merged),
            rows=sum(file.row_count for result in results for file in result.files),
            rows_dropped=sum(result.rows_deleted for result in results),
            bytes_read=plan.size_bytes,
            bytes_written=sum(file.size_bytes for file in written),
        )

    def _write(self, folder: str) -> list[RewriteResult]:
        # The whole schema: columns of other engines must not be lost.
        schema = self.lake_table.whole_schema
        clustering = self.lake_table.layout.clustering
        tasks = [
            RewriteTask(
                number=number,
                table=self.table,
                data_paths=tuple((file.path, file.row_count) for file in group.files),
                deletes=tuple({d: None for file in group.files for d in file.deletes}),
                lineage=tuple(file.lineage for file in group.files if file.lineage is not None),
                lake_schema=schema.serialize().to_pybytes(),
                bucket=group.bucket,
                partition=group.partition,
                folder=folder,
                file_format=clustered_format(group.file_bytes, clustering),
                files=self.filesystem,
                clustering=clustering,
                name_mapping=self.lake_table.name_mapping,
            )
            for number, group in enumerate(self.plan.groups)
        ]
        results = self.runner.rewrite(tasks, on_rows=lambda _: None, is_cancelled=self.is_cancelled)
        results = sorted(results, key=lambda result: result.number)
        if [result.number for result in results] != [task.number for task in tasks]:
            raise CorruptDataError(
                f"lake table '{self.table}': {len(results)} tasks of a rewrite answered,"
                f" {len(tasks)} were given out"
            )
        return results

    def _merge_deletes(self, folder: str) -> list[WrittenDeletes]:
        """Merge position deletes of many small files, without positions of removed data files."""
        written: list[WrittenDeletes] = []
        for number, merge in enumerate(self.plan.merges):
            positions = read_deleted_positions(
                self.filesystem,
                [deletes.deletes for deletes in merge],
                data_paths={p for deletes in merge for p in deletes.data_paths}
                & self.plan.live_paths,
            )
            located = {
                LakeFile(
                    path=path,
                    file_format="PARQUET",
                    spec_id=merge[0].spec_id,
                    partition=merge[0].partition,
                    first_offset=0,
                    last_offset=0,
                ): file_positions
                for path, file_positions in positions.items()
            }
            written += write_position_deletes(
                self.filesystem, located, folder=folder, name=f"m{number:05d}"
            )
        return written

    def _removed(self) -> list[str | Deletes]:
        return [
            *(file.path for group in self.plan.groups for file in group.files),
            *(deletes.deletes for deletes in self.plan.dropped),
            *(deletes.deletes for merge in self.plan.merges for deletes in merge),
        ]
