"""Many tables of many buckets in one service: what they cost in memory, and that all work."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyarrow as pa

from streamhouse.api.client import StreamhouseClient
from tests.support.service_process import ServiceProcess

__all__ = ["ManyTables", "run_many_tables"]

SCHEMA: Final = pa.schema(
    [pa.field("id", pa.int64(), nullable=False), pa.field("text", pa.string())]
)
_THREADS: Final = 4


@dataclass
class ManyTables:
    """What was seen; `bytes_*` are anonymous memory of the service."""

    bytes_empty: int = 0
    bytes_created: int = 0
    bytes_written: int = 0
    bytes_restarted: int = 0
    create_s: float = 0.0
    write_s: float = 0.0
    restart_s: float = 0.0
    files_open: int = 0


def run_many_tables(
    directory: Path, *, tables: int, buckets: int, rows: int, is_keyed: bool
) -> ManyTables:
    """Create the tables, write `rows` to each, kill the service, start it, read all tables."""
    seen = ManyTables()
    names = [f"t{number}" for number in range(tables)]
    data = pa.table({"id": range(rows), "text": ["x" * 40] * rows}, schema=SCHEMA)
    with ServiceProcess(directory) as service, StreamhouseClient(service.endpoint) as client:
        seen.bytes_empty = service.anonymous_bytes
        started_s = time.monotonic()
        key = ["id"] if is_keyed else []
        with ThreadPoolExecutor(_THREADS) as pool:
            create = client.create_table
            list(
                pool.map(
                    lambda name: create(name, SCHEMA, primary_key=key, bucket_count=buckets), names
                )
            )
            seen.create_s = time.monotonic() - started_s
            seen.bytes_created = service.anonymous_bytes
            started_s = time.monotonic()
            write = client.upsert if is_keyed else client.append
            list(pool.map(lambda name: write(name, data), names))
        seen.write_s = time.monotonic() - started_s
        seen.bytes_written = service.anonymous_bytes
        seen.files_open = len(list(Path(f"/proc/{service.pid}/fd").iterdir()))
        service.kill()
    started_s = time.monotonic()
    with (
        ServiceProcess(directory, start_timeout_s=280, stop_timeout_s=280) as service,
        StreamhouseClient(service.endpoint) as client,
    ):
        seen.restart_s = time.monotonic() - started_s
        for name in names:
            ends = [p.high_watermark for p in client.positions(name).values()]
            assert sum(ends) == rows, f"{name}: {ends}"
        seen.bytes_restarted = service.anonymous_bytes
        assert client.read(names[-1]).num_rows == rows
        if is_keyed:
            assert all(client.count(name) == rows for name in names)
        assert service.terminate() == 0
    return seen
