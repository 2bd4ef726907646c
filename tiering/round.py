"""One tiering round: one table, one attempt to advance its tiered offsets.

The steps, in order; a worker may die after any of them and the next round finishes the job:

    claimed           the service granted the table under a new epoch
    lake-opened       the lake table exists; what it covers is known
    planned           offset ranges are fixed
    files-written     Parquet files lie in the round's folder; no snapshot refers to them
    manifests-written the snapshot's metadata is written, not committed
    committed         the lake covers the new offsets; the service does not know yet
    completed         the service knows

A death before `committed` leaves files nobody refers to; one after it leaves a lake that is ahead
of the service, which the next round registers and goes on from. Rows are never committed twice:
the commit asserts that the lake still covers exactly what the round started from.
"""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from streamhouse.storage_service.client.lake_filesystem import LakeFilesystem
from streamhouse.storage_service.errors import (
    CorruptDataError,
    FencedError,
    StreamhouseError,
    UnknownOutcomeError,
)
from streamhouse.storage_service.model.table_state import TieringAssignment
from streamhouse.tiering.iceberg_committer import IcebergLakeTable, LakeCommit
from streamhouse.tiering.iceberg_lake import IcebergLake
from streamhouse.tiering.lake_task import SplitResult
from streamhouse.tiering.lease import Lease
from streamhouse.tiering.maintenance import Maintainer
from streamhouse.tiering.ports import RoundObserver, SilentObserver, TaskRunner, TieringClient
from streamhouse.tiering.round_maintenance import ClaimedMaintenance
from streamhouse.tiering.round_planner import PlanLimits, RoundPlan, plan_round
from streamhouse.tiering.round_splits import check_results, round_splits

__all__ = ["ROUND_STEPS", "RoundResult", "TieringRound"]

_logger = logging.getLogger(__name__)

