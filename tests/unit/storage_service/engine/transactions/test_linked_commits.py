"""Two tables' transactions committed as one: whatever ends the service between, both or none."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from streamhouse.core.errors import (
    StreamhouseError,
    TransactionClosedError,
    TransactionNotFoundError,
    UnavailableError,
    UnsupportedError,
)
from streamhouse.core.model.table import TablePath
from streamhouse.core.model.transaction import (
    LinkedCommit,
    TransactionOperation,
    TransactionStatus,
)
from streamhouse.storage_service.engine.manager import TabletManager
from streamhouse.storage_service.engine.transactions._transaction_commit import TransactionCommit
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
    write_alone,
)

OTHER = "events__rejected"
KINDS = pytest.mark.parametrize("is_keyed", [False, True])
Step = Callable[[pytest.MonkeyPatch], None]


class _Staged:
    """Rows staged in both tables."""

    def __init__(self, begun: str, parts: list[str], linked: LinkedCommit) -> None:
        self.begun = begun
        self.parts = parts
        self.linked = linked


@asynccontextmanager
async def _opened(data: Path) -> AsyncIterator[TabletManager]:
    async with open_manager(data, transaction_chunk_bytes=1_000) as manager:
        yield manager


async def _stage(manager: TabletManager, is_keyed: bool) -> _Staged:
    table = await make_table(manager, is_keyed)
    other = await make_table(manager, True, OTHER)
    own, others = manager.transactions.of(table), manager.transactions.of(other)
    begun, linked = await begin(own, is_keyed, version=1), await begin(others, True)
    return _Staged(
        begun,
        await stage_parts(own, begun, 2),
        LinkedCommit(
            table=f"default.{OTHER}",
            transaction_id=linked,
            parts=tuple(await stage_parts(others, linked, 2)),
        ),
    )


def _ends(manager: TabletManager, path: str) -> list[int]:
    return visible_ends(manager.table(TablePath.parse(path)))


async def _commit(manager: TabletManager, staged: _Staged) -> Any:
    own = manager.transactions.of(manager.table(TablePath.parse("events")))
    return await own.commit(staged.begun, staged.parts, wait_s=20, linked=staged.linked)


@KINDS
async def test_both_are_committed_and_a_repetition_is_answered_alike(
    tmp_path: Path, is_keyed: bool
) -> None:
    async with _opened(tmp_path) as manager:
        staged = await _stage(manager, is_keyed)
        result = await _commit(manager, staged)
        assert result.status is TransactionStatus.COMMITTED
        assert await _commit(manager, staged) == result
        assert _ends(manager, "events") == _ends(manager, OTHER) == [40, 40]
        own = manager.transactions.of(manager.table(TablePath.parse("events")))
        with pytest.raises(TransactionClosedError, match="other parts"):
            await own.commit(staged.begun, staged.parts, wait_s=20)


def _at_store(patch: pytest.MonkeyPatch) -> None:
    async def store(real: Any, commit: TransactionCommit) -> None:
        raise UnavailableError("killed")

    around(patch, "commit-storing", store)


def _at_linked(patch: pytest.MonkeyPatch) -> None:
    # The table's own rows are stored first.
    stored: list[TransactionCommit] = []

    async def store(real: Any, commit: TransactionCommit) -> Any:
        stored.append(commit)
        if len(stored) > 1:
            raise UnavailableError("killed")
        return await real(commit)

    around(patch, "commit-storing", store)


def _at_outcome(patch: pytest.MonkeyPatch) -> None:
    def decide(real: Any, files: TransactionFiles, decision: Decision) -> None:
        if decision.result.status is TransactionStatus.COMMITTED and decision.linked is not None:
            raise UnavailableError("killed")
        real(files, decision)

    around(patch, "decision-writing", decide)


@KINDS
@pytest.mark.parametrize("break_at", [_at_store, _at_linked, _at_outcome])
async def test_what_is_decided_is_completed_by_the_next_start_in_both(
    tmp_path: Path, is_keyed: bool, break_at: Step
) -> None:
    async with _opened(tmp_path) as manager:
        staged = await _stage(manager, is_keyed)
        with pytest.MonkeyPatch.context() as patch:
            break_at(patch)
            with pytest.raises(StreamhouseError):
                await _commit(manager, staged)

    async with _opened(tmp_path) as manager:
        assert _ends(manager, "events") == _ends(manager, OTHER) == [40, 40]
        assert (await _commit(manager, staged)).status is TransactionStatus.COMMITTED
        assert _ends(manager, "events") == _ends(manager, OTHER) == [40, 40]


@KINDS
async def test_what_is_not_decided_is_in_neither(tmp_path: Path, is_keyed: bool) -> None:
    def decide(real: Any, files: TransactionFiles, decision: Decision) -> None:
        raise UnavailableError("killed")

    async with _opened(tmp_path) as manager:
        staged = await _stage(manager, is_keyed)
        with pytest.MonkeyPatch.context() as patch:
            around(patch, "decision-writing", decide)
            with pytest.raises(UnavailableError):
                await _commit(manager, staged)
        assert _ends(manager, "events") == _ends(manager, OTHER) == [0, 0]

    async with _opened(tmp_path) as manager:
        assert _ends(manager, "events") == _ends(manager, OTHER) == [0, 0]
        await _commit(manager, staged)
        assert _ends(manager, "events") == _ends(manager, OTHER) == [40, 40]


async def test_a_version_that_was_committed_commits_nothing_that_is_linked(tmp_path: Path) -> None:
    async with _opened(tmp_path) as manager:
        staged = await _stage(manager, False)
        own = manager.transactions.of(manager.table(TablePath.parse("events")))
        first = await begin(own, False, version=1)
        await own.commit(first, [], wait_s=20)

        result = await _commit(manager, staged)

        assert result.status is TransactionStatus.SKIPPED
        assert _ends(manager, OTHER) == [0, 0]
        others = manager.transactions.of(manager.table(TablePath.parse(OTHER)))
        assert others.abort(staged.linked.transaction_id) is TransactionStatus.ABORTED


async def test_without_what_is_linked_nothing_is_committed(tmp_path: Path) -> None:
    async with _opened(tmp_path) as manager:
        staged = await _stage(manager, False)
        others = manager.transactions.of(manager.table(TablePath.parse(OTHER)))
        others.abort(staged.linked.transaction_id)

        with pytest.raises(TransactionNotFoundError):
            await _commit(manager, staged)

        assert _ends(manager, "events") == [0, 0]


async def test_what_is_being_committed_with_another_table_is_not_committed_by_itself(
    tmp_path: Path,
) -> None:
    async with _opened(tmp_path) as manager:
        staged = await _stage(manager, False)
        others = manager.transactions.of(manager.table(TablePath.parse(OTHER)))
        refused: list[str] = []

        async def store(real: Any, commit: TransactionCommit) -> Any:
            if not refused:
                refused.append("")
                with pytest.raises(TransactionClosedError) as error:
                    await others.commit(staged.linked.transaction_id, [], wait_s=20)
                refused.append(error.value.message)
            return await real(commit)

        with pytest.MonkeyPatch.context() as patch:
            around(patch, "commit-storing", store)
            result = await _commit(manager, staged)

        assert "with another table's" in refused[1]
        assert result.status is TransactionStatus.COMMITTED
        assert _ends(manager, "events") == _ends(manager, OTHER) == [40, 40]
        same = await others.commit(staged.linked.transaction_id, staged.linked.parts, wait_s=20)
        assert same is not None


async def test_what_may_prove_impossible_is_refused_before_anything_is_decided(
    tmp_path: Path,
) -> None:
    async with _opened(tmp_path) as manager:
        staged = await _stage(manager, False)
        others = manager.transactions.of(manager.table(TablePath.parse(OTHER)))
        partial, _ = await others.begin(
            TransactionOperation.UPSERT,
            columns=("id",),
            app_id=None,
            version=None,
            timeout_ms=60_000,
        )
        staged.linked = LinkedCommit(table=f"default.{OTHER}", transaction_id=partial, parts=())

        with pytest.raises(UnsupportedError, match="updates named columns"):
            await _commit(manager, staged)

        await write_alone(manager, manager.table(TablePath.parse("events")), 0)
        assert _ends(manager, OTHER) == [0, 0]
