"""Fifty tables kept fresh by one worker, freshness scaled from a minute to three seconds.

A real service and a real `streamhouse tier` process; a writer appends a few rows to every table,
steadily. The share of rounds in time is the service's own count of rounds whose oldest row was in
the lake within its table's freshness. Then nothing is written any more, and the worker's processor
time says what it costs to be idle. The limit is how many rounds that freshness asks for at least.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

import pyarrow as pa

from benchmarks.harness import SCHEMA, make_rows, percentile, process_cpu_seconds, report
from streamhouse.client import StorageClient
from tests.support.service_process import ServiceProcess

TABLES = 50
ROWS = 100
FRESHNESS_S = 3
WARM_UP_S = 10.0
SECONDS = 45.0
IDLE_SECONDS = 15.0
BAR_IN_TIME = 0.99
BAR_IDLE = 0.02


def main() -> None:
    """Report the rounds in time, and what an idle worker costs."""
    with (
        tempfile.TemporaryDirectory() as directory,
        ServiceProcess(Path(directory) / "data") as service,
        StorageClient(service.endpoint) as client,
    ):
        paths = [f"default.bench_{number}" for number in range(TABLES)]
        for path in paths:
            client.create_table(
                path,
                SCHEMA,
                bucket_count=1,
                properties={"table.datalake.freshness": f"{FRESHNESS_S}s"},
            )
        run = "from streamhouse.cli import main; main()"
        command = [sys.executable, "-c", run, "tier", "--endpoint", service.endpoint]
        with subprocess.Popen(command) as worker:
            try:
                _report_busy(service, client, worker.pid, paths)
                _report_idle(worker.pid, service.endpoint)
            finally:
                worker.terminate()


def _report_busy(
    service: ServiceProcess, client: StorageClient, worker_pid: int, paths: list[str]
) -> None:
    stop = threading.Event()
    writer = threading.Thread(target=_write, args=(client, paths, stop))
    writer.start()
    try:
        time.sleep(WARM_UP_S)
        before, cpu_s = _rounds(service.endpoint), process_cpu_seconds(worker_pid)
        service_s = process_cpu_seconds(service.pid)
        lags = []
        for _ in range(int(SECONDS)):
            time.sleep(1)
            lags.extend(_lags(service.endpoint))
        after = _rounds(service.endpoint)
        cpu_s, service_s = (
            process_cpu_seconds(worker_pid) - cpu_s,
            process_cpu_seconds(service.pid) - service_s,
        )
    finally:
        stop.set()
        writer.join()
    rounds = {how: after[how] - before[how] for how in after}
    total = sum(rounds.values())
    share = rounds["in_time"] / max(total, 1)
    report(
        f"{TABLES} tables, freshness {FRESHNESS_S} s, one worker: rounds in time",
        measured=f"{share:.2%} of {total:,.0f} rounds ({total / SECONDS:.1f}/s,"
        f" {rounds['late']:.0f} late, {rounds['failed']:.0f} failed),"
        f" lag p50 {percentile(lags, 0.5):.1f} s, p99 {percentile(lags, 0.99):.1f} s,"
        f" {cpu_s / max(total, 1) * 1e3:.0f} ms of the worker's and"
        f" {service_s / max(total, 1) * 1e3:.0f} ms of the service's processor a round",
        limit=f"a round a table and freshness: {TABLES / FRESHNESS_S:.1f}/s",
        ratio=share,
        bar=f"at least {BAR_IN_TIME:.0%}",
        reached=share >= BAR_IN_TIME,
    )


def _report_idle(worker_pid: int, endpoint: str) -> None:
    # What was written last is tiered first.
    deadline = time.monotonic() + 10 * FRESHNESS_S
    while any(_lags(endpoint)) and time.monotonic() < deadline:
        time.sleep(0.5)
    before_s, start = process_cpu_seconds(worker_pid), time.perf_counter()
    time.sleep(IDLE_SECONDS)
    share = (process_cpu_seconds(worker_pid) - before_s) / (time.perf_counter() - start)
    report(
        f"an idle worker, {TABLES} tables",
        measured=f"{share:.2%} of a core",
        limit="one core",
        ratio=share,
        bar=f"under {BAR_IDLE:.0%}",
        reached=share < BAR_IDLE,
    )


def _write(client: StorageClient, paths: list[str], stop: threading.Event) -> None:
    """Append to all tables, one after the other, about once a second each."""
    number = 0
    rows = pa.Table.from_batches([make_rows(ROWS)])
    while not stop.wait(1 / TABLES):
        client.append(paths[number % len(paths)], rows)
        number += 1


def _metrics(endpoint: str, name: str) -> list[tuple[str, float]]:
    with urllib.request.urlopen(f"{endpoint}/metrics") as answer:
        text = answer.read().decode()
    found = re.findall(rf'^{name}{{\w+="([^"]*)"}} (\S+)$', text, re.M)
    return [(label, float(value)) for label, value in found]


def _rounds(endpoint: str) -> dict[str, float]:
    return dict(_metrics(endpoint, "streamhouse_tiering_rounds_total"))


def _lags(endpoint: str) -> list[float]:
    return [value for _, value in _metrics(endpoint, "streamhouse_table_lag_seconds")]


if __name__ == "__main__":
    main()
