"""Cursors in the lake, open between fetches, for consumers that read rows older than the log.

A consumer reads years of rows in many fetches, and each fetch begins at the end of the previous
fetch. The cursor of a fetch therefore waits under its next offset, with open files. The next fetch
from this offset takes the cursor; two consumers never share a cursor. Rows that were read and did
not fit into an answer are given back and wait with the cursor.

Invariants:
- Waiting cursors hold at most `idle_bytes_max` bytes in total, or only a single cursor waits.
- A cursor that has waited for `idle_s` is closed at the next look.
Any thread.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

from streamhouse.core.errors import CorruptDataError
from streamhouse.core.model.lake.coverage import CoveredOffsets
from streamhouse.core.model.lake.facts import LakeState
from streamhouse.core.model.lake.older_rows import (
    OlderRows,
    WrittenAt,
)
from streamhouse.core.model.table import TableInfo

if TYPE_CHECKING:
    # Loading the lake library takes a second, and most services never read the lake.
    from streamhouse.reading.lake_only.lake_history import IcebergCursor, IcebergHistory

__all__ = ["LakeCursors"]

_IDLE_BYTES_MAX: Final = 128 << 20
_IDLE_MAX: Final = 64
_IDLE_S: Final = 60.0


class _Place(NamedTuple):
    table_id: int
    schema_id: int
    bucket: int
    offset: int


class _Reader:
    """The returned rows, followed by the rows of a cursor; None for a finished cursor."""

    def __init__(self, cursor: IcebergCursor | None) -> None:
        self._cursor = cursor
        self._returned: deque[OlderRows] = deque()

    @property
    def held_bytes(self) -> int:
        cursor_bytes = 0 if self._cursor is None else self._cursor.held_bytes
        returned_bytes: int = sum(batch.rows.nbytes for batch in self._returned)
        return cursor_bytes + returned_bytes

    @property
    def is_at_end(self) -> bool:
        cursor = self._cursor
        at_end = cursor is None or cursor.next_offset >= cursor.end_offset
        return at_end and not self._returned

    def read(self, *, rows_max: int, bytes_max: int) -> OlderRows:
        """See `IcebergCursor.read`; must not be called at the end."""
        if not self._returned:
            assert self._cursor is not None, "a reader without a cursor has rows or is at its end"
            return self._cursor.read(rows_max=rows_max, bytes_max=bytes_max)
        batch = self._returned.popleft()
        count = batch.rows.num_rows
        fitting = bytes_max * count // max(1, batch.rows.nbytes)
        fitting = max(1, min(rows_max, fitting))
        if fitting >= count:
            return batch
        self._returned.appendleft(batch.since(fitting))
        return batch.up_to(fitting)

    def give_back(self, batch: OlderRows) -> None:
        """Return the rows of the last read to the reader."""
        self._returned.appendleft(batch)

    def close(self) -> None:
        if self._cursor is not None:
            self._cursor.close()


class _Idle(NamedTuple):
    cursor: _Reader
    since_s: float
    held_bytes: int


class LakeCursors:
    """See the module."""

    def __init__(
        self,
        history: IcebergHistory,
        *,
        idle_bytes_max: int = _IDLE_BYTES_MAX,
        idle_max: int = _IDLE_MAX,
        idle_s: float = _IDLE_S,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._history = history
        self._idle_bytes_max = idle_bytes_max
        self._idle_max = idle_max
        self._idle_s = idle_s
        self._clock_s = clock_s
        self._lock = threading.Lock()
        # In the order of waiting, the longest first.
        self._idle: OrderedDict[_Place, _Idle] = OrderedDict()
        self._is_closed = False

    @property
    def held_bytes(self) -> int:
        """The approximate memory of the waiting cursors."""
        with self._lock:
            return sum(idle.held_bytes for idle in self._idle.values())

    def read(
        self,
        table: TableInfo,
        lake: LakeState,
        bucket: int,
        *,
        offset: int,
        rows_max: int,
        bytes_max: int,
        check: Callable[[CoveredOffsets], None],
    ) -> OlderRows:
        """Return rows of the bucket from `offset` on; `offset` is below the tiered offset.

        `check` raises if the lake table has not the history of the table.
        Raises `CorruptDataError` if the lake lacks tiered rows, and as `IcebergHistory.open` and
        `IcebergCursor.read`.
        """
        place = _Place(table.table_id, table.schema_id, bucket, offset)
        cursor = self._take(place) or self._open(table, lake, place, check)
        try:
            batch = cursor.read(rows_max=rows_max, bytes_max=bytes_max)
            if batch.next_offset <= offset:
                raise CorruptDataError(
                    f"table '{table.path}', bucket {bucket}: the lake ends at offset"
                    f" {batch.next_offset}, but rows at {offset} were tiered to it: its catalog or"
                    " metadata is older than the service's data directory; restore the newer one"
                )
        except BaseException:
            cursor.close()
            raise
        self._keep(place._replace(offset=batch.next_offset), cursor)
        return batch

    def give_back(self, table: TableInfo, bucket: int, unread: OlderRows, *, offset: int) -> None:
        """Give rows of `read` back, for the next read from `offset`.

        The rows are the last rows of a read, or all rows of several reads, from `offset` on.
        """
        place = _Place(table.table_id, table.schema_id, bucket, offset)
        cursor = self._take(place._replace(offset=unread.next_offset)) or _Reader(None)
        cursor.give_back(unread)
        self._keep(place, cursor)

    def first_since(
        self, table: TableInfo, lake: LakeState, bucket: int, timestamp_us: int, *, offset: int
    ) -> WrittenAt | None:
        """See `IcebergHistory.first_since`."""
        return self._history.first_since(table, lake, bucket, timestamp_us, offset=offset)

    def close_idle(self) -> None:
        """Close the cursors that have waited too long."""
        with self._lock:
            cursors = self._overdue()
        _close(cursors)

    def close(self) -> None:
        """Close every waiting cursor; a cursor in use is closed after its use."""
        with self._lock:
            self._is_closed = True
            cursors = [idle.cursor for idle in self._idle.values()]
            self._idle.clear()
        _close(cursors)

    def _take(self, place: _Place) -> _Reader | None:
        with self._lock:
            idle = self._idle.pop(place, None)
        return None if idle is None else idle.cursor

    def _open(
        self,
        table: TableInfo,
        lake: LakeState,
        place: _Place,
        check: Callable[[CoveredOffsets], None],
    ) -> _Reader:
        cursor = self._history.open(table, lake, place.bucket, offset=place.offset)
        try:
            if cursor.covered is not None:
                check(cursor.covered)
        except BaseException:
            cursor.close()
            raise
        return _Reader(cursor)

    def _keep(self, place: _Place, cursor: _Reader) -> None:
        """Let an unfinished cursor wait; close overdue and surplus cursors."""
        idle = _Idle(cursor, self._clock_s(), cursor.held_bytes)
        with self._lock:
            to_close = self._overdue()
            if self._is_closed or cursor.is_at_end:
                to_close.append(cursor)
            else:
                if place in self._idle:
                    to_close.append(self._idle.pop(place).cursor)
                self._idle[place] = idle
                to_close += self._too_much()
        _close(to_close)

    def _overdue(self) -> list[_Reader]:
        before_s = self._clock_s() - self._idle_s
        overdue = []
        while self._idle and next(iter(self._idle.values())).since_s < before_s:
            overdue.append(self._idle.popitem(last=False)[1].cursor)
        return overdue

    def _too_much(self) -> list[_Reader]:
        held_bytes = sum(idle.held_bytes for idle in self._idle.values())
        surplus = []
        while len(self._idle) > 1 and (
            held_bytes > self._idle_bytes_max or len(self._idle) > self._idle_max
        ):
            _, idle = self._idle.popitem(last=False)
            held_bytes -= idle.held_bytes
            surplus.append(idle.cursor)
        return surplus


def _close(cursors: list[_Reader]) -> None:
    for cursor in cursors:
        cursor.close()
