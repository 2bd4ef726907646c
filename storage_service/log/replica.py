"""Where changes that are durable on the local disk become durable elsewhere, in the same order.

Positions count what was recorded since the start; they only grow. Safe to call from any thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

__all__ = ["NoReplica", "Replica", "Replication"]


class Replica(Protocol):
    """What is recorded is stored in order, sooner or later."""

    @property
    def recorded_position(self) -> int:
        """The position after all that was recorded so far."""

    @property
    def stored_position(self) -> int:
        """Everything recorded before it is stored."""

    def when_stored(self, position: int, then: Callable[[], None]) -> None:
        """Call `then` once everything before `position` is stored; at once if it is.

        Calls are made in the order of their positions, those of one position in the order they were
        asked for, on any thread. If the owner is fenced they are never made: the process ends.
        """

    def wait_stored(self, position: int) -> None:
        """Return once everything before `position` is stored. Blocking."""

    def gather(self) -> None:
        """Wait a little while something is on its way: what comes meanwhile is stored together.

        For who records next what somebody waits for. Blocking.
        """


class NoReplica:
    """`Replica` of a service whose disk is all it has: the local disk is enough."""

    recorded_position = 0
    stored_position = 0

    def when_stored(self, position: int, then: Callable[[], None]) -> None:
        """See `Replica.when_stored`."""
        del position
        then()

    def wait_stored(self, position: int) -> None:
        """See `Replica.wait_stored`."""

    def gather(self) -> None:
        """See `Replica.gather`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replication:
    """Where what is committed is stored besides the local disk, and who waits for that.

    `is_waited_for`: nothing is acknowledged, shown or applied before it is stored there. Else it
    follows: writes wait while the oldest that is not stored there is older than `lag_ms_max`.
    """

    replica: Replica = field(default_factory=NoReplica)
    is_waited_for: bool = True
    lag_ms_max: int = 1_000

    @property
    def is_none(self) -> bool:
        """Whether the local disk is all there is."""
        return isinstance(self.replica, NoReplica)

    def wait_for_shown(self) -> None:
        """Return once all that was shown before is stored. Blocking."""
        if not self.is_waited_for:
            self.wait_for_recorded()

    def wait_for_recorded(self) -> None:
        """Return once all that was recorded before is stored. Blocking."""
        self.replica.wait_stored(self.replica.recorded_position)
