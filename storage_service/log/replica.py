"""Where changes that are durable on the local disk become durable elsewhere, in the same order.

Positions count what was recorded since the start; they only grow. Safe to call from any thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

__all__ = ["NoReplica", "Replica"]


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
