"""Lookups in the rows that a standby follows: what is visible, and when rows are closed."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from streamhouse.core.errors import UnavailableError
from streamhouse.core.model.table import TableInfo
from streamhouse.core.model.transaction import (
    CommitResult,
    TransactionOperation,
    TransactionStatus,
)
from streamhouse.storage_service.engine.keys.warm_tables import WarmTable
from streamhouse.storage_service.engine.transactions.transaction_files import (
    Decision,
    TransactionFiles,
    TransactionSpec,
)
from tests.support.followed_directory import TABLE, FollowedWorld
from tests.support.in_process_service import open_manager, table_descriptor


def _name(table: WarmTable, key: int) -> str | None:
    stored = table.lookup.find(table.lookup.key({"id": key}))
    assert table.shows(stored.ends)
    values = table.lookup.values(stored)
    return None if values is None else values[1]


def _decision(status: TransactionStatus) -> Decision:
    spec = TransactionSpec(
        transaction_id="a" * 32,
        operation=TransactionOperation.UPSERT,
        columns=None,
        app_id=None,
        version=None,
        timeout_ms=1,
        begun_us=1,
    )
    result = CommitResult(status=status, ranges={}, row_count=0, timestamp_us=1)
    return Decision(spec=spec, parts=(), parts_digest="", starts={}, result=result, number=1)


async def test_the_ends_are_those_of_the_applied_changelog(tmp_path: Path) -> None:
    async with open_manager(tmp_path / "owner") as manager:
        world = FollowedWorld(tmp_path, manager)
        await world.create()
        world.follow()
        table = world.tables.by_path[TABLE]
        assert table.shows({0: 0})
        assert not table.shows({0: 1})

        await world.write([1, 2], "a")
        assert not table.shows({0: 1}), "nothing is applied yet"
        world.follow()

        assert table.shows({0: 2})
        assert not table.shows({0: 3})
        assert (_name(table, 1), _name(table, 3)) == ("a", None)
        world.warm.close()


async def test_rows_of_a_transaction_in_pieces_are_not_shown(tmp_path: Path) -> None:
    async with open_manager(tmp_path / "owner") as manager:
        world = FollowedWorld(tmp_path, manager)
        await world.create()
        await world.write([1], "before")
        world.follow()
        table, info = world.tables.by_path[TABLE], manager.table(TABLE).info
        files = TransactionFiles(
            world.owner / f"tables/{info.table_id}/transactions",
            service_id=manager.service_id,
            table_id=info.table_id,
            filesystem=manager.directory.filesystem,
        )

        decided = _decision(TransactionStatus.COMMITTING)
        files.decide(decided)
        await world.write([1], "a piece")
        world.follow()
        stored = table.lookup.find(table.lookup.key({"id": 1}))
        assert not table.shows(stored.ends), "its rows are met, and wait"
        prefix = pa.record_batch([pa.array([1], pa.int64())], names=["id"])
        assert not table.shows(table.lookup.prefix_rows(prefix, rows_max=1).ends)
        assert table.shows({0: 1})

        outcome = CommitResult(
            status=TransactionStatus.COMMITTED, ranges={}, row_count=1, timestamp_us=1
        )
        files.decide(replace(decided, result=outcome))
        world.follow()
        assert _name(table, 1) == "a piece"
        world.warm.close()


async def test_a_transaction_whose_outcome_is_folded_holds_nothing_back(tmp_path: Path) -> None:
    """Decision, rows, outcome and its folding may be in one object of the journal."""
    async with open_manager(tmp_path / "owner") as manager:
        world = FollowedWorld(tmp_path, manager)
        await world.create()
        world.follow()
        await world.write([1], "a")
        (transactions,) = world.standby.glob("tables/*/transactions")

        gone = transactions / f"{'b' * 32}.decision"
        world.warm.follow([*world.copy(), gone.relative_to(world.standby).as_posix()])

        assert _name(world.tables.by_path[TABLE], 1) == "a"
        world.warm.close()


async def test_an_outcome_folded_in_the_same_object_ends_the_wait(tmp_path: Path) -> None:
    """The file of the decision is gone then; only the file of older outcomes has changed."""
    async with open_manager(tmp_path / "owner") as manager:
        world = FollowedWorld(tmp_path, manager)
        await world.create()
        world.follow()
        table_id = manager.table(TABLE).info.table_id
        files = TransactionFiles(
            world.owner / f"tables/{table_id}/transactions",
            service_id=manager.service_id,
            table_id=table_id,
            filesystem=manager.directory.filesystem,
        )
        files.decide(_decision(TransactionStatus.COMMITTING))
        await world.write([1], "a")
        world.follow()
        assert not world.tables.by_path[TABLE].shows({0: 1})

        (files.directory / f"{'a' * 32}.decision").unlink()
        world.warm.follow([*world.copy(), f"tables/{table_id}/transactions/outcomes"])

        assert _name(world.tables.by_path[TABLE], 1) == "a"
        world.close()


async def test_rows_ahead_of_the_log_are_shown_once_the_log_has_them(tmp_path: Path) -> None:
    """The rows of a checkpoint may be newer than the journal's place at which following begins."""
    async with open_manager(tmp_path / "owner") as manager:
        world = FollowedWorld(tmp_path, manager)
        await world.create()
        await world.write([1], "a")
        world.follow()
        (warm,) = world.warm._buckets.values()
        log_end, warm.rows.applied_offset = warm.log.high_watermark, 5
        world.tables.by_path[TABLE].ends = ()

        world.warm.follow(["service.json"])

        assert log_end == 1
        assert not world.tables.by_path[TABLE].shows({0: 0})
        world.warm.close()


