"""Progress reports of a long operation, independent of their display."""

from __future__ import annotations

from typing import Protocol

__all__ = ["NO_PROGRESS", "Progress"]


class Progress(Protocol):
    """The progress of an operation, in bytes or rows; called from any of its threads."""

    def expect(self, total: int) -> None:
        """Add `total` to the expected amount."""

    def done(self, count: int) -> None:
        """Add `count` to the finished amount."""


class _NoProgress:
    """A progress without a display."""

    def expect(self, total: int) -> None:
        """Ignore the amount."""

    def done(self, count: int) -> None:
        """Ignore the amount."""


NO_PROGRESS: Progress = _NoProgress()
