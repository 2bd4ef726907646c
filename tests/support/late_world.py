"""A service in this process whose journal stores late, and what is left when its disk is lost."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from streamhouse.storage_service.directory.data_directory import DataDirectory
from streamhouse.storage_service.engine.manager import TabletManager
from streamhouse.storage_service.log.filesystem import LocalFilesystem
from streamhouse.storage_service.log.replica import Replication
from streamhouse.storage_service.ownership.journal._journaled_filesystem import JournaledFilesystem
from streamhouse.storage_service.ownership.journal.operations import Operation, is_journalled
from tests.support.in_process_service import open_manager, until
from tests.support.late_journal import LateJournal, files_after

__all__ = ["LateWorld"]


class _OffTheLoop(LateJournal):
    """Recording may wait for room, and storing does: neither is done on the event loop."""

    def record(self, operation: Operation) -> int:
        with pytest.raises(RuntimeError, match="no running event loop"):
            asyncio.get_running_loop()
        return super().record(operation)

    def wait_stored(self, position: int) -> None:
        with pytest.raises(RuntimeError, match="no running event loop"):
            asyncio.get_running_loop()
        super().wait_stored(position)


class LateWorld:
    """A data directory with a journal, which stores what is waited for, and else nothing."""

    def __init__(self, path: Path, *, is_waited_for: bool = True) -> None:
        self.path = path
        self.is_waited_for = is_waited_for
        self.journal = _OffTheLoop(self._on_wait)

    def _on_wait(self, position: int) -> None:
        self.journal.store(position - self.journal.stored_position)

    @contextlib.asynccontextmanager
    async def opened(self, **config: Any) -> AsyncIterator[TabletManager]:
        """Open the tables; leaving stores everything and closes the tables cleanly."""
        directory = DataDirectory.open(self.path)
        stored = files_after(self.journal.operations)
        directory.filesystem = JournaledFilesystem(
            LocalFilesystem(),
            directory.path,
            self.journal,
            log_bytes={n: len(data) for n, data in stored.items() if n.endswith(".log")},
            on_failure=pytest.fail,
        )
        replication = Replication(
            replica=self.journal, is_waited_for=self.is_waited_for, lag_ms_max=3_600_000
        )
        async with open_manager(
            self.path, directory=directory, replication=replication, **config
        ) as manager:
            try:
                yield manager
            finally:
                self.journal.store_at_once()
        self.journal.store_late()

    def restored_at(self, path: Path) -> LateWorld:
        """Return another directory, with what the journal has stored."""
        other = LateWorld(path)
        other.journal.operations = self.journal.operations[: self.journal.stored_position]
        other.journal.store()
        for name, data in files_after(other.journal.operations).items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(data)
        return other

    def killed_at(self, path: Path) -> LateWorld:
        """Return another directory, with the local files, and what the journal has stored."""
        other = LateWorld(path)
        shutil.copytree(self.path, path)
        other.journal.operations = self.journal.operations[: self.journal.stored_position]
        other.journal.store()
        return other

    def local(self) -> dict[str, bytes]:
        """Return the files of the directory that belong to the journal."""
        files = {p.relative_to(self.path).as_posix(): p for p in self.path.rglob("*")}
        return {name: p.read_bytes() for name, p in files.items() if is_journalled(name)}

    async def recorded(self, task: asyncio.Task[Any], count: int = 1) -> None:
        """Return once what `task` does is recorded; it is not answered."""
        wanted = self.journal.stored_position + count
        await until(lambda: self.journal.recorded_position >= wanted)
        assert not task.done()
