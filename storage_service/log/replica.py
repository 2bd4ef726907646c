"""A replica makes durable local changes durable elsewhere, in the same order.

Positions count recorded changes since the start; they only grow. Safe to call from any thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

__all__ = ["NoReplica", "Replica", "Replication"]


class Replica(Protocol):
    """Stores recorded changes in order, sooner or later."""

    @property
    def recorded_position(self) -> int:
        """The position after all changes recorded so far."""

    @property
    def stored_position(self) -> int:
        """The position after all stored changes."""

    def when_stored(self, position: int, callback: Callable[[], None]) -> None:
        """Call `callback` once everything before `position` is stored, perhaps at once.

        Calls are made in the order of positions, for equal positions in the order of requests, on
        any thread. After a fence no call is made: the process ends.
        """

    def wait_stored(self, position: int) -> None:
        """Return once everything before `position` is stored. Blocking."""

    def gather(self) -> None:
        """Wait a little while changes are in flight, so that more changes are stored together.

        For a caller about to record awaited changes. Blocking.
        """


class NoReplica:
    """`Replica` of a service without a journal: the local disk is enough."""

    recorded_position = 0
    stored_position = 0

    def when_stored(self, position: int, callback: Callable[[], None]) -> None:
        """See `Replica.when_stored`."""
        del position
        callback()

    def wait_stored(self, position: int) -> None:
        """See `Replica.wait_stored`."""

    def gather(self) -> None:
        """See `Replica.gather`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replication:
    """The replica of committed changes, and the waiting rule.

    With `is_waited_for` nothing is acknowledged, shown or applied before the replica stored the
    change. Otherwise the replica follows: writes wait while its oldest missing change is older than
    `lag_ms_max`.
    """

    replica: Replica = field(default_factory=NoReplica)
    is_waited_for: bool = True
    lag_ms_max: int = 1_000

    @property
    def is_none(self) -> bool:
        """Whether the local disk is the only storage."""
        return isinstance(self.replica, NoReplica)

    def wait_for_shown(self) -> None:
        """Return once all changes visible before the call are stored. Blocking."""
        if not self.is_waited_for:
            self.wait_for_recorded()

    def wait_for_recorded(self) -> None:
        """Return once all changes recorded before the call are stored. Blocking."""
        self.replica.wait_stored(self.replica.recorded_position)
