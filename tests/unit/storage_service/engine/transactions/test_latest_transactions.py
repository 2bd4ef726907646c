"""What a table says of its latest transactions, newest first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from streamhouse.core.errors import CommitConflictError
from streamhouse.core.model.transaction import ReadPosition, TransactionOperation
from streamhouse.storage_service.engine.transactions.table_transactions import TableTransactions
from tests.support.in_process_service import (
    begin,
    make_table,
    open_manager,
    stage_parts,
    write_alone,
)


async def _committed(transactions: TableTransactions, version: int | None = None) -> str:
    begun = await begin(transactions, version=version)
    parts = await stage_parts(transactions, begun, 1)
    assert await transactions.commit(begun, parts, wait_s=20) is not None
    return begun


def _said(found: list[dict[str, Any]]) -> list[tuple[str, str, int]]:
    return [(one["transaction_id"], one["status"], one["row_count"]) for one in found]


async def test_what_became_of_each_also_after_a_restart(tmp_path: Path) -> None:
    async with open_manager(tmp_path) as manager:
        table = await make_table(manager, is_keyed=False)
        await write_alone(manager, table, 1)
        transactions = manager.transactions.of(table)
        assert transactions.latest(10) == []
        first = await _committed(transactions, version=7)
        late = await begin(transactions, version=8)
        second = await _committed(transactions, version=9)
        assert await transactions.commit(late, [], wait_s=20) is not None
        refused = await begin(transactions, operation=TransactionOperation.OVERWRITE)
        parts = await stage_parts(transactions, refused, 2)
        old = ReadPosition(offsets={0: 0, 1: 0})
        with pytest.raises(CommitConflictError) as conflict:
            await transactions.commit(refused, parts, wait_s=20, read=old)
        transactions.abort(await begin(transactions))
        still_open = await begin(transactions)
        await stage_parts(transactions, still_open, 3)

        found = transactions.latest(10)
        assert _said(found) == [
            (still_open, "open", 120),
            (refused, "refused", 80),
            (late, "skipped", 0),
            (second, "committed", 40),
            (first, "committed", 40),
        ]
        assert [one["reason"] for one in found] == ["", conflict.value.message, "", "", ""]
        assert [one["version"] for one in found] == [None, None, 8, 9, 7]
        assert found[0]["timestamp_us"] is None
        assert found[1]["operation"] == "overwrite"
        assert transactions.latest(2) == found[:2]

    async with open_manager(tmp_path) as manager:
        transactions = manager.transactions.of(next(iter(manager.open_tables())))
        assert transactions.latest(10) == [found[0], *found[2:]]


async def test_as_many_as_are_remembered_and_the_last_of_each_application(tmp_path: Path) -> None:
    async with open_manager(tmp_path, transaction_outcomes_max=3) as manager:
        transactions = manager.transactions.of(await make_table(manager, is_keyed=False))
        of_app = await _committed(transactions, version=1)
        others = [await _committed(transactions) for _ in range(5)]

        found = [one["transaction_id"] for one in transactions.latest(100)]

    assert found == [*reversed(others[-3:]), of_app]
