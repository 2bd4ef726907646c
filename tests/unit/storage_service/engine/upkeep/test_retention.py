"""Which rows retention deletes: old ones, and only those that the lake has."""

from __future__ import annotations

import dataclasses
import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from streamhouse.core.errors import StorageFailedError
from streamhouse.core.model.lake.facts import SideLakeState
from streamhouse.core.model.table_state import TieringReport
from streamhouse.storage_service.directory.data_directory import DataDirectory
from streamhouse.storage_service.engine.manager import TabletManager
from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.engine.upkeep._retention import apply_retention, retain
from streamhouse.storage_service.log.filesystem import LocalFilesystem
from tests.support.in_process_service import (
    event_rows,
    later,
    open_manager,
    routed,
    table_descriptor,
)

DAY_US = 86_400_000_000


async def _filled(manager: TabletManager, **properties: str) -> OpenTable:
    """A table with three appends of 3,000 rows, each in a segment of its own."""
    table = await manager.create_table(
        table_descriptor(
            properties={"table.log.segment-bytes": "64kb", "table.log.ttl": "1d", **properties}
        )
    )
    for _ in range(3):
        await manager.append(table, [routed(0, event_rows(0, 3_000))])
    return table


async def _tier(
    manager: TabletManager, table: OpenTable, offset: int, *, batch: int | None = None
) -> None:
    claim = await manager.tiering.claim("w", tables=[table], force=True)
    assert claim.assignment is not None
    await manager.tiering.complete(
        table,
        TieringReport(
            table_id=table.info.table_id,
            epoch=claim.assignment.epoch,
            snapshot_id=offset,
            table_uuid="u",
            tiered_offsets={0: offset},
            batch=None
            if batch is None
            else SideLakeState(snapshot_id=batch, table_uuid="b", tiered_offsets={0: batch}),
        ),
    )


async def _apply(manager: TabletManager, table: OpenTable, *, age_us: int) -> int:
    return await apply_retention(table, later(manager, age_us))


async def test_rows_that_are_not_tiered_stay_however_old_they_are(tmp_path: Path) -> None:
    async with open_manager(tmp_path) as manager:
        table = await _filled(manager)

        assert await _apply(manager, table, age_us=100 * DAY_US) == 0
        await _tier(manager, table, 4_000)
        assert await _apply(manager, table, age_us=100 * DAY_US) == 1

        # Offset 4,000 lies in the second segment, which therefore stays.
        assert table.tablet(0).log_start_offset == 3_000


async def test_tiered_rows_stay_until_their_time_is_up(tmp_path: Path) -> None:
    async with open_manager(tmp_path) as manager:
        table = await _filled(manager)
        await _tier(manager, table, 9_000)

        assert await _apply(manager, table, age_us=DAY_US // 2) == 0
        assert await _apply(manager, table, age_us=2 * DAY_US) == 3

        assert table.tablet(0).log_start_offset == table.tablet(0).high_watermark == 9_000


async def test_a_table_without_a_lake_loses_rows_by_age_alone(tmp_path: Path) -> None:
    async with open_manager(tmp_path) as manager:
        table = await _filled(manager, **{"table.datalake.enabled": "false"})

        assert await _apply(manager, table, age_us=2 * DAY_US) == 3

        appended = await manager.append(table, [routed(0, event_rows(0, 1))])
        assert appended.ranges == {0: (9_000, 9_001)}


class _Disk(LocalFilesystem):
    """Calls `before_removal` before the file of a segment is removed."""

    before_removal: Callable[[], None]

    def remove(self, path: Path) -> None:
        if path.suffix == ".log":
            self.before_removal()
        super().remove(path)


@pytest.mark.parametrize("is_refused", [False, True])
async def test_readers_are_told_where_the_log_begins_before_a_file_goes(
    tmp_path: Path, *, is_refused: bool
) -> None:
    """Else readers beside the owner answer rows that the owner has refused."""
    told, told_before = list[int](), list[list[int]]()

    def note() -> None:
        told_before.append(told.copy())
        if is_refused:
            raise OSError(errno.EIO, "Input/output error")

    directory = DataDirectory.open(tmp_path)
    directory.filesystem = disk = _Disk()
    disk.before_removal = note
    async with open_manager(tmp_path, directory=directory) as manager:
        table = await _filled(manager, **{"table.datalake.enabled": "false"})
        table.wakeups.on_wake = lambda: told.append(table.tablet(0).log_start_offset)
        if is_refused:
            with pytest.raises(StorageFailedError):
                await _apply(manager, table, age_us=2 * DAY_US)
        else:
            assert await _apply(manager, table, age_us=2 * DAY_US) == 3

        assert told_before[0] == told == [9_000]


async def test_all_tables_have_their_turn_and_are_counted(tmp_path: Path) -> None:
    class Observer:
        def __init__(self) -> None:
            self.counted: list[int] = []

        def segments_deleted(self, count: int) -> None:
            self.counted.append(count)

    async with open_manager(tmp_path) as manager:
        table = await _filled(manager)
        await _tier(manager, table, 9_000)
        observer = Observer()
        runtime = dataclasses.replace(later(manager, 2 * DAY_US), observer=observer)

        await retain(manager.open_tables, runtime)

        assert observer.counted == [3]


async def test_rows_that_the_batch_layout_lacks_stay(tmp_path: Path) -> None:
    async with open_manager(tmp_path) as manager:
        layout = {"table.datalake.batch-layout.sort": "id"}
        table = await _filled(manager, **layout)

        await _tier(manager, table, 9_000)
        assert await _apply(manager, table, age_us=100 * DAY_US) == 0
        await _tier(manager, table, 9_000, batch=3_000)
        assert await _apply(manager, table, age_us=100 * DAY_US) == 1

        assert table.tablet(0).log_start_offset == 3_000
