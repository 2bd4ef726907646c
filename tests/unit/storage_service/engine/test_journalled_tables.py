"""Tables of a service with a journal: what it has of them, and what waits for it."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import pytest

from streamhouse.core.model.transaction import CommitResult, TransactionStatus
from streamhouse.storage_service.directory.data_directory import DataDirectory
from streamhouse.storage_service.engine.keys.key_table import KeyTable
from streamhouse.storage_service.engine.manager import TabletManager
from streamhouse.storage_service.engine.open_table import Appended, LogTable, OpenTable
from streamhouse.storage_service.kv.plan.write_plan import KeyWrite
from streamhouse.storage_service.log.filesystem import LocalFilesystem
from streamhouse.storage_service.log.replica import Replication
from streamhouse.storage_service.ownership.journal._journaled_filesystem import JournaledFilesystem
from streamhouse.storage_service.ownership.journal.operations import Operation, is_journalled
from tests.support.in_process_service import (
    begin,
    event_rows,
    ids_of,
    make_table,
    open_manager,
    routed,
    stage_parts,
    table_descriptor,
    until,
    visible_ends,
)
from tests.support.late_journal import LateJournal, files_after

# Rolls with the third batch.
_SMALL_SEGMENTS = {"table.log.segment-bytes": "64kb"}


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


class World:
    """A data directory with a journal, which stores what is waited for, and else nothing."""

    def __init__(self, path: Path, *, is_waited_for: bool = True) -> None:
        self.path = path
        self.is_waited_for = is_waited_for
        self.journal = _OffTheLoop(self._on_wait)

    def _on_wait(self, position: int) -> None:
        self.journal.store(position - self.journal.stored_position)

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[TabletManager]:
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
        async with open_manager(self.path, directory=directory, replication=replication) as manager:
            yield manager
            self.journal.store_at_once()

    def restored_at(self, path: Path) -> World:
        """Return another directory, with what the journal has stored."""
        other = World(path)
        other.journal.operations = self.journal.operations[: self.journal.stored_position]
        other.journal.store()
        for name, data in files_after(other.journal.operations).items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(data)
        return other

    def killed_at(self, path: Path) -> World:
        """Return another directory, with the local files, and what the journal has stored."""
        other = World(path)
        shutil.copytree(self.path, path)
        other.journal.operations = self.journal.operations[: self.journal.stored_position]
        other.journal.store()
        return other

    def local(self) -> dict[str, bytes]:
        files = {p.relative_to(self.path).as_posix(): p for p in self.path.rglob("*")}
        return {name: p.read_bytes() for name, p in files.items() if is_journalled(name)}

    async def recorded(self, task: asyncio.Task[Any], count: int = 1) -> None:
        """Return once what `task` does is recorded; it is not answered."""
        wanted = self.journal.stored_position + count
        await until(lambda: self.journal.recorded_position >= wanted)
        assert not task.done()


def _begun(coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    return asyncio.get_running_loop().create_task(coroutine)


def _upsert(
    manager: TabletManager, table: OpenTable, start: int, *, sequence: int = 0
) -> Coroutine[Any, Any, Appended]:
    assert isinstance(table, KeyTable)
    write = KeyWrite(0, event_rows(start, start + 3), sequence=sequence)
    return manager.write_keys(table, [write], columns=None, writer_id=9 if sequence else 0)


async def _append(manager: TabletManager, table: OpenTable, start: int, count: int = 5) -> None:
    assert isinstance(table, LogTable)
    rows = event_rows(start, start + count)
    await manager.append(table, [routed(0, rows), routed(1, rows)])


def _rows_of(table: OpenTable) -> list[list[bytes]]:
    return [
        [bytes(batch.payload) for batch in tablet.read(0, bytes_max=1 << 30)]
        for tablet in table.tablets
    ]


async def _commit(manager: TabletManager, table: OpenTable) -> CommitResult | None:
    transactions = manager.transactions.of(table)
    begun = await begin(transactions, isinstance(table, KeyTable))
    parts = await stage_parts(transactions, begun)
    return await transactions.commit(begun, parts, wait_s=20)


async def test_the_journal_has_all_that_a_service_does(tmp_path: Path) -> None:
    world = World(tmp_path / "data")
    async with world.opened() as manager:
        world.journal.store_at_once()
        await manager.create_database("sales")
        log = await manager.create_table(
            table_descriptor("sales.log", bucket_count=2, properties=_SMALL_SEGMENTS)
        )
        keyed = await make_table(manager, is_keyed=True)
        gone = await make_table(manager, is_keyed=False, path="gone")
        for number in range(4):
            await _append(manager, log, 2_000 * number, 2_000)
            await _upsert(manager, keyed, number)
            await _append(manager, gone, number)
        for table in (log, keyed):
            committed = await _commit(manager, table)
            assert committed is not None
            assert committed.status is TransactionStatus.COMMITTED
        await begin(manager.transactions.of(log))
        await manager.alter_properties(
            log.path, updates={"table.log.ttl": "1h"}, removals=("table.log.segment-bytes",)
        )
        await manager.drop_table(gone.path)
        assert log.tablets[0].segment_count > 1
        expected = {table.path: _rows_of(table) for table in (log, keyed)}
        ids = ids_of(keyed)

    local, recorded = world.local(), files_after(world.journal.operations)
    is_mark = str.endswith
    assert local.keys() == recorded.keys()
    assert {n: d for n, d in local.items() if not is_mark(n, ".mark")} == {
        n: d for n, d in recorded.items() if not is_mark(n, ".mark")
    }
    restored = world.restored_at(tmp_path / "restored")
    restored.journal.store_at_once()
    async with restored.opened() as manager:
        found = {table.path: table for table in manager.open_tables()}
        assert {path: _rows_of(table) for path, table in found.items()} == expected
        assert ids_of(found[keyed.path]) == ids
        assert found[log.path].info.properties().log_ttl_ms == 3_600_000
        assert manager.transactions.open_count == 1
        assert manager.databases() == ["default", "sales"]
        await _append(manager, found[log.path], 0)


async def test_changes_by_key_are_applied_and_shown_once_they_are_stored(tmp_path: Path) -> None:
    world = World(tmp_path)
    async with world.opened() as manager:
        table = await make_table(manager, is_keyed=True)
        world.journal.store()
        first = _begun(_upsert(manager, table, 0, sequence=1))
        await world.recorded(first)
        again = _begun(_upsert(manager, table, 0, sequence=1))
        second = _begun(_upsert(manager, table, 10))
        for _ in range(100):
            await asyncio.sleep(0)
        assert not again.done()
        assert not second.done()
        assert isinstance(table, KeyTable)
        assert table.key_buckets[0].rows.applied_offset == 0
        assert visible_ends(table) == [0, 0]
        assert ids_of(table) == []

        world.journal.store_at_once()

        assert (await first).ranges == (await again).ranges == {0: (0, 3)}
        assert (await second).ranges == {0: (3, 6)}
        assert ids_of(table) == [0, 1, 2, 10, 11, 12]


@pytest.mark.parametrize("is_keyed", [False, True])
async def test_a_transaction_is_shown_once_all_of_it_is_stored(
    tmp_path: Path, *, is_keyed: bool
) -> None:
    world = World(tmp_path)
    async with world.opened() as manager:
        table = await make_table(manager, is_keyed)
        transactions = manager.transactions.of(table)
        begun = await begin(transactions, is_keyed)
        parts = await stage_parts(transactions, begun)
        world.journal.store()
        # The decision is stored because it is waited for, then come the rows.
        commit = _begun(transactions.commit(begun, parts, wait_s=20))
        await until(lambda: any(t.log_end_offset for t in table.tablets))
        assert visible_ends(table) == [0, 0]
        assert not commit.done()

        world.journal.store_at_once()
        await commit

        assert sum(visible_ends(table)) == 240


async def test_what_is_here_and_not_stored_is_stored_before_it_is_shown(tmp_path: Path) -> None:
    """A process that was killed comes back: the ends of its logs go to the journal first."""
    world = World(tmp_path / "data", is_waited_for=False)
    async with world.opened() as manager:
        keyed = await make_table(manager, is_keyed=True)
        log = await make_table(manager, is_keyed=False, path="log")
        world.journal.store()
        await _append(manager, log, 0)
        await _upsert(manager, keyed, 0)
        assert world.journal.stored_position < world.journal.recorded_position
        killed = world.killed_at(tmp_path / "again")

    async with killed.opened() as manager:
        found = {str(table.path): table for table in manager.open_tables()}
        assert visible_ends(found["default.log"]) == [5, 5]
        assert ids_of(found["default.events"]) == [0, 1, 2]
        stored = files_after(killed.journal.operations[: killed.journal.stored_position])
        local = killed.local()
        logs = [name for name in local if name.endswith(".log")]
        assert {name: stored[name] for name in logs} == {name: local[name] for name in logs}


async def test_rocksdb_gets_nothing_that_is_not_stored(tmp_path: Path) -> None:
    world = World(tmp_path, is_waited_for=False)
    async with world.opened() as manager:
        table = await make_table(manager, is_keyed=True)
        world.journal.store()
        await _upsert(manager, table, 0)
        assert isinstance(table, KeyTable)
        rows = table.key_buckets[0].rows
        assert visible_ends(table) == [3, 0]
        seen = []

        def on_wait(position: int) -> None:
            seen.append((rows.flushed_offset, world.journal.stored_position < position))
            world.journal.store()

        world.journal.on_wait = on_wait
        await table.key_writer.on_thread(rows.flush)

        assert seen == [(0, True)]
        assert rows.flushed_offset == 3


async def test_a_round_is_handed_out_once_its_rows_are_stored(tmp_path: Path) -> None:
    world = World(tmp_path, is_waited_for=False)
    async with world.opened() as manager:
        table = await make_table(manager, is_keyed=False)
        await _append(manager, table, 0)
        loop = asyncio.get_running_loop()
        late = []

        def on_wait(position: int) -> None:
            if not late:
                # While the claim is being stored, more rows are shown.
                asyncio.run_coroutine_threadsafe(_append(manager, table, 5), loop).result()
                late.append(world.journal.recorded_position)
            world.journal.store(position - world.journal.stored_position)

        world.journal.on_wait = on_wait

        answer = await manager.tiering.claim("one", tables=None, force=True)

        assert answer.assignment is not None
        assert answer.assignment.state.positions[0].high_watermark == 10
        assert world.journal.stored_position >= late[0]
