"""One rewrite of a lake table: planned on its current snapshot, written by tasks, committed.

The steps; a worker may die after any of them:

    rewrite-planned   which files become which
    files-rewritten   new files lie in the rewrite's folder; no snapshot refers to them
    rewrite-staged    the snapshot's metadata is written, not committed
    rewrite-committed the table consists of the new files; older snapshots still have the old ones

A death before the last leaves files that nobody refers to, which orphan removal finds.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.manifest import DataFile

from streamhouse.storage_service.errors import (
    CorruptDataError,
    StreamhouseError,
    UnknownOutcomeError,
)
from streamhouse.storage_service.lake.commits.committer import IcebergLakeTable
from streamhouse.storage_service.lake.commits.replacement import LakeReplacement, commit_replacement
from streamhouse.storage_service.lake.files.deleted_positions import read_deleted_positions
from streamhouse.storage_service.lake.files.lake_filesystem import LakeFilesystem
from streamhouse.storage_service.lake.files.parquet_writer import clustered_format
from streamhouse.storage_service.lake.files.position_deletes import LakeFile, write_position_deletes
from streamhouse.storage_service.lake.files.written_files import data_files, position_delete_files
from streamhouse.storage_service.lake.snapshots.inventory import Inventory
from streamhouse.tiering.maintain.maintenance_plan import RewritePlan
from streamhouse.tiering.tasks.rewrite_task import RewriteResult, RewriteTask
from streamhouse.tiering.worker.ports import TaskRunner

__all__ = ["Rewrite", "Rewritten"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewritten:
    """What a rewrite replaced by what; `snapshot_id` is that of its commit."""

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
    """Everything one rewrite needs; `run` does it."""

    table: str
    lake_table: IcebergLakeTable
    inventory: Inventory
    plan: RewritePlan
    runner: TaskRunner
    filesystem: LakeFilesystem
    table_id: int
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
        try:
            results = self._write(folder)
            merged = self._merge_deletes(folder)
            self.checkpoint("files-rewritten")
            added = [*self._added(results), *merged]
            removed = self._removed()
            snapshot_id = commit_replacement(
                self.lake_table.iceberg,
                LakeReplacement(
                    added=added,
                    removed=removed,
                    base_sequence=self.inventory.sequence_number,
                    table_id=self.table_id,
                    epoch=self.epoch,
                    role=self.lake_table.role,
                ),
                check_lease=self.check_lease,
                checkpoint=self.checkpoint,
            )
        except UnknownOutcomeError:
            # The files may be part of the table.
            raise
        except StreamhouseError:
            with contextlib.suppress(StreamhouseError):
                self.filesystem.delete_folder(folder)
            raise
        self.checkpoint("rewrite-committed")
        self._drop_leftovers(folder, added)
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
            bytes_written=sum(file.file_size_in_bytes for file in added),
        )

    def _write(self, folder: str) -> list[RewriteResult]:
        # Everything the table has now, columns of other engines too: they would be lost otherwise.
        schema = schema_to_pyarrow(self.lake_table.iceberg.schema())
        clustering = self.lake_table.layout.clustering
        tasks = [
            RewriteTask(
                number=number,
                table=self.table,
                data_paths=tuple((file.path, file.row_count) for file in group.files),
                delete_paths=tuple(sorted({d for file in group.files for d in file.deletes})),
                lake_schema=schema.serialize().to_pybytes(),
                bucket=group.bucket,
                partition=group.partition,
                folder=folder,
                file_format=clustered_format(group.file_bytes, clustering),
                files=self.filesystem,
                clustering=clustering,
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

    def _merge_deletes(self, folder: str) -> list[DataFile]:
        """Write the position deletes of many small files anew, without those of dead files."""
        written = []
        for number, merge in enumerate(self.plan.merges):
            positions = read_deleted_positions(
                self.filesystem,
                [deletes.path for deletes in merge],
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
                ): found
                for path, found in positions.items()
            }
            written += write_position_deletes(
                self.filesystem, located, folder=folder, name=f"m{number:05d}"
            )
        return position_delete_files(written)

    def _added(self, results: list[RewriteResult]) -> list[DataFile]:
        table = self.lake_table.iceberg
        return [
            file
            for group, result in zip(self.plan.groups, results, strict=True)
            for file in data_files(
                result.files,
                schema=table.schema(),
                properties=table.metadata.properties,
                spec_id=group.spec_id,
                sort_order_id=self.lake_table.layout.sort_order_id,
            )
        ]

    def _removed(self) -> list[DataFile]:
        paths = [file.path for group in self.plan.groups for file in group.files]
        paths += [deletes.path for deletes in self.plan.dropped]
        paths += [deletes.path for merge in self.plan.merges for deletes in merge]
        return [self.inventory.data_files[path] for path in paths]

    def _drop_leftovers(self, folder: str, added: list[DataFile]) -> None:
        """Delete what attempts left that were not the ones that counted (retries, speculation)."""
        kept = {file.file_path for file in added}
        with contextlib.suppress(StreamhouseError):
            for path in self.filesystem.list_folder(folder):
                if path not in kept:
                    self.filesystem.delete(path)
