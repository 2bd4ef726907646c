"""Transactions where disks fail, limits are reached, time passes and others write."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from streamhouse.core.errors import (
    StorageFailedError,
    TransactionNotFoundError,
    UnknownOutcomeError,
)
from streamhouse.core.model.transaction import (
    TransactionStatus,
)
from streamhouse.storage_service.engine.transactions.transaction_files import TransactionFiles
from streamhouse.storage_service.log.log_tablet import LogTablet
from tests.support.held_step import around
from tests.support.in_process_service import (
    EVENTS,
    begin,
    event_rows,
    make_table,
    open_manager,
    stage_parts,
    until,
    visible_ends,
    write_alone,
)

SMALL = {"transaction_chunk_bytes": 1_000}
KINDS = pytest.mark.parametrize("is_keyed", [False, True])


def _is_log(descriptor: int) -> bool:
    return Path(f"/proc/self/fd/{descriptor}").readlink().suffix == ".log"


@KINDS
async def test_a_full_disk_holds_a_commit_up_and_refuses_others_until_there_is_room(
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

    async with open_manager(tmp_path, **SMALL) as manager:
        table = await make_table(manager, is_keyed)
        other = await make_table(manager, False, "other")
        transactions = manager.transactions.of(table)
        begun = await begin(transactions, is_keyed)
        parts = await stage_parts(transactions, begun)
        monkeypatch.setattr(os, "pwritev", write)
        assert await transactions.commit(begun, parts, wait_s=0) is None
        await until(lambda: transactions.status(begun)["trouble"] != "")
        assert transactions.abort(begun) is TransactionStatus.COMMITTING
        with pytest.raises(StorageFailedError, match="is completing transaction"):
            await write_alone(manager, table, 0)
        assert visible_ends(table) == [0, 0]
        is_full = False
        await write_alone(manager, other, 0)
        result = await transactions.commit(begun, parts, wait_s=20)
        assert result is not None
        assert result.ranges == {0: (0, 120), 1: (0, 120)}
        await write_alone(manager, table, 1)
        assert visible_ends(table) == [121, 120]


@KINDS
async def test_a_failed_sync_leaves_nothing_half_visible_and_the_next_start_completes_it(
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

    async with open_manager(tmp_path, **SMALL) as manager:
        table = await make_table(manager, is_keyed)
        transactions = manager.transactions.of(table)
        begun = await begin(transactions, is_keyed)
        parts = await stage_parts(transactions, begun)
        monkeypatch.setattr(os, "fdatasync", sync)
        for _ in range(2):
            with pytest.raises(UnknownOutcomeError, match="completed only by the next start"):
                await transactions.commit(begun, parts, wait_s=20)
        with pytest.raises(StorageFailedError, match="completed only by the next start"):
            await write_alone(manager, table, 0)
        assert visible_ends(table) == [0, 0]
    monkeypatch.undo()
    async with open_manager(tmp_path, **SMALL) as manager:
        table = next(iter(manager.open_tables()))
        assert visible_ends(table) == [120, 120]
        result = await manager.transactions.of(table).commit(begun, parts, wait_s=20)
        assert result is not None
        assert result.ranges == {0: (0, 120), 1: (0, 120)}
        await write_alone(manager, table, 0)


async def test_a_decision_that_cannot_be_written_leaves_the_transaction_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async with open_manager(tmp_path) as manager:
        table = await make_table(manager, False)
        transactions = manager.transactions.of(table)
        begun = await begin(transactions)
        parts = await stage_parts(transactions, begun)
        monkeypatch.setattr(os, "rename", failing)
        with pytest.raises(StorageFailedError, match="nothing was stored"):
            await transactions.commit(begun, parts, wait_s=20)
        monkeypatch.undo()
        assert transactions.status(begun)["status"] == "open"
        await write_alone(manager, table, 0)
        result = await transactions.commit(begun, parts, wait_s=20)
        assert result is not None
        assert result.ranges == {0: (1, 121), 1: (0, 120)}


@KINDS
async def test_writes_wait_for_a_commit_and_other_tables_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_keyed: bool
) -> None:
    held = asyncio.Event()
    async with open_manager(tmp_path, **SMALL) as manager:
        table = await make_table(manager, is_keyed)
        other = await make_table(manager, is_keyed, "other")
        transactions = manager.transactions.of(table)
        begun = await begin(transactions, is_keyed)
        parts = await stage_parts(transactions, begun)
        pieces = 0

        async def stored(real: Any, *args: Any) -> Any:
            nonlocal pieces
            pieces += 1
            if pieces == 3:
                await held.wait()
            return await real(*args)

        around(monkeypatch, "piece-storing", stored)
        assert await transactions.commit(begun, parts, wait_s=0) is None
        waiting = asyncio.ensure_future(write_alone(manager, table, 0))
        await until(lambda: pieces == 3)
        await write_alone(manager, other, 0)
        assert visible_ends(table) == [0, 0]
        assert not waiting.done()
        status = transactions.status(begun)
        assert status["status"] == "committing"
        assert 0 < status["rows_committed"] < status["rows_to_commit"] == 240
        held.set()
        await waiting
        assert visible_ends(table) == [121, 120]


@KINDS
async def test_a_stop_interrupts_a_commit_and_the_next_start_completes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_keyed: bool
) -> None:
    async with open_manager(tmp_path, **SMALL) as manager:
        table = await make_table(manager, is_keyed)
        transactions = manager.transactions.of(table)
        begun = await begin(transactions, is_keyed)
        parts = await stage_parts(transactions, begun)
        started = asyncio.Event()

        async def stored(real: Any, *args: Any) -> Any:
            timestamp_us = await real(*args)
            started.set()
            await asyncio.sleep(0.01)
            return timestamp_us

        around(monkeypatch, "piece-storing", stored)
        asking = asyncio.ensure_future(transactions.commit(begun, parts, wait_s=20))
        await started.wait()
    with pytest.raises(UnknownOutcomeError, match="the service stops"):
        await asking
    monkeypatch.undo()
    async with open_manager(tmp_path, **SMALL) as manager:
        table = next(iter(manager.open_tables()))
        assert visible_ends(table) == [120, 120]
        assert manager.transactions.open_count == 0


async def test_rows_staged_for_a_log_are_the_frames_of_the_log(tmp_path: Path) -> None:
    async with open_manager(tmp_path) as manager:
        table = await make_table(manager, False)
        transactions = manager.transactions.of(table)
        begun = await begin(transactions)
        await transactions.commit(begun, await stage_parts(transactions, begun), wait_s=20)
        log: LogTablet = table.tablets[1]
        frames = log.read(0, bytes_max=1 << 20)
        assert [frame.row_count for frame in frames] == [20] * 6
        first = pa.ipc.read_record_batch(pa.py_buffer(frames[0].payload), EVENTS)
        assert first == event_rows(20, 40)


@KINDS
async def test_staging_into_a_transaction_that_is_aborted_meanwhile_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_keyed: bool
) -> None:
    is_aborted = threading.Event()

    def after_the_abort(real: Any, files: TransactionFiles, transaction_id: str) -> None:
        assert is_aborted.wait(60)
        (files.directory / f"{transaction_id}.open").unlink(missing_ok=True)
        real(files, transaction_id)

    async with open_manager(tmp_path, **SMALL) as manager:
        table = await make_table(manager, is_keyed)
        transactions = manager.transactions.of(table)
        begun = await begin(transactions, is_keyed)
        around(monkeypatch, "part-syncing", after_the_abort)
        staging = asyncio.ensure_future(stage_parts(transactions, begun))
        await asyncio.sleep(0)
        transactions.abort(begun)
        is_aborted.set()
        with pytest.raises(TransactionNotFoundError):
            await staging


@KINDS
async def test_a_table_goes_only_when_no_rows_are_being_staged_even_of_what_was_aborted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_keyed: bool
) -> None:
    """A part that is written into a directory that is gone would be in the journal for good."""
    is_held, goes_on = threading.Event(), threading.Event()

    def held(real: Any, *args: Any) -> None:
        is_held.set()
        assert goes_on.wait(60)
        real(*args)

    async with open_manager(tmp_path, **SMALL) as manager:
        table = await make_table(manager, is_keyed)
        transactions = manager.transactions.of(table)
        begun = await begin(transactions, is_keyed)
        around(monkeypatch, "part-syncing", held)
        staging = asyncio.ensure_future(stage_parts(transactions, begun))
        await asyncio.to_thread(is_held.wait, 20)
        # Its caller has gone, and then it was aborted.
        staging.cancel()
        transactions.abort(begun)
        dropping = asyncio.ensure_future(manager.drop_table(table.path))
        await asyncio.wait([dropping], timeout=0.3)
        is_early = dropping.done()
        goes_on.set()
        await dropping
        assert not is_early
