"""GET of one key over 32 kept connections, as wrk does it; the service and the client share cores.

Keys are random among a million, in a table that fits in memory. The second figure is taken while
another client upserts and a worker tiers what it writes, the third while the service's own thread
(`--tiering embedded`) does: that one shares Python's lock with the answers. Both go on, five
seconds at a time, until something was tiered meanwhile; the p99 is that of the slowest five. With
32 connections that always ask, each waits for the 31 others: a second figure is the p99 with four.
The limit is what the same client gets from a Python server that reads nothing and answers always
the same. How late the service's event loop was is its `streamhouse_event_loop_lag_seconds`.

All three take a minute on a quiet machine: `python -m benchmarks.bench_get_key`, or with those
wanted of `alone`, `worker` and `embedded`. On a loaded one the p99 is that of the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import urllib3
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.harness import SCHEMA, make_rows, process_cpu_seconds, report
from benchmarks.many_connections import Answers, constant_server, get_rows
from streamhouse.client import StorageClient
from tests.support.service_process import ServiceProcess

KEYS = 1_000_000
CONNECTIONS = 32
FEW_CONNECTIONS = 4
SECONDS = 5.0
BUCKETS = 4
UPSERT_ROWS = 5_000
UPSERT_PAUSE_S = 0.2
PATH = "bench_get_key"
_STREAMHOUSE = (sys.executable, "-c", "from streamhouse.cli import main; main()")


def main() -> None:
    """Report requests/s and the time of the slowest hundredth, alone and while tiering runs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of: {', '.join(PARTS)}")
    wanted = parser.parse_args().parts or list(PARTS)
    for name in wanted:
        if name not in PARTS:
            parser.error(f"there is no part '{name}'; there are {', '.join(PARTS)}")
    base = make_rows(KEYS)
    with constant_server() as endpoint:
        limit = _answers(endpoint).rate
    for name in wanted:
        PARTS[name](base, limit)


def _alone(base: pa.RecordBatch, limit: float) -> None:
    with _service() as (service, client):
        _fill(client, base)
        _measure(service, "nothing else runs", limit, until=lambda: True, p99_ms_max=10)


def _beside_a_worker(base: pa.RecordBatch, limit: float) -> None:
    with _service() as (service, client):
        _fill(client, base)
        worker = subprocess.Popen(
            (*_STREAMHOUSE, "tier", "--endpoint", service.endpoint, "--threads", "1")
        )
        try:
            _measure_while_tiered(service, client, base, "while a worker tiers upserts", limit)
        finally:
            worker.terminate()
            worker.wait()


def _beside_its_own_thread(base: pa.RecordBatch, limit: float) -> None:
    with _service("--tiering", "embedded") as (service, client):
        _fill(client, base)
        _measure_while_tiered(service, client, base, "while its own thread tiers upserts", limit)


@contextlib.contextmanager
def _service(*arguments: str) -> Iterator[tuple[ServiceProcess, StorageClient]]:
    with (
        tempfile.TemporaryDirectory() as directory,
        ServiceProcess(Path(directory), *arguments) as service,
        StorageClient(service.endpoint) as client,
    ):
        yield service, client


def _fill(client: StorageClient, base: pa.RecordBatch) -> None:
    client.create_table(
        PATH,
        SCHEMA,
        primary_key=["id"],
        bucket_count=BUCKETS,
        properties={"table.datalake.freshness": "1s"},
    )
    client.upsert(PATH, pa.Table.from_batches([base]))


def _measure_while_tiered(
    service: ServiceProcess,
    client: StorageClient,
    base: pa.RecordBatch,
    what: str,
    limit: float,
) -> None:
    # The million rows themselves are not what is measured.
    while client.table_state(PATH).lake.snapshot_id is None:
        time.sleep(0.1)
    first = client.table_state(PATH).lake.snapshot_id

    def is_tiered() -> bool:
        return bool(client.table_state(PATH).lake.snapshot_id != first)

    stop = threading.Event()
    writer = threading.Thread(target=_upsert, args=(service.endpoint, base, stop))
    writer.start()
    try:
        _measure(service, what, limit, until=is_tiered, p99_ms_max=5)
    finally:
        stop.set()
        writer.join()


