"""Waiting until rows are in the lake: whether they are, and what is said when they are not in time.

The service moves rows when a worker asks it for a table; a client only looks. What is decided here
is decided of one consistent cut of the table, and of what the service's status says of its rounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from streamhouse.core.backoff import Backoff
from streamhouse.core.errors import (
    HistoryDivergedError,
    InvalidRequestError,
    TableNotFoundError,
)
from streamhouse.core.model.table_state import TableState

__all__ = ["LOOKS", "TieredWait", "rounds_text"]

LOOKS: Final = Backoff(first_s=0.05, most_s=1.0)
"""The pauses between looks at a table."""
_ERROR_CHARACTERS_MAX: Final = 300


@dataclass(frozen=True, slots=True)
class TieredWait:
    """What is waited for: that the lake covers `ends`, bucket -> offset, of the table `table_id`.

    Rows that were overwritten or have expired meanwhile are no lake's to have.
    """

    table_id: int
    ends: Mapping[int, int]

    @classmethod
    def of(cls, state: TableState) -> TieredWait:
        """Wait for the rows that are there now."""
        return cls(
            state.table.table_id, {b: at.high_watermark for b, at in state.positions.items()}
        )

    def rows_left(self, state: TableState) -> int:
        """Return how many rows the lake lacks; raises if it will never have them."""
        table = state.table
        if table.table_id != self.table_id:
            raise TableNotFoundError(
                f"table '{table.path}' was dropped while its rows were waited for, and made anew"
            )
        left = sum(
            max(0, end - max(at.tiered_offset, at.first_offset))
            for at, end in ((state.positions[bucket], end) for bucket, end in self.ends.items())
        )
        if left and state.lake.diverged:
            raise HistoryDivergedError(state.lake.diverged)
        if left and not table.properties().datalake_enabled:
            raise InvalidRequestError(
                f"{left} rows of '{table.path}' are not in the lake and will not be: its property"
                " table.datalake.enabled is false"
            )
        return left

    def is_late(self, state: TableState, *, timeout_s: float, rounds: str) -> str:
        """Return the sentence for who has waited long enough; `rounds` says how those stand."""
        left, name = self.rows_left(state), state.table.path
        return f"{left} rows of '{name}' are not in the lake after {timeout_s:g} s: {rounds}"


def rounds_text(path: str, status: Mapping[str, Any]) -> str:
    """Return whether a worker runs and what it does, of the status that tells of one table."""
    told = next((table for table in status["tables"] if table["table"] == path), None)
    tiering: Mapping[str, Any] = {} if told is None else told["tiering"]
    if tiering.get("lease_left_ms"):
        return f"worker '{tiering['worker_id']}' is at it{_progress(tiering.get('progress'))}"
    if tiering.get("pause_left_ms"):
        return (
            f"the last of {tiering['failures']} failed rounds said"
            f" '{tiering['last_error'][:_ERROR_CHARACTERS_MAX]}', the next one begins in"
            f" {tiering['pause_left_ms'] / 1000:.0f} s"
        )
    workers = [one["worker_id"] for one in (*status["workers"], *status["idle_workers"])]
    if not workers:
        return "no worker has asked for a table in the last minute; start one: streamhouse tier"
    due = "" if told is None else f"; a round is due within {told['freshness_ms'] / 1000:g} s"
    return f"{len(workers)} of the service's workers run, none of them at this table{due}"


def _progress(progress: Mapping[str, Any] | None) -> str:
    if not progress or not progress["step"]:
        return ""
    return f" ({progress['step']}, {progress['rows_done']} of {progress['rows_planned']} rows)"
