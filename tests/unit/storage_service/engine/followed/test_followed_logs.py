"""The logs that a standby follows for fetches: what is visible, and when logs are closed."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from streamhouse.core.errors import OffsetOutOfRangeError, UnavailableError
from streamhouse.core.model.table import TablePath
from streamhouse.core.model.transaction import (
    CommitResult,
    TransactionOperation,
    TransactionStatus,
)
from streamhouse.storage_service.engine.manager import TabletManager
from streamhouse.storage_service.engine.open_table import OpenTable, ReadableTable
from streamhouse.storage_service.engine.transactions.transaction_files import (
    Decision,
    TransactionFiles,
    TransactionSpec,
)
from streamhouse.storage_service.engine.upkeep._retention import apply_retention
from streamhouse.storage_service.log.followed_log import FollowedLog
from streamhouse.storage_service.log.readable_log import ReadableLog
from tests.support.followed_directory import TABLE, FollowedWorld
from tests.support.in_process_service import (
    begin,
    event_rows,
    later,
    open_manager,
    routed,
    stage_parts,
    table_descriptor,
)

EVENTS = TablePath.parse("default.events")
DAY_US = 86_400_000_000


async def _events(manager: TabletManager, **properties: str) -> OpenTable:
    return await manager.create_table(
        table_descriptor(str(EVENTS), bucket_count=2, properties=properties)
    )


def _stored(table: ReadableTable[ReadableLog], start: int | None = None) -> list[tuple[int, bytes]]:
    """Return the offsets and payloads of all visible batches."""
    stored = []
    for log in table.tablets:
        offset = log.log_start_offset if start is None else start
        while offset < log.high_watermark:
            for batch in log.read(offset, bytes_max=1 << 20):
                stored.append((batch.base_offset, bytes(batch.payload)))
                offset = batch.end_offset
    return stored


def _shown(world: FollowedWorld) -> ReadableTable[FollowedLog]:
    return world.logs.by_path[EVENTS]


def _ranges(table: ReadableTable[ReadableLog]) -> list[tuple[int, int]]:
    return [(log.log_start_offset, log.high_watermark) for log in table.tablets]


def _decision(status: TransactionStatus, starts: dict[int, int]) -> Decision:
    spec = TransactionSpec(
        transaction_id="a" * 32,
        operation=TransactionOperation.OVERWRITE,
        columns=None,
        app_id=None,
        version=None,
        timeout_ms=1,
        begun_us=1,
    )
    result = CommitResult(status=status, ranges={}, row_count=0, timestamp_us=1)
    return Decision(
        spec=spec,
        parts=(),
        parts_digest="",
        starts=starts,
        result=result,
        number=1,
        is_truncating=True,
    )


async def test_a_log_is_opened_once_asked_for_and_has_the_rows_of_the_owner(tmp_path: Path) -> None:
    async with open_manager(tmp_path / "owner") as manager:
        world = FollowedWorld(tmp_path, manager)
        table = await _events(manager, **{"table.log.segment-bytes": "64kb"})
        await manager.append(table, [routed(0, event_rows(0, 3_000))])
        world.follow()
        assert not world.logs.by_path

        world.open_log(EVENTS)
        assert _stored(_shown(world)) == _stored(table)

        for number in range(4):
            await manager.append(table, [routed(number % 2, event_rows(0, 3_000))])
            assert _ranges(_shown(world)) != _ranges(table), "nothing is applied yet"
            world.follow()
            assert _stored(_shown(world)) == _stored(table)
        assert _shown(world).tablets[0].fingerprint(3_000) == table.tablets[0].fingerprint(3_000)
        world.close()


async def test_the_changelog_of_a_primary_key_table_is_followed_as_well(tmp_path: Path) -> None:
    async with open_manager(tmp_path / "owner") as manager:
        world = FollowedWorld(tmp_path, manager)
        await world.create()
        await world.write([1, 2], "a")
        world.follow()
        world.open_log(TABLE)
        await world.write([2], "b")
        world.follow()

        assert _stored(world.logs.by_path[TABLE]) == _stored(manager.table(TABLE))
        world.close()


async def test_a_table_that_is_not_there_or_unreadable_is_not_opened(tmp_path: Path) -> None:
    async with open_manager(tmp_path / "owner") as manager:
        world = FollowedWorld(tmp_path, manager)
        await _events(manager)
        world.follow()
        world.open_log(TablePath.parse("default.nothing"))
        assert not world.logs.by_path

        (segment,) = world.standby.glob("tables/*/bucket-1/*.log")
        segment.write_bytes(b"damaged")
        world.open_log(EVENTS)
        assert not world.logs.by_path
        world.close()


async def test_an_overwrite_moves_start_and_end_in_one_step(tmp_path: Path) -> None:
    async with open_manager(tmp_path / "owner") as manager:
        world = FollowedWorld(tmp_path, manager)
        table = await _events(manager)
        await manager.append(table, [routed(0, event_rows(0, 10)), routed(1, event_rows(0, 5))])
        world.follow()
        world.open_log(EVENTS)

        transactions = manager.transactions.of(table)
        begun = await begin(transactions, operation=TransactionOperation.OVERWRITE)
        parts = await stage_parts(transactions, begun, 2)
        await transactions.commit(begun, parts, wait_s=20)
        assert _ranges(_shown(world)) == [(0, 10), (0, 5)]
        world.follow()

        assert _ranges(_shown(world)) == _ranges(table)
        assert _shown(world).tablets[0].log_start_offset == 10
        with pytest.raises(OffsetOutOfRangeError):
            _shown(world).tablets[0].read(9, bytes_max=1)
        world.close()


async def test_a_decided_overwrite_without_an_outcome_holds_back_starts_and_ends(
    tmp_path: Path,
) -> None:
    async with open_manager(tmp_path / "owner") as manager:
        world = FollowedWorld(tmp_path, manager)
        table = await _events(manager)
        await manager.append(table, [routed(0, event_rows(0, 10))])
        world.follow()
        files = TransactionFiles(
            world.owner / f"tables/{table.info.table_id}/transactions",
            service_id=manager.service_id,
            table_id=table.info.table_id,
            filesystem=manager.directory.filesystem,
        )
        decided = _decision(TransactionStatus.COMMITTING, {0: 10})
        files.decide(decided)
        await manager.append(table, [routed(0, event_rows(0, 4))])
        world.follow()
        world.open_log(EVENTS)
        assert EVENTS not in world.logs.by_path, "opened, and no end is known"

        outcome = CommitResult(
            status=TransactionStatus.COMMITTED, ranges={}, row_count=4, timestamp_us=1
        )
        files.decide(replace(decided, result=outcome))
        world.follow()
        # The file with the starts of all buckets comes after the outcome.
        assert _ranges(_shown(world)) == [(10, 14), (0, 0)]
        world.close()


async def test_rows_that_retention_took_are_not_shown(tmp_path: Path) -> None:
    async with open_manager(tmp_path / "owner") as manager:
        world = FollowedWorld(tmp_path, manager)
        table = await _events(
            manager,
            **{
                "table.log.segment-bytes": "64kb",
                "table.log.ttl": "1d",
                "table.datalake.enabled": "false",
            },
        )
        for _ in range(3):
            await manager.append(table, [routed(0, event_rows(0, 3_000))])
        world.follow()
        world.open_log(EVENTS)
        assert await apply_retention(table, later(manager, 2 * DAY_US)) == 3
        world.follow()

        assert _ranges(_shown(world)) == _ranges(table)
        assert _ranges(table)[0] == (9_000, 9_000)
        await manager.append(table, [routed(0, event_rows(0, 10))])
        world.follow()
        assert _stored(_shown(world)) == _stored(table)
        world.close()


async def test_a_dropped_table_is_closed_and_its_successor_is_opened_anew(tmp_path: Path) -> None:
    async with open_manager(tmp_path / "owner") as manager:
        world = FollowedWorld(tmp_path, manager)
        await manager.append(await _events(manager), [routed(0, event_rows(0, 10))])
        world.follow()
        world.open_log(EVENTS)
        dropped = _shown(world)

        await manager.drop_table(EVENTS)
        successor = await _events(manager)
        world.follow()
        assert EVENTS not in world.logs.by_path
        with pytest.raises(UnavailableError):
            dropped.tablets[0].read(0, bytes_max=1)

        world.open_log(EVENTS)
        assert _shown(world).info.table_id == successor.info.table_id
        assert _ranges(_shown(world)) == [(0, 0), (0, 0)]
        world.close()


async def test_rows_that_were_read_stay_when_the_files_are_cut(tmp_path: Path) -> None:
    """A directory is restored in place, to an earlier state, once its logs are closed."""
    async with open_manager(tmp_path / "owner") as manager:
        world = FollowedWorld(tmp_path, manager)
        table = await _events(manager)
        await manager.append(table, [routed(0, event_rows(0, 3_000))])
        world.follow()
        world.open_log(EVENTS)
        log = _shown(world).tablets[0]
        (batch,) = log.read(0, bytes_max=1)
        expected = bytes(batch.payload)

        world.close()
        for segment in world.standby.glob("tables/*/bucket-0/*.log"):
            os.truncate(segment, 0)

        assert bytes(batch.payload) == expected
        with pytest.raises(UnavailableError):
            log.read(0, bytes_max=1)
        with pytest.raises(UnavailableError):
            log.fingerprint(0)
