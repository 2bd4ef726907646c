"""Who tiers which table: claims with a lease, epochs that fence, and the lake snapshots reported.

Invariants:
- an epoch is durable before it is handed out, so no two claims of a table ever share one
- tiered offsets never go backwards, never pass the high watermark, always name every bucket
- whatever a worker says under an epoch that is not the current one, or of a dropped table of the
  same name, changes nothing
- a table whose worker may be at work is handed to no other: who has it is as durable as the epoch,
  and after a restart that worker has a whole lease to be heard of
- a lake that has another history than the log is never registered; that it was seen is durable,
  and from then on nothing of the table is handed out
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
        """Return what is known about the table's rounds."""
        state = self._rounds.get(table.info.table_id)
        if state is None:
            state = self._rounds[table.info.table_id] = self._restored(table.lake)
        return state

    def _restored(self, lake: LakeState) -> TieringRound:
        """Return what a table's state on disk says of a round that was running."""
        # A worker inside the service died with it; any other may be at work.
        if lake.tiering_worker in ("", EMBEDDED_WORKER_ID):
            return TieringRound()
        return TieringRound(
            worker_id=lake.tiering_worker,
            started_at_s=self._started_at_s,
            lease_until_s=self._started_at_s + self._lease_ms / 1000,
        )

    def forget(self, table: OpenTable) -> None:
        """Drop what is known about a table that is served no more; under the lock of its round."""
        self._rounds.pop(table.info.table_id, None)

    async def leave(self, table: OpenTable) -> None:
        """Forget a table that is being dropped; return when nothing of it is recorded any more."""
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
        """Claim the most overdue table; with `force` also one that is fresh or paused.

        With `include_idle` also one whose rows are all in the lake, to maintain that.
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
        reason, retry_ms = "no_tables", 1 << 62
        wanted = tuple(self._tables() if tables is None else tables)
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
        """Return ('', urgency), or the word for why not and how long that will last."""
        now_s = self._runtime.monotonic_s()
        state = self.round_of(table)
        properties = table.properties
        later = TableDue(wait_ms=_RETRY_MS_MAX, urgency=0.0)
        if not properties.datalake_enabled:
            return "datalake_disabled", later
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
        """Return how urgent rows of the batch layout are that has its own freshness.

        None when it has all rows, or gets them in the rounds of the table's own.
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
        """Renew the lease of the round `epoch`; after its completion nothing is left to renew."""
        self._check_claim(table, table_id=table_id, epoch=epoch)
        state = self.round_of(table)
        if not state.is_over:
            self._renew(state)
            state.progress = progress or state.progress

    async def complete(self, table: OpenTable, report: TieringReport) -> LakeState:
        """Register a committed lake snapshot; durable on return; a repeat changes nothing."""
        state, epoch = self.round_of(table), report.epoch
        async with state.lock:
            self._check_claim(table, table_id=report.table_id, epoch=epoch)
            rows = CoveredOffsets(
                tiered_offsets=report.tiered_offsets, epoch=epoch, fingerprints=report.fingerprints
            )
            own = await self._checked(table, rows, sides=(report.changelog, report.batch))
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
                fingerprints=own,
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
        """Return the log's fingerprints at `offsets`, of the buckets where they are known.

        `covered` is what a worker found a lake table to cover. Raises `HistoryDivergedError`,
        durably, when that is not this log's history. If it is, and in an epoch that was not given
        out here (this directory was restored from a backup), later epochs are given out from now
        on.
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
        """Raise `HistoryDivergedError`, durably if `is_kept`, when that is not the log's history.

        `covered` is what a reader found a lake table to cover.
        """
        async with self.round_of(table).lock:
            await self._check(table, (covered,), is_kept=is_kept)

    async def look(self, table: OpenTable, head: Callable[[], Awaitable[int | None]]) -> LakeState:
        """Register the lake snapshot that `head` finds for what is registered; return that.

        It has the same offsets, so only its id is new. Who comes second with a look that began
        earlier looks again: a later commit is never taken back.
        """
        for _ in range(_LOOKS_MAX):
            known = table.lake
            if known.snapshot_id is None or known.diverged:
                break
            snapshot_id = await head()
            async with self.round_of(table).lock:
                lake = table.lake
                if (lake.snapshot_id, lake.tiered_offsets, lake.expired_offsets) != (
                    known.snapshot_id,
                    known.tiered_offsets,
                    known.expired_offsets,
                ):
                    continue
                if snapshot_id is not None:
                    await self.record(table, replace(lake, snapshot_id=snapshot_id))
                break
        return table.lake

    async def reconcile(self, table: OpenTable, covered: CoveredOffsets) -> bool:
        """Go on with a table whose lake has been brought back to its log's history.

        Returns False, and changes nothing, unless fingerprints prove that in every bucket.
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
        """Return the log's fingerprints at what `rows` covers; raises as `_check`."""
        known = table.lake
        lakes = [rows, *(covered_by(side) for side in sides if side is not None)]
        recorded = (known, known.changelog, known.batch)
        said = [covered_by(lake) for lake in recorded if lake is not None]
        if not known.diverged and all(replace(lake, epoch=0) in said for lake in lakes):
            return known.fingerprints
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
        """Keep rounds from being claimed and reported while the table becomes `changed`.

        If that is another batch layout, what is in the former one counts no more: readers turn to
        the rows' own lake table, and a round that runs may go on, but its layout is not registered.
        A crash in between leaves the former layout, to be made anew.

        If other properties of the lake changed, a worker is to look now what is to be tidied:
        nobody may write to the table any more, and a round that runs looks with the former ones.
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
        """Count a round once; maintenance under the same claim is not part of it."""
        if state.oldest_us is not None:
            age_ms = (self._runtime.clock_us() - state.oldest_us) // 1000
            is_in_time = age_ms <= table.properties.datalake_freshness_ms
            self.rounds_ended["in_time" if is_in_time else "late"] += 1
            state.oldest_us = None
            state.last_round_ms = int((self._runtime.monotonic_s() - state.started_at_s) * 1000)

    async def fail(self, table: OpenTable, *, table_id: int, epoch: int, error: str) -> int:
        """Give up the round `epoch`; return the pause before the next one, in milliseconds."""
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
        _logger.warning(
            "event=tiering_failed table=%s epoch=%d pause_ms=%d why=%r",
            table.path,
            epoch,
            pause_ms,
            error[:_LOGGED_ERROR_CHARACTERS_MAX],
        )
        state.paused_until_s = self._runtime.monotonic_s() + pause_ms / 1000
        state.end(self._runtime.monotonic_s())
        return pause_ms

    def is_under_way(self, table: OpenTable) -> bool:
        """Whether a worker may be at work on the table."""
        return self.round_of(table).lease_until_s > self._runtime.monotonic_s()

    def status(self, table: OpenTable) -> dict[str, Any]:
        """Return what people look at when a table is not tiered: JSON."""
        return {
            "tiering_epoch": table.lake.tiering_epoch,
            "tiered_at_us": table.lake.tiered_at_us,
            "untiered_rows": table.untiered_rows,
            "diverged": table.lake.diverged,
            **self.round_of(table).to_json(self._runtime.monotonic_s()),
        }

    def lag_ms(self, table: OpenTable) -> int:
        """Return the age of the oldest row outside the lake, of those whose age is known."""
        since_us = table.known_untiered_since_us if table.properties.datalake_enabled else None
        return 0 if since_us is None else max(0, self._runtime.clock_us() - since_us) // 1000

    def idle_workers(self) -> dict[str, str]:
        """Return worker -> the word for why it has no table, of those heard of lately."""
        now_s = self._runtime.monotonic_s()
        busy = {state.worker_id for state in self._rounds.values() if state.lease_until_s > now_s}
        reasons = self._workers.reasons(now_s)
        return {w: reason for w, reason in reasons.items() if reason and w not in busy}

    def _renew(self, state: TieringRound) -> None:
        state.lease_until_s = self._runtime.monotonic_s() + self._lease_ms / 1000

    def _check_claim(self, table: OpenTable, *, table_id: int, epoch: int) -> None:
        """Raise unless `epoch` is the current one of this very table: each has its own epochs."""
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
