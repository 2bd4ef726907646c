"""Appends over HTTP with fsync, against writing the same bytes with one fdatasync a batch."""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path

from benchmarks.harness import SCHEMA, fsynced_write_seconds, make_rows, median, report
from streamhouse.client import StorageClient
from tests.support.service_process import ServiceProcess

BATCH_ROWS = 10_000
BATCHES = 400
BUCKETS = 4
WRITERS = 4
REPEATS = 5


def main() -> None:
    """Report rows/s of 10k-row appends by four connections to four buckets."""
    batches = [make_rows(BATCH_ROWS, first_id=i * BATCH_ROWS) for i in range(8)]
    pieces = [batches[i % len(batches)].serialize().to_pybytes() for i in range(BATCHES)]
    byte_count = sum(len(piece) for piece in pieces)
    with tempfile.TemporaryDirectory() as directory, ServiceProcess(directory) as service:
        ratios, limits, rates = [], [], []
        for repeat in range(REPEATS + 1):
            limit = byte_count / fsynced_write_seconds(Path(directory) / "raw", pieces)
            seconds = _append_seconds(service.endpoint, f"bench.append_{repeat}", batches)
            if repeat == 0:
                continue
            rates.append(byte_count / seconds)
            limits.append(limit)
            ratios.append(rates[-1] / limit)
    rows_per_byte = BATCH_ROWS * BATCHES / byte_count
    report(
        f"append over HTTP, {BATCH_ROWS:,}-row batches, {BUCKETS} buckets, {WRITERS} connections",
        measured=f"{median(rates) / 1e6:,.0f} MB/s"
        f" ({median(rates) * rows_per_byte / 1e6:.1f} M rows/s)",
        limit=f"write + fdatasync a batch: {median(limits) / 1e6:,.0f} MB/s",
        ratio=median(ratios),
        bar="at least 0.4",
        reached=median(ratios) >= 0.4,
    )


def _append_seconds(endpoint: str, path: str, batches: list[object]) -> float:
    with StorageClient(endpoint) as client:
        if "bench" not in client.list_databases():
            client.create_database("bench")
        client.create_table(
            path,
            SCHEMA,
            bucket_count=BUCKETS,
            properties={"table.datalake.enabled": "false"},
        )

        def write(writer: int) -> None:
            for i in range(writer, BATCHES, WRITERS):
                client.append(path, batches[i % len(batches)])

        threads = [threading.Thread(target=write, args=(w,)) for w in range(WRITERS)]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - start
        stored = sum(p.high_watermark for p in client.positions(path).values())
        assert stored == BATCH_ROWS * BATCHES, stored
        client.drop_table(path)
    return seconds


if __name__ == "__main__":
    main()
