"""Cursors wait for who goes on where they ended: taken once, bounded, closed in time."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pytest

from streamhouse.core.errors import (
    CorruptDataError,
    HistoryDivergedError,
    SnapshotNotFoundError,
)
from streamhouse.core.model.lake.coverage import CoveredOffsets
from streamhouse.core.model.lake.facts import LakeState
from streamhouse.core.model.lake.older_rows import OlderRows, WrittenAt
from streamhouse.core.model.schema import Schema
from streamhouse.core.model.table import TableDescriptor, TableInfo, TablePath
from streamhouse.storage_service.server.history._lake_cursors import LakeCursors

END = 100
INFO = TableInfo(
    descriptor=TableDescriptor(
        path=TablePath.parse("db.t"),
        schema=Schema.from_arrow(pa.schema([pa.field("id", pa.int64())])),
    ),
    table_id=7,
    created_at_us=0,
)


@dataclass
class Cursor:
    """Rows whose ids are their offsets."""

    next_offset: int
    held_bytes: int
    fails: bool = False
    is_closed: bool = False
    end_offset: int = END
    covered: CoveredOffsets | None = field(
        default_factory=lambda: CoveredOffsets(tiered_offsets={0: END}, epoch=1)
    )

    def read(self, *, rows_max: int, bytes_max: int) -> OlderRows:
        assert not self.is_closed
        if self.fails:
            raise SnapshotNotFoundError("a file is gone")
        offsets = np.arange(self.next_offset, min(self.next_offset + rows_max, END))
        self.next_offset += len(offsets)
        rows = pa.record_batch([pa.array(offsets)], names=["id"])
        return OlderRows(rows, offsets, offsets, self.next_offset)

    def close(self) -> None:
        self.is_closed = True


@dataclass
class History:
    """Opens cursors, and remembers them."""

    held_bytes: int = 10
    fails: bool = False
    opened: list[Cursor] = field(default_factory=list)

    def open(self, table: TableInfo, lake: LakeState, bucket: int, *, offset: int) -> Cursor:
        self.opened.append(Cursor(offset, self.held_bytes, self.fails))
        return self.opened[-1]

    def first_since(
        self, table: TableInfo, lake: LakeState, bucket: int, timestamp_us: int, *, offset: int
    ) -> WrittenAt | None:
        return WrittenAt(max(offset, timestamp_us), timestamp_us)


def read(cursors: LakeCursors, offset: int, *, bucket: int = 0, rows_max: int = 10) -> list[int]:
    found = cursors.read(
        *(INFO, LakeState(), bucket),
        offset=offset,
        rows_max=rows_max,
        bytes_max=1 << 20,
        check=lambda _: None,
    )
    assert found.offsets[0] == offset
    ids: list[int] = found.rows.column("id").to_pylist()
    return ids


def test_who_goes_on_finds_the_cursor_that_was_left_there() -> None:
    history = History()
    cursors = LakeCursors(history)
    for offset in range(0, 50, 10):
        assert read(cursors, offset) == [*range(offset, offset + 10)]
    assert len(history.opened) == 1


def test_another_offset_or_bucket_has_a_cursor_of_its_own() -> None:
    history = History()
    cursors = LakeCursors(history)
    read(cursors, 0)
    read(cursors, 0)
    read(cursors, 10, bucket=1)
    assert len(history.opened) == 3
    # The two that ended at the same place: one is enough.
    assert [cursor.is_closed for cursor in history.opened] == [True, False, False]


def test_a_cursor_at_its_end_is_closed() -> None:
    history = History()
    cursors = LakeCursors(history)
    assert read(cursors, 95) == [95, 96, 97, 98, 99]
    assert history.opened[0].is_closed
    assert cursors.held_bytes == 0


@pytest.mark.parametrize(("bytes_max", "count"), [(25, 2), (5, 1), (1000, 3)])
def test_those_that_have_waited_longest_make_room(bytes_max: int, count: int) -> None:
    history = History()
    cursors = LakeCursors(history, idle_bytes_max=bytes_max, idle_max=3)
    for bucket in range(5):
        read(cursors, 0, bucket=bucket)
    assert [cursor.is_closed for cursor in history.opened] == [True] * (5 - count) + [False] * count
    assert cursors.held_bytes == 10 * count


def test_one_that_nobody_takes_is_closed_after_a_while() -> None:
    now = [0.0]
    history = History()
    cursors = LakeCursors(history, idle_s=60, clock_s=lambda: now[0])
    read(cursors, 0)
    now[0] = 59.0
    read(cursors, 0, bucket=1)
    cursors.close_idle()
    assert not history.opened[0].is_closed
    now[0] = 61.0
    cursors.close_idle()
    assert [cursor.is_closed for cursor in history.opened] == [True, False]


def test_a_cursor_that_failed_is_closed_and_not_used_again() -> None:
    history = History(fails=True)
    cursors = LakeCursors(history)
    with pytest.raises(SnapshotNotFoundError):
        read(cursors, 0)
    assert history.opened[0].is_closed
    history.fails = False
    assert read(cursors, 0) == [*range(10)]


def test_a_lake_that_ends_before_what_is_wanted_is_too_old() -> None:
    history = History()
    with pytest.raises(CorruptDataError, match="ends at offset 100, but rows at 100 were tiered"):
        read(LakeCursors(history), END)
    assert history.opened[0].is_closed


def test_a_lake_of_another_history_is_not_read() -> None:
    def check(covered: CoveredOffsets) -> None:
        assert covered.tiered_offsets == {0: END}
        raise HistoryDivergedError("another history")

    history = History()
    cursors = LakeCursors(history)
    with pytest.raises(HistoryDivergedError):
        cursors.read(INFO, LakeState(), 0, offset=0, rows_max=1, bytes_max=1, check=check)
    assert history.opened[0].is_closed


def test_after_the_end_no_cursor_waits() -> None:
    history = History()
    cursors = LakeCursors(history)
    read(cursors, 0)
    cursors.close()
    assert history.opened[0].is_closed
    read(cursors, 10)
    assert history.opened[1].is_closed
