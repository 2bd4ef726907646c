"""Where a named reader of one table stands, as its subscription says it.

Invariants:
- a batch that was handed out counts as read when the next one is asked for, or by `commit`; of a
  reader that goes `by_commit`, by `commit` alone
- when `commit` returns, what was handed out before is on the service's disk as read
"""

from __future__ import annotations

from collections.abc import Mapping

from streamhouse.client.positions._position_reports import PositionReports
from streamhouse.core.model.offsets import Offset, offsets_in, table_of_offsets

__all__ = ["Standing"]


class Standing:
    """Notes what one reader was handed, and what of it is read. One thread at a time."""

    def __init__(
        self, reports: PositionReports, start: Mapping[int, int], *, by_commit: bool
    ) -> None:
        self._reports = reports
        self._by_commit = by_commit
        self._handed = dict(start)
        self._table_id = table_of_offsets(start.values(), what="a reader's start")
        self._is_said = False

    def asked(self) -> None:
        """Note that the reader wants more."""
        # Who goes by commits is told of at its beginning, so that others see it.
        if not self._by_commit or not self._is_said:
            self._is_said = True
            self._reports.reached(self._place())

    def handed(self, bucket: int, end_offset: int) -> None:
        """Note that the reader has the rows of a bucket up to there."""
        self._handed[bucket] = end_offset
        if isinstance(end_offset, Offset):
            self._table_id = end_offset.table_id

    def commit(self) -> None:
        """Say that all is read that was handed out; it is durable on return."""
        self._is_said = True
        self._reports.commit(self._place())

    def _place(self) -> dict[int, int]:
        # One that was adopted by another service has a new id, and the offsets it had.
        return offsets_in(self._table_id, self._handed)

    def close(self) -> None:
        """Report what was read, and no more after that."""
        self._reports.close()