ROUND_STEPS: Final = (
    "claimed",
    "lake-opened",
    "planned",
    "files-written",
    "manifests-written",
    "committed",
    "completed",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundResult:
    """What a round did.

    `tiered`: it moved rows. `recovered`: it only registered a snapshot that an earlier worker had
    committed; more rows may wait.
    """

    table: str
    kind: Literal["tiered", "recovered"]
    snapshot_id: int
    tiered_offsets: Mapping[int, int]
    row_count: int = 0
    file_count: int = 0
    size_bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class TieringRound:
    """Everything one round needs; `run` does it.

    `token` goes to tasks, which open their own connections. `checkpoint` is called with each step
    once it is done; tests raise or die there. `is_stopping` ends the round early. `maintainer`
    looks after the lake table once the rows are in it.
    """

    client: TieringClient
    lake: IcebergLake
    runner: TaskRunner
    assignment: TieringAssignment
    token: str | None = field(default=None, repr=False)
    limits: PlanLimits = field(default_factory=PlanLimits)
    observer: RoundObserver = field(default_factory=SilentObserver)
    checkpoint: Callable[[str], None] = lambda _: None
    is_stopping: Callable[[], bool] = lambda: False
    maintainer: Maintainer | None = None

    def run(self) -> RoundResult:
        """Move the assignment's rows into the lake and tell the service.

        Raises:
            FencedError: another worker owns the table now; nothing of this round is in the lake,
                or it is and the other worker registers it.
            StreamhouseError: the round failed; the claim was given back.
        """
        table = str(self.assignment.state.table.path)
        started_s = time.monotonic()
        self.checkpoint("claimed")
        lease = Lease(
            self.client,
            table=table,
            epoch=self.assignment.epoch,
            lease_ms=self.assignment.lease_ms,
        )
        try:
            with lease:
                result = self._run(lease, started_s=started_s)
        except FencedError:
            raise
        except StreamhouseError as error:
            # The service hands the table out again after a pause, instead of a whole lease.
            with contextlib.suppress(StreamhouseError):
                self.client.fail_tiering(
                    table, epoch=self.assignment.epoch, error=f"{error.code}: {error}"
                )
            raise
        self.checkpoint("completed")
        return result

    def _run(self, lease: Lease, *, started_s: float) -> RoundResult:
        state = self.assignment.state
        lake_table = self.lake.open_or_create(state.table, state.lake)
        self.checkpoint("lake-opened")
        base = self._base_offsets(lake_table)
        if dict(base) != dict(state.lake.tiered_offsets):
            return self._recover(lake_table, base)
        plan = plan_round(
            table=str(state.table.path),
            covered=base,
            positions=state.positions,
            limits=self.limits,
            is_primary_key_table=state.table.is_primary_key_table,
        )
        self.checkpoint("planned")
        folder = (
            f"{lake_table.data_location}/round-{self.assignment.epoch:06d}-{uuid.uuid4().hex[:12]}"
        )
        files = LakeFilesystem(self.lake.file_properties)
        try:
            results = self._write(lake_table, plan, folder=folder, files=files, lease=lease)
            self.checkpoint("files-written")
            lease.check()
            snapshot_id = self._commit(lake_table, plan, results)
        except UnknownOutcomeError:
            # The files may be part of the table.
            raise
        except StreamhouseError:
            with contextlib.suppress(StreamhouseError):
                files.delete_folder(folder)
            raise
        self.checkpoint("committed")
        maintenance = self._maintenance(lake_table, lease, plan)
        is_untidy = maintenance is not None and maintenance.is_due(state.positions)
        self._complete(lake_table, snapshot_id, plan.target_offsets, keep_lease=is_untidy)
        self._drop_leftovers(files, folder, results)
        written = [file for result in results for file in result.files]
        result = RoundResult(
            table=str(state.table.path),
            kind="tiered",
            snapshot_id=snapshot_id,
            tiered_offsets=plan.target_offsets,
            row_count=plan.row_count,
            file_count=len(written),
            size_bytes=sum(file.size_bytes for file in written),
            seconds=time.monotonic() - started_s,
        )
        if maintenance is not None and is_untidy:
            maintenance.after_round(snapshot_id)
        return result

    def _maintenance(
        self, lake_table: IcebergLakeTable, lease: Lease, plan: RoundPlan
    ) -> ClaimedMaintenance | None:
        if self.maintainer is None:
            return None
        return ClaimedMaintenance(
            maintainer=self.maintainer,
            client=self.client,
            lake_table=lake_table,
            info=self.assignment.state.table,
            epoch=self.assignment.epoch,
            lease=lease,
            tiered_offsets=plan.target_offsets,
            is_stopping=self.is_stopping,
        )

    def _base_offsets(self, lake_table: IcebergLakeTable) -> Mapping[int, int]:
        """Return the offsets the lake covers; it is never behind the service."""
        state = self.assignment.state
        table = state.table.path
        recorded = state.lake.tiered_offsets
        covered = lake_table.covered
        if covered is None:
            if state.lake.snapshot_id is None:
                return recorded
            raise CorruptDataError(
                f"lake table '{table}' no longer has the rows tiered to it: its snapshots of"
                " tiering were rolled back; set its current snapshot to"
                f" {state.lake.snapshot_id} or a later one"
            )
        if covered.epoch > self.assignment.epoch:
            raise FencedError(
                f"lake table '{table}' was advanced by tiering epoch {covered.epoch}; this worker"
                f" has epoch {self.assignment.epoch}"
            )
        behind = [b for b, end in recorded.items() if covered.tiered_offsets.get(b, 0) < end]
        if behind:
            raise CorruptDataError(
                f"lake table '{table}', bucket {behind[0]}: it covers offsets up to"
                f" {covered.tiered_offsets.get(behind[0], 0)}, but {recorded[behind[0]]} were"
                f" tiered; it was rolled back: set its current snapshot to {state.lake.snapshot_id}"
                " or a later one"
            )
        return covered.tiered_offsets

    def _recover(self, lake_table: IcebergLakeTable, covered: Mapping[int, int]) -> RoundResult:
        """Tell the service of a snapshot that a worker committed and did not report."""
        snapshot_id = lake_table.snapshot_id
        assert snapshot_id is not None
        table = str(self.assignment.state.table.path)
        _logger.info("table %s: lake snapshot %s was not reported; registering", table, snapshot_id)
        self._complete(lake_table, snapshot_id, covered)
        return RoundResult(
            table=table, kind="recovered", snapshot_id=snapshot_id, tiered_offsets=covered
        )

    def _write(
        self,
        lake_table: IcebergLakeTable,
        plan: RoundPlan,
        *,
        folder: str,
        files: LakeFilesystem,
        lease: Lease,
    ) -> list[SplitResult]:
        state = self.assignment.state
        table = str(state.table.path)
        splits = round_splits(
            plan,
            state.table,
            lake_table,
            folder=folder,
            files=files,
            endpoint=self.client.endpoint,
            token=self.token,
        )
        self.observer.started(table, rows=plan.row_count, splits=len(splits))
        try:
            results = self.runner.run(
                splits,
                on_rows=lambda rows: self.observer.wrote(table, rows=rows),
                is_cancelled=lambda: lease.is_lost or self.is_stopping(),
            )
        except StreamhouseError:
            # A task that was told to stop says so; why it was told is the better error.
            lease.check()
            raise
        finally:
            self.observer.ended(table)
        check_results(plan, results, state.table)
        return results

    def _commit(
        self, lake_table: IcebergLakeTable, plan: RoundPlan, results: list[SplitResult]
    ) -> int:
        commit = LakeCommit(
            files=[file for result in results for file in result.files],
            deletes=[deletes for result in results for deletes in result.deletes],
            base_offsets=plan.base_offsets,
            tiered_offsets=plan.target_offsets,
            epoch=self.assignment.epoch,
        )
        return lake_table.commit(commit, checkpoint=self.checkpoint)

    def _complete(
        self,
        lake_table: IcebergLakeTable,
        snapshot_id: int,
        offsets: Mapping[int, int],
        *,
        keep_lease: bool = False,
    ) -> None:
        table = self.assignment.state.table
        self.client.complete_tiering(
            str(table.path),
            table_id=table.table_id,
            epoch=self.assignment.epoch,
            lake_snapshot_id=snapshot_id,
            lake_table_uuid=lake_table.uuid,
            tiered_offsets=offsets,
            keep_lease=keep_lease,
        )

    def _drop_leftovers(
        self, files: LakeFilesystem, folder: str, results: list[SplitResult]
    ) -> None:
        """Delete what attempts left that were not the ones that counted (retries, speculation)."""
        kept = {path for result in results for path in result.paths}
        with contextlib.suppress(StreamhouseError):
            for path in files.list_folder(folder):
                if path not in kept:
                    files.delete(path)
