"""A commit that depends on what its rows were computed from: when it happens, and when not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pytest

from streamhouse.core.errors import (
    CommitConflictError,
    InvalidRequestError,
    TransactionNotFoundError,
)
from streamhouse.core.model.changelog import OPERATION_DELETE
from streamhouse.core.model.transaction import (
    CommitResult,
    Isolation,
    ReadPosition,
    TransactionOperation,
)
from streamhouse.storage_service.engine.manager import TabletManager
from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.kv.plan.write_plan import KeyWrite
from streamhouse.storage_service.log.append_queue import RoutedBatch
from streamhouse.storage_service.log.staged_part import OPERATION_COLUMN
from tests.support.in_process_service import (
    EVENTS,
    begin,
    make_table,
    open_manager,
    routed,
    table_descriptor,
    visible_ends,
    write_alone,
)


def _rows(ids: list[int], name: str = "n") -> pa.RecordBatch:
    return pa.record_batch([pa.array(ids, pa.int64()), [name] * len(ids)], schema=EVENTS)


def _read(table: OpenTable, isolation: Isolation = Isolation.SNAPSHOT) -> ReadPosition:
    offsets = {b: at.high_watermark for b, at in table.positions().items()}
    return ReadPosition(offsets=offsets, isolation=isolation)


async def _upsert(
    manager: TabletManager, table: OpenTable, ids: list[int], bucket: int = 0
) -> None:
    # Rows that change nothing are no changes.
    write = KeyWrite(bucket, _rows(ids, f"written at {visible_ends(table)}"))
    await manager.write_keys(table, [write], columns=None, writer_id=0)


async def _commit(
    manager: TabletManager,
    table: OpenTable,
    ids: Mapping[int, list[int]],
    read: ReadPosition,
    operation: TransactionOperation = TransactionOperation.UPSERT,
    version: int | None = None,
) -> CommitResult:
    transactions = manager.transactions.of(table)
    begun, _ = await transactions.begin(
        operation,
        columns=None,
        app_id=None if version is None else "app",
        version=version,
        timeout_ms=None,
    )
    batches = [
        RoutedBatch(bucket, len(own), memoryview(_rows(own, "merged").serialize()).cast("B"))
        for bucket, own in ids.items()
    ]
    parts = [(await transactions.stage(begun, EVENTS, batches, token=None))[0]] if batches else []
    ends = visible_ends(table)
    try:
        result = await transactions.commit(begun, parts, wait_s=20, read=read)
    except CommitConflictError:
        assert visible_ends(table) == ends
        with pytest.raises(TransactionNotFoundError):
            transactions.status(begun)
        raise
    assert result is not None
    return result


@pytest.mark.parametrize("count", [1, 500])
async def test_a_key_that_others_changed_is_named_and_nothing_is_written(
    tmp_path: Path, count: int
) -> None:
    async with open_manager(tmp_path) as manager:
        table = await make_table(manager, is_keyed=True)
        await _upsert(manager, table, [1, 2, 3])
        read = _read(table)
        await _upsert(manager, table, [*range(1000, 1000 + count), 2])
        with pytest.raises(CommitConflictError, match="changed the row with id = 2"):
            await _commit(manager, table, {0: [1, 2], 1: [7]}, read)


async def test_other_keys_and_other_buckets_are_no_conflict(tmp_path: Path) -> None:
    async with open_manager(tmp_path) as manager:
        table = await make_table(manager, is_keyed=True)
        await _upsert(manager, table, [1, 2, 3])
        read = _read(table)
        await _upsert(manager, table, [2])
        await _upsert(manager, table, [1], bucket=1)
        result = await _commit(manager, table, {0: [1, 3]}, read)
        assert result.row_count == 2


async def test_serializable_allows_no_change_at_all(tmp_path: Path) -> None:
    async with open_manager(tmp_path) as manager:
        table = await make_table(manager, is_keyed=True)
        read = _read(table, Isolation.SERIALIZABLE)
        assert (await _commit(manager, table, {0: [1]}, read)).row_count == 1
        with pytest.raises(CommitConflictError, match="rows were written to bucket 0"):
            await _commit(manager, table, {1: [2]}, read)


@pytest.mark.parametrize("is_keyed", [False, True])
async def test_an_overwrite_of_what_was_read_meets_no_newer_row(
    tmp_path: Path, is_keyed: bool
) -> None:
    async with open_manager(tmp_path) as manager:
        table = await make_table(manager, is_keyed)
        await write_alone(manager, table, 0)
        read = _read(table)
        await write_alone(manager, table, 1)
        overwrite = TransactionOperation.OVERWRITE
        with pytest.raises(CommitConflictError, match="rows were written to bucket 0"):
            await _commit(manager, table, {1: [5]}, read, overwrite)
        assert (await _commit(manager, table, {1: [5]}, _read(table), overwrite)).row_count == 1


async def test_rows_that_were_truncated_meanwhile_do_not_come_back(tmp_path: Path) -> None:
    overwrite = TransactionOperation.OVERWRITE
    async with open_manager(tmp_path) as manager:
        table = await make_table(manager, is_keyed=False)
        await write_alone(manager, table, 0)
        transactions = manager.transactions.of(table)
        rewrites = [await begin(transactions, False, overwrite) for _ in range(2)]
        read = _read(table)
        truncation = await begin(transactions, False, overwrite)
        assert await transactions.commit(truncation, [], wait_s=20)
        assert visible_ends(table) == list(read.offsets.values())

        with pytest.raises(CommitConflictError, match="were removed"):
            await transactions.commit(rewrites[0], [], wait_s=20, read=read)

    async with open_manager(tmp_path) as manager:
        table = next(iter(manager.open_tables()))
        transactions = manager.transactions.of(table)
        with pytest.raises(CommitConflictError, match="were removed"):
            await transactions.commit(rewrites[1], [], wait_s=20, read=read)
        assert (await _commit(manager, table, {1: [5]}, _read(table), overwrite)).row_count == 1


async def test_a_deleted_key_counts_as_changed(tmp_path: Path) -> None:
    async with open_manager(tmp_path) as manager:
        table = await make_table(manager, is_keyed=True)
        await _upsert(manager, table, [1])
        read = _read(table)
        delete = TransactionOperation.DELETE
        transactions = manager.transactions.of(table)
        begun, _ = await transactions.begin(
            delete, columns=None, app_id=None, version=None, timeout_ms=None
        )
        columns = [pa.array([1], pa.int64()), pa.array([OPERATION_DELETE], pa.int8())]
        keys = pa.record_batch(columns, ["id", OPERATION_COLUMN])
        batch = RoutedBatch(0, 1, memoryview(keys.serialize()).cast("B"))
        part, _ = await transactions.stage(begun, keys.schema, [batch], token=None)
        assert await transactions.commit(begun, [part], wait_s=20, read=read)
        with pytest.raises(CommitConflictError, match="id = 1"):
            await _commit(manager, table, {0: [1]}, read)


async def test_changes_that_left_the_log_count_as_conflict(tmp_path: Path) -> None:
    async with open_manager(tmp_path) as manager:
        table = await make_table(manager, is_keyed=True)
        read = _read(table)
        await _upsert(manager, table, [1])
        table.tablets[0]._truncated_offset = 1
        with pytest.raises(CommitConflictError, match="have left the log"):
            await _commit(manager, table, {0: [7]}, read)


async def test_a_version_that_is_committed_is_skipped_whatever_has_changed(tmp_path: Path) -> None:
    async with open_manager(tmp_path) as manager:
        table = await make_table(manager, is_keyed=True)
        read = _read(table)
        transactions = manager.transactions.of(table)
        begun, _ = await transactions.begin(
            TransactionOperation.UPSERT, columns=None, app_id="app", version=1, timeout_ms=None
        )
        batch = RoutedBatch(0, 1, memoryview(_rows([1]).serialize()).cast("B"))
        part, _ = await transactions.stage(begun, EVENTS, [batch], token=None)
        assert (await _commit(manager, table, {0: [1]}, read, version=1)).row_count == 1
        result = await transactions.commit(begun, [part], wait_s=20, read=read)
        assert result is not None
        assert result.is_skipped
        assert await transactions.commit(begun, [part], wait_s=20, read=read) == result


async def test_offsets_of_all_buckets_are_needed(tmp_path: Path) -> None:
    async with open_manager(tmp_path) as manager:
        table = await make_table(manager, is_keyed=True)
        for offsets in ({0: 0}, {0: 0, 1: 0, 2: 0}, {}):
            with pytest.raises(InvalidRequestError, match="must name all 2 buckets"):
                await _commit(manager, table, {0: [1]}, ReadPosition(offsets=offsets))
        with pytest.raises(CommitConflictError, match="was read up to 9 and ends at 0"):
            await _commit(manager, table, {0: [1]}, ReadPosition(offsets={0: 9, 1: 0}))


async def test_an_open_transaction_keeps_its_condition_over_a_restart(tmp_path: Path) -> None:
    async with open_manager(tmp_path) as manager:
        table = await manager.create_table(table_descriptor(primary_key=("id",)))
        read = _read(table)
        transactions = manager.transactions.of(table)
        begun, _ = await transactions.begin(
            TransactionOperation.UPSERT, columns=None, app_id=None, version=None, timeout_ms=None
        )
        batch = RoutedBatch(0, 1, memoryview(_rows([1]).serialize()).cast("B"))
        part, _ = await transactions.stage(begun, EVENTS, [batch], token=None)
        await _upsert(manager, table, [1])
    async with open_manager(tmp_path) as manager:
        table = next(iter(manager.open_tables()))
        with pytest.raises(CommitConflictError, match="id = 1"):
            await manager.transactions.of(table).commit(begun, [part], wait_s=20, read=read)


async def test_an_append_can_ask_that_nothing_arrived(tmp_path: Path) -> None:
    async with open_manager(tmp_path) as manager:
        table = await make_table(manager, is_keyed=False)
        read = _read(table)
        append = TransactionOperation.APPEND
        assert (await _commit(manager, table, {0: [1]}, read, append)).row_count == 1
        await manager.append(table, [routed(1, _rows([2]))])
        with pytest.raises(CommitConflictError):
            await _commit(manager, table, {0: [1]}, read, append)
