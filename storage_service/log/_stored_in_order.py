"""Commits with a replica: publish in order of storage, or wait for a lagging replica."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from streamhouse.storage_service.log.replica import Replica, Replication

__all__ = ["ReplicaLag", "StoredInOrder"]


class _Waiting:
    __slots__ = ("do", "is_stored")

    def __init__(self, do: Callable[[], None]) -> None:
        self.do = do
        self.is_stored = False


class StoredInOrder:
    """Runs callbacks in the order of requests, each once all earlier changes are stored.

    One thread makes requests. Callbacks run on the replica's threads, or at once.
    """

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._waiting: deque[_Waiting] = deque()
        # Held during a callback, so that the order is kept.
        self._changed = threading.Condition()

    def when_stored(self, do: Callable[[], None]) -> None:
        """Call `do` once all changes recorded so far are stored; never blocks or raises."""
        waiting = _Waiting(do)
        with self._changed:
            self._waiting.append(waiting)
        self._replica.when_stored(self._replica.recorded_position, lambda: self._do_from(waiting))

    def gather(self) -> None:
        """Wait a little while changes are in flight to the replica."""
        self._replica.gather()

    def _do_from(self, waiting: _Waiting) -> None:
        with self._changed:
            waiting.is_stored = True
            while self._waiting and self._waiting[0].is_stored:
                self._waiting[0].do()
                self._waiting.popleft()
            if not self._waiting:
                self._changed.notify_all()

    def wait_until_none(self) -> None:
        """Return when no callback waits any more."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting)


class ReplicaLag:
    """The lag of a replica without waiting commits. One thread."""

    def __init__(self, replication: Replication) -> None:
        self._replica = replication.replica
        self._lag_s_max = replication.lag_ms_max / 1_000
        # Positions and times of recorded changes, oldest first, not stored at the last look.
        self._recorded: deque[tuple[int, float]] = deque()

    def note(self) -> None:
        """Note the time of changes recorded since the last call."""
        position = self._replica.recorded_position
        if not self._recorded or self._recorded[-1][0] < position:
            self._recorded.append((position, time.monotonic()))

    def wait(self) -> None:
        """Return when no unstored change is older than the limit."""
        while self._recorded:
            position, recorded_s = self._recorded[0]
            if position > self._replica.stored_position:
                if time.monotonic() - recorded_s <= self._lag_s_max:
                    return
                self._replica.wait_stored(position)
            self._recorded.popleft()
