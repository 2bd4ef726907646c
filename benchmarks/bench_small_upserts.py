"""Many small upserts at once: ten rows over four buckets a call, eight connections, fsync on."""

from __future__ import annotations

import itertools
import tempfile
import threading
import time
from pathlib import Path

import pyarrow as pa

from benchmarks.harness import (
    SCHEMA,
    changing_calls,
    fsynced_write_seconds,
    make_rows,
    percentile,
    process_cpu_seconds,
    report,
)
from streamhouse.client import StorageClient
from tests.support.service_process import ServiceProcess

KEYS = 100_000
ROWS = 10
BUCKETS = 4
WRITERS = 8
CALLS = 400
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
            calls = [
                changing_calls(base, row_count=ROWS, call_count=CALLS, seed=writer)
                for writer in range(WRITERS)
            ]
            before_s, own_before_s = process_cpu_seconds(service.pid), time.process_time()
            times = _times(service.endpoint, calls)
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


def _times(endpoint: str, calls: list[list[pa.Table]]) -> list[float]:
    times: list[list[float]] = [[] for _ in calls]
    end = time.perf_counter() + SECONDS

    def write(number: int) -> None:
        own = itertools.cycle(calls[number])
        with StorageClient(endpoint) as client:
            while (start := time.perf_counter()) < end:
                client.upsert(PATH, next(own))
                times[number].append(time.perf_counter() - start)

    threads = [threading.Thread(target=write, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [seconds for own in times for seconds in own]


if __name__ == "__main__":
    main()
