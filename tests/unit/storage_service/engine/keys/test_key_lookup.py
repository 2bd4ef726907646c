"""Lookups by key: what is looked up one by one, and what by arrays."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from streamhouse.storage_service.engine.keys.key_table import KeyTable
from tests.support.in_process_service import open_manager, table_descriptor


async def test_keys_are_few_by_their_buckets_and_never_more_than_some_thousand(
    tmp_path: Path,
) -> None:
    async with open_manager(tmp_path) as manager:
        for bucket_count, most in ((1, 48), (4, 192), (64, 2_000)):
            path = f"t{bucket_count}"
            table = await manager.create_table(
                table_descriptor(path, bucket_count=bucket_count, primary_key=("id",))
            )
            assert isinstance(table, KeyTable)
            for count, are_few in ((0, True), (1, True), (most, True), (most + 1, False)):
                rows = pa.record_batch([pa.array(range(count), pa.int64())], names=["id"])

                keys = table.lookup.keys(rows)

                assert (isinstance(keys.encoded, list), len(keys.encoded)) == (are_few, count)
                assert table.lookup.rows(table.lookup.find(keys)).rows.num_rows == count
