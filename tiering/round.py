"""One tiering round: one table, one attempt to advance its tiered offsets.

The steps, in order; a worker may die after any of them and the next round finishes the job:

    claimed           the service granted the table under a new epoch
    lake-opened       the lake table exists; what it covers is known
    planned           offset ranges are fixed
    files-written     Parquet files lie in the round's folder; no snapshot refers to them
    manifests-written the snapshot's metadata is written, not committed
    committed         the lake covers the new offsets; the service does not know yet
    completed         the service knows

A table with a full history goes through three more between `planned` and `files-written`, the same
for its lake table of changes: `history-files-written` and so on (HISTORY_STEPS).

A death before `committed` leaves files nobody refers to; one after it leaves a lake that is ahead
of the service, which the next round registers and goes on from. Rows are never committed twice:
the commit asserts that the lake still covers exactly what the round started from.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from streamhouse.storage_service.client.lake_filesystem import LakeFilesystem
from streamhouse.storage_service.errors import FencedError, StreamhouseError
from streamhouse.storage_service.model.lake import ChangelogLakeState, LakeDebt, LakeState
from streamhouse.storage_service.model.table_state import TieringAssignment
from streamhouse.tiering.iceberg_committer import IcebergLakeTable
from streamhouse.tiering.iceberg_lake import IcebergLake
from streamhouse.tiering.lake_base import base_offsets
from streamhouse.tiering.lease import Lease
from streamhouse.tiering.maintenance import Maintainer
from streamhouse.tiering.ports import RoundObserver, SilentObserver, TaskRunner, TieringClient
from streamhouse.tiering.round_maintenance import ClaimedMaintenance
from streamhouse.tiering.round_planner import PlanLimits, RoundPlan, plan_history, plan_round
from streamhouse.tiering.round_tracker import RoundTracker
from streamhouse.tiering.round_writer import RoundWriter

__all__ = ["HISTORY_STEPS", "ROUND_STEPS", "RoundResult", "TieringRound"]

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
HISTORY_STEP_PREFIX: Final = "history-"
HISTORY_STEPS: Final = tuple(HISTORY_STEP_PREFIX + step for step in ROUND_STEPS[3:6])


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundResult:
    """What a round did.

    `tiered`: it moved rows. `recovered`: it only registered a snapshot that an earlier worker had
    committed; more rows may wait. `maintained`: all rows were in the lake, and it was tidied.
    """

    table: str
    kind: Literal["tiered", "recovered", "maintained"]
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
    looks after the lake table once the rows are in it, in one of the `maintenance_slots`; while
    others wait for this worker (`is_busy`) only once much more of it is due.
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
    is_busy: Callable[[], bool] = lambda: False
    maintenance_slots: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(1))
    tracker: RoundTracker = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tracker", RoundTracker(self.observer))

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
            tracker=self.tracker,
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
        history = self._open_history()
        self.checkpoint("lake-opened")
        base = self._base_offsets(lake_table, state.lake)
        if dict(base) != dict(state.lake.tiered_offsets):
            return self._recover(lake_table, base, history)
        plan = plan_round(
            table=str(state.table.path),
            covered=base,
            positions=state.positions,
            limits=self.limits,
            is_primary_key_table=state.table.is_primary_key_table,
        )
        self.checkpoint("planned")
        if not plan.splits:
            return self._only_maintain(lake_table, history, lease, plan)
        writer = self._writer(lease)
        changelog = None
        if history is not None:
            # Before the rows: the history is never behind them, whenever a worker dies.
            changelog = self._advance_history(history, plan, writer)
        landed = writer.advance(lake_table, plan)
        maintenance = self._maintenance(lake_table, history, lease, plan)
        with self._maintenance_turn(maintenance) as untidy:
            registered = self._complete(
                lake_table,
                landed.snapshot_id,
                plan.target_offsets,
                history=history,
                changelog=changelog,
                keep_lease=bool(untidy),
            )
            writer.drop_leftovers(landed)
            written = [file for result in landed.results for file in result.files]
            result = RoundResult(
                table=str(state.table.path),
                kind="tiered",
                snapshot_id=landed.snapshot_id,
                tiered_offsets=plan.target_offsets,
                row_count=plan.row_count,
                file_count=len(written),
                size_bytes=sum(file.size_bytes for file in written),
                seconds=time.monotonic() - started_s,
            )
            self._tidy(maintenance, untidy, registered)
        return result

    def _only_maintain(
        self,
        lake_table: IcebergLakeTable,
        history: IcebergLakeTable | None,
        lease: Lease,
        plan: RoundPlan,
    ) -> RoundResult:
        """Look after the lake of a table that nobody writes to."""
        snapshot_id = lake_table.snapshot_id
        assert snapshot_id is not None
        maintenance = self._maintenance(lake_table, history, lease, plan)
        with self._maintenance_turn(maintenance) as untidy:
            registered = self._complete(
                lake_table,
                snapshot_id,
                plan.target_offsets,
                history=history,
                changelog=None,
                keep_lease=bool(untidy),
            )
            self._tidy(maintenance, untidy, registered)
        return RoundResult(
            table=str(self.assignment.state.table.path),
            kind="maintained",
            snapshot_id=snapshot_id,
            tiered_offsets=plan.target_offsets,
        )

    def _tidy(
        self,
        maintenance: ClaimedMaintenance | None,
        untidy: tuple[IcebergLakeTable, ...],
        registered: LakeState,
    ) -> None:
        if maintenance is not None and untidy:
            self.tracker.maintaining()
            maintenance.registered = registered
            maintenance.after_round(untidy)

    @contextlib.contextmanager
    def _maintenance_turn(
        self, maintenance: ClaimedMaintenance | None
    ) -> Iterator[tuple[IcebergLakeTable, ...]]:
        """Yield what to maintain now: it is due, and leaves slots to the rounds of other tables."""
        positions = self.assignment.state.positions
        due = () if maintenance is None else maintenance.due(positions, is_busy=self.is_busy())
        has_slot = bool(due) and self.maintenance_slots.acquire(blocking=False)
        try:
            yield due if has_slot else ()
        finally:
            if has_slot:
                self.maintenance_slots.release()

    def _writer(self, lease: Lease) -> RoundWriter:
        return RoundWriter(
            endpoint=self.client.endpoint,
            token=self.token,
            table=self.assignment.state.table,
            epoch=self.assignment.epoch,
            files=LakeFilesystem(self.lake.file_properties),
            runner=self.runner,
            observer=self.tracker,
            lease=lease,
            checkpoint=self.checkpoint,
            is_stopping=self.is_stopping,
        )

    def _open_history(self) -> IcebergLakeTable | None:
        state = self.assignment.state
        if not state.table.properties().datalake_changelog:
            return None
        return self.lake.open_or_create(state.table, state.lake.changelog, has_changes=True)

    def _base_offsets(
        self, lake_table: IcebergLakeTable, known: LakeState | ChangelogLakeState | None
    ) -> Mapping[int, int]:
        return base_offsets(
            lake_table,
            known,
            epoch=self.assignment.epoch,
            bucket_count=self.assignment.state.table.bucket_count,
        )

    def _advance_history(
        self, history: IcebergLakeTable, rows: RoundPlan, writer: RoundWriter
    ) -> ChangelogLakeState:
        """Bring every change that the round moves into the full history."""
        covered = self._base_offsets(history, self.assignment.state.lake.changelog)
        plan = plan_history(rows, covered=covered, limits=self.limits)
        if plan.splits:
            landed = writer.advance(history, plan, step_prefix=HISTORY_STEP_PREFIX)
            writer.drop_leftovers(landed)
            snapshot_id: int | None = landed.snapshot_id
        else:
            snapshot_id = history.snapshot_id
        assert snapshot_id is not None
        return ChangelogLakeState(
            snapshot_id=snapshot_id, table_uuid=history.uuid, tiered_offsets=plan.target_offsets
        )

    def _maintenance(
        self,
        lake_table: IcebergLakeTable,
        history: IcebergLakeTable | None,
        lease: Lease,
        plan: RoundPlan,
    ) -> ClaimedMaintenance | None:
        if self.maintainer is None:
            return None
        return ClaimedMaintenance(
            maintainer=self.maintainer,
            client=self.client,
            lake_table=lake_table,
            history=history,
            info=self.assignment.state.table,
            epoch=self.assignment.epoch,
            lease=lease,
            registered=self.assignment.state.lake,
            tiered_offsets=plan.target_offsets,
            is_stopping=self.is_stopping,
        )

    def _recover(
        self,
        lake_table: IcebergLakeTable,
        covered: Mapping[int, int],
        history: IcebergLakeTable | None,
    ) -> RoundResult:
        """Tell the service of a snapshot that a worker committed and did not report."""
        snapshot_id = lake_table.snapshot_id
        assert snapshot_id is not None
        table = str(self.assignment.state.table.path)
        _logger.info("table %s: lake snapshot %s was not reported; registering", table, snapshot_id)
        changelog = None
        if history is not None and history.snapshot_id is not None:
            changelog = ChangelogLakeState(
                snapshot_id=history.snapshot_id,
                table_uuid=history.uuid,
                tiered_offsets=self._base_offsets(history, self.assignment.state.lake.changelog),
            )
        self._complete(lake_table, snapshot_id, covered, history=history, changelog=changelog)
        return RoundResult(
            table=table, kind="recovered", snapshot_id=snapshot_id, tiered_offsets=covered
        )

    def _complete(
        self,
        lake_table: IcebergLakeTable,
        snapshot_id: int,
        offsets: Mapping[int, int],
        *,
        history: IcebergLakeTable | None,
        changelog: ChangelogLakeState | None,
        keep_lease: bool = False,
    ) -> LakeState:
        table = self.assignment.state.table
        return self.client.complete_tiering(
            str(table.path),
            table_id=table.table_id,
            epoch=self.assignment.epoch,
            lake_snapshot_id=snapshot_id,
            lake_table_uuid=lake_table.uuid,
            tiered_offsets=offsets,
            changelog=changelog,
            keep_lease=keep_lease,
            debt=self._debt(lake_table, history),
        )

    def _debt(
        self, lake_table: IcebergLakeTable, history: IcebergLakeTable | None
    ) -> LakeDebt | None:
        if self.maintainer is None:
            return lake_table.debt
        return self.maintainer.debt(lake_table, history)
