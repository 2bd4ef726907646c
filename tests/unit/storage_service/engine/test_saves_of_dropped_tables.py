"""A table goes only when nothing of it is being saved, and after that nothing is.

A file that is saved where a table's directory was would be in the journal for good.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final

import pytest

from streamhouse.core.errors import (
    StorageFailedError,
    StreamhouseError,
    TableNotFoundError,
    UnavailableError,
)
from streamhouse.storage_service.directory.data_directory import DataDirectory
from streamhouse.storage_service.engine.manager import TabletManager
from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.log.filesystem import LocalFilesystem
from tests.support.in_process_service import event_rows, open_manager, routed, table_descriptor

_DAY_MS: Final = 86_400_000


class _HeldDisk(LocalFilesystem):
    """A disk that keeps some files from getting their names, or refuses them."""

    def __init__(self) -> None:
        super().__init__()
        self.held: str | None = None
        self.refused: str | None = None
        self.is_held, self.goes_on = threading.Event(), threading.Event()
        self.renamed: list[str] = []

    def rename(self, source: Path, target: Path) -> None:
        if target.name == self.refused:
            raise OSError(28, "No space left on device")
        if target.name == self.held:
            self.is_held.set()
            assert self.goes_on.wait(60)
        super().rename(source, target)
        self.renamed.append(target.name)

    def rename_in_order(self, renames: Sequence[tuple[Path, Path]]) -> None:
        for each in renames:
            self.rename(*each)


async def _tier(manager: TabletManager, table: OpenTable) -> None:
    await manager.tiering.claim("w", tables=[table], force=True, include_idle=True)


async def _pin(manager: TabletManager, table: OpenTable) -> None:
    del manager
    await table.lake_pins.pin("reader", owner="me", snapshot_id=1, ttl_ms=_DAY_MS)


async def _report(manager: TabletManager, table: OpenTable) -> None:
    del manager
    await table.consumers.report(
        "c", owner="me", offsets={0: 1}, reads_lake=False, ttl_ms=_DAY_MS, is_durable=True
    )


_SAVES: Final = {"lake.json": _tier, "lake_pins.json": _pin, "consumers.json": _report}


@pytest.mark.parametrize("name", _SAVES)
async def test_a_table_goes_only_when_nothing_of_it_is_being_saved(
    tmp_path: Path, name: str
) -> None:
    save: Callable[[TabletManager, OpenTable], Awaitable[None]] = _SAVES[name]
    disk = _HeldDisk()
    directory = DataDirectory.open(tmp_path)
    directory.filesystem = disk
    async with open_manager(tmp_path, directory=directory) as manager:
        descriptor = table_descriptor("t", properties={"table.datalake.enabled": "true"})
        table = await manager.create_table(descriptor)
        await manager.append(table, [routed(0, event_rows(0, 3))])
        disk.held = name
        saving = asyncio.ensure_future(save(manager, table))
        await asyncio.to_thread(disk.is_held.wait, 20)
        del disk.renamed[:]
        late = asyncio.ensure_future(save(manager, table))
        dropping = asyncio.ensure_future(manager.drop_table(table.path))
        await asyncio.wait([dropping], timeout=0.2)
        is_early = dropping.done() or bool(disk.renamed)
        disk.goes_on.set()
        await asyncio.wait([saving, late, dropping])
        assert not is_early
        await dropping
        await saving
        assert late.done()
        del disk.renamed[:]
        with contextlib.suppress(StreamhouseError):
            await save(manager, table)
        assert disk.renamed == []
        assert list(manager.directory.tables.iterdir()) == []


async def test_a_table_that_could_not_be_dropped_is_saved_as_before(tmp_path: Path) -> None:
    disk = _HeldDisk()
    directory = DataDirectory.open(tmp_path)
    directory.filesystem = disk
    async with open_manager(tmp_path, directory=directory) as manager:
        descriptor = table_descriptor("t", properties={"table.datalake.enabled": "true"})
        table = await manager.create_table(descriptor)
        await manager.append(table, [routed(0, event_rows(0, 3))])
        disk.refused = "service.json"
        with pytest.raises(StorageFailedError):
            await manager.drop_table(table.path)
        disk.refused = None
        for name, save in _SAVES.items():
            await save(manager, table)
            assert disk.renamed[-1] == name


async def test_a_table_is_gone_only_when_the_drop_is_durable(tmp_path: Path) -> None:
    """A request under way was told that the table does not exist; a crash then undid the drop."""
    disk = _HeldDisk()
    directory = DataDirectory.open(tmp_path)
    directory.filesystem = disk
    async with open_manager(tmp_path, directory=directory) as manager:
        table = await manager.create_table(table_descriptor("t"))
        disk.held = "service.json"
        dropping = asyncio.ensure_future(manager.drop_table(table.path))
        await asyncio.to_thread(disk.is_held.wait, 20)
        try:
            assert manager.has_table(table.path)
            with pytest.raises(UnavailableError, match="not open now"):
                manager.table(table.path)
            with pytest.raises(UnavailableError, match="not open now"):
                manager.check_open(table)
            with pytest.raises(UnavailableError, match="not open now"):
                await _report(manager, table)
        finally:
            disk.goes_on.set()
        await dropping
        with pytest.raises(TableNotFoundError, match="does not exist"):
            manager.check_open(table)


@pytest.mark.parametrize("is_made", [True, False])
async def test_databases_change_only_when_the_change_is_durable(
    tmp_path: Path, is_made: bool
) -> None:
    disk = _HeldDisk()
    directory = DataDirectory.open(tmp_path)
    directory.filesystem = disk
    async with open_manager(tmp_path, directory=directory) as manager:
        change = manager.create_database
        if not is_made:
            await manager.create_database("sales")
            change = manager.drop_database
        before = manager.databases()
        disk.held = "service.json"
        changing = asyncio.ensure_future(change("sales"))
        await asyncio.to_thread(disk.is_held.wait, 20)
        shown = manager.databases()
        disk.goes_on.set()
        await changing
        assert shown == before
        assert ("sales" in manager.databases()) == is_made
