"""Several rounds at once in one worker: a claim for each free slot, the most overdue table first.

The service decides which table is next; this module decides when to claim. A worker claims when a
slot is free. After an answer without a table the worker waits for the time in the answer, or for
the end of a round that left rows behind or took long: its table may be due again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Final

from streamhouse.core.model.table_state import TieringAssignment
from streamhouse.core.threads import Pool

__all__ = ["IDLE_WAIT_S_MAX", "TABLES_IN_FLIGHT", "TablesInFlight"]

TABLES_IN_FLIGHT: Final = 4
IDLE_WAIT_S_MAX: Final = 5.0
_LONG_ROUND_S: Final = 0.5

RunRound = Callable[[TieringAssignment], bool]
"""Runs a round; returns whether rows remain in the log. Never raises."""


class TablesInFlight:
    """Runs up to `slots` rounds at once, in a `with` block; its end waits for the rounds.

    Used by one thread. A table may be claimed again while an old round without a claim still ends
    in this process: the new round waits for the old round.
    """

    def __init__(self, run: RunRound, *, slots: int, stopping: threading.Event) -> None:
        self._run = run
        self._slots = slots
        self._stopping = stopping
        self._pool = Pool("tiering-round", slots)
        self._running: dict[Future[bool], str] = {}

    def __enter__(self) -> TablesInFlight:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True)

    @property
    def is_full(self) -> bool:
        """Whether no slot is free."""
        return len(self._running) >= self._slots

    def start(self, assignment: TieringAssignment) -> None:
        """Run the round in a free slot."""
        table = str(assignment.state.table.path)
        earlier = [future for future, running in self._running.items() if running == table]

        def run() -> bool:
            started_s = time.monotonic()
            wait(earlier)
            has_more = self._run(assignment)
            return has_more or time.monotonic() - started_s >= _LONG_ROUND_S

        self._running[self._pool.submit(run)] = table

    def wait_for_slot(self) -> None:
        """Return when a slot is free."""
        while self.is_full:
            self._collect(wait(self._running, return_when=FIRST_COMPLETED).done)

    def wait_idle(self, seconds: float) -> None:
        """Wait `seconds`, or until a claim may succeed again, or the worker stops."""
        end_s = time.monotonic() + seconds
        # The rounds end early when the worker stops: waiting for rounds notices the stop, too.
        while self._running and (left_s := end_s - time.monotonic()) > 0:
            ended = wait(self._running, timeout=left_s, return_when=FIRST_COMPLETED).done
            if self._collect(ended):
                return
            seconds = end_s - time.monotonic()
        if seconds > 0:
            self._stopping.wait(seconds)

    def _collect(self, ended: set[Future[bool]]) -> bool:
        """Forget rounds that ended; return whether a claim may succeed because of some round."""
        for future in ended:
            del self._running[future]
        return any(future.result() for future in ended)
