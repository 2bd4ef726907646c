"""Waiting for rows in the lake: how many are missing, and the message after a timeout.

The service moves rows when a worker claims a table; a client only polls. The functions judge one
consistent cut of the table, and the rounds in the service's status.
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

__all__ = ["POLL_BACKOFF", "TieredWait", "rounds_text"]

POLL_BACKOFF: Final = Backoff(first_s=0.05, most_s=1.0)
"""The pauses between two polls of a table."""
_ERROR_CHARACTERS_MAX: Final = 300


@dataclass(frozen=True, slots=True)
class TieredWait:
    """The goal of a wait: the lake covers `ends`, bucket -> offset, of the table `table_id`.

    Rows that are overwritten or expire meanwhile do not count.
    """

    table_id: int
    ends: Mapping[int, int]

    @classmethod
    def of(cls, state: TableState) -> TieredWait:
        """Wait for all present rows of the table."""
        return cls(
            state.table.table_id, {b: at.high_watermark for b, at in state.positions.items()}
        )

    def missing_rows_of(self, state: TableState) -> int:
        """Return the number of rows missing in the lake; raises if they will never be there."""
        table = state.table
        if table.table_id != self.table_id:
            raise TableNotFoundError(
                f"table '{table.path}' was dropped during the wait, and created again"
            )
        missing_rows = sum(
            max(0, end - max(at.tiered_offset, at.first_offset))
            for at, end in ((state.positions[bucket], end) for bucket, end in self.ends.items())
        )
        if missing_rows and state.lake.diverged:
            raise HistoryDivergedError(state.lake.diverged)
        if missing_rows and not table.properties().datalake_enabled:
            raise InvalidRequestError(
                f"{missing_rows} rows of '{table.path}' are not in the lake and will not be: its"
                " property table.datalake.enabled is false"
            )
        return missing_rows

    def late_message(self, state: TableState, *, timeout_s: float, rounds: str) -> str:
        """Return the message after a timeout; `rounds` describes the table's rounds."""
        missing_rows, name = self.missing_rows_of(state), state.table.path
        return (
            f"{missing_rows} rows of '{name}' are not in the lake after {timeout_s:g} s: {rounds}"
        )


def rounds_text(path: str, status: Mapping[str, Any]) -> str:
    """Return whether a worker runs, and the worker's step, from a status with this table."""
    table_status = next((table for table in status["tables"] if table["table"] == path), None)
    tiering: Mapping[str, Any] = {} if table_status is None else table_status["tiering"]
    if tiering.get("lease_left_ms"):
        return f"worker '{tiering['worker_id']}' is at it{_progress(tiering.get('progress'))}"
    if tiering.get("pause_left_ms"):
        return (
            f"the last of {tiering['failures']} failed rounds said"
            f" '{tiering['last_error'][:_ERROR_CHARACTERS_MAX]}', the next one begins in"
            f" {tiering['pause_left_ms'] / 1000:.0f} s"
        )
    workers = [worker["worker_id"] for worker in (*status["workers"], *status["idle_workers"])]
    if not workers:
        return "no worker has asked for a table in the last minute; start one: streamhouse tier"
    due = (
        ""
        if table_status is None
        else f"; a round is due within {table_status['freshness_ms'] / 1000:g} s"
    )
    return f"{len(workers)} of the service's workers run, none of them at this table{due}"


def _progress(progress: Mapping[str, Any] | None) -> str:
    if not progress or not progress["step"]:
        return ""
    return f" ({progress['step']}, {progress['rows_done']} of {progress['rows_planned']} rows)"
