"""Many small upserts at once: ten rows over four buckets a call, eight connections, fsync on."""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks.harness import (
    SCHEMA,
    fsynced_write_seconds,
    make_rows,
    percentile,
    process_cpu_seconds,
    report,
)
from streamhouse.storage_service.client import StorageClient
from tests.support.service_process import ServiceProcess

KEYS = 100_000
ROWS = 10
BUCKETS = 4
WRITERS = 8
SECONDS = 5.0
PATH = "bench_small_upserts"


def main() -> None:
    """Report how long a call takes, and how many a second there are."""
    base = make_rows(KEYS)
    with tempfile.TemporaryDirectory() as directory:
        sync_s = fsynced_write_seconds(Path(directory) / "probe", [b"x" * 1_000] * 200) / 200
        with (
            ServiceProcess(Path(directory) / "data") as service,
            StorageClient(service.endpoint) as client,
        ):
            client.create_table(PATH, SCHEMA, primary_key=["id"], bucket_count=BUCKETS)
            client.upsert(PATH, pa.Table.from_batches([base]))
            before_s, own_before_s = process_cpu_seconds(service.pid), time.process_time()
            times = _times(service.endpoint, base)
            cpu_ms = (process_cpu_seconds(service.pid) - before_s) / len(times) * 1e3
            own_cpu_ms = (time.process_time() - own_before_s) / len(times) * 1e3
    p50_ms, p99_ms = percentile(times, 0.5) * 1e3, percentile(times, 0.99) * 1e3
    report(
        f"upserts of {ROWS} rows over {BUCKETS} buckets, {WRITERS} writers",
        measured=f"p50 {p50_ms:.2f} ms, p99 {p99_ms:.1f} ms, {len(times) / SECONDS:,.0f} calls/s,"
        f" processor a call: service {cpu_ms:.2f} ms, client {own_cpu_ms:.2f} ms",
        limit=f"one fdatasync: {sync_s * 1e3:.2f} ms",
        ratio=p50_ms / 1e3 / sync_s,
        bar="p50 under 3 ms, at most 0.6 ms of the service's processor",
        reached=p50_ms < 3 and cpu_ms <= 0.6,
    )


def _times(endpoint: str, base: pa.RecordBatch) -> list[float]:
    times: list[list[float]] = [[] for _ in range(WRITERS)]
    end = time.perf_counter() + SECONDS

    def write(number: int) -> None:
        rng = np.random.default_rng(number)
        calls = [_changed(base, rng) for _ in range(200)]
        with StorageClient(endpoint) as client:
            while (start := time.perf_counter()) < end:
                client.upsert(PATH, calls[len(times[number]) % len(calls)])
                times[number].append(time.perf_counter() - start)

    threads = [threading.Thread(target=write, args=(i,)) for i in range(WRITERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [seconds for own in times for seconds in own]


def _changed(base: pa.RecordBatch, rng: np.random.Generator) -> pa.Table:
    """Return random rows with new amounts; the same call twice changes nothing the second time."""
    rows = base.take(pa.array(rng.choice(KEYS, ROWS, replace=False)))
    amounts = pa.array(rng.random(ROWS))
    rows = rows.set_column(rows.schema.get_field_index("amount"), SCHEMA.field("amount"), amounts)
    return pa.Table.from_batches([rows])


if __name__ == "__main__":
    main()
