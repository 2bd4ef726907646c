"""The log that a reader holds: who waits for a bucket is woken by that bucket, however late."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from streamhouse.core.model.lake.facts import LakeState
from streamhouse.core.model.schema import Schema
from streamhouse.core.model.table import TableDescriptor, TableInfo, TablePath
from streamhouse.storage_service.engine.wakeups import WaiterLimit
from streamhouse.storage_service.server.readers._board import Board, Published, SlotView
from streamhouse.storage_service.server.readers._held_table import HeldLog
from streamhouse.storage_service.server.readers._messages import Hold, State, Watch


class _Log:
    """A log of which only the published offsets matter."""

    log_start_offset = high_watermark = 0

    def publish(self, start: int, end: int) -> None:
        self.log_start_offset, self.high_watermark = start, end

    def close(self) -> None:
        """Nothing is open."""


@pytest.fixture
def board() -> Iterator[Board]:
    made = Board.create()
    yield made
    made.close()


def _held(board: Board, sent: list[Watch]) -> HeldLog:
    schema = Schema.from_arrow(pa.schema([pa.field("id", pa.int64())]))
    descriptor = TableDescriptor(path=TablePath.parse("t"), schema=schema, bucket_count=2)
    info = TableInfo(descriptor=descriptor, table_id=1, created_at_us=0)
    logs: Any = (_Log(), _Log())
    state = State(1, 1, LakeState(), {}, 0)
    return HeldLog(
        Hold(info, 0, 1, by_key=False, state=state),
        logs,
        SlotView(board, 0, 1, 2),
        limit=WaiterLimit(10),
        send=sent.append,
    )


def test_a_change_of_another_bucket_loses_no_waiter(board: Board) -> None:
    async def test() -> None:
        sent = list[Watch]()
        board.write(0, 1, (0, 0), (0, 0), 1)
        log = _held(board, sent)
        log.published()
        log.watch()
        waiter = log.wakeups.waiter(1, timeout_s=None)

        board.write(0, 1, (0, 0), (5, 0), 1)
        log.changed()
        assert not waiter.done()
        assert sent == [
            Watch(1, Published((0, 0), (0, 0), 1)),
            Watch(1, Published((0, 0), (5, 0), 1)),
        ]

        board.write(0, 1, (0, 0), (5, 1), 1)
        log.changed()
        assert waiter.done()

    asyncio.run(test())


def test_a_change_without_waiters_is_not_asked_for_again(board: Board) -> None:
    sent = list[Watch]()
    board.write(0, 1, (0, 0), (0, 0), 1)
    log = _held(board, sent)
    log.published()
    log.watch()

    board.write(0, 1, (0, 0), (5, 0), 1)
    log.changed()

    assert len(sent) == 1
