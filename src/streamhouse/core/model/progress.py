"""What a long operation tells of how far it is: who shows it is another matter."""

from __future__ import annotations

from typing import Protocol

__all__ = ["NO_PROGRESS", "Progress"]


class Progress(Protocol):
    """How far an operation is, in bytes or rows as it says; called from any of its threads."""

    def expect(self, total: int) -> None:
        """So much more has to be done."""

    def done(self, count: int) -> None:
        """So much more of it is done."""


class _NoProgress:
    """For who does not look."""

    def expect(self, total: int) -> None:
        """Pass over it."""

    def done(self, count: int) -> None:
        """Pass over it."""


NO_PROGRESS: Progress = _NoProgress()
