"""The worker: claims tables, runs rounds, and waits while no table is due.

`run_forever` keeps every table as fresh as its property requires. `run_once` moves every row of the
log at the time of the call, then returns.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from streamhouse.client import StorageClient, TieringIdle
from streamhouse.core.backoff import Backoff
from streamhouse.core.errors import (
    FencedError,
    HistoryDivergedError,
    NotFoundError,
    OverloadedError,
    StorageFailedError,
    StreamhouseError,
    UnavailableError,
    UnknownOutcomeError,
    UnsupportedError,
)
from streamhouse.core.model.table import TablePath
from streamhouse.core.model.table_state import TableState, TieringAssignment
from streamhouse.lake.files.lake_filesystem import LakeFilesystem
from streamhouse.lake.lake_tables import IcebergLake
from streamhouse.reading.tail.round_planner import ROWS_PER_ROUND_MAX, PlanLimits
from streamhouse.tiering._ports import (
    RoundObserver,
    SilentObserver,
    TaskRunner,
)
from streamhouse.tiering.maintain._maintenance import Maintainer
from streamhouse.tiering.round._round import RoundResult, TieringRound
from streamhouse.tiering.worker._round_log import IdleLog, RoundLog
from streamhouse.tiering.worker._tables_in_flight import (
    IDLE_WAIT_S_MAX,
    TABLES_IN_FLIGHT,
    TablesInFlight,
)

if TYPE_CHECKING:
    from streamhouse.core.traces.spans import Spans

__all__ = ["TableSummary", "TieringService", "new_worker_id"]

_logger = logging.getLogger(__name__)

_BACKOFF: Final = Backoff(first_s=0.2, most_s=IDLE_WAIT_S_MAX)
_FAILURES_MAX: Final = 3
# Errors after which the same call may succeed a moment later.
_PASSING: Final = (FencedError, OverloadedError, UnavailableError, UnknownOutcomeError)


def new_worker_id() -> str:
    """Return a name for this worker, for people to find in the service's messages."""
    return f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}"


@dataclass(kw_only=True)
class TableSummary:
    """The outcome of `run_once` for one table; `error` is why the table is not finished."""

    table: str
    target_offsets: Mapping[int, int]
    rounds: int = 0
    row_count: int = 0
    file_count: int = 0
    size_bytes: int = 0
    seconds: float = 0.0
    snapshot_id: int | None = None
    error: StreamhouseError | None = None
    failures: int = 0

    def add(self, result: RoundResult) -> None:
        """Count a round."""
        self.rounds += 1
        self.row_count += result.row_count
        self.file_count += result.file_count
        self.size_bytes += result.size_bytes
        self.seconds += result.seconds
        self.snapshot_id = result.snapshot_id

    def to_json(self) -> dict[str, Any]:
        """Return the summary as a document for programs."""
        return {
            "table": self.table,
            "row_count": self.row_count,
            "file_count": self.file_count,
            "file_bytes": self.size_bytes,
            "rounds": self.rounds,
            "round_ms": round(self.seconds * 1_000),
            "snapshot_id": self.snapshot_id,
            "error": None if self.error is None else str(self.error),
        }

    def text(self) -> str:
        """Return the summary as one line for people."""
        if self.error is not None:
            return f"{self.table}: failed: {self.error}"
        if not self.row_count:
            return f"{self.table}: nothing to tier (lake snapshot {self.snapshot_id})"
        rate = f", {self.row_count / self.seconds:,.0f} rows/s" if self.seconds else ""
        return (
            f"{self.table}: {self.row_count:,} rows in {self.file_count:,} files"
            f" ({self.size_bytes / 1e6:,.1f} MB), {self.rounds} round"
            f"{'s' if self.rounds != 1 else ''}, {self.seconds:.1f} s{rate}"
            f" (lake snapshot {self.snapshot_id})"
        )

    def is_reached(self, offsets: Mapping[int, int]) -> bool:
        """Whether every row of the time of the call is in the lake."""
        return all(offsets.get(b, 0) >= end for b, end in self.target_offsets.items())