def _answers(endpoint: str, connections: int = CONNECTIONS) -> Answers:
    prefix = f"/v1/tables/{PATH}/rows/"
    return get_rows(endpoint, prefix, keys=KEYS, connections=connections, seconds=SECONDS)


def _measure(
    service: ServiceProcess,
    what: str,
    limit: float,
    *,
    until: Callable[[], bool],
    p99_ms_max: float,
) -> None:
    before_s, looks_before, lag_before = process_cpu_seconds(service.pid), *_lag(service)
    rounds = [_answers(service.endpoint)]
    while not until():
        rounds.append(_answers(service.endpoint))
    count = sum(answers.count for answers in rounds)
    rate, p99_ms = count / sum(a.seconds for a in rounds), max(a.p99_ms for a in rounds)
    cpu_us = (process_cpu_seconds(service.pid) - before_s) / count * 1e6
    looks, lag = _lag(service)
    rises = {bound: int(n - lag_before[bound]) for bound, n in lag.items()}
    late = ", ".join(f"{b * 1e3:g} ms {n} times" for b, n in rises.items() if n) or "nothing"
    report(
        f"GET of one key of {KEYS:,}, {CONNECTIONS} connections, {what}",
        measured=f"{rate / 1e3:,.1f} k/s, p99 {p99_ms:.1f} ms, {cpu_us:.0f} us of the service's"
        f" processor each; the event loop was late by {late} in {looks - looks_before:.0f} looks",
        limit=f"a server that answers a constant: {limit / 1e3:,.1f} k/s",
        ratio=rate / limit,
        bar=f"at least 15 k/s, p99 under {p99_ms_max:g} ms",
        reached=rate >= 15_000 and p99_ms < p99_ms_max,
    )
    few = _answers(service.endpoint, FEW_CONNECTIONS)
    report(
        f"p99 of GET of one key of {KEYS:,}, {FEW_CONNECTIONS} connections, {what}",
        measured=f"{few.p99_ms:.1f} ms at {few.rate / 1e3:,.1f} k/s",
        limit="the bar",
        ratio=few.p99_ms / p99_ms_max,
        bar=f"under {p99_ms_max:g} ms",
        reached=few.p99_ms < p99_ms_max,
    )


def _lag(service: ServiceProcess) -> tuple[float, dict[float, float]]:
    """Return how often the event loop was looked at, and how often it was later than each bound."""
    text = urllib3.request("GET", f"{service.endpoint}/metrics").data.decode()
    (family,) = (
        family
        for family in text_string_to_metric_families(text)
        if family.name == "streamhouse_event_loop_lag_seconds"
    )
    within = {
        float(sample.labels["le"]): sample.value
        for sample in family.samples
        if sample.name.endswith("_bucket")
    }
    looks = within.pop(float("inf"))
    return looks, {bound: looks - count for bound, count in within.items()}


def _upsert(endpoint: str, base: pa.RecordBatch, stop: threading.Event) -> None:
    rng = np.random.default_rng(2)
    with StorageClient(endpoint) as client:
        while not stop.wait(UPSERT_PAUSE_S):
            rows = base.take(pa.array(rng.choice(KEYS, UPSERT_ROWS, replace=False)))
            amounts = pa.array(rng.random(UPSERT_ROWS))
            place = rows.schema.get_field_index("amount")
            client.upsert(PATH, rows.set_column(place, SCHEMA.field("amount"), amounts))


PARTS: Final[dict[str, Callable[[pa.RecordBatch, float], None]]] = {
    "alone": _alone,
    "worker": _beside_a_worker,
    "embedded": _beside_its_own_thread,
}


if __name__ == "__main__":
    main()
