"""The times of a table's commits: each is later than every earlier time, in every bucket.

A commit is a request or a transaction. All rows of a commit have its time, in all buckets, so the
time is the commit's version (`_commit_version`). A clock that goes back stops the times, which then
go on by single microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from streamhouse.storage_service.log.append_queue import RoutedBatch

__all__ = ["CommitClock"]


class CommitClock:
    """See the module. Event loop only: a time is taken in the step that hands over the rows."""

    def __init__(self, clock_us: Callable[[], int], *, last_us: int) -> None:
        self._clock_us = clock_us
        self._last_us = last_us

    def next_us(self) -> int:
        """Return the time of a new commit."""
        self._last_us = max(self._clock_us(), self._last_us + 1)
        return self._last_us

    def stamped(self, batches: Sequence[RoutedBatch]) -> list[RoutedBatch]:
        """Return the rows of a new commit with the commit's time."""
        time_us = self.next_us()
        return [batch._replace(timestamp_us=time_us) for batch in batches]

    def skip(self, until_us: int) -> None:
        """Never return a time up to `until_us` again, the time of a decided transaction."""
        self._last_us = max(self._last_us, until_us)
