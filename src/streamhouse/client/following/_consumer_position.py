"""The position of a table's named reader, reported by the subscription.

Invariants:
- a delivered batch counts as read when the next batch is requested, or by `commit`; with
  `is_by_commit` only by `commit`
- when `commit` returns, all batches delivered before are on the service's disk as read
"""

from __future__ import annotations

from collections.abc import Mapping

from streamhouse.client.positions._position_reports import PositionReports
from streamhouse.core.model.offsets import Offset, offsets_in, table_of_offsets

__all__ = ["ConsumerPosition"]


class ConsumerPosition:
    """Tracks the batches that a reader got and has read. One thread at a time."""

    def __init__(
        self, reports: PositionReports, start: Mapping[int, int], *, is_by_commit: bool
    ) -> None:
        self._reports = reports
        self._is_by_commit = is_by_commit
        self._delivered = dict(start)
        self._table_id = table_of_offsets(start.values(), what="a reader's start")
        self._is_announced = False

    def batch_requested(self) -> None:
        """Note that the reader requests the next batch."""
        # A reader that commits is announced at its beginning, so that others see it.
        if not self._is_by_commit or not self._is_announced:
            self._is_announced = True
            self._reports.reached(self._position())

    def batch_delivered(self, bucket: int, end_offset: int) -> None:
        """Note that the reader has the rows of a bucket up to `end_offset`."""
        self._delivered[bucket] = end_offset
        if isinstance(end_offset, Offset):
            self._table_id = end_offset.table_id

    def commit(self) -> None:
        """Report all delivered rows as read; durable on return."""
        self._is_announced = True
        self._reports.commit(self._position())

    def _position(self) -> dict[int, int]:
        # A table that another service has adopted has a new id, and keeps its offsets.
        return offsets_in(self._table_id, self._delivered)

    def close(self) -> None:
        """Report the rows read, as the last report."""
        self._reports.close()
