"""The lake tables that a round keeps beside the rows' own: the full history, the batch layout.

Each has its own offsets in its own snapshots. The history is advanced before the rows, so that it
is never behind them, whenever a worker dies. The batch layout is advanced after them, from where it
is: it may be far behind, and what happens to it never keeps rows from being fresh. One that a table
got when its log had lost rows already gets those from the rows' own lake table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from streamhouse.core.model.lake.coverage import CoveredOffsets
from streamhouse.core.model.lake.facts import LakeRole, SideLakeState
from streamhouse.core.model.table_state import TieringAssignment
from streamhouse.lake.commits.committer import IcebergLakeTable
from streamhouse.lake.lake_tables import IcebergLake
from streamhouse.tiering.round._lake_base import base_offsets
from streamhouse.tiering.round._round_planner import (
    PlanLimits,
    RoundPlan,
    plan_copy,
    plan_history,
    plan_round,
)
from streamhouse.tiering.round._round_writer import RoundWriter

__all__ = ["BATCH_STEP_PREFIX", "HISTORY_STEP_PREFIX", "SideTable", "is_batch_due"]

HISTORY_STEP_PREFIX: Final = "history-"
BATCH_STEP_PREFIX: Final = "batch-"


def is_batch_due(assignment: TieringAssignment) -> bool:
    """Whether the round has to bring rows into a batch layout."""
    return assignment.is_batch_due and assignment.state.table.properties().has_batch_layout


@dataclass(frozen=True, kw_only=True)
class SideTable:
    """One lake table beside the rows' own, in one round.

    `compare` asks the service whether what it covers is the log's history.
    """

    lake_table: IcebergLakeTable
    known: SideLakeState | None
    assignment: TieringAssignment
    compare: Callable[[CoveredOffsets], object]

    @classmethod
    def history(
        cls,
        lake: IcebergLake,
        assignment: TieringAssignment,
        compare: Callable[[CoveredOffsets], object],
    ) -> SideTable | None:
        """Open the table's full history; None when it keeps none."""
        state = assignment.state
        if not state.table.properties().datalake_changelog:
            return None
        return cls._open(lake, assignment, state.lake.changelog, LakeRole.CHANGES, compare)

    @classmethod
    def batch_layout(
        cls,
        lake: IcebergLake,
        assignment: TieringAssignment,
        compare: Callable[[CoveredOffsets], object],
    ) -> SideTable:
        """Open the table's batch layout, which it has.

        A copy can be made anew: if somebody dropped its lake table, that is what happens.
        """
        opened = cls._open(lake, assignment, None, LakeRole.BATCH, compare)
        known = assignment.state.lake.batch
        is_known = known is not None and known.table_uuid == opened.lake_table.uuid
        return replace(opened, known=known if is_known else None)

    @classmethod
    def _open(
        cls,
        lake: IcebergLake,
        assignment: TieringAssignment,
        known: SideLakeState | None,
        role: LakeRole,
        compare: Callable[[CoveredOffsets], object],
    ) -> SideTable:
        opened = lake.open_or_create(assignment.state.table, known, role=role)
        return cls(lake_table=opened, known=known, assignment=assignment, compare=compare)

    def covered(self) -> Mapping[int, int]:
        """Return the offsets it covers; raises as `base_offsets`."""
        return base_offsets(
            self.lake_table,
            self.known,
            epoch=self.assignment.epoch,
            bucket_count=self.assignment.state.table.bucket_count,
            compare=self.compare,
        )

    def as_it_is(self) -> SideLakeState | None:
        """Return what it covers now, None before its first round."""
        if self.lake_table.snapshot_id is None:
            return None
        return self._at(self.lake_table.snapshot_id, self.covered())

    def follow(self, rows: RoundPlan, writer: RoundWriter, limits: PlanLimits) -> SideLakeState:
        """Bring every change that the round moves into the full history."""
        plan = plan_history(rows, covered=self.covered(), limits=limits)
        return self._advance(plan, writer, HISTORY_STEP_PREFIX)

    def catch_up(
        self, rows: IcebergLakeTable, writer: RoundWriter, limits: PlanLimits
    ) -> SideLakeState:
        """Bring the rows that wait, as many as a round may take, into the batch layout.

        `rows` is the rows' own lake table, as the round has left it.
        """
        state = self.assignment.state
        covered = self.covered()
        is_former = self._is_former
        starts = dict.fromkeys(covered, 0) if is_former else covered
        copied = plan_copy(covered=starts, positions=state.positions, limits=limits)
        if copied.splits or is_former:
            landed = writer.copy(
                rows,
                self.lake_table,
                replace(copied, base_offsets=covered),
                step_prefix=BATCH_STEP_PREFIX,
                is_anew=is_former,
            )
            writer.drop_leftovers(landed)
            return self._at(landed.snapshot_id, copied.target_offsets)
        plan = plan_round(
            table=str(state.table.path),
            covered=covered,
            positions=state.positions,
            limits=limits,
            is_primary_key_table=state.table.is_primary_key_table,
        )
        return self._advance(plan, writer, BATCH_STEP_PREFIX)

    @property
    def _is_former(self) -> bool:
        """Whether it has the rows of a layout that the table had before it got this one."""
        covered = self.lake_table.covered
        if self.known is not None or covered is None:
            return False
        return covered.epoch <= self.assignment.state.lake.batch_since_epoch

    def _advance(self, plan: RoundPlan, writer: RoundWriter, step_prefix: str) -> SideLakeState:
        snapshot_id = self.lake_table.snapshot_id
        # Without rows to move the offsets go past those that have expired.
        is_moved = plan.target_offsets != plan.base_offsets
        if is_moved or plan.truncated_offsets != self.lake_table.truncated_offsets:
            landed = writer.advance(self.lake_table, plan, step_prefix=step_prefix)
            writer.drop_leftovers(landed)
            snapshot_id = landed.snapshot_id
        assert snapshot_id is not None, "a claimed table has rows"
        return self._at(snapshot_id, plan.target_offsets)

    def _at(self, snapshot_id: int, offsets: Mapping[int, int]) -> SideLakeState:
        return SideLakeState(
            snapshot_id=snapshot_id,
            table_uuid=self.lake_table.uuid,
            tiered_offsets=offsets,
            truncated_offsets=self.lake_table.truncated_offsets,
            fingerprints=self.lake_table.fingerprints,
        )
