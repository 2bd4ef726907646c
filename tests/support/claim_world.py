"""Claims and rounds of one service, with clocks that a test moves."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from streamhouse.storage_service.backoff import Backoff
from streamhouse.storage_service.engine.manager import TabletManager
from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.engine.tiering_desk.tiering_coordinator import TieringCoordinator
from streamhouse.storage_service.engine.tiering_desk.tiering_round import ClaimAnswer
from streamhouse.storage_service.model.table_state import TieringAssignment, TieringReport
from tests.support.in_process_service import event_rows, open_manager, routed, table_descriptor

__all__ = ["World", "claim_world"]


class World:
    """One service with tables to tier, and clocks that a test moves."""

    def __init__(self, manager: TabletManager) -> None:
        self.manager = manager
        self.seconds = 1_000.0
        self.tiering = TieringCoordinator(
            tables=manager.open_tables,
            save=manager._save_lake_state,
            runtime=dataclasses.replace(
                manager.runtime, clock_us=self._clock_us, monotonic_s=lambda: self.seconds
            ),
            lease_ms=10_000,
            backoff=Backoff(first_s=1.0, most_s=4.0),
        )
        self._last_append_us = 0

    def _clock_us(self) -> int:
        return self._last_append_us + round((self.seconds - 1_000.0) * 1_000_000)

    async def table(self, path: str = "events", **fields: Any) -> OpenTable:
        """Make a table with 5 rows in each of its two buckets."""
        table = await self.manager.create_table(table_descriptor(path, bucket_count=2, **fields))
        return await self.append(table)

    async def append(self, table: OpenTable) -> OpenTable:
        rows = event_rows(0, 5)
        appended = await self.manager.append(table, [routed(0, rows), routed(1, rows)])
        self._last_append_us = appended.timestamp_us
        return table

    async def claim(self, worker: str = "one", **arguments: Any) -> ClaimAnswer:
        return await self.tiering.claim(worker, **{"tables": None, "force": True, **arguments})

    async def granted(self, worker: str = "one", **arguments: Any) -> TieringAssignment:
        answer = await self.claim(worker, **arguments)
        assert answer.assignment is not None, answer
        return answer.assignment

    async def complete(self, table: OpenTable, epoch: int, **changes: Any) -> Any:
        report: dict[str, Any] = {
            "table_id": table.info.table_id,
            "snapshot_id": 11,
            "table_uuid": "uuid",
            "tiered_offsets": {0: 5, 1: 5},
            **changes,
        }
        return await self.tiering.complete(table, TieringReport(epoch=epoch, **report))


@contextlib.asynccontextmanager
async def claim_world(data_dir: Path) -> AsyncIterator[World]:
    """Open a world on the tables of a directory; leaving closes them cleanly."""
    async with open_manager(data_dir) as manager:
        yield World(manager)
