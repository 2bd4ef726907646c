"""Writes to a primary key table in this process, with disks that hold and fail them."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Any

import pyarrow as pa
import pytest

from streamhouse.storage_service.engine.keys.key_table import KeyTable
from streamhouse.storage_service.engine.manager import TabletManager
from streamhouse.storage_service.engine.open_table import Appended
from streamhouse.storage_service.kv.plan.write_plan import KeyWrite
from tests.support.held_step import around
from tests.support.in_process_service import EVENTS, table_descriptor, until
from tests.support.kv_world import looked_up

__all__ = [
    "FullDisk",
    "HeldSyncs",
    "keyed_table",
    "named",
    "names_of",
    "planned_on_top",
    "watermarks",
    "write_to",
]


async def keyed_table(manager: TabletManager, bucket_count: int = 1, **fields: Any) -> KeyTable:
    """Make a table of `EVENTS` with key `id`."""
    descriptor = table_descriptor(bucket_count=bucket_count, primary_key=("id",), **fields)
    table = await manager.create_table(descriptor)
    assert isinstance(table, KeyTable)
    return table


async def write_to(
    manager: TabletManager, table: KeyTable, *writes: KeyWrite, writer_id: int = 0
) -> Appended:
    """Write one request."""
    return await manager.write_keys(table, writes, columns=None, writer_id=writer_id)


def named(ids: range, name: str) -> pa.RecordBatch:
    """Return rows of `EVENTS` with the same name."""
    return pa.record_batch([pa.array(ids, pa.int64()), [name] * len(ids)], schema=EVENTS)


def names_of(table: KeyTable, bucket: int, ids: range) -> list[str | None]:
    """Return the names of the rows in a bucket; None without a row."""
    keys = pa.record_batch([pa.array(ids, pa.int64())], names=["id"])
    found = looked_up(table.key_buckets[bucket].rows, keys)
    names = iter(found.rows.column("name").to_pylist())
    return [next(names) if is_found else None for is_found in found.found.tolist()]


def watermarks(table: KeyTable) -> list[int]:
    """Return the high watermark of each bucket."""
    return [tablet.high_watermark for tablet in table.tablets]


class HeldSyncs:
    """Syncs wait until `go`; that of the segment `failing` fails then."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.are_under_way = threading.Event()
        self.failing: Any = None
        self._may_go = threading.Event()
        around(patch, "segment-syncing", self._sync)

    def _sync(self, sync: Any, segment: Any) -> None:
        self.are_under_way.set()
        assert self._may_go.wait(60)
        if segment is self.failing:
            raise OSError(5, "Input/output error")
        sync(segment)

    def go(self) -> None:
        """Let them go on."""
        self._may_go.set()


class FullDisk:
    """The next write waits until `go`, and finds no room then; those after it do."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.is_writing = threading.Event()
        self._may_go = threading.Event()
        self._patch = patch
        patch.setattr(os, "pwritev", self._write)

    def _write(self, *_: Any) -> int:
        self.is_writing.set()
        assert self._may_go.wait(60)
        self._patch.undo()
        raise OSError(28, "No space left on device")

    def go(self) -> None:
        """Let them go on."""
        self._may_go.set()


async def planned_on_top(manager: TabletManager, table: KeyTable, write: KeyWrite) -> Any:
    """Begin a write, and return when it is planned beside what is being synced."""
    rows = table.key_buckets[write.bucket].rows
    before = rows.planned_offset
    task = asyncio.ensure_future(write_to(manager, table, write))
    await until(lambda: rows.planned_offset > before)
    return task
