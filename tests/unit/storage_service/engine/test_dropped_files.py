"""What is dropped is let go: a removed file takes its place on the disk while it is open."""

from __future__ import annotations

import contextlib
import gc
from pathlib import Path

import pyarrow as pa
import pytest

from streamhouse.storage_service.engine.manager import TabletManager
from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.kv.plan.write_plan import KeyWrite
from tests.support.in_process_service import event_rows, open_manager, routed, table_descriptor

pytestmark = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="it asks Linux")

_SEGMENTS = {"table.log.segment-bytes": "64kb"}


def _open_files(directory: Path) -> set[str]:
    """Return the files below `directory` that this process has open or mapped, removed or not."""
    found = {
        line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()
    }
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.add(str(descriptor.readlink()))
    return {name for name in found if name.startswith(f"{directory}/")}


def _read_all(table: OpenTable) -> None:
    """Read every segment, by its index."""
    tablet = table.tablet(0)
    for offset in range(tablet.log_start_offset, tablet.high_watermark, 500):
        assert tablet.read(offset, bytes_max=1)


async def _log_table(manager: TabletManager, number: int) -> OpenTable:
    table = await manager.create_table(table_descriptor(f"log{number}", properties=_SEGMENTS))
    for start in range(0, 12_000, 3_000):
        await manager.append(table, [routed(0, event_rows(start, start + 3_000))])
    assert table.tablet(0).segment_count > 2
    return table


async def _key_table(manager: TabletManager, number: int) -> OpenTable:
    descriptor = table_descriptor(f"keys{number}", primary_key=("id",), properties=_SEGMENTS)
    table = await manager.create_table(descriptor)
    for _ in range(2):
        write = KeyWrite(0, event_rows(0, 6_000))
        await manager.write_keys(table, [write], columns=None, writer_id=0)
        await table.key_writer.on_thread(table.key_buckets[0].rows.flush)
    keys = pa.record_batch([pa.array([3, 5], pa.int64())], names=["id"])
    assert None not in table.lookup.find(table.lookup.keys(keys)).values
    return table


@pytest.mark.parametrize("make", [_log_table, _key_table])
async def test_no_file_of_a_dropped_table_stays_open(tmp_path: Path, make: object) -> None:
    async with open_manager(tmp_path) as manager:
        for number in range(3):
            table = await make(manager, number)  # type: ignore[operator]
            _read_all(table)
            held = table.tablet(0).read(0, bytes_max=1)[0].payload
            before = bytes(held)
            assert _open_files(tmp_path / "tables")
            await manager.drop_table(table.path)
            # Who still reads a page of it has that page.
            assert bytes(held) == before
            del table, held
            gc.collect()
            assert _open_files(tmp_path / "tables") == set()
