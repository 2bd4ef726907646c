"""Assigning tables to tiering workers: leases, fencing epochs, reported lake snapshots.

Invariants:
- an epoch is durable before it is handed out, so no two claims of a table share an epoch
- tiered offsets never go backwards, never pass the high watermark, and always name every bucket
- reports under an old epoch, or about a dropped table of the same name, change nothing
- a table with a possibly active worker goes to no further worker: the worker is as durable as the
  epoch, and after a restart the worker has a whole lease for its next heartbeat
- a lake with another history than the log is never registered; the divergence is durable, and the
  table is no longer handed out

Event loop only; disk writes go to the runtime's threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from streamhouse.core.backoff import Backoff
from streamhouse.core.errors import (
    FencedError,
    HistoryDivergedError,
    StreamhouseError,
    UnavailableError,
)
from streamhouse.core.model.lake.coverage import CoveredOffsets
from streamhouse.core.model.lake.facts import LakeState, SideLakeState
from streamhouse.core.model.offsets import further
from streamhouse.core.model.table import TableInfo
from streamhouse.core.model.table_state import (
    EMBEDDED_WORKER_ID,
    TieringAssignment,
    TieringReport,
)
from streamhouse.storage_service.directory.runtime import Runtime
from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.engine.tiering_desk._tiering_reports import (
    batch_of_report,
    check_buckets,
    check_report,
    check_table_id,
    due_of_report,
    has_moved,
)
from streamhouse.storage_service.engine.tiering_desk._tiering_schedule import (
    TableDue,
    due,
)
from streamhouse.storage_service.engine.tiering_desk.history_check import (
    check_history,
    covered_by,
    fingerprints_at,
    is_proven,
)
from streamhouse.storage_service.engine.tiering_desk.tiering_round import (
    ClaimAnswer,
    EndedRound,
    RoundProgress,
    SeenWorkers,
    TieringRound,
)

__all__ = ["TieringCoordinator"]

_logger = logging.getLogger(__name__)

_TABLES_AT_ONCE: Final = 50
_LOOKS_MAX: Final = 3
_RETRY_MS_MIN: Final = 50
_RETRY_MS_MAX: Final = 5_000
_NEVER_MS: Final = 1 << 62
_LOGGED_ERROR_CHARACTERS_MAX: Final = 500


class TieringCoordinator:
    """Hands out tiering rounds of this service's tables."""

    def __init__(
        self,
        *,
        tables: Callable[[], Iterable[OpenTable]],
        save: Callable[[OpenTable, LakeState], None],
        wait_for_shown: Callable[[], None],
        runtime: Runtime,
        lease_ms: int,
        backoff: Backoff,
    ) -> None:
        self._tables = tables
        self._save = save
        self._wait_for_shown = wait_for_shown
        self._runtime = runtime
        self._lease_ms = lease_ms
        self._backoff = backoff
        self._started_at_s = runtime.monotonic_s()
        self._rounds: dict[int, TieringRound] = {}
        self._workers = SeenWorkers()
        self.rounds_ended: Counter[str] = Counter()
        """How many rounds ended `in_time`, `late` or `failed` since the service started."""
        self.is_early = False
        """Whether tables are handed out before they are due, to make room in the log."""

    def round_of(self, table: OpenTable) -> TieringRound:
        """Return the round of the table."""
        state = self._rounds.get(table.info.table_id)
        if state is None:
            state = self._rounds[table.info.table_id] = self._restored(table.lake)
        return state

    def _restored(self, lake: LakeState) -> TieringRound:
        """Return the running round recorded in a table's stored state."""
        # A worker inside the service died with it; any other may be at work.
        if lake.tiering_worker in ("", EMBEDDED_WORKER_ID):
            return TieringRound()
        return TieringRound(
            worker_id=lake.tiering_worker,
            started_at_s=self._started_at_s,
            lease_until_s=self._started_at_s + self._lease_ms / 1000,
        )

    def forget(self, table: OpenTable) -> None:
        """Forget the round of a table that is no longer served; under the lock of the round."""
        self._rounds.pop(table.info.table_id, None)

    async def leave(self, table: OpenTable) -> None:
        """Forget a table being dropped; return when the table's round is no longer recorded."""
        assert table.is_dropped
        async with self.round_of(table).lock:
            self.forget(table)

    async def claim(
        self,
        worker_id: str,
        *,
        tables: Iterable[OpenTable] | None,
        force: bool,
        include_idle: bool = False,
    ) -> ClaimAnswer:
        """Claim the most overdue table; with `force` fresh and paused tables are claimed, too.

        With `include_idle` a fully tiered table is claimed for maintenance, too. A worker that
        starts claims an empty list of tables.
        """
        answer = await self._claim(worker_id, tables=tables, force=force, include_idle=include_idle)
        self._workers.asked(worker_id, answer.reason, now_s=self._runtime.monotonic_s())
        return answer

    async def _claim(
        self,
        worker_id: str,
        *,
        tables: Iterable[OpenTable] | None,
        force: bool,
        include_idle: bool,
    ) -> ClaimAnswer:
        candidates = []
        wanted = tuple(self._tables() if tables is None else tables)
        reason, retry_ms = "no_tables" if tables is None or wanted else "starting", _NEVER_MS
        unread = [table for table in wanted if not table.is_age_known]
        if unread:
            await self._runtime.run(_read_ages, unread)
        for number, table in enumerate(wanted, start=1):
            if number % _TABLES_AT_ONCE == 0:
                # Others have their turn; whether the chosen one may be had is asked again.
                await asyncio.sleep(0)
            word, wait = self._claimable(table, force=force, include_idle=include_idle)
            if not word:
                candidates.append((wait.urgency, table.info.table_id, table))
            elif wait.wait_ms <= retry_ms:
                reason, retry_ms = word, wait.wait_ms
        for _, _, table in sorted(candidates, reverse=True, key=lambda c: c[:2]):
            assignment = await self._grant(table, worker_id, force=force, include_idle=include_idle)
            if assignment is not None:
                return ClaimAnswer(assignment=assignment)
            reason, retry_ms = "leased", _RETRY_MS_MIN
        retry_ms = max(_RETRY_MS_MIN, min(retry_ms, _RETRY_MS_MAX))
        return ClaimAnswer(assignment=None, reason=reason, retry_after_ms=retry_ms)

    def _claimable(
        self, table: OpenTable, *, force: bool, include_idle: bool
    ) -> tuple[str, TableDue]:
        """Return ('', urgency), or the word for the refusal and its duration."""
        now_s = self._runtime.monotonic_s()
        state = self.round_of(table)
        properties = table.properties
        later = TableDue(wait_ms=_RETRY_MS_MAX, urgency=0.0)
        if not properties.datalake_enabled:
            # The reason for an idle worker only if no other table is.
            return "datalake_disabled", replace(later, wait_ms=_NEVER_MS)
        if table.lake.diverged:
            return "history_diverged", later
        try:
            oldest_us = None if table.is_dropped else table.oldest_untiered_us()
        except StreamhouseError as error:
            # A damaged log must not keep the other tables from being tiered.
            _logger.warning("event=tiering_unreadable table=%s why=%r", table.path, error.message)
            return "unreadable", later
        age_ms = 0 if oldest_us is None else max(0, self._runtime.clock_us() - oldest_us) // 1000
        urgency = due(
            oldest_untiered_age_ms=age_ms,
            freshness_ms=properties.datalake_freshness_ms,
            last_round_ms=state.last_round_ms,
            since_last_round_ms=state.since_last_ms(now_s),
        )
        layout = self._batch_layout_due(table)
        if layout is not None and (oldest_us is None or layout.urgency > urgency.urgency):
            urgency = layout
        is_idle = oldest_us is None and layout is None
        is_untidy = state.is_aging(table, now_s) or state.is_untidy(
            table, now_s=now_s, now_us=self._runtime.clock_us()
        )
        if is_idle and not (include_idle or is_untidy):
            # A row that is written this moment is due so much later.
            return "nothing_to_tier", urgency
        if state.lease_until_s > now_s:
            return "leased", replace(later, wait_ms=int((state.lease_until_s - now_s) * 1000) + 1)
        if force or is_idle:
            return "", urgency
        if state.paused_until_s > now_s:
            pause_ms = int((state.paused_until_s - now_s) * 1000) + 1
            return "paused_after_failure", replace(later, wait_ms=pause_ms)
        return ("not_due" if urgency.wait_ms and not self.is_early else ""), urgency

    def _batch_layout_due(self, table: OpenTable) -> TableDue | None:
        """Return the urgency of a batch layout with a freshness of its own.

        None if the layout has all rows, or gets its rows in the table's own rounds.
        """
        freshness_ms = table.properties.datalake_batch_freshness_ms
        if table.is_dropped or not table.lacks_batch_rows:
            return None
        age_ms = max(0, self._runtime.clock_us() - (table.lake.batch_tiered_at_us or 0)) // 1000
        return due(
            oldest_untiered_age_ms=age_ms,
            freshness_ms=freshness_ms or table.properties.datalake_freshness_ms,
            last_round_ms=0,
            since_last_round_ms=self.round_of(table).since_last_ms(self._runtime.monotonic_s()),
        )

    async def _grant(
        self, table: OpenTable, worker_id: str, *, force: bool, include_idle: bool
    ) -> TieringAssignment | None:
        state = self.round_of(table)
        async with state.lock:
            # Another claim may have won while this one waited for the lock, or it is no table here.
            if (
                table.is_dropped
                or self._claimable(table, force=force, include_idle=include_idle)[0]
            ):
                return None
            oldest_us = table.oldest_untiered_us()
            lake = replace(
                table.lake,
                tiering_epoch=table.lake.tiering_epoch + 1,
                tiering_worker=worker_id,
            )
            await self.record(table, lake)
            state.begin(worker_id, now_s=self._runtime.monotonic_s(), oldest_us=oldest_us)
            self._renew(state)
            layout = self._batch_layout_due(table)
            is_every_round = not table.properties.datalake_batch_freshness_ms
            assignment = TieringAssignment(
                epoch=lake.tiering_epoch,
                lease_ms=self._lease_ms,
                state=table.state(),
                is_batch_due=force
                or include_idle
                # There is nothing to bring to it, but it is to be maintained.
                or (oldest_us is None and layout is None)
                or is_every_round
                or self.is_early
                or (layout is not None and not layout.wait_ms),
            )
            # What the lake gets must outlive this machine: else other rows get its offsets.
            await self._runtime.run(self._wait_for_shown)
            return assignment

    async def heartbeat(
        self,
        table: OpenTable,
        *,
        table_id: int,
        epoch: int,
        progress: RoundProgress | None = None,
    ) -> None:
        """Renew the lease of the round `epoch`; a completed round has no lease."""
        self._check_claim(table, table_id=table_id, epoch=epoch)
        state = self.round_of(table)
        if not state.is_over:
            self._renew(state)
            state.progress = progress or state.progress

    async def complete(self, table: OpenTable, report: TieringReport) -> LakeState:
        """Register a committed lake snapshot; durable on return; a repetition changes nothing."""
        state, epoch = self.round_of(table), report.epoch
        async with state.lock:
            self._check_claim(table, table_id=report.table_id, epoch=epoch)
            rows = CoveredOffsets(
                tiered_offsets=report.tiered_offsets, epoch=epoch, fingerprints=report.fingerprints
            )
            fingerprints = await self._checked(table, rows, sides=(report.changelog, report.batch))
            lake = table.lake
            truncated = report.truncated_offsets
            reported = replace(
                lake,
                snapshot_id=report.snapshot_id,
                table_uuid=report.table_uuid,
                tiered_offsets=dict(report.tiered_offsets),
                changelog=report.changelog or lake.changelog,
                batch=batch_of_report(table, report.batch, epoch=epoch),
                truncated_offsets=dict(lake.truncated_offsets if truncated is None else truncated),
                expired_offsets=further(lake.expired_offsets, report.expired_offsets),
                expired_at_us=max(lake.expired_at_us, report.expired_at_us),
                fingerprints=fingerprints,
            )
            if reported != lake:
                check_report(table, reported)
                now_us = self._runtime.clock_us()
                has_come = has_moved(lake.batch, reported.batch)
                batch_us = now_us if has_come else lake.batch_tiered_at_us
                lake = replace(reported, tiered_at_us=now_us, batch_tiered_at_us=batch_us)
            lake = replace(
                lake,
                tiering_worker=state.worker_id if report.keep_lease else "",
                maintenance_due_us=lake.maintenance_due_us
                if report.keep_lease
                else due_of_report(table, report.maintenance_due_us, epoch=epoch),
            )
            await self.record(table, lake)
            state.failures, state.paused_until_s, state.last_error = 0, 0.0, ""
            state.debt = report.debt.completed_by(state.debt) if report.debt else state.debt
            self._count_round(table, state)
            if report.keep_lease:
                self._renew(state)
            else:
                state.end(self._runtime.monotonic_s())
            return table.lake

    async def compare_history(
        self,
        table: OpenTable,
        *,
        table_id: int,
        covered: CoveredOffsets | None,
        offsets: Mapping[int, int],
    ) -> dict[int, str]:
        """Return the log's fingerprints at `offsets`, for the buckets with a known fingerprint.

        `covered` are the offsets covered by the lake table, as read by a worker. Raises
        `HistoryDivergedError`, durably, if the lake has another history than the log. If the
        history is the same but the epoch is unknown here (this directory was restored from a
        backup), later epochs are larger than the lake's epoch.
        """
        check_table_id(table, table_id)
        async with self.round_of(table).lock:
            if covered is not None:
                await self._check(table, (covered,))
                if covered.epoch > table.lake.tiering_epoch:
                    # Whoever asks is fenced by the lake itself.
                    lake = replace(table.lake, tiering_epoch=covered.epoch, tiering_worker="")
                    await self.record(table, lake)
                    self.round_of(table).end(self._runtime.monotonic_s())
        return await self._runtime.run(fingerprints_at, table, offsets)

    async def check_lake(self, table: OpenTable, covered: CoveredOffsets, *, is_kept: bool) -> None:
        """Raise `HistoryDivergedError`, durably if `is_kept`, for a lake of another history.

        `covered` are the offsets covered by the lake table, as read by a reader.
        """
        async with self.round_of(table).lock:
            await self._check(table, (covered,), is_kept=is_kept)

    async def look(self, table: OpenTable, head: Callable[[], Awaitable[int | None]]) -> LakeState:
        """Register the snapshot found by `head` for the registered one; return the new state.

        The offsets are the same and only the id is new. A look that is overtaken by a later look
        looks again: a later commit is never undone.
        """
        for _ in range(_LOOKS_MAX):
            present = table.lake
            if present.snapshot_id is None or present.diverged:
                break
            snapshot_id = await head()
            async with self.round_of(table).lock:
                lake = table.lake
                if (lake.snapshot_id, lake.tiered_offsets, lake.expired_offsets) != (
                    present.snapshot_id,
                    present.tiered_offsets,
                    present.expired_offsets,
                ):
                    continue
                if snapshot_id is not None:
                    await self.record(table, replace(lake, snapshot_id=snapshot_id))
                break
        return table.lake

    async def reconcile(self, table: OpenTable, covered: CoveredOffsets) -> bool:
        """Continue with a table whose lake has returned to the log's history.

        Returns False, without a change, unless fingerprints prove the history in every bucket.
        """
        async with self.round_of(table).lock:
            check_buckets(table, (covered,))
            if not await self._runtime.run(is_proven, table, covered):
                return False
            await self.record(table, replace(table.lake, diverged=""))
            return True

    async def _checked(
        self, table: OpenTable, rows: CoveredOffsets, *, sides: Iterable[SideLakeState | None]
    ) -> Mapping[int, str]:
        """Return the log's fingerprints at the offsets covered by `rows`; raises as `_check`."""
        present = table.lake
        lakes = [rows, *(covered_by(side) for side in sides if side is not None)]
        recorded = (present, present.changelog, present.batch)
        covers = [covered_by(lake) for lake in recorded if lake is not None]
        if not present.diverged and all(replace(lake, epoch=0) in covers for lake in lakes):
            return present.fingerprints
        await self._check(table, lakes)
        return await self._runtime.run(fingerprints_at, table, rows.tiered_offsets)

    async def _check(
        self, table: OpenTable, lakes: Iterable[CoveredOffsets], *, is_kept: bool = True
    ) -> None:
        """Raise `HistoryDivergedError`, durably, unless the lakes have the log's history."""
        if table.lake.diverged:
            raise HistoryDivergedError(table.lake.diverged)
        check_buckets(table, lakes)
        try:
            await self._runtime.run(check_history, table, lakes)
        except HistoryDivergedError as error:
            if not is_kept:
                raise
            _logger.error("event=history_diverged table=%s why=%r", table.path, error.message)
            await self.record(table, replace(table.lake, diverged=error.message, tiering_worker=""))
            self.round_of(table).end(self._runtime.monotonic_s())
            raise

    @contextlib.asynccontextmanager
    async def changing(self, table: OpenTable, changed: TableInfo) -> AsyncIterator[None]:
        """Exclude claims and reports of rounds while the table becomes `changed`.

        With another batch layout the former layout no longer counts: readers use the rows' own lake
        table, and a running round may continue, but the layout of the round is not registered. A
        crash in between leaves the former layout, to be made again.

        After a change of other lake properties a worker looks for due maintenance soon: the table
        may have no more writes, and a running round uses the former properties.
        """
        async with self.round_of(table).lock:
            lake = table.lake
            if table.info.descriptor.batch_layout() != changed.descriptor.batch_layout():
                lake = replace(
                    lake,
                    batch=None,
                    batch_tiered_at_us=None,
                    batch_since_epoch=lake.tiering_epoch,
                )
            if table.properties.of_lake() != changed.properties().of_lake():
                lake = replace(
                    lake,
                    # Of a lake table that nobody has made yet nothing is due.
                    maintenance_due_us=None if lake.snapshot_id is None else 0,
                    altered_in_epoch=lake.tiering_epoch,
                )
            if lake is not table.lake:
                await self.record(table, lake)
            yield

    async def record(self, table: OpenTable, lake: LakeState) -> None:
        """Make `lake` the table's state, durably; under the lock of its round."""
        if table.is_dropped:
            # What another shard has of it by now does not change here.
            raise UnavailableError(f"table '{table.path}' is not served here any more")
        if lake != table.lake:
            await self._runtime.run(self._save, table, lake)
            table.keep_lake(lake)

    def _count_round(self, table: OpenTable, state: TieringRound) -> None:
        """Count a round once; maintenance under the same claim is not counted."""
        if state.oldest_us is not None:
            age_ms = (self._runtime.clock_us() - state.oldest_us) // 1000
            is_in_time = age_ms <= table.properties.datalake_freshness_ms
            self.rounds_ended["in_time" if is_in_time else "late"] += 1
            state.oldest_us = None
            state.last_round_ms = self._round_ms(state)
            state.ended.append(
                EndedRound(ended_us=self._runtime.clock_us(), round_ms=state.last_round_ms)
            )

    def _round_ms(self, state: TieringRound) -> int:
        return int((self._runtime.monotonic_s() - state.started_at_s) * 1000)

    async def fail(self, table: OpenTable, *, table_id: int, epoch: int, error: str) -> int:
        """End the failed round `epoch`; return the pause before the next round, in milliseconds."""
        state = self.round_of(table)
        async with state.lock:
            self._check_claim(table, table_id=table_id, epoch=epoch)
            await self.record(table, replace(table.lake, tiering_worker=""))
            return self._fail(table, state, epoch, error)

    def _fail(self, table: OpenTable, state: TieringRound, epoch: int, error: str) -> int:
        self.rounds_ended["failed"] += 1
        state.failures += 1
        pause_ms = round(self._backoff.after(state.failures) * 1000)
        state.last_error = error
        shown_error = error[:_LOGGED_ERROR_CHARACTERS_MAX]
        state.ended.append(
            EndedRound(
                ended_us=self._runtime.clock_us(),
                round_ms=self._round_ms(state),
                error=shown_error,
            )
        )
        _logger.warning(
            "event=tiering_failed table=%s epoch=%d pause_ms=%d why=%r",
            table.path,
            epoch,
            pause_ms,
            shown_error,
        )
        state.paused_until_s = self._runtime.monotonic_s() + pause_ms / 1000
        state.end(self._runtime.monotonic_s())
        return pause_ms

    def is_under_way(self, table: OpenTable) -> bool:
        """Whether a worker may be at work on the table."""
        return self.round_of(table).lease_until_s > self._runtime.monotonic_s()

    def status(self, table: OpenTable) -> dict[str, Any]:
        """Return the facts that explain an untiered table, as JSON."""
        return {
            "tiering_epoch": table.lake.tiering_epoch,
            "tiered_at_us": table.lake.tiered_at_us,
            "untiered_rows": table.untiered_rows,
            "diverged": table.lake.diverged,
            **self.round_of(table).to_json(self._runtime.monotonic_s()),
        }

    def lag_ms(self, table: OpenTable) -> int:
        """Return the age of the oldest row missing from the lake, among rows of known age."""
        since_us = table.known_untiered_since_us if table.properties.datalake_enabled else None
        return 0 if since_us is None else max(0, self._runtime.clock_us() - since_us) // 1000

    def idle_workers(self) -> dict[str, str]:
        """Return the reason of each idle worker's last empty answer."""
        now_s = self._runtime.monotonic_s()
        busy = {state.worker_id for state in self._rounds.values() if state.lease_until_s > now_s}
        reasons = self._workers.reasons(now_s)
        return {w: reason for w, reason in reasons.items() if reason and w not in busy}

    def _renew(self, state: TieringRound) -> None:
        state.lease_until_s = self._runtime.monotonic_s() + self._lease_ms / 1000

    def _check_claim(self, table: OpenTable, *, table_id: int, epoch: int) -> None:
        """Raise unless `epoch` is the table's current epoch; each table has own epochs."""
        check_table_id(table, table_id)
        current = table.lake.tiering_epoch
        if epoch != current or current == 0:
            holder = self.round_of(table).worker_id
            raise FencedError(
                f"table '{table.path}': tiering epoch {epoch} is not the current one, {current}"
                f"{f' of worker {holder!r}' if holder and epoch < current else ''};"
                " stop this round and claim the table again"
            )


def _read_ages(tables: Iterable[OpenTable]) -> None:
    for table in tables:
        with contextlib.suppress(StreamhouseError):
            table.oldest_untiered_us()
