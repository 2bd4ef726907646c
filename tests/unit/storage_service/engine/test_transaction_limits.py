"""What bounds transactions, and what becomes of those that nobody finishes."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamhouse.core.errors import (
    CorruptDataError,
    OverloadedError,
    RequestTooLargeError,
    TransactionNotFoundError,
)
from streamhouse.core.model.transaction import (
    CommitResult,
)
from tests.support.in_process_service import (
    EVENTS,
    begin,
    make_table,
    open_manager,
    stage_parts,
    staged_batches,
    visible_ends,
)


async def test_limits_are_errors_that_name_them_and_dropping_gives_room(tmp_path: Path) -> None:
    limits = {
        "transactions_open_max": 2,
        "transaction_parts_max": 2,
        "transaction_table_bytes_max": 5_000,
        "transaction_bytes_max": 5_500,
    }

    async with open_manager(tmp_path, **limits) as manager:
        table = await make_table(manager, False)
        transactions = manager.transactions.of(table)
        first, second = await begin(transactions), await begin(transactions)
        with pytest.raises(OverloadedError, match="transactions_open_max"):
            await begin(transactions)
        await stage_parts(transactions, first, 2)
        with pytest.raises(RequestTooLargeError, match="transaction_parts_max"):
            await stage_parts(transactions, first, 1)
        with pytest.raises(OverloadedError, match="transaction_table_bytes_max"):
            await transactions.stage(second, EVENTS, staged_batches(0, 100), token=None)
        other = manager.transactions.of(await make_table(manager, False, "other"))
        with pytest.raises(OverloadedError, match="transaction_bytes_max"):
            await other.stage(await begin(other), EVENTS, staged_batches(0, 100), token=None)
        transactions.abort(first)
        assert transactions.staged_bytes == manager.transactions.staged_bytes == 0
        await stage_parts(transactions, second, 1)
        await manager.drop_table(table.path)
        assert manager.transactions.staged_bytes == 0


async def test_an_idle_transaction_is_dropped_with_its_files_also_after_a_restart(
    tmp_path: Path,
) -> None:
    def files() -> list[Path]:
        every = {"outcomes", "truncated"}
        return [path for path in tmp_path.rglob("transactions/*") if path.name not in every]

    async with open_manager(tmp_path) as manager:
        transactions = manager.transactions.of(await make_table(manager, False))
        dead, kept = await begin(transactions), await begin(transactions)
        await stage_parts(transactions, dead)
        [part] = await stage_parts(transactions, kept, 1)
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


async def test_a_token_names_the_part_it_made(tmp_path: Path) -> None:
    async with open_manager(tmp_path) as manager:
        transactions = manager.transactions.of(await make_table(manager, False))
        begun = await begin(transactions)
        stage = transactions.stage
        first = await stage(begun, EVENTS, staged_batches(0, 5), token="t")
        again = await stage(begun, EVENTS, staged_batches(0, 5), token="t")
        assert again == first
        assert transactions.status(begun)["parts"] == 1


async def test_a_damaged_part_aborts_the_whole_transaction(tmp_path: Path) -> None:
    async with open_manager(tmp_path) as manager:
        table = await make_table(manager, False)
        transactions = manager.transactions.of(table)
        begun = await begin(transactions)
        parts = await stage_parts(transactions, begun)
        [path] = tmp_path.rglob(f"*{parts[3]}.part")
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(CorruptDataError, match=parts[3]):
            await transactions.commit(begun, parts, wait_s=20)
        assert visible_ends(table) == [0, 0]
        assert transactions.open_count == 0


async def test_outcomes_are_folded_into_one_file_and_versions_outlive_it(tmp_path: Path) -> None:
    config = {"transaction_outcomes_max": 10}
    async with open_manager(tmp_path, **config) as manager:
        transactions = manager.transactions.of(await make_table(manager, False))
        begun = [await begin(transactions, version=7)]
        await transactions.commit(begun[0], await stage_parts(transactions, begun[0], 1), wait_s=20)
        for _ in range(150):
            begun.append(await begin(transactions))
            await transactions.commit(begun[-1], [], wait_s=20)
    assert len(list(tmp_path.rglob("transactions/*"))) < 100
    async with open_manager(tmp_path, **config) as manager:
        transactions = manager.transactions.of(next(iter(manager.open_tables())))
        assert transactions.status(begun[-1])["status"] == "committed"
        with pytest.raises(TransactionNotFoundError):
            transactions.status(begun[100])
        assert await begin(transactions, version=7) == ""
        assert await begin(transactions, version=8) != ""
