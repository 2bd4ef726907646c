"""A `Progress` that keeps what it is told."""

from __future__ import annotations

__all__ = ["SeenProgress"]


class SeenProgress:
    """What an operation expected, and the steps it took."""

    def __init__(self) -> None:
        self.expected = 0
        self.steps: list[int] = []

    def expect(self, total: int) -> None:
        """Add to what is expected."""
        self.expected += total

    def done(self, count: int) -> None:
        """Keep a step."""
        self.steps.append(count)
