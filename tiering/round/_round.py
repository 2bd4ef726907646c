"""A tiering round: an attempt to advance the tiered offsets of a table.

The steps, in order; a worker may die after any of them and the next round finishes the job:

    claimed           the service granted the table under a new epoch
    lake-opened       the lake table exists, with the offsets that it covers
    planned           offset ranges are fixed
    files-written     Parquet files lie in the round's folder; no snapshot refers to them
    manifests-written the snapshot's metadata is written, not committed
    committed         the lake covers the new offsets; the service does not know yet
    completed         the service knows

For a table with a full history, three steps follow `planned`: `history-files-written` and the like
(HISTORY_STEPS), for the lake table of changes. For a table with a batch layout that is due, three
steps follow `committed` (BATCH_STEPS); by then the service has registered the rows.

A worker that dies before `committed` leaves unreferenced files. A worker that dies after
`committed` leaves a lake ahead of the service: the next round registers the snapshot and goes on.
Rows are never committed twice: the commit asserts that the lake still covers exactly the offsets
of the round's start.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from streamhouse.client import StorageClient
from streamhouse.core.errors import FencedError, StreamhouseError
from streamhouse.core.model.lake.coverage import CoveredOffsets
from streamhouse.core.model.lake.facts import LakeDebt, LakeState, SideLakeState
from streamhouse.core.model.offsets import truncated_offsets
from streamhouse.core.model.table_state import TieringAssignment, TieringReport
from streamhouse.lake.commits.committer import IcebergLakeTable
from streamhouse.lake.files.lake_filesystem import LakeFilesystem
from streamhouse.lake.files.parquet_writer import WrittenFile
from streamhouse.lake.lake_tables import IcebergLake
from streamhouse.reading.tail.lake_base import base_offsets
from streamhouse.reading.tail.round_planner import PlanLimits, RoundPlan, plan_round
from streamhouse.tiering._ports import (
    RoundObserver,
    SilentObserver,
    TaskRunner,
)
from streamhouse.tiering.maintain._maintenance import Maintainer
from streamhouse.tiering.round._lease import Lease, RoundTracker
from streamhouse.tiering.round._round_maintenance import ClaimedMaintenance
from streamhouse.tiering.round._round_writer import LandedFiles, RoundWriter
from streamhouse.tiering.round._side_tables import (
    BATCH_STEP_PREFIX,
    HISTORY_STEP_PREFIX,
    SideTable,
    is_batch_due,
)

__all__ = ["BATCH_STEPS", "HISTORY_STEPS", "ROUND_STEPS", "RoundResult", "TieringRound"]

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
HISTORY_STEPS: Final = tuple(HISTORY_STEP_PREFIX + step for step in ROUND_STEPS[3:6])
BATCH_STEPS: Final = tuple(BATCH_STEP_PREFIX + step for step in ROUND_STEPS[3:6])


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundResult:
    """The outcome of a round.

    `tiered`: the round moved rows. `recovered`: the round only registered a snapshot that an
    earlier worker had committed; more rows may wait. `maintained`: all rows were in the lake
    already, and the lake was tidied. `batch_offsets` belong to the batch layout, where due.
    `rows_written`, files and sizes count the lake table of the rows only; later changes may have
    replaced some of its rows.
    """

    table: str
    kind: Literal["tiered", "recovered", "maintained"]
    snapshot_id: int
    tiered_offsets: Mapping[int, int]
    row_count: int = 0
    rows_written: int = 0
    file_count: int = 0
    size_bytes: int = 0
    seconds: float = 0.0
    batch_offsets: Mapping[int, int] | None = None

    @property
    def reached_offsets(self) -> Mapping[int, int]:
        """The end offset of each bucket that every lake table of the round has reached."""
        if self.batch_offsets is None:
            return self.tiered_offsets
        return {b: min(end, self.batch_offsets[b]) for b, end in self.tiered_offsets.items()}


@dataclass(frozen=True, kw_only=True)
class TieringRound:
    """The inputs of one round; `run` carries it out.

    `token` goes to tasks, which open their own connections. `checkpoint` is called after each
    step; tests raise or die there. `is_stopping` ends the round early. `maintainer` maintains the
    lake table after the commit, in one of the `maintenance_slots`. While other tables wait for
    this worker (`is_busy`), maintenance begins only once much more is due.
    """

    client: StorageClient
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
        """Move the assignment's rows into the lake and report the snapshot to the service.

        Raises:
            FencedError: another worker owns the table now, and registers any snapshot that this
                round committed.
            StreamhouseError: the round failed; the claim was given back.
        """
        info = self.assignment.state.table
        table = str(info.path)
        started_s = time.monotonic()
        self.checkpoint("claimed")
        lease = Lease(
            self.client,
            table=table,
            table_id=info.table_id,
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
                    table,
                    table_id=info.table_id,
                    epoch=self.assignment.epoch,
                    error=f"{error.code}: {error}",
                )
            raise
        self.checkpoint("completed")
        return result

    def _run(self, lease: Lease, *, started_s: float) -> RoundResult:
        state = self.assignment.state
        lake_table = self.lake.open_or_create(state.table, state.lake)
        history = SideTable.history(self.lake, self.assignment, self._compare)
        self.checkpoint("lake-opened")
        base = base_offsets(
            lake_table,
            state.lake,
            epoch=self.assignment.epoch,
            bucket_count=state.table.bucket_count,
            compare=self._compare,
        )
        is_behind = lake_table.truncated_offsets != truncated_offsets(state.positions)
        # A round that removes overwritten rows also registers the lake's offsets, in its commit.
        if dict(base) != dict(state.lake.tiered_offsets) and not is_behind:
            return self._recover(lake_table, base, history)
        plan = plan_round(
            table=str(state.table.path),
            covered=base,
            positions=state.positions,
            limits=self.limits,
            is_primary_key_table=state.table.is_primary_key_table,
        )
        self.checkpoint("planned")
        writer = self._writer(lease)
        changelog = None
        if history is not None:
            changelog = history.follow(plan, writer, self.limits)
        landed = self._advance(lake_table, plan, writer, is_behind=is_behind)
        written = [file for result in landed.results for file in result.files]
        report = functools.partial(
            self._complete,
            lake_table,
            landed.snapshot_id,
            plan.target_offsets,
            changelog=changelog,
            written=written,
        )
        layout = batch = None
        if is_batch_due(self.assignment):
            # The service registers the rows first: the batch layout must not delay their readers.
            registered = report(keep_lease=True)
            layout, batch = self._fill_batch_layout(lake_table, writer, registered)
        sides = [side.lake_table for side in (history, layout) if side is not None]
        maintenance = self._maintenance(lake_table, sides, lease, plan)
        with self._maintenance_turn(maintenance) as due:
            registered = report(
                batch=batch,
                sides=sides,
                keep_lease=bool(due),
                due_us=None if maintenance is None else maintenance.due_again_us(),
            )
            writer.drop_leftovers(landed)
            is_moved = plan.splits or is_behind or batch not in (None, state.lake.batch)
            result = RoundResult(
                table=str(state.table.path),
                kind="tiered" if is_moved else "maintained",
                snapshot_id=landed.snapshot_id,
                tiered_offsets=plan.target_offsets,
                row_count=plan.row_count,
                rows_written=_rows_of(written),
                file_count=len(written),
                size_bytes=sum(file.size_bytes for file in written),
                seconds=time.monotonic() - started_s,
                batch_offsets=self._batch_offsets(batch),
            )
            self._tidy(maintenance, due, registered)
        return result

    def _fill_batch_layout(
        self, rows: IcebergLakeTable, writer: RoundWriter, registered: LakeState
    ) -> tuple[SideTable | None, SideLakeState | None]:
        """Bring rows into the batch layout, unless the table's layout was changed or removed.

        The lake table of a removed layout may be dropped at any moment, with the rows in it.
        """
        if self._is_layout_lost(registered):
            return None, None
        try:
            layout = SideTable.batch_layout(self.lake, self.assignment, self._compare)
            return layout, layout.catch_up(rows, writer, self.limits)
        except FencedError:
            raise
        except StreamhouseError as error:
            path = self.assignment.state.table.path
            with contextlib.suppress(StreamhouseError):
                registered = self.client.table_state(str(path)).lake
            if not self._is_layout_lost(registered):
                raise
            _logger.info("event=batch_layout_lost table=%s why=%r", path, str(error))
            return None, None

    def _is_layout_lost(self, registered: LakeState) -> bool:
        """Whether the table has lost the batch layout of the time of the claim."""
        return self.assignment.epoch <= registered.batch_since_epoch

    def _batch_offsets(self, batch: SideLakeState | None) -> Mapping[int, int] | None:
        """Return the offsets of the batch layout, where it is due."""
        if not is_batch_due(self.assignment):
            return None
        return (
            dict.fromkeys(self.assignment.state.positions, 0)
            if batch is None
            else batch.tiered_offsets
        )

    def _tidy(
        self,
        maintenance: ClaimedMaintenance | None,
        due: tuple[IcebergLakeTable, ...],
        registered: LakeState,
    ) -> None:
        if maintenance is not None and due:
            self.tracker.maintaining()
            maintenance.registered = registered
            maintenance.after_round(due)

    @contextlib.contextmanager
    def _maintenance_turn(
        self, maintenance: ClaimedMaintenance | None
    ) -> Iterator[tuple[IcebergLakeTable, ...]]:
        """Yield the lake tables to maintain now: due ones, if a maintenance slot is free."""
        positions = self.assignment.state.positions
        due = () if maintenance is None else maintenance.due(positions, is_busy=self.is_busy())
        has_slot = bool(due) and self.maintenance_slots.acquire(blocking=False)
        try:
            yield due if has_slot else ()
        finally:
            if has_slot:
                self.maintenance_slots.release()

    def _advance(
        self,
        lake_table: IcebergLakeTable,
        plan: RoundPlan,
        writer: RoundWriter,
        *,
        is_behind: bool,
    ) -> LandedFiles:
        """Bring the lake up to `plan`, unless only the batch layout lacks rows."""
        if plan.splits or is_behind:
            return writer.advance(lake_table, plan)
        snapshot_id = lake_table.snapshot_id
        assert snapshot_id is not None, "a claimed table has rows, and they are in the lake"
        return LandedFiles(snapshot_id=snapshot_id, folder="", results=())

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
            fingerprints=self._fingerprints,
            checkpoint=self.checkpoint,
            is_stopping=self.is_stopping,
        )

    def _compare(self, covered: CoveredOffsets) -> None:
        """Have the service verify that the offsets of a lake table belong to the log's history."""
        table = self.assignment.state.table
        self.client.compare_history(str(table.path), table_id=table.table_id, covered=covered)

    def _fingerprints(self, offsets: Mapping[int, int]) -> Mapping[int, str]:
        table = self.assignment.state.table
        return self.client.compare_history(
            str(table.path), table_id=table.table_id, offsets=offsets
        )

    def _maintenance(
        self,
        lake_table: IcebergLakeTable,
        sides: Sequence[IcebergLakeTable],
        lease: Lease,
        plan: RoundPlan,
    ) -> ClaimedMaintenance | None:
        if self.maintainer is None:
            return None
        return ClaimedMaintenance(
            maintainer=self.maintainer,
            client=self.client,
            lake_table=lake_table,
            sides=tuple(sides),
            info=self.assignment.state.table,
            epoch=self.assignment.epoch,
            lease=lease,
            registered=self.assignment.state.lake,
            tiered_offsets=plan.target_offsets,
            is_stopping=self.is_stopping,
            is_idle=not (plan.splits or lake_table.truncated_offsets != plan.truncated_offsets),
        )

    def _recover(
        self,
        lake_table: IcebergLakeTable,
        covered: Mapping[int, int],
        history: SideTable | None,
    ) -> RoundResult:
        """Register a snapshot that an earlier worker committed and did not report."""
        snapshot_id = lake_table.snapshot_id
        assert snapshot_id is not None
        table = str(self.assignment.state.table.path)
        _logger.info("event=snapshot_registered table=%s snapshot=%d", table, snapshot_id)
        changelog = None if history is None else history.current_state()
        # If no rows wait, the next claim, which may come at once, tidies the table.
        due_us = None if self.maintainer is None else 0
        self._complete(lake_table, snapshot_id, covered, changelog=changelog, due_us=due_us)
        return RoundResult(
            table=table,
            kind="recovered",
            snapshot_id=snapshot_id,
            tiered_offsets=covered,
            # The next round fills a batch layout that is due.
            batch_offsets=self._batch_offsets(self.assignment.state.lake.batch),
        )

    def _complete(
        self,
        lake_table: IcebergLakeTable,
        snapshot_id: int,
        offsets: Mapping[int, int],
        *,
        changelog: SideLakeState | None = None,
        batch: SideLakeState | None = None,
        sides: Sequence[IcebergLakeTable] = (),
        written: Sequence[WrittenFile] = (),
        keep_lease: bool = False,
        due_us: int | None = None,
    ) -> LakeState:
        table = self.assignment.state.table
        report = TieringReport(
            table_id=table.table_id,
            epoch=self.assignment.epoch,
            snapshot_id=snapshot_id,
            table_uuid=lake_table.uuid,
            tiered_offsets=offsets,
            changelog=changelog,
            batch=batch,
            keep_lease=keep_lease,
            maintenance_due_us=due_us,
            truncated_offsets=lake_table.truncated_offsets,
            expired_offsets=lake_table.expired_offsets,
            expired_at_us=lake_table.expired_at_us,
            fingerprints=lake_table.fingerprints,
            debt=self._debt(lake_table, sides, written),
        )
        return self.client.complete_tiering(str(table.path), report)

    def _debt(
        self,
        lake_table: IcebergLakeTable,
        sides: Sequence[IcebergLakeTable],
        written: Sequence[WrittenFile],
    ) -> LakeDebt | None:
        debt = lake_table.debt
        if self.maintainer is not None:
            debt = self.maintainer.debt(lake_table, sides)
        if debt is None:
            return None
        return replace(debt, round_files=len(written), round_rows=_rows_of(written))


def _rows_of(written: Sequence[WrittenFile]) -> int:
    return sum(file.row_count for file in written)
