"""Transactions where disks fail, limits are reached, time passes and others write."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from streamhouse.storage_service.errors import (
    CorruptDataError,
    OverloadedError,
    RequestTooLargeError,
    StorageFailedError,
    TransactionNotFoundError,
    UnknownOutcomeError,
)
from streamhouse.storage_service.log.filesystem import LocalFilesystem
from streamhouse.storage_service.log.log_tablet import LogTablet
from streamhouse.storage_service.log.staged_part import StagedBatch
from streamhouse.storage_service.model.transaction import (
    CommitResult,
    TransactionOperation,
    TransactionStatus,
)
from streamhouse.storage_service.tablet.key_writer import KeyWrite
from streamhouse.storage_service.tablet.open_table import OpenTable
from streamhouse.storage_service.tablet.table_transactions import TableTransactions
from streamhouse.storage_service.tablet.tablet_manager import TabletManager
from streamhouse.storage_service.tablet.transaction_commit import TransactionCommit
from tests.support.in_process_service import (
    EVENTS,
    event_rows,
    open_manager,
    routed,
    table_descriptor,
)

SMALL = {"transaction_chunk_bytes": 1_000}
KINDS = pytest.mark.parametrize("is_keyed", [False, True])


async def _table(manager: TabletManager, is_keyed: bool, path: str = "events") -> OpenTable:
    key = ("id",) if is_keyed else ()
    return await manager.create_table(table_descriptor(path, bucket_count=2, primary_key=key))


async def _begin(
    transactions: TableTransactions, is_keyed: bool = False, version: int | None = None
) -> str:
    operation = TransactionOperation.UPSERT if is_keyed else TransactionOperation.APPEND
    app_id = None if version is None else "app"
    begun, _ = await transactions.begin(
        operation, columns=None, app_id=app_id, version=version, timeout_ms=60_000
    )
    return begun


def _batches(start: int, count: int) -> list[StagedBatch]:
    return [
        StagedBatch(
            bucket,
            count,
            memoryview(event_rows(first, first + count).serialize()).cast("B"),
        )
        for bucket, first in ((0, start), (1, start + count))
    ]


async def _staged(transactions: TableTransactions, begun: str, parts: int = 6) -> list[str]:
    return [
        (await transactions.stage(begun, EVENTS, _batches(100 * n, 20), token=None))[0]
        for n in range(parts)
    ]


async def _append(manager: TabletManager, table: OpenTable, number: int) -> None:
    row = event_rows(10_000 + number, 10_001 + number)
    if table.key_writer is None:
        await manager.append(table, [routed(0, row)], writer_id=0)
    else:
        await manager.write_keys(table, [KeyWrite(0, row)], columns=None, writer_id=0)


def _is_log(descriptor: int) -> bool:
    return Path(f"/proc/self/fd/{descriptor}").readlink().suffix == ".log"


def _ends(table: OpenTable) -> list[int]:
    return [tablet.high_watermark for tablet in table.tablets]


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)


@KINDS
def test_a_full_disk_holds_a_commit_up_and_refuses_others_until_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_keyed: bool
) -> None:
    real = os.pwritev
    is_full = False
    writes = 0

    def write(descriptor: int, buffers: Any, position: int) -> int:
        nonlocal writes, is_full
        if _is_log(descriptor):
            writes += 1
            is_full |= writes == 3
            if is_full:
                raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, buffers, position)

    async def scenario() -> None:
        nonlocal is_full
        async with open_manager(tmp_path, **SMALL) as manager:
            table = await _table(manager, is_keyed)
            other = await _table(manager, False, "other")
            transactions = manager.transactions.of(table)
            begun = await _begin(transactions, is_keyed)
            parts = await _staged(transactions, begun)
            monkeypatch.setattr(os, "pwritev", write)
            assert await transactions.commit(begun, parts, wait_s=0) is None
            await _until(lambda: transactions.status(begun)["trouble"] != "")
            assert transactions.abort(begun) is TransactionStatus.COMMITTING
            with pytest.raises(StorageFailedError, match="is completing transaction"):
                await _append(manager, table, 0)
            assert _ends(table) == [0, 0]
            is_full = False
            await _append(manager, other, 0)
            result = await transactions.commit(begun, parts, wait_s=20)
            assert result is not None
            assert result.ranges == {0: (0, 120), 1: (0, 120)}
            await _append(manager, table, 1)
            assert _ends(table) == [121, 120]

    asyncio.run(scenario())


@KINDS
def test_a_failed_sync_leaves_nothing_half_visible_and_the_next_start_completes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_keyed: bool
) -> None:
    syncs = 0
    real = os.fdatasync

    def sync(descriptor: int) -> None:
        nonlocal syncs
        if _is_log(descriptor):
            syncs += 1
            if syncs == 4:
                raise OSError(errno.EIO, "Input/output error")
        real(descriptor)

    async def scenario() -> None:
        async with open_manager(tmp_path, **SMALL) as manager:
            table = await _table(manager, is_keyed)
            transactions = manager.transactions.of(table)
            begun = await _begin(transactions, is_keyed)
            parts = await _staged(transactions, begun)
            monkeypatch.setattr(os, "fdatasync", sync)
            for _ in range(2):
                with pytest.raises(UnknownOutcomeError, match="completed only by the next start"):
                    await transactions.commit(begun, parts, wait_s=20)
            with pytest.raises(UnknownOutcomeError, match="completed only by the next start"):
                await _append(manager, table, 0)
            assert _ends(table) == [0, 0]
        monkeypatch.undo()
        async with open_manager(tmp_path, **SMALL) as manager:
            table = next(iter(manager.open_tables()))
            assert _ends(table) == [120, 120]
            result = await manager.transactions.of(table).commit(begun, parts, wait_s=20)
            assert result is not None
            assert result.ranges == {0: (0, 120), 1: (0, 120)}
            await _append(manager, table, 0)

    asyncio.run(scenario())


def test_a_decision_that_cannot_be_written_leaves_the_transaction_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(self: LocalFilesystem, source: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async def scenario() -> None:
        async with open_manager(tmp_path) as manager:
            table = await _table(manager, False)
            transactions = manager.transactions.of(table)
            begun = await _begin(transactions)
            parts = await _staged(transactions, begun)
            monkeypatch.setattr(LocalFilesystem, "rename", failing)
            with pytest.raises(StorageFailedError, match="nothing was stored"):
                await transactions.commit(begun, parts, wait_s=20)
            monkeypatch.undo()
            assert transactions.status(begun)["status"] == "open"
            await _append(manager, table, 0)
            result = await transactions.commit(begun, parts, wait_s=20)
            assert result is not None
            assert result.ranges == {0: (1, 121), 1: (0, 120)}

    asyncio.run(scenario())


@KINDS
def test_writes_wait_for_a_commit_and_other_tables_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_keyed: bool
) -> None:
    async def scenario() -> None:
        held = asyncio.Event()
        async with open_manager(tmp_path, **SMALL) as manager:
            table = await _table(manager, is_keyed)
            other = await _table(manager, is_keyed, "other")
            transactions = manager.transactions.of(table)
            begun = await _begin(transactions, is_keyed)
            parts = await _staged(transactions, begun)
            real = TransactionCommit._stored
            pieces = 0

            async def stored(self: TransactionCommit, *args: Any) -> int:
                nonlocal pieces
                pieces += 1
                if pieces == 3:
                    await held.wait()
                return await real(self, *args)

            monkeypatch.setattr(TransactionCommit, "_stored", stored)
            assert await transactions.commit(begun, parts, wait_s=0) is None
            waiting = asyncio.ensure_future(_append(manager, table, 0))
            await _until(lambda: pieces == 3)
            await _append(manager, other, 0)
            assert _ends(table) == [0, 0]
            assert not waiting.done()
            status = transactions.status(begun)
            assert status["status"] == "committing"
            assert 0 < status["rows_committed"] < status["rows_to_commit"] == 240
            held.set()
            await waiting
            assert _ends(table) == [121, 120]

    asyncio.run(scenario())


@KINDS
def test_a_stop_interrupts_a_commit_and_the_next_start_completes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_keyed: bool
) -> None:
    async def scenario() -> None:
        async with open_manager(tmp_path, **SMALL) as manager:
            table = await _table(manager, is_keyed)
            transactions = manager.transactions.of(table)
            begun = await _begin(transactions, is_keyed)
            parts = await _staged(transactions, begun)
            real = TransactionCommit._stored
            started = asyncio.Event()

            async def stored(self: TransactionCommit, *args: Any) -> int:
                timestamp_us = await real(self, *args)
                started.set()
                await asyncio.sleep(0.01)
                return timestamp_us

            monkeypatch.setattr(TransactionCommit, "_stored", stored)
            asking = asyncio.ensure_future(transactions.commit(begun, parts, wait_s=20))
            await started.wait()
        with pytest.raises(UnknownOutcomeError, match="the service stops"):
            await asking
        monkeypatch.undo()
        async with open_manager(tmp_path, **SMALL) as manager:
            table = next(iter(manager.open_tables()))
            assert _ends(table) == [120, 120]
            assert manager.transactions.open_count == 0

    asyncio.run(scenario())


def test_limits_are_errors_that_name_them_and_dropping_gives_room(tmp_path: Path) -> None:
    limits = {
        "transactions_open_max": 2,
        "transaction_parts_max": 2,
        "transaction_table_bytes_max": 5_000,
        "transaction_bytes_max": 5_500,
    }

    async def scenario() -> None:
        async with open_manager(tmp_path, **limits) as manager:
            table = await _table(manager, False)
            transactions = manager.transactions.of(table)
            first, second = await _begin(transactions), await _begin(transactions)
            with pytest.raises(OverloadedError, match="transactions_open_max"):
                await _begin(transactions)
            await _staged(transactions, first, 2)
            with pytest.raises(RequestTooLargeError, match="transaction_parts_max"):
                await _staged(transactions, first, 1)
            with pytest.raises(OverloadedError, match="transaction_table_bytes_max"):
                await transactions.stage(second, EVENTS, _batches(0, 100), token=None)
            other = manager.transactions.of(await _table(manager, False, "other"))
            with pytest.raises(OverloadedError, match="transaction_bytes_max"):
                await other.stage(await _begin(other), EVENTS, _batches(0, 100), token=None)
            transactions.abort(first)
            assert transactions.staged_bytes == manager.transactions.staged_bytes == 0
            await _staged(transactions, second, 1)
            await manager.drop_table(table.path)
            assert manager.transactions.staged_bytes == 0

    asyncio.run(scenario())


def test_an_idle_transaction_is_dropped_with_its_files_also_after_a_restart(
    tmp_path: Path,
) -> None:
    def files() -> list[Path]:
        return list(tmp_path.rglob("transactions/*"))

    async def scenario() -> None:
        async with open_manager(tmp_path) as manager:
            transactions = manager.transactions.of(await _table(manager, False))
            dead, kept = await _begin(transactions), await _begin(transactions)
            await _staged(transactions, dead)
            [part] = await _staged(transactions, kept, 1)
            expires_us = transactions.status(dead)["expires_timestamp_us"]
            transactions.drop_expired(expires_us - 1)
            assert transactions.open_count == 2
            transactions.drop_expired(expires_us)
            assert transactions.open_count == 1
            with pytest.raises(TransactionNotFoundError, match="timed out"):
                transactions.status(dead)
        assert {path.name.partition(".")[0] for path in files()} == {kept}
        # Begun and cut off before it was answered; staged and cut off.
        torn = files()[0].parent
        (torn / "0123.open").write_bytes(b"{")
        (torn / f"{kept}.0123.part").write_bytes(b"SHTP")
        async with open_manager(tmp_path) as manager:
            transactions = manager.transactions.of(next(iter(manager.open_tables())))
            assert transactions.open_count == 1
            assert transactions.status(kept)["row_count"] == 40
            result = await transactions.commit(kept, [part], wait_s=20)
            assert isinstance(result, CommitResult)
        assert [path.suffix for path in files()] == [".decision"]

    asyncio.run(scenario())


def test_a_token_names_the_part_it_made(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with open_manager(tmp_path) as manager:
            transactions = manager.transactions.of(await _table(manager, False))
            begun = await _begin(transactions)
            stage = transactions.stage
            first = await stage(begun, EVENTS, _batches(0, 5), token="t")
            again = await stage(begun, EVENTS, _batches(0, 5), token="t")
            assert again == first
            assert transactions.status(begun)["parts"] == 1

    asyncio.run(scenario())


def test_a_damaged_part_aborts_the_whole_transaction(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with open_manager(tmp_path) as manager:
            table = await _table(manager, False)
            transactions = manager.transactions.of(table)
            begun = await _begin(transactions)
            parts = await _staged(transactions, begun)
            [path] = tmp_path.rglob(f"*{parts[3]}.part")
            path.write_bytes(path.read_bytes()[:-1])
            with pytest.raises(CorruptDataError, match=parts[3]):
                await transactions.commit(begun, parts, wait_s=20)
            assert _ends(table) == [0, 0]
            assert transactions.open_count == 0

    asyncio.run(scenario())


def test_outcomes_are_folded_into_one_file_and_versions_outlive_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = {"transaction_outcomes_max": 10}
        async with open_manager(tmp_path, **config) as manager:
            transactions = manager.transactions.of(await _table(manager, False))
            begun = [await _begin(transactions, version=7)]
            await transactions.commit(begun[0], await _staged(transactions, begun[0], 1), wait_s=20)
            for _ in range(150):
                begun.append(await _begin(transactions))
                await transactions.commit(begun[-1], [], wait_s=20)
        assert len(list(tmp_path.rglob("transactions/*"))) < 100
        async with open_manager(tmp_path, **config) as manager:
            transactions = manager.transactions.of(next(iter(manager.open_tables())))
            assert transactions.status(begun[-1])["status"] == "committed"
            with pytest.raises(TransactionNotFoundError):
                transactions.status(begun[100])
            assert await _begin(transactions, version=7) == ""
            assert await _begin(transactions, version=8) != ""

    asyncio.run(scenario())


def test_rows_staged_for_a_log_are_the_frames_of_the_log(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with open_manager(tmp_path) as manager:
            table = await _table(manager, False)
            transactions = manager.transactions.of(table)
            begun = await _begin(transactions)
            await transactions.commit(begun, await _staged(transactions, begun), wait_s=20)
            log: LogTablet = table.tablets[1]
            frames = log.read(0, bytes_max=1 << 20)
            assert [frame.row_count for frame in frames] == [20] * 6
            first = pa.ipc.read_record_batch(pa.py_buffer(frames[0].payload), EVENTS)
            assert first == event_rows(20, 40)

    asyncio.run(scenario())
