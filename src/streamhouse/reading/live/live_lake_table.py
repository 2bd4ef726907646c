"""The live metadata of one lake table: the lake's snapshot, and the tail of the log on top of it.

A live cut is a round that is never committed. The rows since the last round become Parquet files
and position deletes, as in a round, and one snapshot more than the catalog has. The next cut adds
only the rows since this cut.

Files of a cut lie in folders named `live/<unix seconds>-<id>`, below the data and the metadata of
the lake table. A cut is handed out for 15 minutes after its oldest folder was made, and stays
readable for 15 minutes more; then anybody who serves the table deletes the folder.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from streamhouse.core.errors import UnavailableError
from streamhouse.core.model.lake.coverage import CoveredOffsets
from streamhouse.core.model.lake.facts import LakeCatalog, LakeRole
from streamhouse.core.model.offsets import BucketPositions, truncated_offsets
from streamhouse.core.model.table_state import TableState
from streamhouse.lake.commits.committer import IcebergLakeTable, LakeCommit
from streamhouse.lake.files.lake_filesystem import LakeFilesystem
from streamhouse.lake.guards.table_commits import LakeMetadata
from streamhouse.lake.lake_tables import IcebergLake
from streamhouse.lake.uncommitted_catalog import UncommittedCatalog, written_metadata
from streamhouse.reading.live.live_folders import new_folder
from streamhouse.reading.tail.lake_base import base_offsets
from streamhouse.reading.tail.lake_task import LogReads, SplitResult, run_split
from streamhouse.reading.tail.round_planner import PlanLimits, RoundPlan, plan_round
from streamhouse.reading.tail.round_splits import check_results, round_splits

__all__ = ["HANDED_OUT_S", "LiveCut", "LiveLakeTable"]

HANDED_OUT_S: Final = 15 * 60
# Every chunk is a few files to open; a chunk that deletes rows is read for each later delete.
CHUNKS_MAX: Final = 16
# As many rows as one round moves: a table with more has waited too long for its round.
_LIMITS: Final = PlanLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveCut:
    """A lake table at one moment, with every row up to `end_offsets`.

    The snapshot `base_snapshot_id` of the catalog must stay as long as the cut is read. `made_s` is
    when the oldest folder of the cut was made, in unix seconds. `row_count` and `size_bytes` are of
    the data files that were written for this cut.
    """

    table: LakeMetadata
    end_offsets: Mapping[int, int]
    base_snapshot_id: int | None
    made_s: float
    row_count: int = 0
    size_bytes: int = 0


class LiveLakeTable:
    """Makes the live cuts of one lake table. Not thread-safe.

    `compare` verifies the offsets of a lake table that differ from the registered ones, as
    `StorageClient.compare_history` does.
    """

    def __init__(
        self,
        catalog: UncommittedCatalog,
        described: LakeCatalog,
        *,
        role: LakeRole = LakeRole.ROWS,
        compare: Callable[[TableState, CoveredOffsets], object],
        limits: PlanLimits = _LIMITS,
    ) -> None:
        self.limits: Final = limits
        self._catalog = catalog
        self._lake = IcebergLake(described, opened=self._catalog)
        self._files = LakeFilesystem(described.properties)
        self._role = role
        self._compare = compare
        self._base_key: object = None
        self._base: LakeMetadata | None = None
        self._state: TableState | None = None
        self._cut: LiveCut | None = None
        self._chunks = 0

    def cut(self, state: TableState, log: LogReads, *, now_s: float) -> LiveCut:
        """Return a cut with exactly the rows of `state`; the same cut if nothing has changed.

        Raises:
            UnavailableError: too many rows wait for a round.
            StreamhouseError: as a union read of a damaged, diverged or dropped table.
        """
        # What a later cut of the same lake snapshot does not change.
        base_key = (state.table.table_id, state.lake.snapshot_id, state.lake.table_uuid)
        cut = self._cut
        if cut is not None and (
            base_key != self._base_key
            or self._chunks >= CHUNKS_MAX
            or now_s >= cut.made_s + HANDED_OUT_S
        ):
            cut = None
        if cut is not None and self._shows(state):
            return cut
        try:
            self._cut = self._next(cut, state, log, now_s=now_s)
        except BaseException:
            self._cut = None
            raise
        self._base_key, self._state = base_key, state
        return self._cut

    def _shows(self, state: TableState) -> bool:
        """Whether the present cut is the table at `state`."""
        before = self._state
        return (
            before is not None
            and before.table == state.table
            and {b: at.high_watermark for b, at in before.positions.items()}
            == {b: at.high_watermark for b, at in state.positions.items()}
            and truncated_offsets(before.positions) == truncated_offsets(state.positions)
        )

    def _next(
        self, before: LiveCut | None, state: TableState, log: LogReads, *, now_s: float
    ) -> LiveCut:
        """Return a cut on top of `before`, or all anew."""
        if before is None:
            self._catalog.forget()
            self._chunks = 0
        folder = self._catalog.folder = new_folder(now_s)
        lake_table = self._lake.open_or_create(state.table, state.lake, role=self._role)
        if before is None:
            self._base = LakeMetadata.of(lake_table.iceberg)
        plan = self._plan(lake_table, state)
        is_behind = dict(plan.truncated_offsets) != lake_table.truncated_offsets
        results: list[SplitResult] = []
        if plan.splits or (is_behind and lake_table.snapshot_id is not None):
            results = self._add(lake_table, plan, state, log, folder)
            self._chunks += 1
        table = self._write(lake_table)
        rows = sum(file.row_count for result in results for file in result.files)
        size = sum(file.size_bytes for result in results for file in result.files)
        assert self._base is not None
        return LiveCut(
            table=table,
            end_offsets=plan.target_offsets,
            base_snapshot_id=self._base.metadata.current_snapshot_id,
            made_s=now_s if before is None else before.made_s,
            row_count=rows,
            size_bytes=size,
        )

    def _plan(self, lake_table: IcebergLakeTable, state: TableState) -> RoundPlan:
        info = state.table
        covered = base_offsets(
            lake_table,
            state.lake,
            epoch=state.lake.tiering_epoch,
            bucket_count=info.bucket_count,
            compare=lambda offsets: self._compare(state, offsets),
        )
        plan = plan_round(
            table=str(info.path),
            covered=covered,
            positions=_readable(state),
            limits=self.limits,
            is_primary_key_table=info.is_primary_key_table,
        )
        waiting = sum(
            at.high_watermark - plan.target_offsets[bucket]
            for bucket, at in state.positions.items()
        )
        if waiting:
            raise UnavailableError(
                f"table '{info.path}': {plan.row_count + waiting} rows are not in the lake yet, and"
                f" a live cut has at most {plan.row_count} of them: run a round"
                " (`streamhouse tier --once`), and try again"
            )
        return plan

    def _add(
        self,
        lake_table: IcebergLakeTable,
        plan: RoundPlan,
        state: TableState,
        log: LogReads,
        folder: str,
    ) -> list[SplitResult]:
        """Write the rows of `plan` and commit them in memory."""
        data_folder = f"{lake_table.data_location}/{folder}"
        with self._files.attempt_in(data_folder):
            splits = round_splits(
                plan,
                state.table,
                lake_table,
                folder=data_folder,
                files=self._files,
                endpoint="",
                token=None,
            )
            results = [
                run_split(split, open_log=lambda _: contextlib.nullcontext(log)) for split in splits
            ]
            is_folded = state.table.is_primary_key_table and self._role is not LakeRole.CHANGES
            check_results(plan, results, table=str(state.table.path), is_folded=is_folded)
            commit = LakeCommit(
                files=[file for result in results for file in result.files],
                deletes=[deletes for result in results for deletes in result.deletes],
                base_offsets=plan.base_offsets,
                tiered_offsets=plan.target_offsets,
                truncated_offsets=plan.truncated_offsets,
                epoch=state.lake.tiering_epoch,
            )
            lake_table.commit(commit)
        return results

    def _write(self, lake_table: IcebergLakeTable) -> LakeMetadata:
        """Return the shown metadata in a new file, or the catalog's own if nothing was added."""
        assert self._base is not None
        if lake_table.iceberg.metadata is self._base.metadata and self._base.metadata_location:
            return self._base
        return written_metadata(lake_table.iceberg, base=self._base.metadata)


def _readable(state: TableState) -> Mapping[int, BucketPositions]:
    """Return the positions, without rows that left the log of a table that has no lake."""
    if state.lake.snapshot_id is not None or state.table.is_primary_key_table:
        return state.positions
    return {
        bucket: replace(at, expired_offset=max(at.expired_offset, at.log_start_offset))
        for bucket, at in state.positions.items()
    }
