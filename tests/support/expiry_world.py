"""One service's tables whose rows by key age, and what looks after them, with clocks to set."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from streamhouse.storage_service.engine.manager import TabletManager
from streamhouse.storage_service.engine.open_table import Appended, OpenTable
from streamhouse.storage_service.engine.runtime import clock_us
from streamhouse.storage_service.engine.upkeep.row_expiry import RowExpiry
from streamhouse.storage_service.errors import OverloadedError
from streamhouse.storage_service.kv.plan.write_plan import KeyWrite
from tests.support.in_process_service import EVENTS, open_manager, table_descriptor

__all__ = ["HOUR_US", "TTL", "ExpiryWorld", "expiry_of", "expiry_world", "ids_of"]

HOUR_US = 3_600_000_000
TTL = {"table.datalake.ttl": "1h"}


def expiry_of(
    manager: TabletManager,
    *,
    clock_us: Callable[[], int],
    monotonic_s: Callable[[], float],
    check_room: Callable[[], None] = lambda: None,
    observer: Any = None,
    tables: Sequence[OpenTable] | None = None,
) -> RowExpiry:
    """Return what looks after the tables of `manager`, or `tables` of them, by clocks to set."""
    return RowExpiry(
        tables=manager.open_tables if tables is None else lambda: tables,
        directory=manager.directory,
        check_room=check_room,
        runtime=dataclasses.replace(
            manager.runtime,
            observer=observer or manager.runtime.observer,
            clock_us=clock_us,
            monotonic_s=monotonic_s,
        ),
    )


class ExpiryWorld:
    """See the module. `room` is what refuses more rows; `expired` counts each piece."""

    def __init__(self, manager: TabletManager) -> None:
        self.manager = manager
        self.ahead_us = 0
        self.monotonic_s = 0.0
        self.room: list[OverloadedError] = []
        self.expired: list[int] = []
        self.expiry = expiry_of(
            manager,
            check_room=self._check_room,
            clock_us=lambda: clock_us() + self.ahead_us,
            observer=self,
            monotonic_s=lambda: self.monotonic_s,
        )

    def ages_file(self, table: OpenTable) -> Path:
        """Where the marks of a table are."""
        return self.manager.directory.row_ages_file(table.info.table_id).path

    def rows_expired(self, count: int) -> None:
        """Be told of deleted rows."""
        self.expired.append(count)

    def _check_room(self) -> None:
        if self.room:
            raise self.room[0]

    async def table(self, name: str = "db", *, properties: dict[str, str] = TTL) -> OpenTable:
        """Make a table of one bucket."""
        return await self.manager.create_table(
            table_descriptor(f"default.{name}", primary_key=("id",), properties=properties)
        )

    async def upsert(
        self, table: OpenTable, ids: Iterable[int], name: str = "n", *, bucket: int = 0
    ) -> Appended:
        """Write rows of these ids to a bucket."""
        chosen = list(ids)
        rows = pa.record_batch([pa.array(chosen, pa.int64()), [name] * len(chosen)], schema=EVENTS)
        write = KeyWrite(bucket, rows)
        return await self.manager.write_keys(table, [write], columns=None, writer_id=0)

    async def look(self, *, ahead_us: int = 2 * HOUR_US) -> None:
        """Look as of that time."""
        self.ahead_us = ahead_us
        await self.expiry.look()


def ids_of(table: OpenTable) -> list[int]:
    """Return the ids below 100 that the first bucket has."""
    keys = pa.record_batch([pa.array(range(100), pa.int64())], names=["id"])
    ids: list[int] = table.key_buckets[0].rows.lookup(keys).rows.column("id").to_pylist()
    return ids


@contextlib.asynccontextmanager
async def expiry_world(data_dir: Path, **config: Any) -> AsyncIterator[ExpiryWorld]:
    """Open a world on the tables of a directory; leaving closes them cleanly."""
    async with open_manager(data_dir, **config) as manager:
        yield ExpiryWorld(manager)