@dataclass(kw_only=True)
class TieringService:
    """One tiering worker of any number: the service hands each table to one worker at a time.

    `tables` limits the worker to some tables; None means all. `run_forever` works on up to
    `tables_in_flight` tables at once, and maintains at most half as many. `patience_s` is how long
    `run_once` waits for a table that another worker holds and does not advance. `spans` makes a
    trace of each round. With `shares_log` the service is in this process, and logs each failed
    round itself.
    """

    client: StorageClient
    lake: IcebergLake
    runner: TaskRunner
    token: str | None = field(default=None, repr=False)
    tables: Sequence[str] | None = None
    worker_id: str = field(default_factory=new_worker_id)
    rows_per_round_max: int = ROWS_PER_ROUND_MAX
    tables_in_flight: int = TABLES_IN_FLIGHT
    patience_s: float = 120.0
    observer: RoundObserver = field(default_factory=SilentObserver)
    checkpoint: Callable[[str], None] = lambda _: None
    stopping: threading.Event = field(default_factory=threading.Event)
    spans: Spans | None = None
    shares_log: bool = False
    maintainer: Maintainer = field(init=False)
    _maintenance_slots: threading.Semaphore = field(init=False)
    _rounds: RoundLog = field(default_factory=RoundLog)
    # Set while every slot is taken: tables that are due may be waiting.
    _is_busy: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._maintenance_slots = threading.Semaphore(max(1, self.tables_in_flight // 2))
        self.maintainer = Maintainer(
            pins=self.client,
            runner=self.runner,
            filesystem=LakeFilesystem(self.lake.file_properties),
            checkpoint=self.checkpoint,
        )

    def stop(self) -> None:
        """End the running round early and let the loop return; safe from any thread."""
        self.stopping.set()

    def run_forever(self) -> None:
        """Work until `stop`. Raises only errors beyond the reach of waiting, like a wrong token."""
        failures = 0
        idle_log = IdleLog()
        with TablesInFlight(
            self._run_and_report, slots=self.tables_in_flight, stopping=self.stopping
        ) as in_flight:
            while not self.stopping.is_set():
                try:
                    answer = self.client.claim_tiering(self.worker_id, tables=self.tables)
                    failures = 0
                except (*_PASSING, StorageFailedError, NotFoundError) as error:
                    _logger.warning("event=no_table_claimed why=%r", str(error))
                    failures += 1
                    in_flight.wait_idle(_BACKOFF.after(failures))
                    continue
                if isinstance(answer, TieringIdle):
                    self._is_busy.clear()
                    idle_log.idle(answer)
                    self._rounds.tick()
                    in_flight.wait_idle(min(answer.retry_after_ms / 1000, IDLE_WAIT_S_MAX))
                    continue
                in_flight.start(answer)
                if self.tables_in_flight > 1 and in_flight.is_full:
                    self._is_busy.set()
                in_flight.wait_for_slot()
        self._rounds.close()

    def _run_and_report(self, assignment: TieringAssignment) -> bool:
        """Run a round, and keep its failure to its table; return whether rows remain."""
        try:
            result = self._run_round(assignment)
        except StreamhouseError as error:
            # The service pauses the table; other tables go on.
            path = assignment.state.table.path
            self._log_failure(path, error)
            return False
        except Exception as error:  # noqa: BLE001 - one table's bug must not stop the others
            self._report_bug(assignment, error)
            return False
        positions = assignment.state.positions.items()
        return any(result.tiered_offsets.get(b, 0) < p.high_watermark for b, p in positions)

    def run_once(self) -> list[TableSummary]:
        """Tier every table to the current end of its log, due or not; return a summary of each.

        Raises `UnsupportedError` for a named table with tiering off. A failure of a table is in its
        summary, and the work on other tables goes on.
        """
        summaries = self._targets()
        waiting = {
            path: summary
            for path, summary in summaries.items()
            if summary.error is None and not summary.is_reached(self._tiered(path))
        }
        progress_s = time.monotonic()
        while waiting and not self.stopping.is_set():
            answer = self._claim(waiting)
            if answer is None:
                continue
            if isinstance(answer, TieringAssignment):
                self._advance(answer, waiting)
                progress_s = time.monotonic()
                continue
            if self._drop_reached(waiting):
                progress_s = time.monotonic()
            elif time.monotonic() - progress_s > self.patience_s:
                for path in list(waiting):
                    waiting.pop(path).error = UnavailableError(
                        f"table '{path}' could not be claimed for {self.patience_s:g} s:"
                        f" {answer.reason}"
                    )
            else:
                self.stopping.wait(min(answer.retry_after_ms / 1000, IDLE_WAIT_S_MAX))
        return list(summaries.values())

    def _claim(self, waiting: dict[str, TableSummary]) -> TieringAssignment | TieringIdle | None:
        """Claim one of the tables; None when some table was dropped."""
        try:
            return self.client.claim_tiering(self.worker_id, tables=list(waiting), force=True)
        except NotFoundError:
            for path in list(waiting):
                try:
                    self.client.describe_table(path)
                except NotFoundError as error:
                    waiting.pop(path).error = error
            return None

    def _advance(self, assignment: TieringAssignment, waiting: dict[str, TableSummary]) -> None:
        path = str(assignment.state.table.path)
        summary = waiting[path]
        try:
            result = self._run_round(assignment)
        except StreamhouseError as error:
            summary.failures += 1
            self._log_failure(path, error)
            if not isinstance(error, _PASSING) or summary.failures >= _FAILURES_MAX:
                waiting.pop(path).error = error
            return
        summary.add(result)
        if summary.is_reached(result.reached_offsets):
            del waiting[path]

    def _drop_reached(self, waiting: dict[str, TableSummary]) -> bool:
        """Remove tables already tiered far enough by other workers; return whether any were."""
        reached = [p for p, summary in waiting.items() if summary.is_reached(self._tiered(p))]
        for path in reached:
            del waiting[path]
        return bool(reached)

    def _targets(self) -> dict[str, TableSummary]:
        summaries: dict[str, TableSummary] = {}
        for path in self.client.list_tables() if self.tables is None else self.tables:
            try:
                state = self.client.table_state(path)
            except NotFoundError:
                if self.tables is not None:
                    raise
                continue
            if reason := _why_not(state):
                if self.tables is not None:
                    raise UnsupportedError(f"table '{path}' cannot be tiered: {reason}")
                continue
            name = str(TablePath.parse(path))
            ends = {bucket: p.high_watermark for bucket, p in state.positions.items()}
            summaries[name] = TableSummary(
                table=name, target_offsets=ends, snapshot_id=state.lake.snapshot_id
            )
            if state.lake.diverged:
                summaries[name].error = HistoryDivergedError(state.lake.diverged)
        return summaries

    def _tiered(self, path: str) -> Mapping[int, int]:
        """Return the offsets that the lake has reached; -1 while the lake has overwritten rows."""
        state = self.client.table_state(path)
        if state.has_overwritten_rows:
            return dict.fromkeys(state.positions, -1)
        return state.reached_offsets()

    def _run_round(self, assignment: TieringAssignment) -> RoundResult:
        if self.spans is None:
            return self._round(assignment, self.checkpoint)
        table = str(assignment.state.table.path)
        with self.spans.of_work("tiering round", {"streamhouse.table": table}) as stages:

            def checkpoint(step: str) -> None:
                stages.end(step)
                self.checkpoint(step)

            return self._round(assignment, checkpoint)

    def _round(
        self, assignment: TieringAssignment, checkpoint: Callable[[str], None]
    ) -> RoundResult:
        result = TieringRound(
            client=self.client,
            lake=self.lake,
            runner=self.runner,
            assignment=assignment,
            token=self.token,
            limits=PlanLimits(
                rows_max=self.rows_per_round_max, parallelism=self.runner.parallelism
            ),
            observer=self.observer,
            checkpoint=checkpoint,
            is_stopping=self.stopping.is_set,
            maintainer=self.maintainer,
            maintenance_slots=self._maintenance_slots,
            is_busy=self._is_busy.is_set,
        ).run()
        self._rounds.add(result)
        _logger.debug(
            "event=round table=%s kind=%s rows=%d files=%d bytes=%d seconds=%.3f snapshot=%d",
            result.table,
            result.kind,
            result.row_count,
            result.file_count,
            result.size_bytes,
            result.seconds,
            result.snapshot_id,
        )
        return result

    def _report_bug(self, assignment: TieringAssignment, bug: Exception) -> None:
        info = assignment.state.table
        _logger.error("event=bug table=%s", info.path, exc_info=bug)
        try:
            self.client.fail_tiering(
                str(info.path),
                table_id=info.table_id,
                epoch=assignment.epoch,
                error=f"internal: {type(bug).__name__}: {bug}",
            )
        except StreamhouseError as error:
            _logger.warning("event=failure_not_told why=%r", str(error))

    def _log_failure(self, path: object, error: StreamhouseError) -> None:
        # A fenced round is not reported: another worker has the table.
        is_logged = self.shares_log and not isinstance(error, FencedError)
        level = logging.DEBUG if is_logged else logging.WARNING
        template = "event=round_failed table=%s code=%s why=%r"
        _logger.log(level, template, path, error.code, str(error))


def _why_not(state: TableState) -> str:
    """Return why a table is never tiered, or an empty string."""
    if not state.table.properties().datalake_enabled:
        return "its property table.datalake.enabled is false"
    return ""
