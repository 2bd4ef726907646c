"""A table that begins with the lake it had elsewhere: where its log starts, what failures leave."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from streamhouse.core.errors import (
    CommitConflictError,
    CorruptDataError,
    DatabaseNotFoundError,
    HistoryDivergedError,
    StorageFailedError,
    StreamhouseError,
    TableExistsError,
)
from streamhouse.core.model.lake.facts import LakeState
from streamhouse.core.model.table import TableDescriptor, TableInfo
from streamhouse.storage_service.engine.manager import TabletManager
from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.log.segments.segment_format import segment_path
from streamhouse.storage_service.log.segments.segment_scan import open_segment
from tests.support.held_step import around
from tests.support.in_process_service import event_rows, open_manager, routed, table_descriptor

ENDS = {0: 40, 1: 0, 2: 7}


class FakeLake:
    """Lake tables that an owner with this id had."""

    def __init__(self, owner_id: int, descriptor: TableDescriptor | None = None) -> None:
        self.owner_id = owner_id
        self.descriptor = descriptor or table_descriptor(bucket_count=3)
        self.taken: list[int] = []
        self.error: StreamhouseError | None = None
        self.newest_us = 0

    def last_commit_us(self) -> int:
        return self.newest_us

    def take_over(self, table_id: int, *, now_us: int) -> tuple[TableInfo, LakeState]:
        if self.error is not None:
            raise self.error
        self.taken.append(table_id)
        lake = LakeState(
            snapshot_id=1,
            table_uuid="u",
            tiering_epoch=9,
            tiered_offsets=ENDS,
            truncated_offsets={0: 30},
        )
        table = TableInfo(
            descriptor=self.descriptor,
            table_id=table_id,
            created_at_us=now_us,
            adopted_from={self.owner_id: ENDS},
        )
        return table, lake


async def test_the_log_begins_where_the_lake_ends_also_after_a_restart(tmp_path: Path) -> None:
    lake = FakeLake(owner_id=12)

    def check(manager: TabletManager, *, added: int) -> None:
        (table,) = manager.open_tables()
        assert table.info.table_id == 13
        assert table.lake.tiered_offsets == ENDS
        positions = table.positions()
        assert {b: at.log_start_offset for b, at in positions.items()} == ENDS
        assert positions[0].high_watermark == 40 + added
        assert positions[0].truncated_offset == 30
        assert table.row_count == 47 - 30 + added

    async with open_manager(tmp_path) as manager:
        table = await manager.adopt_table(lambda: lake)
        check(manager, added=0)
        appended = await manager.append(table, [routed(0, event_rows(0, 5))])
        assert appended.ranges == {0: (40, 45)}
    async with open_manager(tmp_path) as manager:
        check(manager, added=5)
    assert lake.taken == [13]


async def test_what_is_refused_takes_nothing_over(tmp_path: Path) -> None:
    async with open_manager(tmp_path) as manager:
        there = await manager.create_table(table_descriptor())
        lake = FakeLake(owner_id=1)
        with pytest.raises(TableExistsError):
            await manager.adopt_table(lambda: lake)
        elsewhere = FakeLake(owner_id=1, descriptor=table_descriptor("nowhere.t"))
        with pytest.raises(DatabaseNotFoundError):
            await manager.adopt_table(lambda: elsewhere)
        assert lake.taken == elsewhere.taken == []
        await manager.drop_table(there.path)

        lake.error = CommitConflictError("somebody was faster")
        with pytest.raises(CommitConflictError):
            await manager.adopt_table(lambda: lake)
        assert manager.list_tables(None) == []
        lake.error = None
        assert (await manager.adopt_table(lambda: lake)).info.table_id == 3


async def test_a_table_that_cannot_be_filled_or_opened_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    async with open_manager(tmp_path) as manager:
        lake = FakeLake(owner_id=1)
        with monkeypatch.context() as patched:
            around(patched, "log-beginning", refuse)
            with pytest.raises(StreamhouseError, match="No space left"):
                await manager.adopt_table(lambda: lake)
        keyed = FakeLake(
            owner_id=1, descriptor=table_descriptor(bucket_count=3, primary_key=("id",))
        )
        # Nobody here can read the lake.
        with pytest.raises(CorruptDataError, match="the rows by key are lost"):
            await manager.adopt_table(lambda: keyed)
        assert manager.list_tables(None) == []
    async with open_manager(tmp_path) as manager:
        assert manager.list_tables(None) == []


async def test_commits_are_later_than_those_of_the_adopted_lake(tmp_path: Path) -> None:
    lake = FakeLake(owner_id=12)
    lake.newest_us = 5_000
    clock = iter(range(100, 4_000))
    async with open_manager(tmp_path, clock_us=lambda: next(clock)) as manager:
        await manager.adopt_table(lambda: lake)
    # The first commit after a restart is later, too.
    async with open_manager(tmp_path, clock_us=lambda: next(clock)) as manager:
        (table,) = manager.open_tables()
        times = [
            (await manager.append(table, [routed(bucket, event_rows(0, 1))])).timestamp_us
            for bucket in (1, 0, 2)
        ]
    assert times == [5_001, 5_002, 5_003]


@pytest.mark.parametrize("newest_us", [4_000, 9_000])
async def test_commits_are_later_than_those_of_the_replaced_log_and_of_its_lake(
    tmp_path: Path, newest_us: int
) -> None:
    now_us = 8_000
    async with open_manager(tmp_path, clock_us=lambda: now_us) as manager:
        table = await _diverged(manager)
        now_us = 1_000
        lake = FakeLake(owner_id=8)
        lake.newest_us = newest_us
        made = await manager.replace_by_lake(table, lambda: lake)
        appended = await manager.append(made, [routed(0, event_rows(0, 1))])
        assert appended.timestamp_us > max(8_000, newest_us)


async def _diverged(manager: TabletManager) -> OpenTable:
    table = await manager.create_table(table_descriptor(bucket_count=3))
    await manager.append(table, [routed(0, event_rows(0, 5))])
    await manager.tiering.record(table, replace(table.lake, diverged="the lake has other rows"))
    return table


async def test_the_lake_takes_the_place_of_a_log_whose_files_stay(tmp_path: Path) -> None:
    async with open_manager(tmp_path) as manager:
        table = await _diverged(manager)
        with pytest.raises(HistoryDivergedError):
            await manager.append(table, [routed(0, event_rows(0, 5))])

        made = await manager.replace_by_lake(table, lambda: FakeLake(owner_id=8))

        assert (made.info.table_id, made.positions()[0].log_start_offset) == (9, 40)
        appended = await manager.append(made, [routed(0, event_rows(0, 5))])
        assert appended.ranges == {0: (40, 45)}
    async with open_manager(tmp_path) as manager:
        (table,) = manager.open_tables()
        assert (table.info.table_id, table.positions()[0].high_watermark) == (9, 45)
        aside = manager.directory.given_up(1)
        log = open_segment(segment_path(aside / "bucket-0", 0))
        assert sum(frame.row_count for frame in log.frames()) == 5


class _Crash(BaseException):
    pass


class _DyingLake(FakeLake):
    """The service dies when the lake tables have another owner."""

    def take_over(self, table_id: int, *, now_us: int) -> tuple[TableInfo, LakeState]:
        super().take_over(table_id, now_us=now_us)
        raise _Crash


async def test_a_replacement_that_is_cut_off_leaves_the_table_or_none_and_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    async with open_manager(tmp_path) as manager:
        table = await _diverged(manager)
        lake = FakeLake(owner_id=1)
        lake.error = CommitConflictError("somebody was faster")
        with pytest.raises(CommitConflictError):
            await manager.replace_by_lake(table, lambda: lake)
        assert manager.table(table.path) is table
    async with open_manager(tmp_path) as manager:
        (table,) = manager.open_tables()
        with pytest.raises(_Crash):
            await manager.replace_by_lake(table, lambda: _DyingLake(owner_id=1))
    async with open_manager(tmp_path) as manager:
        (table,) = manager.open_tables()
        assert table.lake.diverged
        with monkeypatch.context() as patched:
            around(patched, "log-beginning", refuse)
            with pytest.raises(StorageFailedError, match="No space left"):
                await manager.replace_by_lake(table, lambda: FakeLake(owner_id=4))
        assert manager.list_tables(None) == []
    async with open_manager(tmp_path) as manager:
        made = await manager.adopt_table(lambda: FakeLake(owner_id=5))
        assert made.positions()[0].log_start_offset == 40
        assert (manager.directory.given_up(1) / "bucket-0").is_dir()
