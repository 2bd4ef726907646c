"""Rows that were read by a schema, and come to a table with a primary key after it has changed."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from streamhouse.core.errors import InvalidRequestError, UnavailableError
from streamhouse.storage_service.engine.manager import TabletManager
from streamhouse.storage_service.kv.plan.write_plan import KeyWrite
from tests.support.in_process_service import event_rows, open_manager, table_descriptor


async def _write(manager: TabletManager, write: KeyWrite) -> None:
    (table,) = manager.open_tables()
    await manager.write_keys(table, [write], columns=None, writer_id=0)


async def test_rows_of_a_schema_before_the_current_one_that_do_not_fit_it_are_sent_again(
    tmp_path: Path,
) -> None:
    async with open_manager(tmp_path) as manager:
        descriptor = table_descriptor(bucket_count=1, primary_key=("id",))
        table = await manager.create_table(descriptor)
        await manager.alter_schema(table.path, [{"rename": "name", "to": "title"}])
        unknown = pa.record_batch([pa.array([1], pa.int64()), ["a"]], names=["id", "other"])

        with pytest.raises(UnavailableError, match=r"its schema changed .* send them again"):
            await _write(manager, KeyWrite(0, unknown, schema_id=0))
        with pytest.raises(InvalidRequestError, match="other"):
            await _write(manager, KeyWrite(0, unknown, schema_id=1))
        await _write(manager, KeyWrite(0, event_rows(0, 3), schema_id=0))
        assert table.key_buckets[0].row_count == 3
