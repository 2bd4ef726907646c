"""Tables of a service with a journal: what it has of them, and what waits for it."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from streamhouse.core.errors import StorageFailedError
from streamhouse.core.model.transaction import CommitResult, TransactionStatus
from streamhouse.storage_service.engine.keys.key_table import KeyTable
from streamhouse.storage_service.engine.manager import TabletManager
from streamhouse.storage_service.engine.open_table import Appended, LogTable, OpenTable
from streamhouse.storage_service.kv.plan.write_plan import KeyWrite
from tests.support.held_step import lower
from tests.support.in_process_service import (
    begin,
    event_rows,
    ids_of,
    make_table,
    routed,
    stage_parts,
    table_descriptor,
    until,
    visible_ends,
)
from tests.support.late_journal import files_after
from tests.support.late_world import LateWorld

# Rolls with the third batch.
_SMALL_SEGMENTS = {"table.log.segment-bytes": "64kb"}


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
    world = LateWorld(tmp_path / "data")
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
    world = LateWorld(tmp_path)
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


async def _in_flight(
    world: LateWorld, manager: TabletManager, table: OpenTable, count: int
) -> list[asyncio.Task[Appended]]:
    """Begin upserts of one writer, each recorded before the next; the journal stores none."""
    world.journal.store()
    tasks = []
    for number in range(count):
        tasks.append(_begun(_upsert(manager, table, 10 * number, sequence=number + 1)))
        await world.recorded(tasks[0], number + 1)
    return tasks


async def _turns(count: int = 100) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_groups_of_changes_by_key_are_in_flight_together_and_shown_in_order(
    tmp_path: Path,
) -> None:
    world = LateWorld(tmp_path)
    async with world.opened() as manager:
        table = await make_table(manager, is_keyed=True)
        tasks = await _in_flight(world, manager, table, 3)
        await _turns()
        assert isinstance(table, KeyTable)
        rows = table.key_buckets[0].rows
        assert (rows.applied_offset, rows.planned_offset, visible_ends(table)) == (0, 9, [0, 0])
        assert ids_of(table) == []

        for number, task in enumerate(tasks):
            world.journal.store(1)
            assert (await task).ranges == {0: (3 * number, 3 * number + 3)}
            await _turns()
            assert not any(later.done() for later in tasks[number + 1 :])
            assert rows.applied_offset == visible_ends(table)[0] == 3 * number + 3
            assert ids_of(table) == [10 * n + i for n in range(number + 1) for i in range(3)]


async def test_an_answer_that_stores_nothing_waits_for_the_groups_before_it(
    tmp_path: Path,
) -> None:
    """A repeated batch, and rows that are there already: a takeover must find the same rows."""
    world = LateWorld(tmp_path)
    async with world.opened() as manager:
        table = await make_table(manager, is_keyed=True)
        tasks = await _in_flight(world, manager, table, 2)
        repeated = _begun(_upsert(manager, table, 10, sequence=2))
        same = _begun(_upsert(manager, table, 0))
        world.journal.store(1)
        await tasks[0]
        await _turns()
        assert not repeated.done()
        assert not same.done()

        world.journal.store(1)

        assert (await repeated).ranges == (await tasks[1]).ranges == {0: (3, 6)}
        assert (await same).ranges == {0: (6, 6)}
        world.journal.store_at_once()


async def test_a_disk_that_is_full_for_one_group_keeps_the_groups_in_flight_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_full = threading.Event()

    def full(*_: Any) -> int:
        is_full.set()
        raise OSError(28, "No space left on device")

    world = LateWorld(tmp_path)
    async with world.opened() as manager:
        table = await make_table(manager, is_keyed=True)
        tasks = await _in_flight(world, manager, table, 2)
        assert isinstance(table, KeyTable)
        rows = table.key_buckets[0].rows
        monkeypatch.setattr(os, "pwritev", full)
        refused = _begun(_upsert(manager, table, 20, sequence=3))
        await until(is_full.is_set)
        await until(lambda: table.key_writer._submitted[-1].is_synced)
        later = _begun(_upsert(manager, table, 30))
        await _turns(1_000)
        # Nothing is planned on rows that may never be there.
        assert (refused.done(), later.done(), rows.planned_offset) == (False, False, 9)
        monkeypatch.undo()

        world.journal.store_at_once()

        assert [(await task).ranges for task in tasks] == [{0: (0, 3)}, {0: (3, 6)}]
        with pytest.raises(StorageFailedError):
            await refused
        assert (await later).ranges == {0: (6, 9)}
        assert ids_of(table) == [0, 1, 2, 10, 11, 12, 30, 31, 32]


async def test_few_groups_are_in_flight_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lower(monkeypatch, "groups-submitted", 2)
    world = LateWorld(tmp_path)
    async with world.opened() as manager:
        table = await make_table(manager, is_keyed=True)
        tasks = await _in_flight(world, manager, table, 2)
        third = _begun(_upsert(manager, table, 20, sequence=3))
        recorded = world.journal.recorded_position
        await _turns(1_000)
        assert world.journal.recorded_position == recorded

        world.journal.store(1)
        await tasks[0]

        await world.recorded(third, 2)
        world.journal.store_at_once()
        assert (await third).ranges == {0: (6, 9)}


@pytest.mark.parametrize("is_commit", [False, True])
async def test_a_change_that_needs_the_table_alone_waits_for_all_groups_in_flight(
    tmp_path: Path, *, is_commit: bool
) -> None:
    world = LateWorld(tmp_path)
    async with world.opened() as manager:
        table = await make_table(manager, is_keyed=True)
        transactions = manager.transactions.of(table)

        async def add_column() -> None:
            await manager.alter_schema(table.path, [{"add": "unit", "type": "string"}])

        change = add_column
        if is_commit:
            begun = await begin(transactions, is_keyed=True)
            parts = await stage_parts(transactions, begun)

            async def commit() -> None:
                await transactions.commit(begun, parts, wait_s=20)

            change = commit
        tasks = await _in_flight(world, manager, table, 3)
        recorded = world.journal.recorded_position
        changing = _begun(change())

        for task in tasks:
            await _turns(1_000)
            assert world.journal.recorded_position == recorded
            world.journal.store(1)
            await task
        world.journal.store_at_once()
        await changing

        assert world.journal.recorded_position > recorded


@pytest.mark.parametrize("is_keyed", [False, True])
async def test_a_transaction_is_shown_once_all_of_it_is_stored(
    tmp_path: Path, *, is_keyed: bool
) -> None:
    world = LateWorld(tmp_path)
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
    world = LateWorld(tmp_path / "data", is_waited_for=False)
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
    world = LateWorld(tmp_path, is_waited_for=False)
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
    world = LateWorld(tmp_path, is_waited_for=False)
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
