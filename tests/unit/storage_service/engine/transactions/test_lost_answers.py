"""What a caller is told who lost the answer of a commit and asks again."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamhouse.core.errors import CommitConflictError, TransactionNotFoundError
from streamhouse.core.model.transaction import (
    CommitResult,
    ReadPosition,
    TransactionOperation,
    TransactionStatus,
)
from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.engine.transactions._transaction_outcomes import (
    TransactionOutcomes,
    new_transaction_id,
)
from streamhouse.storage_service.engine.transactions.table_transactions import TableTransactions
from streamhouse.storage_service.engine.transactions.transaction_files import (
    Decision,
    TransactionSpec,
)
from tests.support.in_process_service import begin, make_table, open_manager, write_alone


def _read(table: OpenTable) -> ReadPosition:
    return ReadPosition(offsets={b: at.high_watermark for b, at in table.positions().items()})


async def _refused(transactions: TableTransactions, read: ReadPosition) -> str:
    begun = await begin(transactions, operation=TransactionOperation.OVERWRITE)
    with pytest.raises(CommitConflictError, match="rows were written"):
        await transactions.commit(begun, [], wait_s=20, read=read)
    return begun


async def _committed(transactions: TableTransactions) -> str:
    begun = await begin(transactions, operation=TransactionOperation.OVERWRITE)
    assert await transactions.commit(begun, [], wait_s=20) is not None
    return begun


async def test_a_refused_commit_is_refused_again_also_after_a_restart(tmp_path: Path) -> None:
    async with open_manager(tmp_path) as manager:
        table = await make_table(manager, is_keyed=False)
        await write_alone(manager, table, 1)
        transactions = manager.transactions.of(table)
        old = ReadPosition(offsets=dict.fromkeys(_read(table).offsets, 0))
        begun = await _refused(transactions, old)
        with pytest.raises(CommitConflictError, match="rows were written"):
            await transactions.commit(begun, [], wait_s=20, read=old)
    async with open_manager(tmp_path) as manager:
        transactions = manager.transactions.of(next(iter(manager.open_tables())))
        with pytest.raises(CommitConflictError, match="nothing of it was written: read the table"):
            await transactions.commit(begun, [], wait_s=20, read=old)
        with pytest.raises(TransactionNotFoundError, match=r"nothing of it was written$"):
            await transactions.commit(begun, [], wait_s=20)


async def test_what_may_have_been_committed_and_forgotten_is_not_called_a_conflict(
    tmp_path: Path,
) -> None:
    config = {"transaction_outcomes_max": 3}
    async with open_manager(tmp_path, **config) as manager:
        table = await make_table(manager, is_keyed=False)
        transactions = manager.transactions.of(table)
        first = await _committed(transactions)
        read = _read(table)
        aborted = await begin(transactions, operation=TransactionOperation.OVERWRITE)
        transactions.abort(aborted)
        for _ in range(3):
            last = await _committed(transactions)
    for life in range(2):
        async with open_manager(tmp_path, **config) as manager:
            transactions = manager.transactions.of(next(iter(manager.open_tables())))
            with pytest.raises(TransactionNotFoundError, match="before the last 3 transactions"):
                await transactions.commit(first, [], wait_s=20, read=read)
            # It began after the first, which alone is forgotten.
            with pytest.raises(CommitConflictError, match="nothing of it was written"):
                await transactions.commit(aborted, [], wait_s=20, read=read)
            assert (await transactions.commit(last, [], wait_s=20)) is not None, life


def test_ids_of_former_releases_and_of_nobody_prove_nothing() -> None:
    outcomes = TransactionOutcomes(outcomes_max=2)
    outcomes.loaded(1)
    assert outcomes.is_uncommitted(new_transaction_id(1))
    for foreign in ("ab" * 16, "", "1-", "9" * 5000 + "-" + "ab" * 16, "-1-" + "ab" * 16):
        assert not outcomes.is_uncommitted(foreign)


def test_what_a_start_finds_says_what_was_forgotten_before_it() -> None:
    outcomes = TransactionOutcomes(outcomes_max=3)
    for number in (2, 7, 8):
        outcomes.add(_decision(number), is_folded=True)
    outcomes.loaded(9)
    assert not outcomes.is_uncommitted(new_transaction_id(6))
    assert outcomes.is_uncommitted(new_transaction_id(7))
    outcomes.add(_decision(9))
    outcomes.add(_decision(10))
    assert not outcomes.is_uncommitted(new_transaction_id(7))
    assert outcomes.is_uncommitted(new_transaction_id(8))


def _decision(number: int) -> Decision:
    spec = TransactionSpec(
        transaction_id=new_transaction_id(number),
        operation=TransactionOperation.APPEND,
        columns=None,
        app_id=None,
        version=None,
        timeout_ms=1,
        begun_us=number,
    )
    result = CommitResult(
        status=TransactionStatus.COMMITTED, ranges={}, row_count=0, timestamp_us=number
    )
    return Decision(spec=spec, parts=(), parts_digest="", starts={}, result=result, number=number)
