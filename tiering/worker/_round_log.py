"""The log lines of a worker: each round at debug, a summary once a minute at info."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from streamhouse.client import TieringIdle
from streamhouse.core.model.lake.facts import SCATTERED_ADVICE, are_rows_scattered
from streamhouse.tiering.round._round import RoundResult
from streamhouse.tiering.worker._tables_in_flight import IDLE_WAIT_S_MAX

__all__ = ["IdleLog", "RoundLog"]

_logger = logging.getLogger(__name__)

_LOG_AGAIN_S: Final = 60.0
_LOG_CHANGE_S: Final = 5.0
_SCATTERED_AGAIN_S: Final = 3_600.0
_IDLE_SENTENCES: Final = {
    "no_tables": "there are no tables",
    "datalake_disabled": "no table is to be tiered (table.datalake.enabled is false)",
    "nothing_to_tier": "the lake has every row",
    "not_due": "every table is fresh enough",
    "leased": "other rounds have the tables that are behind",
    "paused_after_failure": "tables rest after a failed round (GET /v1/tiering has the errors)",
    "unreadable": "a table's log cannot be read (the service's log says why)",
}


class RoundLog:
    """Logs a summary of rounds: after the first round, then once a minute. Thread-safe."""

    def __init__(self, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self._monotonic_s = monotonic_s
        self._lock = threading.Lock()
        self._logged_at_s = -_LOG_AGAIN_S
        self._scattered_at_s: dict[str, float] = {}
        self._clear()

    def add(self, result: RoundResult) -> None:
        """Count a round that has ended."""
        with self._lock:
            self._tables.add(result.table)
            self._rounds += 1
            self._rows += result.row_count
            self._size_bytes += result.size_bytes
            self._seconds += result.seconds
            if are_rows_scattered(result.rows_written, files=result.file_count):
                self._say_scattered(result)
        self.tick()

    def tick(self) -> None:
        """Log the summary if a minute has passed."""
        with self._lock:
            if self._monotonic_s() - self._logged_at_s >= _LOG_AGAIN_S:
                self._say()

    def close(self) -> None:
        """Log the remaining rounds."""
        with self._lock:
            self._say()

    def _say_scattered(self, result: RoundResult) -> None:
        """Warn of a table once an hour, because only a change of the table helps."""
        now_s = self._monotonic_s()
        if now_s - self._scattered_at_s.get(result.table, -_SCATTERED_AGAIN_S) < _SCATTERED_AGAIN_S:
            return
        self._scattered_at_s[result.table] = now_s
        _logger.warning(
            "event=rows_scattered table=%s files=%d rows=%d why=%r",
            result.table,
            result.file_count,
            result.rows_written,
            SCATTERED_ADVICE,
        )

    def _say(self) -> None:
        if not self._rounds:
            return
        _logger.info(
            "event=rounds tables=%d rounds=%d rows=%d bytes=%d seconds=%.3f",
            len(self._tables),
            self._rounds,
            self._rows,
            self._size_bytes,
            self._seconds,
        )
        self._logged_at_s = self._monotonic_s()
        self._clear()

    def _clear(self) -> None:
        self._tables: set[str] = set()
        self._rounds = self._rows = self._size_bytes = 0
        self._seconds = 0.0


class IdleLog:
    """Logs why a worker is idle: when the reason changes, and once a minute."""

    def __init__(self, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self._monotonic_s = monotonic_s
        self._reason = ""
        self._logged_at_s = -_LOG_AGAIN_S

    def idle(self, answer: TieringIdle) -> None:
        """Log the service's answer without a table."""
        now_s = self._monotonic_s()
        pause_s = _LOG_AGAIN_S if answer.reason == self._reason else _LOG_CHANGE_S
        if now_s - self._logged_at_s >= pause_s:
            self._reason, self._logged_at_s = answer.reason, now_s
            _logger.debug(
                "event=idle reason=%s why='%s' again_in_s=%.1f",
                answer.reason,
                _IDLE_SENTENCES.get(answer.reason, "the service did not say more"),
                min(answer.retry_after_ms / 1000, IDLE_WAIT_S_MAX),
            )
