"""The lake tables of a round beside the rows' own: the full history and the batch layout.

Each table has offsets in its snapshots. A round advances the history before the rows: the
history is never behind, whenever a worker dies. A round advances the batch layout after the rows.
The layout may be far behind; its troubles never delay fresh rows. A layout added after the log had
dropped rows gets the dropped rows from the rows' own lake table.
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
from streamhouse.reading.tail.lake_base import base_offsets
from streamhouse.reading.tail.round_planner import (
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
    """A lake table beside the rows' own, in a round; `registered` is the service's record.

    `compare` has the service verify that the covered offsets belong to the log's history.
    """

    lake_table: IcebergLakeTable
    registered: SideLakeState | None
    assignment: TieringAssignment
    compare: Callable[[CoveredOffsets], object]

    @classmethod
    def history(
        cls,
        lake: IcebergLake,
        assignment: TieringAssignment,
        compare: Callable[[CoveredOffsets], object],
    ) -> SideTable | None:
        """Open the table's full history; None without one."""
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
        """Open the batch layout of a table with one; a dropped lake table is created anew."""
        opened = cls._open(lake, assignment, None, LakeRole.BATCH, compare)
        registered = assignment.state.lake.batch
        is_same = registered is not None and registered.table_uuid == opened.lake_table.uuid
        return replace(opened, registered=registered if is_same else None)

    @classmethod
    def _open(
        cls,
        lake: IcebergLake,
        assignment: TieringAssignment,
        registered: SideLakeState | None,
        role: LakeRole,
        compare: Callable[[CoveredOffsets], object],
    ) -> SideTable:
        opened = lake.open_or_create(assignment.state.table, registered, role=role)
        return cls(lake_table=opened, registered=registered, assignment=assignment, compare=compare)

    def covered(self) -> Mapping[int, int]:
        """Return the offsets of the lake table; raises as `base_offsets`."""
        return base_offsets(
            self.lake_table,
            self.registered,
            epoch=self.assignment.epoch,
            bucket_count=self.assignment.state.table.bucket_count,
            compare=self.compare,
        )

    def current_state(self) -> SideLakeState | None:
        """Return the state of the current snapshot; None before the first round."""
        if self.lake_table.snapshot_id is None:
            return None
        return self._at(self.lake_table.snapshot_id, self.covered())

    def follow(self, rows: RoundPlan, writer: RoundWriter, limits: PlanLimits) -> SideLakeState:
        """Bring every change of the round into the full history."""
        plan = plan_history(rows, covered=self.covered(), limits=limits)
        return self._advance(plan, writer, HISTORY_STEP_PREFIX)

    def catch_up(
        self, rows: IcebergLakeTable, writer: RoundWriter, limits: PlanLimits
    ) -> SideLakeState:
        """Bring waiting rows into the batch layout, as many as a round may take.

        `rows` is the rows' own lake table after the round's commit.
        """
        state = self.assignment.state
        covered = self.covered()
        is_outdated = self._is_outdated
        starts = dict.fromkeys(covered, 0) if is_outdated else covered
        copied = plan_copy(covered=starts, positions=state.positions, limits=limits)
        if copied.splits or is_outdated:
            landed = writer.copy(
                rows,
                self.lake_table,
                replace(copied, base_offsets=covered),
                step_prefix=BATCH_STEP_PREFIX,
                is_anew=is_outdated,
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
    def _is_outdated(self) -> bool:
        """Whether the lake table has the rows of an earlier batch layout of the table."""
        covered = self.lake_table.covered
        if self.registered is not None or covered is None:
            return False
        return covered.epoch <= self.assignment.state.lake.batch_since_epoch

    def _advance(self, plan: RoundPlan, writer: RoundWriter, step_prefix: str) -> SideLakeState:
        snapshot_id = self.lake_table.snapshot_id
        # Expired rows move the offsets without a split.
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
