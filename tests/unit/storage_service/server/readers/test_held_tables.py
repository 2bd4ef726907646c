"""The tables that a reader holds: all that is counted or shown was published at some moment."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from streamhouse.core.errors import UnavailableError
from streamhouse.storage_service.config import ServiceConfig
from streamhouse.storage_service.engine.keys.key_table import KeyTable
from streamhouse.storage_service.engine.manager import TabletManager
from streamhouse.storage_service.kv.plan.write_plan import KeyWrite
from streamhouse.storage_service.kv.row_copy import RowCopy
from streamhouse.storage_service.log.writer_state import TRANSACTION_WRITER
from streamhouse.storage_service.server.readers._board import Board
from streamhouse.storage_service.server.readers._held_table import HeldRows, HeldTables
from streamhouse.storage_service.server.readers._messages import (
    Floor,
    Hold,
    Holds,
    Lost,
    Opened,
    State,
    Watch,
)
from tests.support.held_step import around
from tests.support.in_process_service import (
    event_rows,
    make_table,
    open_manager,
    until,
    visible_ends,
)

_SLOT = 3
_GENERATION = 1


class _Owner:
    """A service's table, and the tables of a reader beside it, in this process."""

    def __init__(self, manager: TabletManager, table: KeyTable, board: Board, data: Path) -> None:
        self.manager = manager
        self.table = table
        self._board = board
        self.lost: list[str] = []
        self.holds = False
        self.held = HeldTables(ServiceConfig(data_dir=data), board, self._take)

    def _take(self, message: Opened | Holds | Lost | Watch) -> None:
        match message:
            case Opened(generation):
                applied = [bucket.rows.applied_offset for bucket in self.table.key_buckets]
                self.held.floor(Floor(generation, applied))
            case Holds(by_key=True):
                self.holds = True
            case Lost(why=why):
                self.lost.append(why)

    def publish(self) -> None:
        """Tell the reader what is visible."""
        ends = visible_ends(self.table)
        self._board.write(_SLOT, _GENERATION, [0] * len(ends), ends)

    async def hold(self) -> None:
        """Have the reader load the rows, and wait until it has answered."""
        self.lost.clear()
        self.publish()
        state = State(_GENERATION, 0, self.table.lake, {}, 0)
        self.held.hold(Hold(self.table.info, _SLOT, _GENERATION, by_key=True, state=state))
        await until(lambda: self.holds or bool(self.lost))

    @property
    def rows(self) -> HeldRows:
        """The rows that the reader holds."""
        return self.held.rows("default.events")

    async def upsert(self, start: int, count: int) -> None:
        """Write rows to both buckets at once."""
        writes = [
            KeyWrite(0, event_rows(start, start + count)),
            KeyWrite(1, event_rows(start + count, start + 2 * count)),
        ]
        await self.manager.write_keys(self.table, writes, columns=None, writer_id=0)
        self.publish()


@asynccontextmanager
async def _owner(data: Path) -> AsyncIterator[_Owner]:
    board = Board.create()
    async with open_manager(data) as manager:
        table = await make_table(manager, is_keyed=True)
        assert isinstance(table, KeyTable)
        owner = _Owner(manager, table, board, data)
        try:
            yield owner
        finally:
            owner.held.end_generation(table.path, _GENERATION)
            await until(lambda: not owner.held._loads)
    board.close()


class _HeldReplay:
    """Holds the replay of rows before the second bucket, once asked to."""

    def __init__(self) -> None:
        self.is_armed = False
        self.is_reached = threading.Event()
        self.may_go_on = threading.Event()
        self._first: RowCopy | None = None

    def replay(self, real: Callable[..., None], rows: RowCopy, *args: Any, **named: Any) -> None:
        if self.is_armed:
            self._first = self._first or rows
            if rows is not self._first:
                self.is_reached.set()
                assert self.may_go_on.wait(60)
        real(rows, *args, **named)


async def test_a_count_beside_a_thread_that_follows_is_one_of_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = _HeldReplay()
    around(monkeypatch, "copy-replaying", step.replay)
    async with _owner(tmp_path) as owner:
        await owner.upsert(0, 100)
        await owner.hold()
        held = owner.rows
        assert held.count_rows() == 200
        before = held.log.published().ends

        await owner.upsert(1_000, 500)
        step.is_armed = True
        following = asyncio.ensure_future(held.follow_soon(held.log.published().ends))
        await until(step.is_reached.is_set)
        # A request that arrived before the change, and is answered now.
        assert held.missing(before) == 0
        assert held.count_rows() == 200
        step.may_go_on.set()
        await following

        assert held.count_rows() == 1_200


async def test_who_waits_for_an_end_in_the_middle_waits_for_all_buckets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread follows further than the request needs, one bucket after the other."""
    step = _HeldReplay()
    around(monkeypatch, "copy-replaying", step.replay)
    async with _owner(tmp_path) as owner:
        await owner.hold()
        held = owner.rows
        await owner.manager.write_keys(
            owner.table, [KeyWrite(0, event_rows(0, 100))], columns=None, writer_id=0
        )
        owner.publish()
        middle = held.log.published().ends
        await owner.upsert(1_000, 500)
        step.is_armed = True
        following = asyncio.ensure_future(held.follow_soon(held.log.published().ends))
        await until(step.is_reached.is_set)

        assert held.missing(middle) > 0
        step.may_go_on.set()
        await following

        assert (held.missing(middle), held.count_rows()) == (0, 1_100)


async def test_rows_that_were_let_go_take_no_memory_again(tmp_path: Path) -> None:
    """A request on its way to a thread meets rows that another request has let go meanwhile."""
    async with _owner(tmp_path) as owner:
        await owner.upsert(0, 100)
        await owner.hold()
        held, memory = owner.rows, owner.held._options.memory
        assert memory is not None
        assert memory.used_bytes > 0
        await owner.upsert(1_000, 500)
        owner.held.let_go(held, "the rows do not fit")
        await until(lambda: not owner.held._loads)

        with pytest.raises(UnavailableError, match="are not held any more"):
            await held.follow_soon(held.log.published().ends)

        assert memory.used_bytes == 0


async def test_files_with_rows_that_nobody_may_see_yet_are_not_held(tmp_path: Path) -> None:
    """A transaction has stored pieces, which RocksDB has by now, and is not shown yet."""
    async with _owner(tmp_path) as owner:
        await owner.upsert(0, 100)
        writer, bucket = owner.table.key_writer, owner.table.key_buckets[0]
        piece = KeyWrite(0, event_rows(1_000, 1_010), sequence=10)
        await writer.write([piece], columns=None, writer_id=TRANSACTION_WRITER, timestamp_us=1)
        await writer.on_thread(bucket.rows.flush)
        assert (bucket.rows.applied_offset, visible_ends(owner.table)) == (110, [100, 100])

        await owner.hold()

        assert owner.lost == ["table 'default.events' has changes that are not visible yet"]
        writer.publish_all()
        await owner.hold()
        assert owner.holds
        assert owner.rows.count_rows() == 210
