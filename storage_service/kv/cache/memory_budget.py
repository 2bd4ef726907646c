"""One budget of memory for the rows that all buckets of a service keep at hand, shared fairly.

A bucket may take what the others leave, and always an equal share of all: busy buckets use what
idle ones do not need, and none is pushed out altogether. Buckets report what they use; they give
back what is over their share when they are written to, or when they are asked to.
"""

from __future__ import annotations

import threading
from typing import Final

__all__ = ["MemoryBudget", "MemoryShare"]


class MemoryBudget:
    """`bytes_max` for all shares together; any thread."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max: Final = bytes_max
        self._lock: Final = threading.Lock()
        self._used: dict[MemoryShare, int] = {}
        self._total = 0

    @property
    def used_bytes(self) -> int:
        """What all shares have reported."""
        return self._total

    def join(self) -> MemoryShare:
        """Return a new share, which uses nothing yet."""
        share = MemoryShare(self)
        self._report(share, 0)
        return share

    def _report(self, share: MemoryShare, used_bytes: int) -> None:
        with self._lock:
            self._total += used_bytes - self._used.get(share, 0)
            self._used[share] = used_bytes

    def _leave(self, share: MemoryShare) -> None:
        with self._lock:
            self._total -= self._used.pop(share, 0)

    def _allowed(self, share: MemoryShare) -> int:
        with self._lock:
            others = self._total - self._used.get(share, 0)
            return max(self._bytes_max // max(len(self._used), 1), self._bytes_max - others)


class MemoryShare:
    """What one bucket uses of a budget."""

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget: Final = budget

    def report(self, used_bytes: int) -> int:
        """Say what is used now; return what may be."""
        self._budget._report(self, used_bytes)
        return self._budget._allowed(self)

    def leave(self) -> None:
        """Use nothing any more; harmless when repeated."""
        self._budget._leave(self)
