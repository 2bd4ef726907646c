"""Source: the batches of one table, which its subscription pulls one by one, and can end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from typing import Generic, TypeVar

from streamhouse.client.following._standing import Standing
from streamhouse.client.http._stop_signal import STOP, StopSignal
from streamhouse.core.errors import InvalidRequestError, StreamhouseError

__all__ = ["Source"]

_B = TypeVar("_B")


class Source(Generic[_B]):
    """The batches of one table, without an end until `end` is called.

    Args:
        table: its path.
        batches: yields them. What it asks of the service breaks off when `stop` is set.
        stop: what `end` sets.
        note: tells a standing where a batch ends.
        standing: where the reader stands, if it has a name.
        no_commit: why positions cannot be committed, if they cannot.
    """

    def __init__(
        self,
        table: str,
        batches: Generator[_B, None, None],
        *,
        stop: StopSignal,
        note: Callable[[Standing, _B], None] | None = None,
        standing: Standing | None = None,
        no_commit: str = "",
    ) -> None:
        self.table = table
        self._batches = batches
        self._stop = stop
        self._note = note
        self._standing = standing
        self._no_commit = no_commit
        self._turn = threading.Lock()
        self._ended = threading.Event()

    def asked(self) -> None:
        """Note that the reader wants the next batch."""
        if self._standing is not None:
            self._standing.asked()

    def handed(self, batch: _B) -> None:
        """Note that the reader has this batch."""
        if self._standing is not None and self._note is not None:
            self._note(self._standing, batch)

    def commit(self) -> None:
        """Say that the reader has read what it was handed; durable on return."""
        if self._standing is None:
            raise InvalidRequestError(self._no_commit)
        self._standing.commit()

    def pull(self) -> _B | None:
        """Wait for the next batch and return it, or None when the source was ended."""
        try:
            with self._turn:
                if self._stop.is_set():
                    return None
                before = STOP.set(self._stop)
                try:
                    return next(self._batches, None)
                except StreamhouseError:
                    # What broke because it was to end is no failure.
                    if self._stop.is_set():
                        return None
                    raise
                finally:
                    STOP.reset(before)
        finally:
            self._end_if_stopped()

    def end(self) -> None:
        """Let who waits in `pull` return, and let go of the connection; any thread, idempotent."""
        self._stop.set()
        self._end_if_stopped()

    def wait_ended(self, timeout_s: float) -> None:
        """Wait until nothing of it goes on, but not longer than that."""
        self._ended.wait(timeout_s)

    def _end_if_stopped(self) -> None:
        # Who has the turn does it, when its turn is over.
        if self._stop.is_set() and self._turn.acquire(blocking=False):
            try:
                if not self._ended.is_set():
                    self._batches.close()
                    if self._standing is not None:
                        self._standing.close()
                    self._ended.set()
            finally:
                self._turn.release()
