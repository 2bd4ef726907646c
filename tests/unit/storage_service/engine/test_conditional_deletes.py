"""Deletes of rows that have a version below an offset when it is their turn."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pyarrow as pa

from streamhouse.storage_service.engine.open_table import Appended
from streamhouse.storage_service.kv.plan.write_plan import delete_of
from tests.support.in_process_service import (
    TTL,
    ExpiryWorld,
    ids_of,
    open_manager,
    table_descriptor,
)


async def test_a_delete_on_a_condition_is_planned_apart_from_other_writes(tmp_path: Path) -> None:
    async with open_manager(tmp_path) as manager:
        world = ExpiryWorld(manager)
        table = await world.table()
        await world.upsert(table, range(10))
        keys = pa.record_batch([pa.array(range(10), pa.int64())], names=["id"])

        async def delete() -> Appended:
            write = delete_of(0, keys, written_below=10)
            return await manager.write_keys(table, [write], columns=None, writer_id=0)

        # They wait together, so that they are one round.
        answers = await asyncio.gather(
            world.upsert(table, [1]), delete(), delete(), world.upsert(table, [2])
        )

        assert [a.ranges[0] for a in answers] == [(10, 12), (12, 21), (21, 21), (21, 22)]
        assert ids_of(table) == [1, 2]


async def test_a_condition_holds_for_a_request_of_several_buckets(tmp_path: Path) -> None:
    async with open_manager(tmp_path) as manager:
        world = ExpiryWorld(manager)
        table = await manager.create_table(
            table_descriptor("default.db", primary_key=("id",), bucket_count=2, properties=TTL)
        )
        writes = []
        for bucket, ids in enumerate(([1, 2], [3, 4])):
            for i in ids:
                await world.upsert(table, [i], bucket=bucket)
            keys = pa.record_batch([pa.array(ids, pa.int64())], names=["id"])
            writes.append(delete_of(bucket, keys, written_below=1))
        await manager.write_keys(table, writes, columns=None, writer_id=0)

        assert ids_of(table) == [2]
        assert table.row_count == 2


async def test_no_version_is_below_the_first_offset(tmp_path: Path) -> None:
    async with open_manager(tmp_path) as manager:
        world = ExpiryWorld(manager)
        table = await world.table()
        await world.upsert(table, range(3))
        keys = pa.record_batch([pa.array(range(3), pa.int64())], names=["id"])
        write = delete_of(0, keys, written_below=0)

        answer = await manager.write_keys(table, [write], columns=None, writer_id=0)

        assert answer.ranges[0] == (3, 3)
        assert ids_of(table) == [0, 1, 2]
