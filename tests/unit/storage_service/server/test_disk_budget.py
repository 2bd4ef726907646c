"""The disk budget: room is made from what the lake has, then writes wait; no row is lost."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from streamhouse.core.model.table_state import TieringReport
from streamhouse.storage_service.engine.open_table import OpenTable
from tests.support.in_process_service import InProcessService, event_rows, in_process_service

SMALL_SEGMENTS = {"table.log.segment-bytes": "64kb"}


async def _append(service: InProcessService, *, path: str = "events", count: int = 5_000) -> Any:
    return await service.append([(0, 0, event_rows(0, count))], path=path)


async def _tiered(service: InProcessService, table: OpenTable) -> None:
    """Say that everything is in the lake."""
    coordinator = service.service.manager.tiering
    claim = await coordinator.claim("w", tables=[table], force=True)
    assert claim.assignment is not None
    await coordinator.complete(
        table,
        TieringReport(
            table_id=table.info.table_id,
            epoch=claim.assignment.epoch,
            snapshot_id=7,
            table_uuid="u",
            tiered_offsets={0: table.tablets[0].high_watermark},
        ),
    )


async def test_over_the_budget_writes_wait_until_tiering_has_made_room(tmp_path: Path) -> None:
    async with in_process_service(tmp_path, disk_bytes_max=300_000) as service:
        await service.create_table(properties=SMALL_SEGMENTS)
        budget, table = service.service.manager.disk_budget, service.service.table("events")
        await budget.look()
        while table.tablets[0].size_bytes <= 300_000:
            assert (await _append(service)).status == 200
        await budget.look()

        refused = await _append(service)
        assert refused.error()[:2] == (503, "overloaded")
        assert refused.headers["retry-after"] == "1"
        assert "--disk-max" in refused.json()["error"]["message"]
        # Reads and lookups of state are not writes.
        state = await service.call("GET", "/v1/tables/events/state")
        written = state.json()["positions"]["0"]["high_watermark"]
        assert state.json()["positions"]["0"]["log_start_offset"] == 0

        await _tiered(service, table)
        await budget.look()

        assert table.tablets[0].log_start_offset == written
        assert budget.bytes_used < 300_000
        assert (await _append(service)).status == 200


async def test_close_to_the_budget_tables_are_tiered_before_they_are_due(tmp_path: Path) -> None:
    async with in_process_service(tmp_path, disk_bytes_max=10_000_000) as service:
        await service.create_table(properties={"table.datalake.freshness": "1d"})
        await _append(service)
        coordinator, table = service.service.manager.tiering, service.service.table("events")
        await service.service.manager.disk_budget.look()
        early = await coordinator.claim("w", tables=[table], force=False)
        assert (early.assignment, early.reason) == (None, "not_due")

        while table.tablets[0].size_bytes <= 8_000_000:
            await _append(service, count=100_000)
        await service.service.manager.disk_budget.look()

        early = await coordinator.claim("w", tables=[table], force=False)
        assert early.assignment is not None
        assert (await _append(service)).status == 200


async def test_the_log_of_a_table_without_a_lake_stays_for_its_age(tmp_path: Path) -> None:
    async with in_process_service(tmp_path, disk_bytes_max=100_000) as service:
        properties = {**SMALL_SEGMENTS, "table.datalake.enabled": "false"}
        await service.create_table(properties=properties)
        for _ in range(5):
            await _append(service)
        await service.service.manager.disk_budget.look()

        assert service.service.table("events").tablets[0].log_start_offset == 0
        assert (await _append(service)).status == 503


async def test_without_a_lake_the_budget_waits_for_nobody_who_changes_files(tmp_path: Path) -> None:
    async with in_process_service(tmp_path, disk_bytes_max=100_000) as service:
        properties = {**SMALL_SEGMENTS, "table.datalake.enabled": "false"}
        await service.create_table(properties=properties)
        # As a backup does, or an adoption, for minutes.
        async with service.service.manager.runtime.changing_files:
            for _ in range(5):
                await _append(service)
            async with asyncio.timeout(60):
                await service.service.manager.disk_budget.look()

            assert (await _append(service)).status == 503


async def test_rows_by_key_count_and_their_writes_wait_too(tmp_path: Path) -> None:
    async with in_process_service(tmp_path, disk_bytes_max=1) as service:
        await service.create_table(primary_key=("id",))
        await service.service.manager.disk_budget.look()
        assert service.service.manager.disk_budget.bytes_used > 1

        for route in ("upsert", "delete"):
            refused = await service.call("POST", f"/v1/tables/events/{route}", body=b"")
            assert refused.error()[:2] == (503, "overloaded")


async def test_a_table_that_loses_its_lake_while_room_is_made_keeps_its_log(tmp_path: Path) -> None:
    async with in_process_service(tmp_path, disk_bytes_max=100_000) as service:
        await service.create_table(properties=SMALL_SEGMENTS)
        manager, table = service.service.manager, service.service.table("events")
        await _append(service)
        async with manager.runtime.changing_files:
            off = {"table.datalake.enabled": "false"}
            altering = asyncio.ensure_future(
                manager.alter_properties(table.path, updates=off, removals=[])
            )
            await asyncio.sleep(0)
            looking = asyncio.ensure_future(manager.disk_budget.look())
            await asyncio.sleep(0)
        await asyncio.gather(altering, looking)

        assert not table.properties.datalake_enabled
        assert table.tablets[0].log_start_offset == 0
