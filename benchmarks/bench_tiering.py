"""Tiering a backlog, against pyarrow writing the same rows to Parquet from memory.

The limit writes the table's own five columns with the settings of lake files, on one thread, from
batches that are in memory already. Tiering fetches the rows from the service over HTTP, adds the
three system columns, writes with as many threads as there are cores, and commits to Iceberg.

And the command `streamhouse tier --once` for a thousand rows, which is its start; beside it Python
with the libraries that no tiering does without.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyarrow as pa

from benchmarks.harness import SCHEMA, make_rows, median, report
from streamhouse.client import StorageClient
from streamhouse.lake.files.parquet_writer import FileFormat, open_parquet
from streamhouse.lake.lake_tables import IcebergLake
from streamhouse.tiering.worker._service import TieringService
from streamhouse.tiering.worker.thread_runner import ThreadRunner
from tests.support.service_process import ServiceProcess

BATCH_ROWS = 10_000
BATCHES = 400
BUCKETS = 4
REPEATS = 5
BAR = 0.5
START_ROWS = 1_000
START_SECONDS_MAX = 1.0


def main() -> None:
    """Report tiering with a thread per core, and with one."""
    batches = [make_rows(BATCH_ROWS, first_id=i * BATCH_ROWS) for i in range(BATCHES)]
    row_count = BATCH_ROWS * BATCHES
    with (
        tempfile.TemporaryDirectory() as directory,
        ServiceProcess(directory) as service,
        StorageClient(service.endpoint) as client,
    ):
        lake = IcebergLake(client.lake_catalog())
        for name, threads in (("a thread per core", None), ("one thread", 1)):
            runner = ThreadRunner(threads)
            ratios, limits, rates = [], [], []
            for repeat in range(REPEATS + 1):
                limit = row_count / _parquet_seconds(Path(directory) / "limit.parquet", batches)
                rate = row_count / _tiering_seconds(client, lake, runner, batches)
                # The first run warms up: imports, the catalog, the page cache.
                if repeat:
                    limits.append(limit)
                    rates.append(rate)
                    ratios.append(rate / limit)
            report(
                f"tiering {row_count / 1e6:.0f} M rows in {BUCKETS} buckets, {name}",
                measured=f"{median(rates) / 1e6:.2f} M rows/s",
                limit=f"pyarrow to Parquet from memory: {median(limits) / 1e6:.2f} M rows/s",
                ratio=median(ratios),
                bar=f"at least {BAR}" if threads is None else "no bar",
                reached=threads is not None or median(ratios) >= BAR,
            )
        _report_start(client, service.endpoint)
        lake.close()


def _report_start(client: StorageClient, endpoint: str) -> None:
    client.create_table("bench.started", SCHEMA, bucket_count=BUCKETS)
    libraries = "import pyarrow.parquet, pyiceberg.catalog.sql, pyiceberg.catalog.rest"
    program = str(Path(sys.executable).with_name("streamhouse"))
    command = [program, "tier", "--once", "--endpoint", endpoint]
    commands, limits = [], []
    for repeat in range(REPEATS + 1):
        client.append("bench.started", make_rows(START_ROWS))
        seconds = _seconds(command), _seconds([sys.executable, "-c", libraries])
        if repeat:
            commands.append(seconds[0])
            limits.append(seconds[1])
    measured = median(commands)
    report(
        f"the command `streamhouse tier --once`, {START_ROWS:,} rows",
        measured=f"{measured:.2f} s",
        limit=f"Python with pyarrow, pyiceberg and SQLAlchemy: {median(limits):.2f} s",
        ratio=measured / median(limits),
        bar=f"under {START_SECONDS_MAX} s",
        reached=measured < START_SECONDS_MAX,
    )


def _seconds(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - start


def _parquet_seconds(path: Path, batches: list[pa.RecordBatch]) -> float:
    settings = FileFormat()
    rows = pa.Table.from_batches(batches)
    start = time.perf_counter()
    with (
        pa.OSFile(str(path), "wb") as sink,
        open_parquet(sink, SCHEMA, settings, sample=rows) as writer,
    ):
        writer.write_table(rows, row_group_size=settings.row_group_rows)
    seconds = time.perf_counter() - start
    path.unlink()
    return seconds


def _tiering_seconds(
    client: StorageClient, lake: IcebergLake, runner: ThreadRunner, batches: list[pa.RecordBatch]
) -> float:
    path = f"bench.tiering_{time.monotonic_ns()}"
    if "bench" not in client.list_databases():
        client.create_database("bench")
    client.create_table(path, SCHEMA, bucket_count=BUCKETS)
    for start in range(0, len(batches), 10):
        client.append(path, pa.Table.from_batches(batches[start : start + 10]))
    worker = TieringService(client=client, lake=lake, runner=runner, tables=[path])
    start_s = time.perf_counter()
    (summary,) = worker.run_once()
    seconds = time.perf_counter() - start_s
    assert summary.row_count == sum(batch.num_rows for batch in batches), summary
    client.drop_table(path)
    return seconds


if __name__ == "__main__":
    main()
