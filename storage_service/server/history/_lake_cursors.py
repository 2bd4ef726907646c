"""Consumers that read what has left the log: places in the lake, kept open between their fetches.

A consumer reads years in many fetches. Each goes on where its last one ended, so the cursor that
answered that one waits under its next offset, with its files open. Whoever asks for that offset
takes it; two consumers never share one. Rows that were read and did not fit into an answer are
given back, and wait with the cursor.

Invariants:
- cursors that wait hold at most `idle_bytes_max` bytes together, or one of them is all there is
- one that nobody has taken for `idle_s` is closed at the next look
Any thread.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Final, NamedTuple

from streamhouse.core.errors import CorruptDataError
from streamhouse.core.model.lake.coverage import CoveredOffsets
from streamhouse.core.model.lake.facts import LakeState
from streamhouse.core.model.lake.older_rows import (
    LakeHistory,
    OlderRows,
    OlderRowsCursor,
    WrittenAt,
)
from streamhouse.core.model.table import TableInfo

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
    """Rows that were given back, and the cursor behind them, if that is not at its end."""

    def __init__(self, cursor: OlderRowsCursor | None) -> None:
        self._cursor = cursor
        self._given_back: deque[OlderRows] = deque()

    @property
    def held_bytes(self) -> int:
        own = 0 if self._cursor is None else self._cursor.held_bytes
        given_back: int = sum(found.rows.nbytes for found in self._given_back)
        return own + given_back

    @property
    def is_at_end(self) -> bool:
        cursor = self._cursor
        at_end = cursor is None or cursor.next_offset >= cursor.end_offset
        return at_end and not self._given_back

    def read(self, *, rows_max: int, bytes_max: int) -> OlderRows:
        """See `OlderRowsCursor.read`; not at the end."""
        if not self._given_back:
            assert self._cursor is not None, "else it is at its end"
            return self._cursor.read(rows_max=rows_max, bytes_max=bytes_max)
        found = self._given_back.popleft()
        count = found.rows.num_rows
        fitting = bytes_max * count // max(1, found.rows.nbytes)
        fitting = max(1, min(rows_max, fitting))
        if fitting >= count:
            return found
        self._given_back.appendleft(found.since(fitting))
        return found.up_to(fitting)

    def give_back(self, found: OlderRows) -> None:
        """Have these rows again, which were the last that were read."""
        self._given_back.appendleft(found)

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
        history: LakeHistory,
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
        # The one that has waited longest is the first.
        self._idle: OrderedDict[_Place, _Idle] = OrderedDict()
        self._is_closed = False

    @property
    def held_bytes(self) -> int:
        """About how much memory the cursors hold that wait."""
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
        """Return rows of the bucket from `offset` on, which is below its tiered offset.

        `check` raises if the lake table, as it is found, has not the history of the table.
        Raises `CorruptDataError` if the lake is too old for that, and as `LakeHistory.open` and
        `OlderRowsCursor.read`.
        """
        place = _Place(table.table_id, table.schema_id, bucket, offset)
        cursor = self._taken(place) or self._opened(table, lake, place, check)
        try:
            found = cursor.read(rows_max=rows_max, bytes_max=bytes_max)
            if found.next_offset <= offset:
                raise CorruptDataError(
                    f"table '{table.path}', bucket {bucket}: the lake ends at offset"
                    f" {found.next_offset}, but rows at {offset} were tiered to it: its catalog or"
                    " metadata is older than the service's data directory; restore the newer one"
                )
        except BaseException:
            cursor.close()
            raise
        self._keep(place._replace(offset=found.next_offset), cursor)
        return found

    def give_back(self, table: TableInfo, bucket: int, rest: OlderRows, *, offset: int) -> None:
        """Let rows wait that `read` has returned, for who reads on from `offset`.

        They are its last rows, or all rows of several reads, and none of them is below `offset`.
        """
        place = _Place(table.table_id, table.schema_id, bucket, offset)
        cursor = self._taken(place._replace(offset=rest.next_offset)) or _Reader(None)
        cursor.give_back(rest)
        self._keep(place, cursor)

    def first_since(
        self, table: TableInfo, lake: LakeState, bucket: int, timestamp_us: int, *, offset: int
    ) -> WrittenAt | None:
        """See `LakeHistory.first_since`."""
        return self._history.first_since(table, lake, bucket, timestamp_us, offset=offset)

    def close_idle(self) -> None:
        """Close the cursors that have waited too long."""
        with self._lock:
            gone = self._overdue()
        _close(gone)

    def close(self) -> None:
        """Close every cursor that waits; those in use are closed after it."""
        with self._lock:
            self._is_closed = True
            gone = [idle.cursor for idle in self._idle.values()]
            self._idle.clear()
        _close(gone)

    def _taken(self, place: _Place) -> _Reader | None:
        with self._lock:
            idle = self._idle.pop(place, None)
        return None if idle is None else idle.cursor

    def _opened(
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
        """Let a cursor wait, unless it is at its end; close what is too much for that."""
        idle = _Idle(cursor, self._clock_s(), cursor.held_bytes)
        with self._lock:
            gone = self._overdue()
            if self._is_closed or cursor.is_at_end:
                gone.append(cursor)
            else:
                if place in self._idle:
                    gone.append(self._idle.pop(place).cursor)
                self._idle[place] = idle
                gone += self._too_much()
        _close(gone)

    def _overdue(self) -> list[_Reader]:
        before_s = self._clock_s() - self._idle_s
        gone = []
        while self._idle and next(iter(self._idle.values())).since_s < before_s:
            gone.append(self._idle.popitem(last=False)[1].cursor)
        return gone

    def _too_much(self) -> list[_Reader]:
        held_bytes = sum(idle.held_bytes for idle in self._idle.values())
        gone = []
        while len(self._idle) > 1 and (
            held_bytes > self._idle_bytes_max or len(self._idle) > self._idle_max
        ):
            _, idle = self._idle.popitem(last=False)
            held_bytes -= idle.held_bytes
            gone.append(idle.cursor)
        return gone


def _close(cursors: list[_Reader]) -> None:
    for cursor in cursors:
        cursor.close()