async def test_a_schema_is_followed_and_a_dropped_name_is_not_found(tmp_path: Path) -> None:
    async with open_manager(tmp_path / "owner") as manager:
        world = FollowedWorld(tmp_path, manager)
        await world.create()
        await world.write([1], "a")
        world.follow()
        table = world.tables.by_path[TABLE]
        await manager.alter_schema(TABLE, [{"add": "more", "type": "bigint"}])
        world.follow()
        assert world.tables.by_path[TABLE] is table
        assert table.lookup.info.schema.names[-1] == "more"
        assert _name(table, 1) == "a"

        await manager.drop_table(TABLE)
        world.follow()

        assert not world.tables.by_path
        with pytest.raises(UnavailableError):
            table.lookup.find(table.lookup.key({"id": 1}))
        world.warm.close()


class _SlowRows:
    """Rows of a bucket with a lookup that is held."""

    def __init__(self) -> None:
        self.is_in, self.may_go_on = threading.Event(), threading.Event()
        self.order: list[str] = []

    def find(self, keys: pa.Array, *, bytes_max: int) -> None:
        del keys, bytes_max
        self.is_in.set()
        assert self.may_go_on.wait(30)
        self.order.append("found")


def test_rows_are_closed_after_the_last_lookup() -> None:
    descriptor = table_descriptor(str(TABLE), primary_key=("id",))
    info = TableInfo(descriptor=descriptor, table_id=1, created_at_us=0)
    slow = _SlowRows()
    rows: Any = slow
    table = WarmTable(info, [rows])
    keys = table.lookup.keys(pa.record_batch([pa.array(range(100), pa.int64())], names=["id"]))

    looking = threading.Thread(target=lambda: table._rows[0].find(keys.encoded, bytes_max=1))
    looking.start()
    assert slow.is_in.wait(30)
    closing = threading.Thread(target=lambda: (table.close(), slow.order.append("closed")))
    closing.start()
    slow.may_go_on.set()
    looking.join(30)
    closing.join(30)

    assert slow.order == ["found", "closed"]
    with pytest.raises(UnavailableError):
        table.lookup.find(keys)
