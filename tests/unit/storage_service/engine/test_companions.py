"""A table of rejected rows lives and ends with its table, and nothing linked to it is lost."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from streamhouse.core.errors import (
    StorageFailedError,
    StreamhouseError,
    TableDamagedError,
    TransactionClosedError,
    UnavailableError,
)
from streamhouse.core.model.table import TablePath
from streamhouse.core.model.transaction import (
    LinkedCommit,
    TransactionOperation,
    TransactionStatus,
)
from streamhouse.storage_service.engine.manager import TabletManager
from streamhouse.storage_service.engine.transactions.transaction_files import (
    Decision,
    TransactionFiles,
)
from tests.support.held_step import around
from tests.support.in_process_service import (
    begin,
    make_table,
    open_manager,
    stage_parts,
    visible_ends,
)

EVENTS = TablePath.parse("events")
OTHER = TablePath.parse("events$rejected")


@contextlib.asynccontextmanager
async def _opened(data: Path) -> AsyncIterator[TabletManager]:
    async with open_manager(data) as manager:
        yield manager


async def _both(manager: TabletManager) -> None:
    await make_table(manager, False)
    await make_table(manager, True, "events__rejected")


def _paths(manager: TabletManager) -> list[str]:
    return [str(table.path) for table in manager.open_tables()]


async def test_a_dropped_table_takes_its_rejected_rows_along(tmp_path: Path) -> None:
    async with _opened(tmp_path) as manager:
        await _both(manager)
        await make_table(manager, False, "others")

        await manager.drop_table(EVENTS)

        assert _paths(manager) == ["default.others"]
        assert [path.name for path in manager.directory.tables.iterdir()] == ["3"]
        await _both(manager)
        assert visible_ends(manager.table(OTHER)) == [0, 0]
    async with _opened(tmp_path) as manager:
        assert sorted(_paths(manager)) == [
            "default.events",
            "default.events__rejected",
            "default.others",
        ]


async def test_rejected_rows_are_dropped_alone_and_stay_when_their_table_is_not_there(
    tmp_path: Path,
) -> None:
    async with _opened(tmp_path) as manager:
        await _both(manager)
        await manager.drop_table(OTHER)
        assert _paths(manager) == ["default.events"]
    async with _opened(tmp_path) as manager:
        # Of an older version, which dropped tables without them.
        await make_table(manager, True, "gone__rejected")
    async with _opened(tmp_path) as manager:
        assert sorted(_paths(manager)) == ["default.events", "default.gone__rejected"]


async def test_a_drop_that_is_not_stored_drops_neither(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with _opened(tmp_path) as manager:
        await _both(manager)

        def fail(*_: Any, **__: Any) -> None:
            raise OSError(errno.EIO, "the disk refused")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", fail)
            patch.setattr(os, "fsync", fail)
            with pytest.raises(StorageFailedError):
                await manager.drop_table(EVENTS)
        assert len(_paths(manager)) == 2
        assert visible_ends(manager.table(OTHER)) == [0, 0]


def _table_file(manager: TabletManager) -> Path:
    directory = manager.directory.table(manager.table(EVENTS).info.table_id)
    return directory / "table.json"


async def _staged(manager: TabletManager) -> tuple[str, list[str], LinkedCommit]:
    own = manager.transactions.of(manager.table(EVENTS))
    others = manager.transactions.of(manager.table(OTHER))
    begun = await begin(own, False)
    linked, _ = await others.begin(
        TransactionOperation.UPSERT, columns=None, app_id=None, version=None, timeout_ms=1
    )
    parts = await stage_parts(others, linked, 2)
    link = LinkedCommit(table=str(OTHER), transaction_id=linked, parts=tuple(parts))
    return begun, await stage_parts(own, begun, 2), link


async def _decided(manager: TabletManager) -> LinkedCommit:
    """Decide a commit of both tables that does not get further."""
    begun, parts, link = await _staged(manager)
    with pytest.MonkeyPatch.context() as patch:

        async def store(real: Any, commit: Any) -> None:
            raise UnavailableError("killed")

        around(patch, "commit-storing", store)
        own = manager.transactions.of(manager.table(EVENTS))
        with pytest.raises(StreamhouseError):
            await own.commit(begun, parts, wait_s=20, linked=link)
    return link


async def test_what_is_linked_to_a_table_that_cannot_be_opened_waits_for_it(
    tmp_path: Path,
) -> None:
    async with _opened(tmp_path) as manager:
        await _both(manager)
        link = await _decided(manager)
        file = _table_file(manager)
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])

    async with _opened(tmp_path) as manager:
        with pytest.raises(TableDamagedError):
            manager.table(EVENTS)
        others = manager.transactions.of(manager.table(OTHER))
        # Its time is long over, and nobody may end it or commit it alone.
        await manager.transactions.drop_expired()
        assert others.abort(link.transaction_id) is TransactionStatus.COMMITTING
        with pytest.raises(TransactionClosedError, match="with another table's"):
            await others.commit(link.transaction_id, link.parts, wait_s=20)
        assert visible_ends(manager.table(OTHER)) == [0, 0]

    file.write_bytes(content)
    async with _opened(tmp_path) as manager:
        assert visible_ends(manager.table(EVENTS)) == [40, 40]
        assert visible_ends(manager.table(OTHER)) == [40, 40]


async def test_a_damaged_table_that_is_dropped_leaves_its_files_and_those_beside_it(
    tmp_path: Path,
) -> None:
    async with _opened(tmp_path) as manager:
        await _both(manager)
        await _decided(manager)
        file = _table_file(manager)
    file.write_bytes(b"{}")

    async with _opened(tmp_path) as manager:
        before = len(list(manager.directory.tables.iterdir()))
        await manager.drop_damaged(EVENTS)
        assert _paths(manager) == []
        assert len(list(manager.directory.tables.iterdir())) == before
        await _both(manager)
        assert visible_ends(manager.table(OTHER)) == [0, 0]


async def test_an_undecided_transaction_is_not_kept(tmp_path: Path) -> None:
    def decide(real: Any, files: TransactionFiles, decision: Decision) -> None:
        raise UnavailableError("killed")

    async with _opened(tmp_path) as manager:
        await _both(manager)
        begun, parts, link = await _staged(manager)
        own = manager.transactions.of(manager.table(EVENTS))
        with pytest.MonkeyPatch.context() as patch:
            around(patch, "decision-writing", decide)
            with pytest.raises(UnavailableError):
                await own.commit(begun, parts, wait_s=20, linked=link)
        others = manager.transactions.of(manager.table(OTHER))
        assert others.abort(link.transaction_id) is TransactionStatus.ABORTED
