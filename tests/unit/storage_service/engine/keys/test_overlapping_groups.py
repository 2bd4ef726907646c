"""Write groups planned on top of a group whose changes are being stored, or are refused."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from streamhouse.core.errors import (
    StorageFailedError,
    UnknownOutcomeError,
)
from streamhouse.storage_service.engine.manager import TabletManager
from streamhouse.storage_service.engine.open_table import Appended, OpenTable
from streamhouse.storage_service.kv.plan.write_plan import KeyWrite, delete_of
from tests.support.in_process_service import (
    event_rows,
    open_manager,
    until,
)
from tests.support.key_writes import (
    FullDisk,
    HeldSyncs,
    keyed_table,
    named,
    names_of,
    planned_on_top,
    watermarks,
    write_to,
)


async def test_a_large_write_is_planned_while_another_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_manager(tmp_path) as manager:
        table = await keyed_table(manager)
        syncs = HeldSyncs(monkeypatch)
        first = asyncio.ensure_future(write_to(manager, table, KeyWrite(0, event_rows(0, 3))))
        await until(syncs.are_under_way.is_set)

        second = await planned_on_top(manager, table, KeyWrite(0, named(range(2_000), "b")))

        assert not first.done()
        assert watermarks(table) == [0]
        assert names_of(table, 0, range(1)) == [None]
        syncs.go()
        assert (await first).ranges == {0: (0, 3)}
        assert (await second).ranges == {0: (3, 2_006)}
        assert names_of(table, 0, range(4)) == ["b"] * 4


async def test_what_was_planned_on_rows_that_were_not_stored_is_planned_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_manager(tmp_path) as manager:
        table = await keyed_table(manager, 2)
        syncs = HeldSyncs(monkeypatch)
        syncs.failing = table.tablets[0]._active
        both = [KeyWrite(bucket, event_rows(0, 3)) for bucket in (0, 1)]
        first = asyncio.ensure_future(write_to(manager, table, *both))
        await until(syncs.are_under_way.is_set)
        rows = named(range(2_000), "b")
        stored = await planned_on_top(manager, table, KeyWrite(1, rows))
        refused = asyncio.ensure_future(write_to(manager, table, KeyWrite(0, rows)))

        syncs.go()

        with pytest.raises(UnknownOutcomeError):
            await first
        with pytest.raises(StorageFailedError, match="bucket 0 is read-only"):
            await refused
        assert (await stored).ranges == {1: (3, 2_006)}
        assert watermarks(table) == [0, 2_006]
        assert names_of(table, 1, range(3)) == ["b"] * 3
        assert names_of(table, 0, range(3)) == [None] * 3


async def test_rows_that_are_there_already_are_refused_with_the_request_that_brought_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second and the fourth change nothing, after the first and the third of their group."""
    async with open_manager(tmp_path) as manager:
        table = await keyed_table(manager, 2)
        await write_to(manager, table, KeyWrite(0, named(range(4), "old")))
        disk = FullDisk(monkeypatch)
        new = KeyWrite(0, named(range(2), "new"))
        gone = delete_of(0, named(range(2, 4), "").select(["id"]))
        elsewhere = delete_of(1, named(range(2), "").select(["id"]))
        writes = [
            asyncio.ensure_future(write_to(manager, table, write))
            for write in (new, new, gone, gone, elsewhere)
        ]
        await until(disk.is_writing.is_set)

        disk.go()

        *refused, unchanged = await asyncio.gather(*writes, return_exceptions=True)
        assert [type(error) for error in refused] == [StorageFailedError] * 4
        assert unchanged.ranges == {1: (0, 0)}
        assert names_of(table, 0, range(4)) == ["old"] * 4
        assert (await write_to(manager, table, new)).ranges == {0: (4, 8)}


async def test_a_full_disk_takes_back_what_was_planned_on_top(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_manager(tmp_path) as manager:
        table = await keyed_table(manager)
        disk = FullDisk(monkeypatch)
        first = asyncio.ensure_future(write_to(manager, table, KeyWrite(0, event_rows(0, 3))))
        await until(disk.is_writing.is_set)
        second = await planned_on_top(manager, table, KeyWrite(0, named(range(2_000), "b")))

        disk.go()

        with pytest.raises(StorageFailedError):
            await first
        # Nothing of the first is there: these are new rows, at its offsets.
        assert (await second).ranges == {0: (0, 2_000)}
        assert table.key_buckets[0].row_count == 2_000


async def _some_written_while_old(
    manager: TabletManager, table: OpenTable, is_held: threading.Event
) -> tuple[asyncio.Future[Appended], asyncio.Future[Appended]]:
    """Begin to write 400 of 1,000 rows again, and plan on top to delete those that are old."""
    first = asyncio.ensure_future(write_to(manager, table, KeyWrite(0, named(range(400), "b"))))
    await until(is_held.is_set)
    keys = named(range(1_000), "").select(["id"])
    expired = await planned_on_top(manager, table, delete_of(0, keys, written_below=1_000))
    return first, expired


async def test_rows_that_are_written_meanwhile_are_not_deleted_for_their_age(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_manager(tmp_path) as manager:
        table = await keyed_table(manager)
        await write_to(manager, table, KeyWrite(0, named(range(1_000), "old")))
        syncs = HeldSyncs(monkeypatch)
        first, expired = await _some_written_while_old(manager, table, syncs.are_under_way)

        syncs.go()

        assert (await first).ranges == {0: (1_000, 1_800)}
        assert (await expired).ranges == {0: (1_800, 2_400)}
        assert names_of(table, 0, range(1_000)) == ["b"] * 400 + [None] * 600


async def test_rows_are_as_old_as_they_were_when_what_was_written_meanwhile_was_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_manager(tmp_path) as manager:
        table = await keyed_table(manager)
        await write_to(manager, table, KeyWrite(0, named(range(1_000), "old")))
        disk = FullDisk(monkeypatch)
        first, expired = await _some_written_while_old(manager, table, disk.is_writing)

        disk.go()

        with pytest.raises(StorageFailedError):
            await first
        assert (await expired).ranges == {0: (1_000, 2_000)}
        assert names_of(table, 0, range(1_000)) == [None] * 1_000
