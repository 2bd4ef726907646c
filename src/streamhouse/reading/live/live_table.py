"""Live cuts of one lake table: the registered snapshot and the log's tail as an Iceberg table.

A cut is a round that is never committed: the same files, deletes and snapshots, in metadata that no
catalog has. Guarantees:
- a cut has exactly the rows of the table at the moment of its `ServedTable`
- a commit of another engine past the service is in the cuts five seconds later
- each cut is staged on the one before, with only the rows that came since; all is made anew when
  the service registers another snapshot, and when the oldest files are old
- the rows lie in few steps: small steps are taken back and written again as one, so that a row is
  written again a few times at most, once for each power of four
- all files lie in the folders of `lake/files/live_folders.py`; a failed cut deletes its own

Snapshot ids are random, as those of rounds: an unchanged table is answered with the very same cut,
and two processes never serve one table at a time.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple, Protocol

from streamhouse.core.errors import (
    OffsetOutOfRangeError,
    TableNotFoundError,
    UnavailableError,
)
from streamhouse.core.model.lake.coverage import CoveredOffsets
from streamhouse.core.model.lake.facts import LakeRole, LakeState
from streamhouse.core.model.table import TableInfo
from streamhouse.core.threads import Pool
from streamhouse.lake.commits.committer import IcebergLakeTable, LakeCommit
from streamhouse.lake.files.live_folders import HANDED_OUT_S, LiveFolders
from streamhouse.lake.files.parquet_writer import WrittenFile
from streamhouse.lake.files.position_deletes import (
    DeletedRows,
    WrittenDeletes,
    deleted_rows,
    locate_below,
    write_position_deletes,
)
from streamhouse.lake.guards.served_tables import ServedTable
from streamhouse.lake.guards.table_commits import LakeMetadata
from streamhouse.lake.snapshots.live_files import LiveFilesCache
from streamhouse.lake.staged_lake import StagedLake, StagedState, StagedTable
from streamhouse.reading.tail.lake_base import base_offsets
from streamhouse.reading.tail.lake_task import LogReads, SplitResult, TieringSplit, run_split
from streamhouse.reading.tail.round_planner import (
    PlanLimits,
    RoundPlan,
    plan_history,
    plan_round,
)
from streamhouse.reading.tail.round_splits import check_results, round_splits

__all__ = ["LOOK_S", "STEPS_MAX", "LiveCut", "LiveLakeTable", "TableReads"]

# A cut of more rows takes longer than a reader waits, and a round is due anyway.
_LIMITS: Final = PlanLimits()
STEPS_MAX: Final = 16
_MERGED_MIN: Final = 3
_GROWTH: Final = 4
LOOK_S: Final = 5.0
# A thread costs more than fewer rows take.
_PARALLEL_ROWS_MIN: Final = 1 << 16


class TableReads(LogReads, Protocol):
    """Reads of a table's log, and the comparison of its history; `StorageClient` is one."""

    def check_lake_history(self, path: str, covered: CoveredOffsets, *, table_id: int) -> None:
        """See `StorageClient.check_lake_history`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveCut(LakeMetadata):
    """A lake table as of `end_offsets`, in metadata with one snapshot more than committed.

    `base_snapshot_id` is the committed snapshot that must stay for readers, None without one. The
    oldest folder of the cut was made at `made_s`: that decides how long the cut is handed out.
    `rows_written` and `bytes_written` are of the data files that were written for this cut.
    """

    end_offsets: Mapping[int, int]
    base_snapshot_id: int | None
    made_s: float
    rows_written: int = 0
    bytes_written: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """A step to a cut: the table before it, and the number of changes from `offsets` on."""

    before: StagedState
    offsets: Mapping[int, int]
    changes: int


@dataclass(slots=True, kw_only=True)
class _Staged:
    """A staged table in its last cut: what was served then, and the steps to it."""

    table: StagedTable
    base: tuple[object, ...]
    served: ServedTable
    offsets: Mapping[int, int]
    made_s: float
    looked_s: float
    steps: list[_Step] = field(default_factory=list)
    cut: LiveCut | None = None

    def is_current(self, served: ServedTable, registered: LakeState, *, now_s: float) -> bool:
        """Whether its files may still be handed out, and stand on what is registered."""
        is_young = 0 <= now_s - self.made_s < HANDED_OUT_S
        return is_young and self.base == _base_of(served, registered)

    def is_last_look_valid(self, *, now_s: float) -> bool:
        """Look at the catalog now and then; return whether no other engine has committed since.

        A commit through the service's catalog is registered at once.
        """
        if now_s < self.looked_s + LOOK_S:
            return True
        self.looked_s = now_s
        return not self.table.was_committed_to()

    def has_rows_of(self, served: ServedTable) -> bool:
        """Whether nothing came since the last cut."""
        return self.served.info == served.info and _ends(self.served) == _ends(served)


class LiveLakeTable:
    """The live cuts of the lake table of a `role`. Not thread-safe: the owner locks.

    `before_writing` gets the location of the lake table before each cut that makes folders below.
    """

    def __init__(
        self,
        lake: StagedLake,
        *,
        role: LakeRole = LakeRole.ROWS,
        limits: PlanLimits = _LIMITS,
        before_writing: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.role = role
        self.limits = limits
        self._before_writing = before_writing
        self._lake = lake
        self._cache = LiveFilesCache()
        self._staged: _Staged | None = None

    def cut(self, served: ServedTable, log: TableReads, *, now_s: float) -> LiveCut:
        """Return the cut with all rows of `served`; the very same one if nothing has changed.

        Raises:
            HistoryDivergedError: lake and log have other histories.
            TableNotFoundError: the table has no lake table of this role.
            UnavailableError: more rows wait for a round than a cut may have.
            StreamhouseError: the lake table cannot be read, as in a union read.
        """
        served.lake.refuse_diverged(served.info.path)
        served = _without_rows_gone(served)
        registered = _registered(served, self.role)
        _check_waiting(served, registered, self.limits)
        staged, self._staged = self._staged, None
        if staged is not None and not (
            staged.is_current(served, registered, now_s=now_s)
            and staged.is_last_look_valid(now_s=now_s)
        ):
            staged = None
        if staged is not None and staged.cut is not None and staged.has_rows_of(served):
            self._staged = staged
            return staged.cut
        if staged is None:
            staged = self._opened(served, registered, log, now_s=now_s)
        # After an error the next cut begins anew.
        cut = self._advance(staged, served, log, now_s=now_s)
        self._staged = staged
        return cut

    def _opened(
        self, served: ServedTable, registered: LakeState, log: TableReads, *, now_s: float
    ) -> _Staged:
        info = served.info

        def compare(covered: CoveredOffsets) -> None:
            log.check_lake_history(str(info.path), covered, table_id=info.table_id)

        table = self._lake.open(info, registered, compare=compare, cache=self._cache)
        offsets = base_offsets(
            table.lake_table,
            table.registered,
            epoch=_epoch(served, table.lake_table),
            bucket_count=info.bucket_count,
            compare=compare,
        )
        return _Staged(
            table=table,
            base=_base_of(served, registered),
            served=served,
            offsets=offsets,
            made_s=now_s,
            looked_s=now_s,
        )

    def _advance(
        self, staged: _Staged, served: ServedTable, log: TableReads, *, now_s: float
    ) -> LiveCut:
        """Stage what came since the last cut, write the metadata, and return the cut."""
        table = staged.table
        changes = _take_back(staged, served)
        self._before_writing(table.location)
        folders = LiveFolders(table.location, made_s=now_s)
        table.write_into(folders)
        try:
            before = table.state()
            if before.info != served.info:
                table.evolve(served.info)
            plan = _planned(served, table, staged.offsets, self.limits)
            written_files = self._write(staged, served, plan, folders, log)
            written = table.write_metadata()
        except BaseException:
            folders.delete(self._lake.files)
            raise
        if changes or written_files:
            staged.steps.append(_Step(before=before, offsets=staged.offsets, changes=changes))
        staged.served, staged.offsets = served, plan.target_offsets
        staged.cut = LiveCut(
            metadata=written.metadata,
            metadata_location=written.metadata_location,
            end_offsets=plan.target_offsets,
            base_snapshot_id=table.base_snapshot_id,
            made_s=staged.made_s,
            rows_written=sum(file.row_count for file in written_files),
            bytes_written=sum(file.size_bytes for file in written_files),
        )
        return staged.cut

    def _write(
        self,
        staged: _Staged,
        served: ServedTable,
        plan: RoundPlan,
        folders: LiveFolders,
        log: TableReads,
    ) -> Sequence[WrittenFile]:
        """Write and stage the rows of `plan`, if there are any; return the new data files."""
        lake_table = staged.table.lake_table
        is_behind = plan.truncated_offsets != lake_table.truncated_offsets
        expired = _Expired([], [])
        if not (is_behind or staged.steps):
            expired = self._expired(served, lake_table, folders)
        if not (plan.splits or is_behind or any(expired)):
            return []
        splits = round_splits(
            plan,
            served.info,
            lake_table,
            folder=folders.data,
            files=self._lake.files,
            endpoint="",
            token=None,
        )
        results = _run(splits, log)
        is_folded = served.info.is_primary_key_table and self.role is not LakeRole.CHANGES
        check_results(plan, results, table=str(served.info.path), is_folded=is_folded)
        commit = _commit(results, plan, expired, epoch=_epoch(served, lake_table))
        lake_table.commit(commit)
        return commit.files

    def _expired(
        self, served: ServedTable, lake_table: IcebergLakeTable, folders: LiveFolders
    ) -> _Expired:
        """Delete the rows that reached their time to live and are in lake files still."""
        files, live = self._lake.files, lake_table.live_files()
        expired = _Expired([], [])
        for bucket, at in served.positions.items():
            candidates = live.of_bucket(bucket, before=at.expired_offset)
            located = locate_below(files, candidates, at.expired_offset, bucket=bucket)
            if lake_table.has_vectors:
                expired.rows.extend(deleted_rows(located))
            else:
                name = f"b{bucket:05d}-expired"
                written = write_position_deletes(files, located, folder=folders.data, name=name)
                expired.deletes.extend(written)
        return expired


class _Expired(NamedTuple):
    """Deletes of expired rows: position delete files, or in format version 3 the rows."""

    deletes: list[WrittenDeletes]
    rows: list[DeletedRows]


def _run(splits: Sequence[TieringSplit], log: TableReads) -> list[SplitResult]:
    """Write the files of the splits; many rows on as many threads as there are processors."""

    def run(split: TieringSplit) -> SplitResult:
        return run_split(split, open_log=lambda _: contextlib.nullcontext(log))

    if sum(split.range.row_count for split in splits) < _PARALLEL_ROWS_MIN:
        return [run(split) for split in splits]
    # The pool ends before an error goes on: then no thread writes files any more.
    with Pool("live_write", os.cpu_count() or 1) as pool:
        return list(pool.map(run, splits))


def _take_back(staged: _Staged, served: ServedTable) -> int:
    """Take back the small last steps; return the number of changes for the next step."""
    ends = served.high_watermarks
    changes = sum(ends[bucket] - start for bucket, start in staged.offsets.items())
    kept = kept_steps([step.changes for step in staged.steps], changes)
    if kept < len(staged.steps):
        step = staged.steps[kept]
        changes += sum(later.changes for later in staged.steps[kept:])
        staged.table.go_back(step.before)
        staged.offsets = step.offsets
        del staged.steps[kept:]
    return changes


def kept_steps(steps: Sequence[int], changes: int) -> int:
    """Return how many of the steps stay before a step with so many changes; a number for each.

    At least three last steps are written again, and only while the new step has at least a quarter
    of the changes of each.
    """
    kept = len(steps)
    while True:
        small = kept
        while small and steps[small - 1] < _GROWTH * changes:
            small -= 1
        if kept - small < _MERGED_MIN:
            break
        changes += sum(steps[small:kept])
        kept = small
    return kept if kept < STEPS_MAX else STEPS_MAX // 2


def _epoch(served: ServedTable, lake_table: IcebergLakeTable) -> int:
    """Return the epoch of a commit on the table: a worker may have claimed the table meanwhile."""
    covered = lake_table.covered
    return max(served.lake.tiering_epoch, 0 if covered is None else covered.epoch)


def _commit(
    results: Sequence[SplitResult],
    plan: RoundPlan,
    expired: _Expired,
    *,
    epoch: int,
) -> LakeCommit:
    return LakeCommit(
        files=[file for result in results for file in result.files],
        deletes=[*expired.deletes, *(d for result in results for d in result.deletes)],
        deleted_rows=[*expired.rows, *(r for result in results for r in result.deleted_rows)],
        base_offsets=plan.base_offsets,
        tiered_offsets=plan.target_offsets,
        truncated_offsets=plan.truncated_offsets,
        epoch=epoch,
    )


def _registered(served: ServedTable, role: LakeRole) -> LakeState:
    """Return the service's record of the lake table of `role`, with no rows before its first round.

    Raises `TableNotFoundError` if the table has no such lake table.
    """
    lake, properties = served.lake, served.info.properties()
    if role is LakeRole.ROWS:
        return lake
    has_one = properties.has_batch_layout
    side = lake.batch
    if role is LakeRole.CHANGES:
        has_one, side = properties.datalake_changelog, lake.changelog
    if not has_one:
        name = role.lake_name(str(served.info.path))
        raise TableNotFoundError(f"table '{served.info.path}' has no lake table '{name}'")
    if side is None:
        return LakeState(role=role, tiered_offsets=dict.fromkeys(served.positions, 0))
    return side.as_lake_state(role, expired_offsets=lake.expired_offsets)


def _without_rows_gone(served: ServedTable) -> ServedTable:
    """Leave out what has left the log of a table that was never tiered: no rows any more."""
    if served.lake.snapshot_id is not None:
        return served
    positions = {
        bucket: replace(at, expired_offset=max(at.expired_offset, at.log_start_offset))
        for bucket, at in served.positions.items()
    }
    return replace(served, positions=positions)


def _base_of(served: ServedTable, registered: LakeState) -> tuple[object, ...]:
    """Return what a staged table stands on: with another base all is made anew."""
    tiered = registered.tiered_offsets
    return (
        # Rows that left the log before they were in the lake.
        tuple(max(0, at.log_start_offset - tiered[b]) for b, at in served.positions.items()),
        served.info.table_id,
        registered.snapshot_id,
        registered.table_uuid,
        registered.tiered_offsets,
        registered.truncated_offsets,
        registered.expired_offsets,
    )


def _ends(served: ServedTable) -> list[tuple[int, int]]:
    return [(at.high_watermark, at.truncated_offset) for _, at in sorted(served.positions.items())]


def _check_waiting(served: ServedTable, registered: LakeState, limits: PlanLimits) -> None:
    """Raise `UnavailableError` if more rows wait for a round than a round, or a cut, takes."""
    is_history = registered.role is LakeRole.CHANGES
    waiting = {
        bucket: at.high_watermark
        - max(registered.tiered_offsets[bucket], 0 if is_history else at.first_offset)
        for bucket, at in served.positions.items()
    }
    bucket_rows_max = limits.rows_max
    if served.info.is_primary_key_table:
        bucket_rows_max = limits.key_bucket_rows_max
    if sum(waiting.values()) > limits.rows_max or max(waiting.values()) > bucket_rows_max:
        raise UnavailableError(
            f"table '{served.info.path}': {sum(waiting.values())} rows wait for a round, and a live"
            f" table shows at most {limits.rows_max} of them ({bucket_rows_max} of a bucket):"
            f" {_by_a_round(served.info)}"
        )


def _by_a_round(info: TableInfo) -> str:
    """Return what to do about rows that only a round takes."""
    on = "" if info.properties().datalake_enabled else "set table.datalake.enabled to true, "
    return f"{on}run a round (`streamhouse tier --once`) and load the table again"


def _planned(
    served: ServedTable, table: StagedTable, offsets: Mapping[int, int], limits: PlanLimits
) -> RoundPlan:
    """Return the plan from `offsets` to the ends of the log.

    Raises `UnavailableError` if the log no longer has the rows of a new batch layout.
    """
    info = served.info
    if table.role is LakeRole.CHANGES:
        rows = RoundPlan(splits=(), base_offsets=offsets, target_offsets=served.high_watermarks)
        return plan_history(rows, covered=offsets, limits=limits)
    try:
        return plan_round(
            table=str(info.path),
            covered=offsets,
            positions=served.positions,
            limits=limits,
            is_primary_key_table=info.is_primary_key_table,
        )
    except OffsetOutOfRangeError as error:
        if table.role is LakeRole.ROWS:
            raise
        raise UnavailableError(
            f"the batch layout of table '{info.path}' lacks rows that have left the log:"
            f" {_by_a_round(info)}"
        ) from error
