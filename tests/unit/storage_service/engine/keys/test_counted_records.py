"""Batches of producers that count records, as a table with a primary key takes them."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from streamhouse.core.model.records.record_sequence import Continuity, RecordSequence
from streamhouse.storage_service.engine.manager import TabletManager
from streamhouse.storage_service.engine.open_table import Appended, OpenTable
from streamhouse.storage_service.kv.plan.write_plan import KeyWrite
from tests.support.in_process_service import EVENTS, event_rows, open_manager, table_descriptor
from tests.support.kv_world import looked_up

_WRITER = 9


async def _write(manager: TabletManager, table: OpenTable, write: KeyWrite) -> Appended:
    return await manager.write_keys(table, [write], columns=None, writer_id=_WRITER)


def _names(table: OpenTable) -> list[str]:
    keys = pa.record_batch([pa.array(range(3), pa.int64())], names=["id"])
    found = looked_up(table.key_buckets[0].rows, keys)
    return found.rows.column("name").to_pylist()


async def test_a_batch_of_counted_records_may_follow_one_that_changed_nothing(
    tmp_path: Path,
) -> None:
    first, same, other = (RecordSequence(0, 3 * number, 3).packed() for number in range(3))
    new = pa.record_batch([pa.array(range(3), pa.int64()), ["new"] * 3], schema=EVENTS)
    async with open_manager(tmp_path) as manager:
        descriptor = table_descriptor(bucket_count=1, primary_key=("id",))
        table = await manager.create_table(descriptor)
        write = KeyWrite(0, event_rows(0, 3), sequence=first, continuity=Continuity.UNKNOWN)
        await _write(manager, table, write)
        nothing = await _write(manager, table, write._replace(sequence=same))
        changed = write._replace(rows=new, sequence=other)
        after = await _write(manager, table, changed)

        assert (nothing.ranges, after.ranges) == ({0: (3, 3)}, {0: (3, 9)})

    # A process that knows nothing but the logs gets all three again: it has them.
    async with open_manager(tmp_path) as manager:
        (table,) = manager.open_tables()
        again = [
            await _write(manager, table, w) for w in (write, write._replace(sequence=same), changed)
        ]

        assert [a.ranges[0] for a in again] == [(0, 3), (3, 3), (3, 9)]
        assert _names(table) == ["new"] * 3
