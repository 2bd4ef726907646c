"""GET of one key over 32 kept connections, as wrk does it; the service and the client share cores.

Keys are random among a million, in a table that fits in memory. The second figure is taken while
another client upserts and a worker tiers what it writes, the third while the service's own thread
(`--tiering embedded`) does: that one shares Python's lock with the answers. The limit is what the
same client gets from a Python server that reads nothing and answers always the same.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks.harness import SCHEMA, make_rows, process_cpu_seconds, report
from benchmarks.many_connections import Answers, constant_server, get_rows
from streamhouse.storage_service.client import StorageClient
from tests.support.service_process import ServiceProcess

KEYS = 1_000_000
CONNECTIONS = 32
SECONDS = 5.0
BUCKETS = 4
UPSERT_ROWS = 5_000
UPSERT_PAUSE_S = 0.2
PATH = "bench_get_key"
_STREAMHOUSE = (sys.executable, "-c", "from streamhouse.cli import main; main()")


def main() -> None:
    """Report requests/s and the time of the slowest hundredth, alone and while tiering runs."""
    base = make_rows(KEYS)
    with constant_server() as endpoint:
        limit = _answers(endpoint).rate
    with _service() as (service, client):
        _fill(client, base)
        _measure(service, "nothing else runs", limit)
        worker = subprocess.Popen(
            (*_STREAMHOUSE, "tier", "--endpoint", service.endpoint, "--threads", "1")
        )
        try:
            _measure_while_tiered(service, client, base, "while a worker tiers upserts", limit)
        finally:
            worker.terminate()
            worker.wait()
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
    stop = threading.Event()
    writer = threading.Thread(target=_upsert, args=(service.endpoint, base, stop))
    writer.start()
    _measure(service, what, limit, p99_ms_max=5)
    stop.set()
    writer.join()
    assert client.table_state(PATH).lake.snapshot_id != first, "nothing was tiered meanwhile"


def _answers(endpoint: str) -> Answers:
    prefix = f"/v1/tables/{PATH}/rows/"
    return get_rows(endpoint, prefix, keys=KEYS, connections=CONNECTIONS, seconds=SECONDS)


def _measure(service: ServiceProcess, what: str, limit: float, *, p99_ms_max: float = 10) -> None:
    before_s = process_cpu_seconds(service.pid)
    answers = _answers(service.endpoint)
    cpu_us = (process_cpu_seconds(service.pid) - before_s) / answers.count * 1e6
    report(
        f"GET of one key of {KEYS:,}, {CONNECTIONS} connections, {what}",
        measured=f"{answers.rate / 1e3:,.1f} k/s, p99 {answers.p99_ms:.1f} ms, {cpu_us:.0f} us of"
        " the service's processor each",
        limit=f"a server that answers a constant: {limit / 1e3:,.1f} k/s",
        ratio=answers.rate / limit,
        bar=f"at least 15 k/s, p99 under {p99_ms_max:g} ms",
        reached=answers.rate >= 15_000 and answers.p99_ms < p99_ms_max,
    )


def _upsert(endpoint: str, base: pa.RecordBatch, stop: threading.Event) -> None:
    rng = np.random.default_rng(2)
    with StorageClient(endpoint) as client:
        while not stop.wait(UPSERT_PAUSE_S):
            rows = base.take(pa.array(rng.choice(KEYS, UPSERT_ROWS, replace=False)))
            amounts = pa.array(rng.random(UPSERT_ROWS))
            place = rows.schema.get_field_index("amount")
            client.upsert(PATH, rows.set_column(place, SCHEMA.field("amount"), amounts))


if __name__ == "__main__":
    main()
