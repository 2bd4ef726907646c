"""The service's memory of each table's tiering rounds, and of the workers.

Times are of a monotonic clock. Decisions are the coordinator's.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Any, Final

from streamhouse.core.model.lake.facts import LakeDebt
from streamhouse.core.model.table_state import TieringAssignment
from streamhouse.storage_service.engine.open_table import OpenTable

__all__ = ["ClaimAnswer", "EndedRound", "RoundProgress", "SeenWorkers", "TieringRound"]

AGING_LOOKS_PER_TTL: Final = 10
AGING_MS_MIN: Final = 60_000
_WORKERS_MAX: Final = 1_000
_SEEN_S_MAX: Final = 60.0
_ROUNDS_KEPT: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimAnswer:
    """An assignment, or the reason for none (a stable word) and the time of the next request."""

    assignment: TieringAssignment | None
    reason: str = ""
    retry_after_ms: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "assignment": None if self.assignment is None else self.assignment.to_json(),
            "reason": self.reason,
            "retry_after_ms": self.retry_after_ms,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundProgress:
    """The progress of a round, reported by the worker: the step, the rows done and planned."""

    step: str = ""
    rows_done: int = 0
    rows_planned: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "step": self.step,
            "rows_done": self.rows_done,
            "rows_planned": self.rows_planned,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRound:
    """A round that has ended: when, how long it took, and the error of a failed round."""

    ended_us: int
    round_ms: int
    error: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {"ended_us": self.ended_us, "round_ms": self.round_ms, "error": self.error}


@dataclass
class TieringRound:
    """A table's current round, and the results of earlier rounds.

    `oldest_us` is the write time of the round's oldest row, until the report.
    """

    worker_id: str = ""
    lease_until_s: float = 0.0
    started_at_s: float = 0.0
    ended_at_s: float | None = None
    oldest_us: int | None = None
    progress: RoundProgress = field(default_factory=RoundProgress)
    debt: LakeDebt | None = None
    last_round_ms: int = 0
    failures: int = 0
    paused_until_s: float = 0.0
    last_error: str = ""
    ended: deque[EndedRound] = field(default_factory=lambda: deque(maxlen=_ROUNDS_KEPT))
    is_over: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def begin(self, worker_id: str, *, now_s: float, oldest_us: int | None) -> None:
        """Give the table to a worker."""
        self.worker_id, self.is_over = worker_id, False
        self.started_at_s, self.oldest_us = now_s, oldest_us
        self.progress = RoundProgress()

    def end(self, now_s: float) -> None:
        """Take the table from its worker; a late heartbeat must not renew the lease."""
        self.worker_id, self.lease_until_s, self.is_over = "", 0.0, True
        self.ended_at_s = now_s

    def is_aging(self, table: OpenTable, now_s: float) -> bool:
        """Whether old rows may be due to leave the lake of a table without new rows.

        For tables whose worker has not reported the time.
        """
        if table.lake.maintenance_due_us is not None:
            return False
        properties = table.properties
        ttl_ms = properties.datalake_ttl_ms
        # Rows by key do not leave by themselves: they are deleted, and rounds bring that.
        if (
            ttl_ms is None
            or table.info.is_primary_key_table
            or not properties.datalake_auto_maintenance
        ):
            return False
        since_ms = self.since_last_ms(now_s)
        is_time = since_ms is None or since_ms >= max(AGING_MS_MIN, ttl_ms // AGING_LOOKS_PER_TTL)
        return is_time and now_s >= self.paused_until_s and table.lake.snapshot_id is not None

    def is_untidy(self, table: OpenTable, *, now_s: float, now_us: int) -> bool:
        """Whether maintenance is due by now, as reported by the last worker."""
        due_us = table.lake.maintenance_due_us
        if due_us is None or now_us < due_us or not table.properties.datalake_auto_maintenance:
            return False
        since_ms = self.since_last_ms(now_s)
        # Whatever a worker says, a table that nobody writes to is claimed once a minute at most.
        return (since_ms is None or since_ms >= AGING_MS_MIN) and now_s >= self.paused_until_s

    def since_last_ms(self, now_s: float) -> int | None:
        """Return the time since the last round; None before the first round."""
        return None if self.ended_at_s is None else int((now_s - self.ended_at_s) * 1000)

    def to_json(self, now_s: float) -> dict[str, Any]:
        """Return the facts that explain an untiered table."""
        return {
            "worker_id": self.worker_id,
            "lease_left_ms": _left_ms(self.lease_until_s, now_s),
            "failures": self.failures,
            "last_error": self.last_error,
            "pause_left_ms": _left_ms(self.paused_until_s, now_s),
            "last_round_ms": self.last_round_ms,
            "rounds": [ended.to_json() for ended in reversed(self.ended)],
            "round_ms": int((now_s - self.started_at_s) * 1000) if self.worker_id else 0,
            "progress": self.progress.to_json() if self.worker_id else None,
            "maintenance_debt": None if self.debt is None else self.debt.status_json(),
        }


@dataclass
class SeenWorkers:
    """The workers of the last minute, each with its last answer."""

    _seen: OrderedDict[str, tuple[float, str]] = field(default_factory=OrderedDict)

    def asked(self, worker_id: str, reason: str, *, now_s: float) -> None:
        """Note a worker's request; `reason` is empty for an assignment."""
        self._seen[worker_id] = (now_s, reason)
        self._seen.move_to_end(worker_id)
        self._forget(now_s)

    def reasons(self, now_s: float) -> dict[str, str]:
        """Return the reason of each worker's last empty answer."""
        self._forget(now_s)
        return {worker: reason for worker, (_, reason) in self._seen.items()}

    def _forget(self, now_s: float) -> None:
        while self._seen:
            oldest_s, _ = next(iter(self._seen.values()))
            if len(self._seen) <= _WORKERS_MAX and now_s - oldest_s <= _SEEN_S_MAX:
                return
            self._seen.popitem(last=False)


def _left_ms(until_s: float, now_s: float) -> int:
    return max(0, int((until_s - now_s) * 1000))
