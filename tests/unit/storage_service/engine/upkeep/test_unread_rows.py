"""What retention does about rows that a consumer has not read: it says so, or waits for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamhouse.storage_service.engine.manager import TabletManager
from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.engine.upkeep._retention import apply_retention, retain
from streamhouse.storage_service.engine.upkeep.consumer_lag import consumer_lags
from tests.support.in_process_service import (
    event_rows,
    later,
    open_manager,
    routed,
    table_descriptor,
)

DAY_US = 86_400_000_000
WAIT = {"table.log.consumers.wait": "true"}


async def _filled(manager: TabletManager, **properties: str) -> OpenTable:
    """A table without a lake, with three appends of 3,000 rows, each in a segment of its own."""
    given = {
        "table.log.segment-bytes": "64kb",
        "table.log.ttl": "1d",
        "table.datalake.enabled": "false",
        **properties,
    }
    table = await manager.create_table(table_descriptor(properties=given))
    for _ in range(3):
        await manager.append(table, [routed(0, event_rows(0, 3_000))])
    return table


async def _report(
    table: OpenTable, offset: int, *, name: str = "billing", lake: bool = False
) -> None:
    ttl_ms = table.properties.log_consumers_ttl_ms
    await table.consumers.report(
        name, owner="me", offsets={0: offset}, reads_lake=lake, ttl_ms=ttl_ms
    )


async def test_unread_rows_are_told_of_once_before_they_go_and_counted_when_they_do(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_manager(tmp_path) as manager:
        table = await _filled(manager)
        await _report(table, 4_000)
        await retain(manager.open_tables, later(manager, DAY_US // 2))
        [lag] = await consumer_lags(table, manager.runtime)
        assert (lag.rows, lag.rows_at_risk, caplog.messages) == (5_000, 0, [])

        for _ in range(2):
            await retain(manager.open_tables, later(manager, DAY_US * 9 // 10))
        [lag] = await consumer_lags(table, manager.runtime)
        assert lag.rows_at_risk == 5_000
        [said] = [message for message in caplog.messages if "unread_rows_expire " in message]
        assert "table=events consumer=billing rows=5000" in said.replace("default.", "")

        caplog.clear()
        await retain(manager.open_tables, later(manager, 2 * DAY_US))
        lost = [message for message in caplog.messages if "event=unread_rows_expired" in message]
        assert "rows=5000" in lost[0]
        assert table.tablet(0).log_start_offset == 9_000


async def test_retention_waits_for_the_slowest_consumer_until_it_is_forgotten(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_manager(tmp_path) as manager:
        table = await _filled(manager, **WAIT)
        await _report(table, 4_000)
        await _report(table, 7_000, name="fast")

        assert await apply_retention(table, later(manager, 2 * DAY_US)) == 1
        # Offset 4,000 lies in the second segment, which therefore stays.
        assert table.tablet(0).log_start_offset == 3_000
        await _report(table, 6_000)
        assert await apply_retention(table, later(manager, 2 * DAY_US)) == 1
        await table.consumers.forget("billing", owner="me")
        await table.consumers.forget("fast", owner="me")
        assert await apply_retention(table, later(manager, 2 * DAY_US)) == 1

        assert not [message for message in caplog.messages if "unread" in message]


async def test_the_disk_budget_waits_for_nobody_and_takes_no_row_before_its_time(
    tmp_path: Path,
) -> None:
    async with open_manager(tmp_path) as manager:
        table = await _filled(manager, **WAIT)
        await _report(table, 0)

        assert await apply_retention(table, later(manager, DAY_US // 2), is_early=True) == 0
        assert await apply_retention(table, later(manager, 2 * DAY_US)) == 0
        assert await apply_retention(table, later(manager, 2 * DAY_US), is_early=True) == 3


async def test_who_reads_the_lake_loses_nothing_that_is_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_manager(tmp_path) as manager:
        table = await _filled(manager, **{"table.datalake.enabled": "true"})
        table.keep_lake(table.lake.__class__(tiered_offsets={0: 9_000}))
        await _report(table, 0, lake=True)

        await retain(manager.open_tables, later(manager, 2 * DAY_US))

        assert table.tablet(0).log_start_offset == 9_000
        assert not [message for message in caplog.messages if "unread" in message]
        # How old the oldest unread row is the log does not know any more.
        [lag] = await consumer_lags(table, manager.runtime)
        assert (lag.rows, lag.lag_ms) == (9_000, None)


async def test_lag_is_the_age_of_the_oldest_unread_row(tmp_path: Path) -> None:
    async with open_manager(tmp_path) as manager:
        table = await _filled(manager)
        await _report(table, 3_000)
        await _report(table, 9_000, name="done")

        behind, done = await consumer_lags(table, later(manager, 60_000_000))

        assert (behind.consumer.name, behind.rows) == ("billing", 6_000)
        assert behind.lag_ms is not None
        assert behind.lag_ms >= 60_000
        assert (done.rows, done.lag_ms) == (0, 0)
